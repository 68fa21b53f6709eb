"""The slots that tickets hold."""

from __future__ import annotations

from batch_agent.scheduler.core import Slot, Ticket


def slot_of(ticket: Ticket) -> Slot:
    """Return the slot that the ticket holds. Fails if it holds none."""
    assert ticket.slot is not None, ticket.state
    return ticket.slot

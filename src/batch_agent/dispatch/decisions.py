"""Rows whose retries are used up, while it is not known whether their last failures were their own.

They wait for evidence: a good answer, an endpoint that goes down, or, when nothing is in flight that could tell, the
word of a probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batch_agent.errors import Interrupted
from batch_agent.scheduler.blame import Step, after_probe, next_step
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.endpoint import Endpoint


class Decisions:
    """``pump`` hands out slots, which may bring evidence; ``probe`` asks an endpoint whether it is there."""

    def __init__(self, pump: Callable[[], None], probe: Callable[[Endpoint], object]) -> None:
        self._pump, self._probe = pump, probe
        self._waiting: dict[Ticket, asyncio.Future[bool]] = {}  # True: on the word of a probe

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def decide(self, ticket: Ticket, max_retries: int, *, retryable: bool, wait: bool = True) -> Step:
        """What becomes of a row whose attempt failed, once that can be decided; with ``wait`` off, as far as it is
        decided now. Raises Interrupted when the run is over."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        step = next_step(ticket.row, max_retries, retryable=retryable)
        while wait and not endpoint.given_up and (step == "wait" or (step == "fail" and _is_unclear(ticket))):
            decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting[ticket] = decided
            try:
                self._pump()
                on_probe = await decided
            finally:
                self._waiting.pop(ticket, None)
            step = next_step(ticket.row, max_retries, retryable=retryable)
            if on_probe and step == "wait":
                step = after_probe(ticket.row, max_retries, asyncio.get_running_loop().time())
                if step == "fail":
                    endpoint.server.history.give_up_on(ticket.row)
            elif on_probe:
                break
        if endpoint.given_up:
            return "retry"
        return "fail" if step == "wait" else step

    def look(self) -> None:
        """Wake the rows whose failures are decided now."""
        for ticket, decided in tuple(self._waiting.items()):
            assert ticket.endpoint is not None
            known = ticket.endpoint.given_up or not (ticket.row.undecided or _is_unclear(ticket))
            if known and not decided.done():
                decided.set_result(False)

    def probed(self, endpoint: Endpoint) -> None:
        """A probe found the endpoint up: that is all that will be known."""
        for ticket, decided in tuple(self._waiting.items()):
            if ticket.endpoint is endpoint and not decided.done():
                decided.set_result(True)

    def idle(self) -> None:
        """Nothing is in flight that could decide anything: probe where rows wait."""
        for ticket, decided in tuple(self._waiting.items()):
            if ticket.row.undecided:
                assert ticket.endpoint is not None
                self._probe(ticket.endpoint)
            elif not decided.done():
                decided.set_result(True)

    def interrupt(self, why: str) -> None:
        for decided in self._waiting.values():
            if not decided.done():
                decided.set_exception(Interrupted(why))


def _is_unclear(ticket: Ticket) -> bool:
    assert ticket.endpoint is not None
    return ticket.endpoint.server.refusals.is_unclear(ticket.progress)

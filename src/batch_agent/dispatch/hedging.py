"""Hedging: a slow request is sent to a second endpoint too. The first good answer wins, the other is cancelled.

Off unless ``Policy.hedge`` is set. The second request has its own slot, is paid like any request, and never goes to the
same endpoint. Its failure is not charged to the row.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batch_agent.dispatch.policy import Policy, Question
from batch_agent.errors import BackendError, Interrupted
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Slot, Ticket

if TYPE_CHECKING:
    from batch_agent.dispatch.dispatcher import Dispatcher


async def hedged(dispatcher: Dispatcher, question: Question, slot: Slot, policy: Policy) -> Reply:
    """Return the first answer. Raises the error of the first request if neither was answered."""
    loop = asyncio.get_running_loop()
    first = loop.create_task(dispatcher.attempt(question, slot, policy))
    racers = [first]
    try:
        await asyncio.wait(racers, timeout=policy.hedge)
        if first.done():
            return first.result()
        progress = slot.ticket.progress
        other = dispatcher.slots.claim(progress, progress.turns, avoid=slot.endpoint)
        racers.append(loop.create_task(_second(dispatcher, question, slot, other, policy)))
        return await _winner(dispatcher, question, slot, other, racers)
    finally:
        for racer in racers:
            racer.cancel()
        await asyncio.gather(*racers, return_exceptions=True)


async def _winner(
    dispatcher: Dispatcher, question: Question, slot: Slot, other: Ticket, racers: list[asyncio.Task[Reply]]
) -> Reply:
    first, running = racers[0], set(racers)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for racer in sorted(done, key=racers.index):
            error = racer.exception()
            if error is None:
                failure = first.exception() if first.done() else None
                if isinstance(failure, BackendError):
                    dispatcher.endpoints.failed(slot, failure)
                if racer is not first:
                    question.lost()
                return racer.result()
            if not isinstance(error, BackendError | Interrupted):
                raise error
        if first.done() and (other.slot is None or not dispatcher.endpoints.flights.has(other.slot)):
            break  # it may wait for the slot or budget that the first request still holds
    return first.result()


async def _second(dispatcher: Dispatcher, question: Question, first: Slot, ticket: Ticket, policy: Policy) -> Reply:
    slot = await dispatcher.slots.hold(ticket)
    call = None
    try:
        if slot.endpoint is first.endpoint:
            raise Interrupted("no other endpoint is free")
        again = question.again()
        call = await dispatcher.reserve(slot, again.request)
        try:
            return await dispatcher.attempt(again, slot, policy)
        except BackendError as error:
            dispatcher.endpoints.failed(slot, error)
            raise
    finally:
        if call is not None:
            call.fail()  # the cost of the answer is already on the turn's account
        dispatcher.slots.release(slot)

"""Second requests: the same question is sent again while the first request is in flight. The first good answer wins,
the other request is cancelled. A second request has its own slot and is paid like any request. Its failure is not
charged to the row.

``hedged`` sends a slow request to another endpoint too, if ``Policy.hedge`` is set. ``SecondRequests`` sends a request
again that may be lost, to any endpoint.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batch_agent.dispatch.policy import Observer, Policy, Question
from batch_agent.errors import BackendError, Interrupted, JobError, Timeout
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Slot, Ticket

if TYPE_CHECKING:
    from batch_agent.dispatch.dispatcher import Dispatcher


async def hedged(dispatcher: Dispatcher, question: Question, slot: Slot, policy: Policy) -> Reply:
    """Return the first answer. Raises the error of the first request if neither request was answered."""
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
    if slot.endpoint is first.endpoint:
        dispatcher.slots.release(slot)
        raise Interrupted("no other endpoint is free")
    return await _ask_in(dispatcher, slot, question.again(), policy)


async def _ask_in(dispatcher: Dispatcher, slot: Slot, again: Question, policy: Policy) -> Reply:
    call = None
    try:
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


class SecondRequests:
    """Second requests beside first ones that may be lost. The first request continues, so that nothing is lost if it is
    only slow."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.tasks: dict[Slot, asyncio.Task[None]] = {}  # by the slot of the first request
        self._answers: dict[Slot, Reply] = {}  # until the first request is cancelled

    def start(self, slot: Slot, question: Question, policy: Policy, observer: Observer) -> bool:
        """Send the question again as soon as there is a slot. Returns False if it cannot be sent beside the first."""
        again, request = question.again(), question.request
        if again is question or request is None:
            return False
        if request.relay is not None or (request.client is not None and request.on_begin is not None):
            return False  # a client reads the answer of the first request as it is written
        coroutine = self._ask(slot, again, policy, observer)
        self.tasks[slot] = asyncio.get_running_loop().create_task(coroutine)
        return True

    async def _ask(self, first: Slot, again: Question, policy: Policy, observer: Observer) -> None:
        dispatcher, progress = self._dispatcher, first.ticket.progress
        ticket = dispatcher.slots.claim(progress, progress.turns, avoid=first.endpoint)
        ticket.lost = ticket.second = True  # it is not sent a third time
        try:
            slot = await dispatcher.slots.hold(ticket)
            seconds = slot.sent_at - first.sent_at
            late = f"{dispatcher.name} did not answer within {seconds:.3g} s; the request is sent again"
            observer.failed(Timeout(late), seconds, None, 0.0)
            observer.sent(0.0)
            self._answers[first] = await _ask_in(dispatcher, slot, again, policy)
        except JobError:
            return  # the first request continues
        dispatcher.endpoints.flights.recall(first, asyncio.get_running_loop().time())

    def answer(self, slot: Slot) -> Reply | None:
        """Return the answer of the second request if it arrived before that of the first; else None."""
        return self._answers.get(slot)

    async def end(self, slot: Slot) -> None:
        """Cancel the second request, because the first one has ended."""
        self._answers.pop(slot, None)
        if (task := self.tasks.pop(slot, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

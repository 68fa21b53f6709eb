"""A request that takes too long, sent to another endpoint too: the first good answer counts, the other is ended.

Off unless ``Policy.hedge`` is set. The second request has a slot of its own, pays like any request, and is never sent
to the same endpoint. If it fails, that is not charged to the row.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batch_agent.dispatch.policy import Policy, Question
from batch_agent.errors import BackendError, Interrupted
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Ticket

if TYPE_CHECKING:
    from batch_agent.dispatch.dispatcher import Dispatcher


async def hedged(dispatcher: Dispatcher, question: Question, ticket: Ticket, policy: Policy) -> Reply:
    """The first answer. Raises the error of the first request if neither was answered."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()
    first = loop.create_task(dispatcher.attempt(question, ticket, policy.timeout))
    racers = [first]
    try:
        await asyncio.wait(racers, timeout=policy.hedge)
        if not first.done():
            racers.append(loop.create_task(_second(dispatcher, question, ticket, policy, sent)))
        return await _winner(dispatcher, question, ticket, racers, sent)
    finally:
        for racer in racers:
            racer.cancel()
        await asyncio.gather(*racers, return_exceptions=True)


async def _winner(
    dispatcher: Dispatcher, question: Question, ticket: Ticket, racers: list[asyncio.Task[Reply]], sent: asyncio.Event
) -> Reply:
    """``sent``: the second request has left. Before that it may wait for the slot or the budget that the first still
    holds, so it is not waited for when the first has failed."""
    first, running = racers[0], set(racers)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for racer in sorted(done, key=racers.index):
            error = racer.exception()
            if error is None:
                failure = first.exception() if first.done() else None
                if isinstance(failure, BackendError):
                    dispatcher.endpoints.failed(ticket, failure)
                if racer is not first:
                    question.lost()
                return racer.result()
            if not isinstance(error, BackendError | Interrupted):
                raise error
        if first.done() and not sent.is_set():
            break
    return first.result()


async def _second(
    dispatcher: Dispatcher, question: Question, first: Ticket, policy: Policy, sent: asyncio.Event
) -> Reply:
    progress = first.progress
    ticket = dispatcher.slots.claim(progress, progress.turns, avoid=first.endpoint)
    await dispatcher.slots.hold(ticket)
    call = None
    try:
        if ticket.endpoint is first.endpoint:
            raise Interrupted("no other endpoint is free")
        again = question.again()
        call = await dispatcher.reserve(ticket, again.request)
        sent.set()
        try:
            return await dispatcher.attempt(again, ticket, policy.timeout)
        except BackendError as error:
            dispatcher.endpoints.failed(ticket, error)
            raise
    finally:
        if call is not None:
            call.fail()  # what the answer cost is on the account of the turn
        dispatcher.slots.release(ticket)

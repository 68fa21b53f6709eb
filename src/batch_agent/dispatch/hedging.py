"""A turn that takes too long, asked of another endpoint too: the first good answer counts, the other request is ended.

Off unless asked for (``hedge=``). The second request has a slot of its own and is never sent to the same endpoint. What
the record holds is not asked at all, so it is not asked twice; and tools that the first answer has started early are
given up when the second one wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from batch_agent.backends.base import ModelRequest
from batch_agent.errors import BackendError, Interrupted
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Ticket

if TYPE_CHECKING:
    from batch_agent.engine.agent.turn import Resources

Ask = Callable[[ModelRequest, Ticket], Awaitable[Reply]]


async def hedged(
    r: Resources, seconds: float, request: ModelRequest, ticket: Ticket, first: Awaitable[Reply], ask: Ask
) -> tuple[Reply, Ticket]:
    """The first answer, and the ticket it came by. ``first`` is the request that has left, ``ask`` sends another.
    Raises the error of the first, where neither was answered."""
    loop = asyncio.get_running_loop()
    racers = {loop.create_task(_as_task(first)): ticket}
    try:
        await asyncio.wait(racers, timeout=seconds)
        if not next(iter(racers)).done():
            other = r.limiter.claim(ticket.progress, ticket.progress.turns, avoid=ticket.endpoint)
            racers[loop.create_task(_second(r, request, other, ask))] = other
        return await _winner(r, racers)
    finally:
        for racer in racers:
            racer.cancel()
        await asyncio.gather(*racers, return_exceptions=True)


async def _winner(r: Resources, racers: dict[asyncio.Task[Reply], Ticket]) -> tuple[Reply, Ticket]:
    first = next(iter(racers))
    running = set(racers)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for racer in done:
            if racer.exception() is None:
                failure = first.exception() if first.done() else None
                if isinstance(failure, BackendError):
                    r.limiter.endpoints.failed(racers[first], failure)
                return racer.result(), racers[racer]
            if not isinstance(racer.exception(), BackendError | Interrupted):
                racer.result()  # which raises: a fault of ours
    return first.result(), racers[first]


async def _second(r: Resources, request: ModelRequest, ticket: Ticket, ask: Ask) -> Reply:
    await r.limiter.hold(ticket)
    loop = asyncio.get_running_loop()
    try:
        endpoint = ticket.endpoint
        if endpoint is None or endpoint is ticket.avoid:
            raise Interrupted("no other endpoint is free")
        call = await r.spending.reserve(request)
        left = loop.time()
        try:
            reply = await ask(replace(request, endpoint=endpoint.name, said=[]), ticket)
        except BackendError as error:
            r.limiter.endpoints.failed(ticket, error)
            raise
        finally:
            r.spending.fail(call)  # what is paid for is on the account of the turn
        r.limiter.answered(ticket, loop.time() - left, reply)
        return reply
    finally:
        r.limiter.release(ticket)


async def _as_task(first: Awaitable[Reply]) -> Reply:
    return await first

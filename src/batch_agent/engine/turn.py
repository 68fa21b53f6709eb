"""One turn: wait for a slot, send the request, hold the slot until the answer is complete, try again by error type.

The slot is held for the request alone. Between two tries it is given back, so a rate-limited agent blocks nobody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.compiler.schema import OutputSchema
from batch_agent.engine.limiter import Limiter
from batch_agent.engine.shapes import Shapes
from batch_agent.errors import BackendError, RateLimited, Timeout, Unavailable
from batch_agent.events import Sink, TurnFailed, TurnFinished, TurnStarted
from batch_agent.job import Timings
from batch_agent.messages import Conversation, Reply, ToolCall, Usage
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.retry import retry_delay
from batch_agent.tools.pool import PendingCall, ToolPool


@dataclass(slots=True)
class Resources:
    """What the agents of one run share."""

    backend: Backend
    limiter: Limiter
    tools: ToolPool
    schema: OutputSchema[object] | None
    shared: Conversation
    shapes: Shapes
    emit: Sink
    max_turns: int | None
    max_retries: int
    timeout_per_agent: float | None
    timeout_per_turn: float | None
    early_tools: bool  # start a tool while the model is still talking
    chance: Callable[[], float] = random.random
    answered: bool = False  # the backend has given at least one good answer


@dataclass(slots=True)
class Tally:
    """What one agent has used so far. Times in seconds."""

    sent: int = 0  # requests that left
    retries: int = 0  # requests sent again, and answers asked for again
    turns: int = 0  # complete answers
    usage: Usage = field(default_factory=Usage)
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    first_token: float | None = None

    @property
    def attempts(self) -> int:
        return 1 + self.retries if self.sent else 0

    def timings(self, total: float) -> Timings:
        return Timings(self.queued, self.inference, self.tool_wait, total, self.first_token)


@dataclass(slots=True)
class EarlyCalls:
    """Tool calls started while their answer was still being streamed, by call id."""

    pool: ToolPool
    started: dict[str, PendingCall] = field(default_factory=dict)

    def __call__(self, call: ToolCall) -> None:
        # A write waits for the end of the answer: an answer that breaks off is asked for again.
        if self.pool.can_start_early(call.name):
            self.started[call.id] = self.pool.start(call)

    def abandon(self) -> None:
        for pending in self.started.values():
            pending.abandon()
        self.started.clear()


async def take_turn(
    r: Resources, request: ModelRequest, index: int, tally: Tally, ticket: Ticket, early: EarlyCalls | None
) -> Reply:
    """The model's complete answer, or the BackendError that could not be helped."""
    failures = 0
    while True:
        error = None
        try:
            return await _send(r, request, index, tally, ticket, early)
        except BackendError as failure:
            error = failure
        if early is not None:
            early.abandon()
        failures += 1
        again = error.retryable and failures <= r.max_retries
        after = error.retry_after if isinstance(error, RateLimited | Unavailable) else None
        delay = retry_delay(failures, after, r.chance()) if again else None
        now = asyncio.get_running_loop().time()
        r.emit(TurnFailed(now, index, tally.turns + 1, error.type, str(error), delay))
        if delay is None:
            raise error
        tally.retries += 1
        tally.queued += delay
        await asyncio.sleep(delay)
        ticket = r.limiter.claim(request.turns_left)


async def _send(
    r: Resources, request: ModelRequest, index: int, tally: Tally, ticket: Ticket, early: EarlyCalls | None
) -> Reply:
    loop, limiter = asyncio.get_running_loop(), r.limiter
    claimed = loop.time()
    await limiter.hold(ticket)
    left = loop.time()
    generation = limiter.capacity.generation
    tally.queued += left - claimed
    tally.sent += 1
    r.emit(TurnStarted(left, index, tally.turns + 1))
    try:
        reply = await _infer(r, request, early)
    except BackendError as error:
        limiter.release(ticket)
        if isinstance(error, RateLimited) or (isinstance(error, Unavailable) and error.status == 503):
            limiter.overloaded(generation, error.retry_after)
        raise
    finally:
        limiter.release(ticket)
        tally.inference += loop.time() - left
    now = loop.time()
    tally.turns += 1
    tally.usage += reply.usage
    if tally.first_token is None:
        tally.first_token = reply.first_token
    r.answered = True
    limiter.succeeded()
    r.emit(TurnFinished(now, index, tally.turns, reply.usage, now - left, reply.first_token))
    return reply


async def _infer(r: Resources, request: ModelRequest, early: EarlyCalls | None) -> Reply:
    if r.timeout_per_turn is None:
        return await r.backend.infer(request, early)
    try:
        async with asyncio.timeout(r.timeout_per_turn) as limit:
            return await r.backend.infer(request, early)
    except TimeoutError:
        if not limit.expired():
            raise
        raise Timeout(
            f"{r.backend.name} gave no complete answer in timeout_per_turn, {r.timeout_per_turn:g} s"
        ) from None

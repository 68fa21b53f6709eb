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
from batch_agent.engine.cancellation import cancelled_by_us
from batch_agent.engine.limiter import Limiter
from batch_agent.engine.shapes import Shapes
from batch_agent.engine.spending import Spending
from batch_agent.errors import BackendError, Timeout, Unavailable
from batch_agent.events import Sink, StreamingDecided, TurnFailed, TurnFinished, TurnStarted
from batch_agent.job import Timings
from batch_agent.messages import Conversation, Reply, ToolCall, Usage
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER, retry_delay
from batch_agent.scheduler.streaming import Streaming
from batch_agent.store.steps import Spent
from batch_agent.tools.pool import PendingCall, ToolPool


@dataclass(slots=True)
class Resources:
    """What the agents of one run share."""

    backend: Backend
    limiter: Limiter
    spending: Spending
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
    streaming: Streaming = field(default_factory=Streaming)
    chance: Callable[[], float] = random.random
    answered: bool = False  # the backend has given at least one good answer


@dataclass(slots=True)
class Tally:
    """What one agent has used so far. Times in seconds."""

    sent: int = 0  # requests that left
    retries: int = 0  # requests sent again, and answers asked for again
    again: bool = False  # the next request to leave is such a one
    turns: int = 0  # complete answers
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None  # $, of the turns whose price is known
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    first_token: float | None = None
    before: float = 0.0  # seconds that an earlier session worked on it

    @property
    def attempts(self) -> int:
        return 1 + self.retries if self.sent else 0

    def leave(self) -> None:
        self.sent += 1
        self.retries += self.again
        self.again = False

    def add(self, reply: Reply, cost: float | None) -> None:
        self.turns += 1
        self.pay(reply.usage, cost)
        if self.first_token is None:
            self.first_token = reply.first_token

    def pay(self, usage: Usage, cost: float | None) -> None:
        self.usage += usage
        if cost is not None:
            self.cost = cost + (self.cost or 0.0)

    def follow(self, reply: Reply, spent: Spent) -> None:
        """Count a turn that an earlier session took, with everything it had spent by then."""
        self.add(reply, None)
        self.take_over(spent)

    def take_over(self, spent: Spent) -> None:
        self.sent, self.retries, self.cost, self.before = spent.sent, spent.retries, spent.cost, spent.total
        self.again = False
        self.queued, self.inference, self.tool_wait = spent.queued, spent.inference, spent.tool_wait

    def spent(self, seconds: float) -> Spent:
        """``seconds`` is how long the agent has been alive in this session."""
        total = self.before + seconds
        return Spent(self.sent, self.retries, self.queued, self.inference, self.tool_wait, total, self.cost)

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

    def gained(self, now: float) -> float:
        """Seconds for which the longest of them has been running."""
        return max((pending.seconds(now) for pending in self.started.values()), default=0.0)

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
        paid = tally.cost or 0.0
        try:
            return await _send(r, request, index, tally, ticket, early)
        except BackendError as failure:
            error = failure
        if early is not None:
            early.abandon()
        failures += 1
        again = error.retryable and failures <= r.max_retries and (error.retry_after or 0.0) <= LONGEST_RETRY_AFTER
        delay = retry_delay(failures, error.retry_after, r.chance()) if again else None
        now = asyncio.get_running_loop().time()
        cost = (tally.cost or 0.0) - paid
        r.emit(TurnFailed(now, index, tally.turns + 1, error.type, str(error), delay, error.usage, cost))
        if delay is None:
            raise error
        tally.again = True
        try:
            await asyncio.sleep(delay)
        finally:
            tally.queued += asyncio.get_running_loop().time() - now
        ticket = r.limiter.claim(request.turns_left)


async def _send(
    r: Resources, request: ModelRequest, index: int, tally: Tally, ticket: Ticket, early: EarlyCalls | None
) -> Reply:
    loop, limiter, spending = asyncio.get_running_loop(), r.limiter, r.spending
    claimed = loop.time()
    await limiter.hold(ticket)
    try:
        call = await spending.reserve(request)
    except BaseException:
        limiter.release(ticket)
        raise
    left = loop.time()
    generation = limiter.capacity.generation
    tally.queued += left - claimed
    tally.leave()
    r.emit(TurnStarted(left, index, tally.turns + 1))
    try:
        reply = await _infer(r, request, early)
        cost = spending.settle(call, reply.usage, cached=reply.saved is not None)
    except BackendError as error:
        tally.pay(error.usage or Usage(), spending.fail(call, error))
        if error.overload:
            limiter.overloaded(generation, error.retry_after)
        raise
    finally:
        spending.fail(call)
        limiter.release(ticket)
        tally.inference += loop.time() - left
    now = loop.time()
    tally.add(reply, cost)
    r.answered = True
    limiter.succeeded()
    r.emit(TurnFinished(now, index, tally.turns, reply.usage, now - left, reply.first_token, cost, reply.saved))
    if early is not None and reply.saved is None:
        decided = r.streaming.learn(early.gained(now), reply.usage.completion_tokens, limiter.scheduler.inflight)
        if decided is not None:
            r.emit(StreamingDecided(now, *decided))
    return reply


async def _infer(r: Resources, request: ModelRequest, early: EarlyCalls | None) -> Reply:
    limit = asyncio.timeout(r.timeout_per_turn)
    try:
        async with limit:
            return await r.backend.infer(request, early)
    except BackendError as error:
        error.text = error.text or "".join(request.said)
        raise
    except TimeoutError:
        if not limit.expired():
            raise
        raise Timeout(
            f"{r.backend.name} gave no complete answer in timeout_per_turn, {r.timeout_per_turn:g} s",
            text="".join(request.said),
        ) from None
    except asyncio.CancelledError:
        if cancelled_by_us():
            raise
        raise Unavailable(f"{r.backend.name} gave the call up: something it waited for was cancelled") from None

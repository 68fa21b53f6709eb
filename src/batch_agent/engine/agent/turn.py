"""One turn: wait for a slot, send the request, hold the slot until the answer is complete, try again by error type.

The slot is held for the request alone. Between two tries it is given back, so a rate-limited agent blocks nobody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.hedging import hedged
from batch_agent.dispatch.limiter import Limiter
from batch_agent.dispatch.spending import Spending
from batch_agent.engine.agent.shapes import Shapes
from batch_agent.engine.agent.tool_prewarm import ToolPrewarm
from batch_agent.engine.run.prefix_leader import PrefixLeader
from batch_agent.errors import BackendError, BadResponse, OutputError, Timeout, Unavailable
from batch_agent.events import SchemaUnsupported, Sink, StreamingDecided, TurnFailed, TurnFinished, TurnStarted
from batch_agent.job import Job, Timings
from batch_agent.messages import Conversation, Reply, ToolCall, Usage
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.scheduler.core import SUSPECT, Ticket
from batch_agent.scheduler.health import trouble_of
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER, retry_delay
from batch_agent.scheduler.streaming import Streaming
from batch_agent.store.steps import Spent
from batch_agent.tools.pool import PendingCall, ToolPool

if TYPE_CHECKING:
    from batch_agent.engine.agent.compaction import Compactor

# Calls of one answer that are run. Models that plan ask for a handful at once; one that writes hundreds is in a loop,
# and each of its calls would be a task, an outcome in the record and a message in the conversation.
MOST_CALLS = 64


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
    run: str  # its id
    clock: Callable[[], float]  # wall-clock time for events
    max_turns: int | None
    max_retries: int
    timeout_per_agent: float | None
    timeout_per_turn: float | None
    early_tools: bool  # start a tool while the model is still talking
    hedge: float | None = None  # seconds after which another endpoint is asked too
    ends_with_answer: bool = True  # an agent asks no more after an answer without calls, if that is a good one
    streaming: Streaming = field(default_factory=Streaming)
    prewarm: ToolPrewarm | None = None
    compactor: Compactor | None = None  # None: what is asked is never cut
    schema_noted: bool = False  # that the server does not keep to it
    lead: PrefixLeader | None = None  # None: nobody goes ahead of the others
    hints: bool = True  # servers that plan are told what they can expect
    answers: int = 0  # complete ones
    answer_tokens: int = 0  # ... and what they had together
    chance: Callable[[], float] = random.random

    @property
    def usual_tokens(self) -> int | None:
        """Of an answer; None before the first."""
        return self.answer_tokens // self.answers if self.answers else None


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
    job: Job
    turn: int
    started: dict[str, PendingCall] = field(default_factory=dict)

    def __call__(self, call: ToolCall) -> None:
        # A write waits for the end of the answer: an answer that breaks off is asked for again.
        if len(self.started) < MOST_CALLS and self.pool.can_start_early(call.name):
            self.started[call.id] = self.pool.start(call, self.job, self.turn)

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
    ticket.once = not r.max_retries
    while True:
        paid = tally.cost or 0.0
        try:
            return await _send(r, request, index, tally, ticket, early)
        except BackendError as failure:
            error = failure
        if early is not None:
            early.abandon()
        now = asyncio.get_running_loop().time()
        if not error.retryable or ticket.failures > r.max_retries or _asks_too_much(error):
            await r.limiter.endpoints.learn(ticket)  # before it is the last word
        delay = _delay(r, ticket, error)
        cost = (tally.cost or 0.0) - paid
        turn = tally.turns + 1
        r.emit(TurnFailed(r.clock(), r.run, index, turn, error.type, str(error), delay, error.usage, cost))
        if delay is None:
            raise error
        tally.again = True
        request.tries += 1
        try:
            await r.limiter.again(ticket, delay)
        finally:
            tally.queued += asyncio.get_running_loop().time() - now


def _delay(r: Resources, ticket: Ticket, error: BackendError) -> float | None:
    """Seconds until the request is sent again; None when it is not. What was the server's fault costs a row nothing,
    unless its request is there each time the server goes down."""
    endpoint = ticket.endpoint
    assert endpoint is not None
    elsewhere = r.limiter.endpoints.others_work(endpoint) and trouble_of(error) is not None
    ticket.avoid = endpoint if elsewhere else None
    if endpoint.given_up:
        return 0.0  # at another endpoint; where there is none, the run is over
    if ticket.hits > max(SUSPECT, r.max_retries):
        return None
    if not error.retryable or ticket.failures > r.max_retries:
        return None
    if endpoint.health.is_down or ticket.lost:
        return 0.0
    if elsewhere:
        return 0.0 if not error.overload else retry_delay(max(1, ticket.failures), None, r.chance())
    if _asks_too_much(error):
        return None
    return retry_delay(max(1, ticket.failures), error.retry_after, r.chance())


def _asks_too_much(error: BackendError) -> bool:
    return (error.retry_after or 0.0) > LONGEST_RETRY_AFTER


async def _send(
    r: Resources, request: ModelRequest, index: int, tally: Tally, ticket: Ticket, early: EarlyCalls | None
) -> Reply:
    loop, limiter, spending = asyncio.get_running_loop(), r.limiter, r.spending
    claimed = loop.time()
    await limiter.hold(ticket)
    try:
        await limiter.endpoints.budgets.afford(ticket, partial(spending.expect, request))
        call = await spending.reserve(request)
    except BaseException:
        limiter.release(ticket)
        raise
    if ticket.endpoint is not None and ticket.endpoint.name:
        request.endpoint = ticket.endpoint.name
    left = loop.time()
    tally.queued += left - claimed
    tally.leave()
    r.emit(TurnStarted(r.clock(), r.run, index, tally.turns + 1))
    try:
        reply, by = await _answer(r, request, ticket, early)
        if not reply.tool_calls and not _has_answer(reply.text, r.schema):
            raise BadResponse(f"{r.backend.name} gave an empty answer", text=reply.text, usage=reply.usage)
        cost = spending.settle(call, reply.usage, cached=reply.saved is not None)
        if reply.saved is not None:
            limiter.endpoints.budgets.settle(ticket, asked=False)
        elif by is ticket:  # else another endpoint was asked, and has said so
            limiter.answered(ticket, loop.time() - left, reply)
    except BackendError as error:
        tally.pay(error.usage or Usage(), spending.fail(call, error))
        limiter.endpoints.failed(ticket, error)
        raise
    finally:
        spending.fail(call)
        limiter.release(ticket)
        tally.inference += loop.time() - left
    if by is not ticket and early is not None:
        early.abandon()
    seconds = loop.time() - left
    tally.add(reply, cost)
    r.answers += 1
    r.answer_tokens += reply.usage.completion_tokens
    done = TurnFinished(
        r.clock(), r.run, index, tally.turns, reply.usage, seconds, reply.first_token, cost, reply.saved
    )
    r.emit(done)
    _note_schema(r)
    if early is not None and reply.saved is None:
        gained = early.gained(loop.time())
        decided = r.streaming.learn(gained, reply.usage.completion_tokens, limiter.scheduler.inflight)
        if decided is not None:
            r.emit(StreamingDecided(r.clock(), r.run, *decided))
    return reply


def _note_schema(r: Resources) -> None:
    """Say once what the backend has found out about its server and schemas."""
    if r.schema is not None and not r.schema_noted and (note := r.backend.capabilities.schema_note):
        r.schema_noted = True
        r.emit(SchemaUnsupported(r.clock(), r.run, note))


def _has_answer(text: str, schema: OutputSchema[object] | None) -> bool:
    """What a model says to itself alone is none, where the text is the output; else the schema judges it."""
    text = text.strip()
    if text and schema is None and (text[0] == "<" or text[-1] == ">"):  # it may be between tags, all of it
        with suppress(OutputError):  # which is for whoever reads the answer to say
            text = strip_reasoning(text)
    return bool(text)


async def _answer(
    r: Resources, request: ModelRequest, ticket: Ticket, early: EarlyCalls | None
) -> tuple[Reply, Ticket]:
    """And the ticket that it came by."""
    if r.hedge is None or len(r.limiter.scheduler.endpoints) == 1:
        return await _infer(r, request, ticket, early), ticket
    first = _infer(r, request, ticket, early)
    return await hedged(r, r.hedge, request, ticket, first, lambda again, other: _infer(r, again, other, None))


async def _infer(r: Resources, request: ModelRequest, ticket: Ticket, early: EarlyCalls | None) -> Reply:
    limit = r.limiter.endpoints.limit(ticket, r.timeout_per_turn)
    report = early if early is not None or request.on_begin is None else _start_nothing
    try:
        async with limit:
            return await r.backend.infer(request, report)
    except BackendError as error:
        error.text = error.text or "".join(request.said)
        raise
    except TimeoutError:
        if not limit.expired():
            raise
        raise Timeout(
            f"{r.backend.name} gave no complete answer in {_time_allowed(r, ticket)}", text="".join(request.said)
        ) from None
    except asyncio.CancelledError:
        if cancelled_by_us():
            raise
        raise Unavailable(f"{r.backend.name} gave the call up: something it waited for was cancelled") from None
    finally:
        r.limiter.endpoints.finished(ticket)
        if request.on_begin is not None:
            request.on_begin()


def _start_nothing(call: ToolCall) -> None:
    """For an answer that is streamed only to see it begin."""


def _time_allowed(r: Resources, ticket: Ticket) -> str:
    seconds = asyncio.get_running_loop().time() - ticket.sent_at
    if ticket.lost:
        return f"{seconds:.3g} s, and the server has been down meanwhile"
    return (
        f"{seconds:.3g} s, on trial after an outage" if ticket.trial else f"timeout_per_turn, {r.timeout_per_turn:g} s"
    )

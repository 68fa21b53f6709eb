"""One turn of an agent for the dispatcher: the request, the effects of each attempt on the agent's tally, and the tool
calls that start while the answer is still being written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from batch_agent.agent.prefix_leader import PrefixLeader
from batch_agent.agent.shapes import Shapes
from batch_agent.agent.tool_prewarm import ToolPrewarm
from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.dispatcher import Dispatcher, ModelCall
from batch_agent.dispatch.policy import Observer, Policy
from batch_agent.errors import BackendError, EmptyAnswer, OutputError, Truncated
from batch_agent.events import SchemaUnsupported, Sink, StreamingDecided, TurnFailed, TurnFinished, TurnStarted
from batch_agent.job import Job, Timings
from batch_agent.messages import Conversation, Reply, ToolCall, Usage
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.record.digests import ShapeDigests
from batch_agent.record.steps import Spent
from batch_agent.scheduler.streaming import Streaming
from batch_agent.tools.pool import PendingCall, ToolPool

if TYPE_CHECKING:
    from batch_agent.agent.compaction import Compactor
    from batch_agent.agent.touches import Touches
    from batch_agent.observe.telemetry import Traces


# After this many rows whose images were refused, no images are sent; a single refusal may concern only that image.
IMAGE_REFUSALS = 3


@dataclass(slots=True)
class Resources:
    backend: Backend
    dispatcher: Dispatcher
    policy: Policy  # retries and timeouts of turns
    tools: ToolPool
    schema: OutputSchema[object] | None
    shared: Conversation
    shapes: Shapes
    emit: Sink
    run: str  # its id
    clock: Callable[[], float]  # wall-clock time for events
    max_turns: int | None
    timeout_per_agent: float | None
    early_tools: bool  # start a tool while the model is still writing
    ends_with_answer: bool = True  # an agent ends with a valid answer without tool calls
    keeps_cut_text: bool = False  # free text that was cut at max_tokens is accepted and marked as truncated
    streaming: Streaming = field(default_factory=Streaming)
    prewarm: ToolPrewarm | None = None
    compactor: Compactor | None = None  # None: conversations are never cut
    schema_noted: bool = False  # an event reported that the server does not enforce the schema
    touches: Touches | None = None  # None: contexts are not touched while tools run
    sees_images: bool | None = None  # the model accepts images of tool results; None: not known yet
    image_refusals: int = 0
    lead: PrefixLeader | None = None  # None: no request is sent ahead of the others
    digests: ShapeDigests = field(default_factory=ShapeDigests)
    traces: Traces | None = None  # None: the run is not traced
    hints: bool = True  # send hints about each agent to servers that plan
    answers: int = 0  # number of complete answers
    answer_tokens: int = 0  # sum over all of them

    @property
    def usual_tokens(self) -> int | None:
        """Mean completion tokens of an answer; None before the first."""
        return self.answer_tokens // self.answers if self.answers else None

    def note_images(self, *, accepted: bool) -> None:
        """Learn from an answer to a request with images of tool results, or to one without them after a refusal."""
        self.image_refusals += not accepted
        if accepted or self.image_refusals >= IMAGE_REFUSALS:
            self.sees_images = accepted

    def start_tool(self, call: ToolCall, job: Job, turn: int) -> PendingCall:
        if self.traces is None:
            return self.tools.start(call, job, turn)
        # Most calls need no trace context, because their result is cached or shared.
        return self.tools.start(call, job, turn, partial(self.traces.of_call, self.run, job.index, turn, call.id))


CUT = "length"  # finish reason of a text that was cut at max_tokens and is kept
# The most calls of one answer that are run. Models that plan make a few at once. A model that writes hundreds is in a
# loop, and each of its calls would need a task, a record and a message.
MOST_CALLS = 64


@dataclass(slots=True)
class Tally:
    """What one agent has used so far. Times in seconds."""

    sent: int = 0  # requests that left
    retries: int = 0  # requests sent again, and answers requested again
    again: bool = False  # the next request is one of these
    turns: int = 0  # complete answers
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None  # $, of the turns whose price is known
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    first_token: float | None = None
    before: float = 0.0  # seconds spent in earlier sessions

    @property
    def attempts(self) -> int:
        return 1 + self.retries if self.sent else 0

    def add(self, reply: Reply, cost: float | None) -> None:
        self.turns += 1
        self.usage += reply.usage
        if cost is not None:
            self.cost = cost + (self.cost or 0.0)
        if self.first_token is None:
            self.first_token = reply.first_token

    def pay(self, usage: Usage, cost: float | None) -> None:
        self.usage += usage
        if cost is not None:
            self.cost = cost + (self.cost or 0.0)

    def take_over(self, spent: Spent) -> None:
        self.sent, self.retries, self.cost, self.before = spent.sent, spent.retries, spent.cost, spent.total
        self.again = False
        self.queued, self.inference, self.tool_wait = spent.queued, spent.inference, spent.tool_wait

    def spent(self, seconds: float) -> Spent:
        """Return everything spent. ``seconds`` is the agent's lifetime in this session."""
        total = self.before + seconds
        return Spent(self.sent, self.retries, self.queued, self.inference, self.tool_wait, total, self.cost)

    def timings(self, total: float) -> Timings:
        return Timings(self.queued, self.inference, self.tool_wait, total, self.first_token)


@dataclass(slots=True)
class EarlyCalls:
    """Tool calls that started while their answer was streamed, by call id."""

    r: Resources
    job: Job
    turn: int
    started: dict[str, PendingCall] = field(default_factory=dict)

    def __call__(self, call: ToolCall) -> None:
        # A write starts only when the answer is complete, because an incomplete answer is requested again.
        if len(self.started) < MOST_CALLS and self.r.tools.can_start_early(call.name):
            self.started[call.id] = self.r.start_tool(call, self.job, self.turn)

    def gained(self, now: float) -> float:
        """Return the seconds that the longest call has been running."""
        return max((pending.seconds(now) for pending in self.started.values()), default=0.0)

    def abandon(self) -> None:
        for pending in self.started.values():
            pending.abandon()
        self.started.clear()


class TurnCall(ModelCall, Observer):
    """A Question and its Observer. ``early`` has the tool calls that start while the answer is streamed. ``schema`` is
    that of the answer."""

    __slots__ = ("_early", "_index", "_r", "_schema", "_tally")

    def __init__(
        self,
        r: Resources,
        request: ModelRequest,
        index: int,
        tally: Tally,
        early: EarlyCalls | None,
        schema: OutputSchema[object] | None,
    ) -> None:
        self.backend, self.request = r.backend, request
        self.on_tool_call = _start_nothing if early is None and request.on_begin is not None else early
        self._r, self._index, self._tally, self._early = r, index, tally, early
        self._schema = schema

    def shortened(self, cut: Truncated) -> Reply | None:
        if self._schema is not None or not self._r.keeps_cut_text or cut.in_call or not _is_begun(cut.text):
            return super().shortened(cut)
        return Reply(cut.text, usage=cut.usage or Usage(), finish_reason=CUT)

    def check(self, reply: Reply) -> None:
        if not reply.tool_calls and not _has_answer(reply.text, self._schema):
            raise EmptyAnswer(f"{self.backend.name} gave an empty answer", text=reply.text, usage=reply.usage)

    def lost(self) -> None:
        """Stop the tools of this request, because another request was answered first."""
        if self._early is not None:
            self._early.abandon()

    # What an attempt changes

    def sent(self, queued: float) -> None:
        r, tally = self._r, self._tally
        tally.queued += queued
        tally.sent += 1
        tally.retries += tally.again
        tally.again = False
        r.emit(TurnStarted(r.clock(), r.run, self._index, tally.turns + 1))

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        r, tally = self._r, self._tally
        tally.inference += seconds
        tally.pay(error.usage or Usage(), cost)
        self.lost()
        tally.again = delay is not None
        turn, endpoint = tally.turns + 1, self.request.endpoint
        message, spent = str(error), (error.usage, cost or 0.0)
        r.emit(TurnFailed(r.clock(), r.run, self._index, turn, error.type, message, delay, *spent, endpoint, seconds))

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        r, tally = self._r, self._tally
        tally.inference += seconds
        tally.add(reply, cost)
        r.answers += 1
        r.answer_tokens += reply.usage.completion_tokens
        r.emit(
            TurnFinished(
                r.clock(),
                r.run,
                self._index,
                tally.turns,
                reply.usage,
                seconds,
                reply.first_token,
                cost,
                reply.saved,
                self.request.endpoint,
                reply.model,
            )
        )
        if self._schema is not None and not r.schema_noted and (note := r.backend.capabilities.schema_note):
            r.schema_noted = True
            r.emit(SchemaUnsupported(r.clock(), r.run, note))
        if self._early is not None and reply.saved is None:
            gained = self._early.gained(asyncio.get_running_loop().time())
            inflight = r.dispatcher.scheduler.inflight
            decided = r.streaming.learn(gained, reply.usage.completion_tokens, inflight)
            if decided is not None:
                r.emit(StreamingDecided(r.clock(), r.run, *decided))


def _has_answer(text: str, schema: OutputSchema[object] | None) -> bool:
    """Return whether the text is an answer: more than reasoning if the text is the output."""
    text = text.strip()
    if text and schema is None and (text[0] == "<" or text[-1] == ">"):  # the whole text may be inside tags
        with suppress(OutputError):  # the reader of the answer reports it
            text = strip_reasoning(text)
    return bool(text)


def _is_begun(text: str) -> bool:
    """Return whether a text that was cut contains more than reasoning."""
    try:
        return bool(strip_reasoning(text).strip())
    except OutputError:
        return False


def _start_nothing(call: ToolCall) -> None:
    """Do nothing; for an answer that is streamed only to detect its beginning."""

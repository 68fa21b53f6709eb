"""The events of a run, as one stream of typed values. Terminal, web page, metrics and traces all read this stream.

``at`` is wall-clock time in seconds since 1970, and never goes back within the events of one process. ``run`` is the
run's id, for sinks of several runs; ``index`` is the agent's index in that run, ``turn`` counts its answers from 1, and
``call`` is the position of a tool call in its answer. These four identify every call.

Events contain facts, never secrets. They contain no prompt, answer, tool arguments or result. But an error message may
quote the part of an answer that did not validate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from batch_agent.job import AgentError, AgentResult, Timings
from batch_agent.messages import Usage
from batch_agent.value_type import value_type

Ended = Literal["complete", "drained", "pilot", "cancelled", "failed", "out of budget", "unreachable"]


@value_type
class RunEvent:
    at: float
    run: str


@value_type
class RowEvent(RunEvent):
    index: int


@value_type
class TurnEvent(RowEvent):
    turn: int


@value_type
class CallEvent(TurnEvent):
    """``call_id`` is the model's id for the call, which need not be unique."""

    call: int
    call_id: str
    tool: str


Source: TypeAlias = Literal["run", "shared", "cache"]  # how a tool call was served


@value_type
class RunStarted(RunEvent):
    """``model`` is empty until the backend has been asked for it."""

    total: int | None  # None: the inputs are an iterator of unknown length
    backend: str
    model: str
    cost_per_second: float = 0.0  # $, if the run is paid by time


@value_type
class ModelChosen(RunEvent):
    """The user named no model, and the backend has this one."""

    model: str


@value_type
class JobStarted(RowEvent):
    """``elsewhere``: a worker in another process has begun the row. It exports the spans of the row."""

    job_id: str
    elsewhere: bool = False


@value_type
class RowTakenOver(JobStarted):
    """The feeder's own worker continues a row that another process has begun. Only metrics and spans get this event:
    the other sinks got the JobStarted of the row."""


@value_type
class TurnStarted(TurnEvent):
    """The request was sent; the agent holds a slot from here to TurnFinished or TurnFailed."""


@value_type
class TurnFinished(TurnEvent):
    usage: Usage
    seconds: float
    first_token: float | None
    cost: float | None = None  # $, None if no price is known
    saved: Usage | None = None  # tokens of an answer from the response cache
    endpoint: str = ""  # which answered
    model: str = ""  # the server's name for the model, or ""


@value_type
class TurnFailed(TurnEvent):
    """``retry_in`` is the wait before the retry; None: no retry. ``usage`` and ``cost`` are those of an unusable
    answer, if the server reports them."""

    error_type: str
    message: str
    retry_in: float | None
    usage: Usage | None = None
    cost: float = 0.0
    endpoint: str = ""  # to which the request was sent
    seconds: float = 0.0  # from sending to the failure


@value_type
class AnswerRejected(TurnEvent):
    """The answer of a turn does not fit the output schema; the model gets the errors and answers again."""

    error_type: str
    message: str


@value_type
class ContextCompacted(TurnEvent):
    """A conversation was cut before this turn. ``before_tokens`` is the size the prompt would have had; of the actual
    ``after_tokens``, ``cached_tokens`` were still in the server's cache."""

    before_tokens: int
    after_tokens: int
    cached_tokens: int


@value_type
class ToolStarted(CallEvent):
    """The call was passed to its tool, or to a call in flight or a cached result that it shares."""


@value_type
class ToolFinished(CallEvent):
    """``source`` says how the call was served: run now, shared with one in flight, or taken from the cache."""

    seconds: float
    ok: bool
    source: Source


@value_type
class JobFinished(RowEvent):
    """The job's AgentResult without its input, output and transcript."""

    job_id: str
    error: AgentError | None
    attempts: int
    turns: int
    usage: Usage
    cost: float | None
    timings: Timings
    resumed: bool
    answered_by: str | None = None

    @classmethod
    def of(cls, result: AgentResult[object], at: float, run: str) -> JobFinished:
        """Return the event of a row that has its result."""
        return cls(
            at,
            run,
            result.index,
            result.job_id,
            result.error,
            result.attempts,
            result.turns,
            result.usage,
            result.cost,
            result.timings,
            result.resumed,
            result.answered_by,
        )

    @property
    def ok(self) -> bool:
        return self.error is None


@value_type
class LimitChanged(RunEvent):
    """The number of model requests allowed in flight, and why it changed."""

    max_inflight: int | None
    reason: str
    endpoint: str = ""


@value_type
class HealthChanged(RunEvent):
    """An endpoint went down, was tried, came back or was given up. ``reason`` is its latest failure, ``rule`` is the
    rule by which it counts as down or doubted; ``since`` and ``next_trial`` use the same clock as ``at``, and are 0
    while it works."""

    endpoint: str
    state: Literal["healthy", "suspect", "down", "on trial"]
    reason: str
    since: float = 0.0
    next_trial: float = 0.0
    rule: str = ""


@value_type
class ControlFinished(RunEvent):
    """A control request ended: a few tokens of no row, sent to find out whether rows or an endpoint are bad. ``error``
    is the error's message, or "" if it was answered."""

    endpoint: str
    seconds: float
    usage: Usage
    cost: float | None = None  # $; None if no price is known
    error: str = ""


@value_type
class CacheRead(RunEvent):
    """The KV caches of the engines behind a run, read about once a second. The fields from ``held_seconds`` on are
    totals since the start of the run."""

    tokens: int | None  # that the caches hold
    usage: float | None  # 0 to 1, the part that running requests hold
    contexts: int  # tokens of the contexts of the agents that are admitted
    held: int  # agents that wait because their contexts do not fit
    held_seconds: float  # that agents waited so, all together
    recomputed: int  # tokens that were computed again because they had been evicted
    recompute_seconds: float  # of the engines, that this took
    touches: int  # evicted contexts that were computed again while their agents waited for tools
    touched_tokens: int
    kept_alive: int  # times that the shared prefix was touched


@value_type
class StreamingDecided(RunEvent):
    """A decision whether answers are streamed from now on, so that tools can start early, and its reason. Before the
    first of these events answers are streamed, if the run allows it."""

    streams: bool
    reason: str


@value_type
class SchemaUnsupported(RunEvent):
    """The server was found not to enforce the output schema: it is no longer sent, and answers are validated and
    repaired. Once in a run."""

    reason: str


@value_type
class DrainStarted(RunEvent):
    """No new row starts; running rows finish."""


@value_type
class RunFinished(RunEvent):
    """``reason``: the limit that ended the run, or why it is unreachable or refused."""

    ended: Ended
    reason: str = ""


Event = (
    RunStarted
    | JobStarted
    | TurnStarted
    | TurnFinished
    | TurnFailed
    | AnswerRejected
    | ContextCompacted
    | ToolStarted
    | ToolFinished
    | JobFinished
    | LimitChanged
    | HealthChanged
    | ControlFinished
    | CacheRead
    | StreamingDecided
    | SchemaUnsupported
    | ModelChosen
    | DrainStarted
    | RunFinished
)
Sink = Callable[[Event], None]


class TypedSink:
    """A sink with one handler for each type of event that it needs. A run calls the handlers directly, so an event of
    any other type costs the sink nothing."""

    handlers: Mapping[type, Callable[[Any], None]]

    def __call__(self, event: Event) -> None:
        handle = self.handlers.get(type(event))
        if handle is not None:
            handle(event)


class ListSink:
    """A sink that handles many events at once, which is cheaper than one at a time."""

    handlers: Mapping[type, Callable[[Any], None]]  # by type of event

    def __call__(self, event: Event) -> None:
        self.take((event,))

    def take(self, events: Iterable[Event]) -> None:
        handlers = self.handlers
        for event in events:
            handle = handlers.get(type(event))
            if handle is not None:
                handle(event)


logger = logging.getLogger("batch_agent")

FREQUENT = (JobStarted, TurnStarted, TurnFinished, ToolStarted, ToolFinished, JobFinished)
# Events that a worker in another process sends to the observers of its feeder. The feeder makes JobFinished of the
# result. Other events are about the state of one process.
SENT = (
    *(JobStarted, TurnStarted, TurnFinished, TurnFailed, AnswerRejected, ContextCompacted),
    *(ToolStarted, ToolFinished, ControlFinished),
)
MOST_HELD = 256  # events
HELD_SECONDS = 1.0


class Sinks:
    """A sink that passes events to all others. A sink that raises gets no more events, and does not affect the run."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._set(list(sinks))

    def add(self, sink: Sink) -> None:
        self._set([*self._sinks, sink])

    def __call__(self, event: Event) -> None:
        handlers = self._handlers.get(type(event))
        if handlers is None:
            handlers = self._handlers[type(event)] = self._handlers_of(type(event))
        for sink, handle in handlers:
            try:
                handle(event)
            except Exception:  # noqa: BLE001
                self._drop(sink)

    def elsewhere(self, event: Event) -> None:
        """Pass on an event of a worker in another process. Metrics do not get it, because their numbers come with
        commits."""
        for sink, handle in self._handlers_of(type(event)):
            try:
                (sink.elsewhere if isinstance(sink, Sinks) else handle)(event)
            except Exception:  # noqa: BLE001
                self._drop(sink)

    def _drop(self, sink: Sink) -> None:
        logger.exception("a sink of events raised an exception and gets no more events")
        self._set([other for other in self._sinks if other is not sink])

    def _set(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._handlers: dict[type, list[tuple[Sink, Sink]]] = {}  # by type of event: each sink, and what to call
        # The frequent types of events that a sink takes. Others of these types are not made.
        self.wanted = frozenset(kind for kind in FREQUENT if self._handlers_of(kind))

    def _handlers_of(self, kind: type) -> list[tuple[Sink, Sink]]:
        found = [(sink, sink.handlers.get(kind) if isinstance(sink, TypedSink) else sink) for sink in self._sinks]
        if kind is RowTakenOver:
            found = [each for each in found if isinstance(each[0], TypedSink | Sinks)]
        return [(sink, handle) for sink, handle in found if handle is not None]


class Held(TypedSink):
    """A sink that collects events and passes many of them on at once.

    In a loop over many events, a sink needs a fraction of the CPU time that it needs between two turns of agents,
    because its code stays in the processor's cache. Events are held for a second at most. Create it inside the event
    loop.
    """

    def __init__(self) -> None:
        self.handlers = {}
        self._sinks: list[ListSink] = []
        self._events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sink: ListSink) -> None:
        self._sinks.append(sink)
        self.handlers = {**self.handlers, **dict.fromkeys(sink.handlers, self._hold)}

    def flush(self) -> None:
        """Pass on all held events."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        for sink in tuple(self._sinks):
            try:
                sink.take(events)
            except Exception:
                logger.exception("a sink of events raised an exception and gets no more events")
                self._sinks.remove(sink)

    def _hold(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= MOST_HELD:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(HELD_SECONDS, self.flush)

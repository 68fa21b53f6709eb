"""What happens in a run, as one stream of typed values. Terminal, web page, metrics and traces all read this stream.

``at`` is wall-clock time in seconds since 1970, which within one run never goes back. ``run`` is the run's own id, by
which a sink of several runs tells them apart; ``index`` is the agent's in that run, ``turn`` counts its answers from 1,
and ``call`` is a call's place in the answer that asked for it: the four of them name every call once.

Events carry facts and never secrets. They hold no prompt, no answer, no tool's arguments or result; but a message of an
error says what went wrong in somebody's words, and may quote the piece of an answer that did not validate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from batch_agent.job import AgentError, Timings
from batch_agent.messages import Usage

Ended = Literal["complete", "drained", "cancelled", "failed", "out of budget", "unreachable"]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """``model`` is empty where the backend is yet to be asked for it."""

    at: float
    run: str
    total: int | None  # None: the inputs are an iterator of unknown length
    backend: str
    model: str
    cost_per_second: float = 0.0  # $, where the run costs by the clock


@dataclass(frozen=True, slots=True)
class ModelChosen:
    """The user named no model, and the backend has this one."""

    at: float
    run: str
    model: str


@dataclass(frozen=True, slots=True)
class JobStarted:
    at: float
    run: str
    index: int
    job_id: str


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The request left; the agent holds a slot from here to TurnFinished or TurnFailed."""

    at: float
    run: str
    index: int
    turn: int


@dataclass(frozen=True, slots=True)
class TurnFinished:
    at: float
    run: str
    index: int
    turn: int
    usage: Usage
    seconds: float
    first_token: float | None
    cost: float | None = None  # $, None where no price is known
    saved: Usage | None = None  # tokens of an answer that the response cache had
    endpoint: str = ""  # that answered
    model: str = ""  # as the server names it, "" if it does not


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """``retry_in`` is the wait before the same request is sent again, None when it is not. ``usage`` and ``cost`` are
    those of an answer that was no use, where the server says what it took."""

    at: float
    run: str
    index: int
    turn: int
    error_type: str
    message: str
    retry_in: float | None
    usage: Usage | None = None
    cost: float = 0.0
    endpoint: str = ""  # that was asked
    seconds: float = 0.0  # from sending it to its failure


@dataclass(frozen=True, slots=True)
class AnswerRejected:
    """The answer of a turn does not fit the output schema; the model is shown what is wrong and asked again."""

    at: float
    run: str
    index: int
    turn: int
    error_type: str
    message: str


@dataclass(frozen=True, slots=True)
class ContextCompacted:
    """A conversation was cut before this turn, as the answer shows it. ``before_tokens`` is what the prompt would have
    had; of the ``after_tokens`` that it had the server still knew ``cached_tokens``."""

    at: float
    run: str
    index: int
    turn: int
    before_tokens: int
    after_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """``call_id`` is what the model called it, which need not be unique."""

    at: float
    run: str
    index: int
    turn: int
    call: int
    call_id: str
    tool: str


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """``source`` says what the call cost: run now, shared with one in flight, or taken from the cache."""

    at: float
    run: str
    index: int
    turn: int
    call: int
    call_id: str
    tool: str
    seconds: float
    ok: bool
    source: Literal["run", "shared", "cache"]


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The job's AgentResult without its input, output and transcript."""

    at: float
    run: str
    index: int
    job_id: str
    error: AgentError | None
    attempts: int
    turns: int
    usage: Usage
    cost: float | None
    timings: Timings
    resumed: bool

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class LimitChanged:
    """The number of model calls allowed in flight, and why it changed."""

    at: float
    run: str
    max_inflight: int | None
    reason: str
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """An endpoint went down, was tried, came back or was given up. ``reason`` is its latest failure; ``since`` and
    ``next_trial`` are on the clock of ``at``, and 0 while it works."""

    at: float
    run: str
    endpoint: str
    state: Literal["healthy", "suspect", "down", "on trial"]
    reason: str
    since: float = 0.0
    next_trial: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The KV caches of the engines behind a run, about once a second. From ``held_seconds`` on, since its start."""

    at: float
    run: str
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


@dataclass(frozen=True, slots=True)
class StreamingDecided:
    """Whether answers are streamed from now on, so that tools can start early, and why. Until the first of these they
    are, where the run may."""

    at: float
    run: str
    streams: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SchemaUnsupported:
    """The server was found not to keep to the output schema: it goes there no more, and answers are checked and
    repaired. Once in a run."""

    at: float
    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """No new row starts; those under way finish."""

    at: float
    run: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """``reason`` says which limit it was, for a run that is out of budget; why, for one that is unreachable or that the
    server refuses."""

    at: float
    run: str
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
    | CacheRead
    | StreamingDecided
    | SchemaUnsupported
    | ModelChosen
    | DrainStarted
    | RunFinished
)
Sink = Callable[[Event], None]

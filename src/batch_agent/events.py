"""What happens in a run, as one stream of typed values. Terminal, web page, metrics and traces all read this stream.

``at`` is the event loop's clock, in seconds. Events carry facts, never secrets, and no prompt text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from batch_agent.job import AgentResult
from batch_agent.messages import Usage

Ended = Literal["complete", "drained", "cancelled", "failed", "out of budget"]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """``model`` is empty where the backend is yet to be asked for it."""

    at: float
    total: int | None  # None: the inputs are an iterator of unknown length
    backend: str
    model: str
    cost_per_second: float = 0.0  # $, where the run costs by the clock


@dataclass(frozen=True, slots=True)
class ModelChosen:
    """The user named no model, and the backend has this one."""

    at: float
    model: str


@dataclass(frozen=True, slots=True)
class JobStarted:
    at: float
    index: int
    job_id: str


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The request left; the agent holds a slot from here to TurnFinished or TurnFailed."""

    at: float
    index: int
    turn: int


@dataclass(frozen=True, slots=True)
class TurnFinished:
    at: float
    index: int
    turn: int
    usage: Usage
    seconds: float
    first_token: float | None
    cost: float | None = None  # $, None where no price is known
    saved: Usage | None = None  # tokens of an answer that the response cache had


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """``retry_in`` is the wait before the same request is sent again, None when it is not. ``usage`` and ``cost`` are
    those of an answer that was no use, where the server says what it took."""

    at: float
    index: int
    turn: int
    error_type: str
    message: str
    retry_in: float | None
    usage: Usage | None = None
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolStarted:
    at: float
    index: int
    tool: str


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """``source`` says what the call cost: run now, shared with one in flight, or taken from the cache."""

    at: float
    index: int
    tool: str
    seconds: float
    ok: bool
    source: Literal["run", "shared", "cache"]


@dataclass(frozen=True, slots=True)
class JobFinished:
    at: float
    result: AgentResult[object]


@dataclass(frozen=True, slots=True)
class LimitChanged:
    """The number of model calls allowed in flight, and why it changed."""

    at: float
    max_inflight: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StreamingDecided:
    """Whether answers are streamed from now on, so that tools can start early, and why. Until the first of these they
    are, where the run may."""

    at: float
    streams: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """``reason`` says which limit it was, for a run that is out of budget."""

    at: float
    ended: Ended
    reason: str = ""


Event = (
    RunStarted
    | JobStarted
    | TurnStarted
    | TurnFinished
    | TurnFailed
    | ToolStarted
    | ToolFinished
    | JobFinished
    | LimitChanged
    | StreamingDecided
    | ModelChosen
    | RunFinished
)
Sink = Callable[[Event], None]

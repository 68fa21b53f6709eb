"""What happens in a run, as one stream of typed values. Terminal, web page, metrics and traces all read this stream.

``at`` is the event loop's clock, in seconds. Events carry facts, never secrets, and no prompt text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from batch_agent.job import AgentResult
from batch_agent.messages import Usage


@dataclass(frozen=True, slots=True)
class RunStarted:
    at: float
    total: int | None  # None: the inputs are an iterator of unknown length
    backend: str
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


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """``retry_in`` is the wait before the same request is sent again, None when it is not."""

    at: float
    index: int
    turn: int
    error_type: str
    message: str
    retry_in: float | None


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
class RunFinished:
    at: float
    ended: Literal["complete", "drained", "cancelled", "failed"]


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
    | RunFinished
)
Sink = Callable[[Event], None]

"""A job, the unit of a batch, and the result that every job ends in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batch_agent.errors import JobError
from batch_agent.messages import Message, Usage

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One input, compiled: what this agent says beyond what all agents share."""

    index: int
    job_id: str
    input: object
    prompt: str
    identified: bool = False  # job_id is the input's own, not its position


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """Stands in a batch's inputs for a row that could not be read; its job fails with ``message``, the others run."""

    message: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Stands in a batch's inputs for a row whose index is not the place where it comes; no two have the same."""

    index: int
    value: object


@dataclass(frozen=True, slots=True)
class AgentError:
    """Why a job failed. ``type`` is one of a fixed set of strings, listed in docs/errors.md."""

    stage: str
    type: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, error: JobError) -> AgentError:
        return cls(error.stage, error.type, str(error), error.retryable)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. ``queued`` is waiting for an inference slot or a retry, ``inference`` holding one, ``tool_wait`` waiting
    for tools; ``first_token`` is of the first streamed turn."""

    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    first_token: float | None = None


@dataclass(frozen=True, slots=True)
class AgentResult(Generic[T_co]):
    """How one job ended. ``output`` is an instance of the schema the caller gave, or text without one."""

    index: int
    job_id: str
    input: object
    ok: bool
    output: T_co | None
    error: AgentError | None = None
    attempts: int = 0  # 1 plus the retries used; 0 when nothing was sent
    turns: int = 0  # complete answers of the model
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None
    timings: Timings = field(default_factory=Timings)
    messages: tuple[Message, ...] = ()
    raw_text: str = ""  # the model's last text, before any parsing
    repaired: bool = False  # the output was read from JSON that had to be mended
    resumed: bool = False  # it was in the record of an earlier session; nothing was sent for it in this one

    def __bool__(self) -> bool:
        return self.ok

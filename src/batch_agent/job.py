"""A job, the unit of a batch, and the result that every job ends in.

For type checkers an ``AgentResult`` is a ``Success`` or a ``Failure``, so that a test of ``ok`` settles what ``output``
and ``error`` are; for ``isinstance`` it is the class both have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, Self, TypeAlias, TypeVar

from batch_agent.errors import JobError, error_of
from batch_agent.foreign import describe
from batch_agent.messages import Attachment, Message, Usage
from batch_agent.value_type import value_type

T_co = TypeVar("T_co", covariant=True)

SHOWN_CHARACTERS = 100  # of an output or a message, where a result is printed


@value_type
class Job:
    """One input, compiled: what this agent says beyond what all agents share."""

    index: int
    job_id: str
    input: object
    prompt: str
    identified: bool = False  # job_id is the input's own, not its position
    parts: tuple[Job, ...] = ()  # it does not fit, and these are done instead and merged
    shortened: bool = False  # its longest field was cut to fit
    affinity: str = ""  # jobs with the same one are best done by the same endpoint
    images: Mapping[str, Attachment] = field(default_factory=dict, compare=False)  # what marks in its prompt stand for


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

    def exception(self) -> JobError:
        """The error of the tree that this tells of, to be raised."""
        return error_of(self.type, self.message, self.stage, self.retryable)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@value_type
class Timings:
    """Seconds. ``queued`` is waiting for an inference slot or a retry, ``inference`` holding one, ``tool_wait`` waiting
    for tools; ``first_token`` is of the first streamed turn."""

    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    first_token: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class BaseResult(Generic[T_co]):
    """How one job ended; always a Success or a Failure."""

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
    repaired: bool = False  # the output was read from JSON that was mended or cut out of prose
    truncated: bool = False  # the output is text that was cut at max_tokens
    resumed: bool = False  # it was in the record of an earlier session; nothing was sent for it in this one
    chunks: int = 1  # the parts that the input was done in, where it did not fit (oversized="chunk")
    shortened: bool = False  # the input did not fit, and only its beginning was sent (oversized="truncate")
    artifacts: Mapping[str, Path] = field(default_factory=dict)  # files that a worker saved, by name

    def __new__(
        cls, index: int = 0, job_id: str = "", input: object = None, ok: bool | None = None, *rest: Any, **named: Any
    ) -> Self:
        kind: Any = cls
        if cls is BaseResult:
            kind = Success if ok else Failure
        # As dataclasses.replace would make it.
        elif ok is not None and issubclass(cls, Success | Failure) and ok != issubclass(cls, Success):
            raise TypeError(f"a {cls.__name__} cannot have ok={ok}; see as_failure")
        made: Self = object.__new__(kind)
        return made

    def as_failure(self, error: AgentError) -> Failure:
        """The same job, when it turns out that its output cannot be used."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return Failure(**{**known, "ok": False, "output": None, "error": error})

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        outcome = f"ok: {_shown(self.output)}" if self.ok else f"failed: {cut(str(self.error))}"
        name = "" if self.job_id == str(self.index) else f" {cut(self.job_id)!r}"
        return f"<AgentResult {self.index}{name} {outcome}>"


@dataclass(frozen=True, slots=True, repr=False)
class Success(BaseResult[T_co]):
    """A job that was done. ``output`` is an instance of the schema the caller gave, or text without one."""

    ok: Literal[True]
    output: T_co
    error: None = None

    def unwrap(self) -> T_co:
        """The output."""
        return self.output

    def __bool__(self) -> Literal[True]:
        return True


@dataclass(frozen=True, slots=True, repr=False)
class Failure(BaseResult[Never]):
    """A job that was not done; ``error`` says why."""

    ok: Literal[False]
    output: None
    error: AgentError = AgentError("run", JobError.type, "no reason was given")

    def unwrap(self) -> Never:
        """Raises what happened: a JobError, of the class that ``batch_agent.errors`` has for it."""
        error = self.error.exception()
        error.add_note(f"in row {self.index}" + ("" if self.job_id == str(self.index) else f" ({self.job_id})"))
        raise error

    def __bool__(self) -> Literal[False]:
        return False


if TYPE_CHECKING:
    AgentResult: TypeAlias = Success[T_co] | Failure
else:
    AgentResult = BaseResult


def cut(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """``text`` on one line of at most ``limit`` characters, whatever is not printable written out."""
    line = " ".join(text[: 4 * limit].split())
    if not line.isprintable():
        line = repr(line)[1:-1]
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def _shown(output: object) -> str:
    try:
        return cut(repr(output))
    except Exception as error:  # the output's class is the user's
        return f"{type(output).__name__} ({cut(describe(error))})"

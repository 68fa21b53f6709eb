"""A job, the unit of a batch, and the result of every job.

For type checkers an ``AgentResult`` is a ``Success`` or a ``Failure``, so that a test of ``ok`` decides the types of
``output`` and ``error``; for ``isinstance`` it is their common base class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, Self, TypeAlias, TypeVar, cast

from batch_agent.errors import Interrupted, JobError, WorkerFailed, error_of
from batch_agent.foreign import describe
from batch_agent.messages import Attachment, Message, Usage
from batch_agent.value_type import value_type

T_co = TypeVar("T_co", covariant=True)

JOINED = " + "  # between the models that answered one row
SHOWN_CHARACTERS = 100  # of an output or a message, when a result is printed


@value_type
class Job:
    """One input, compiled: the part of this agent's prompt that other agents do not share."""

    index: int
    job_id: str
    input: object
    prompt: str
    own_id: str | None = None  # the id that the input has itself, which is part of its question
    parts: tuple[Job, ...] = ()  # if it does not fit: these are done instead, and their answers merged
    shortened: bool = False  # its longest field was cut to fit
    affinity: str = ""  # jobs with the same value are preferably sent to the same endpoint
    images: Mapping[str, Attachment] = field(default_factory=dict, compare=False)  # behind the marks in its prompt
    seed: int | None = None  # of a sample of a row; it replaces the seed of the run


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """Replaces an input that could not be read; its job fails with ``message``, the others run."""

    message: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Replaces an input whose index is not its position; indexes must be unique. ``name`` is the id of the row that it
    came from, if it has one."""

    index: int
    value: object
    name: str | None = None


@dataclass(frozen=True, slots=True)
class AgentError:
    """The reason why a job failed. ``type`` is one of a fixed set of strings, listed in docs/errors.md. ``traceback``
    is that of an exception in the code of a worker, as text; else ""."""

    stage: str
    type: str
    message: str
    retryable: bool = False
    traceback: str = ""

    @classmethod
    def of(cls, error: JobError) -> AgentError:
        traceback = error.traceback if isinstance(error, WorkerFailed) else ""
        return cls(error.stage, error.type, str(error), error.retryable, traceback)

    def exception(self) -> JobError:
        """Return this error as an exception that can be raised."""
        return error_of(self.type, self.message, self.stage, self.retryable)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@value_type
class Timings:
    """Seconds. ``queued``: waiting for an inference slot or a retry; ``inference``: holding a slot; ``tool_wait``:
    waiting for tools; ``first_token``: of the first streamed turn."""

    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    first_token: float | None = None


@value_type
class Earlier:
    """The answer of an entry of a cascade that another answer has replaced. ``name`` is the entry."""

    name: str
    output: object = None
    error: AgentError | None = None
    doubts: Mapping[str, float | None] | None = None
    votes: Mapping[str, Mapping[str, Any]] | None = None
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None

    @property
    def doubt(self) -> float | None:
        """The largest doubt of a field; None if no doubt is known."""
        return largest_doubt(self.doubts)


class _LazyTexts:
    """Decodes the ``raw_text`` and the ``messages`` of a result that came as bytes when one of them is first read: they
    are large, and most results are only counted and written. Until then both fields have no value, and Python calls
    ``__getattr__`` for a field without one."""

    __slots__ = ("_read_texts",)

    _read_texts: Callable[[], tuple[str, tuple[Message, ...]]]

    def read_later(self, read: Callable[[], tuple[str, tuple[Message, ...]]]) -> None:
        """Take the values of both fields away. ``read`` returns them."""
        self._read_texts = read
        del self.raw_text, self.messages  # type: ignore[attr-defined]

    def with_output(self, output: object) -> AgentResult[object]:
        """Return the result with another output. Texts that were not read stay so."""
        made: Any = self
        if not hasattr(self, "_read_texts"):
            return cast("AgentResult[object]", replace(made, output=output))
        made = replace(made, output=output, raw_text="", messages=())
        made.read_later(self._read_texts)
        return cast("AgentResult[object]", made)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name not in ("raw_text", "messages"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            self.raw_text, self.messages = self._read_texts()
            return getattr(self, name)


@value_type
class BaseResult(_LazyTexts, Generic[T_co]):
    """The result of one job; always a Success or a Failure."""

    index: int
    job_id: str
    input: object
    ok: bool
    output: T_co | None
    error: AgentError | None = None
    attempts: int = 0  # 1 plus the retries used; 0 when nothing was sent
    turns: int = 0  # complete answers from the model
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None
    timings: Timings = field(default_factory=Timings)
    messages: tuple[Message, ...] = ()
    raw_text: str = ""  # the model's last text, before any parsing
    repaired: bool = False  # the output was read from JSON that was corrected or found in prose
    truncated: bool = False  # the output is text that was cut at max_tokens, or a worker got such a text
    resumed: bool = False  # from the record of an earlier session; nothing was sent in this one
    chunks: int = 1  # parts that the input was split into because it did not fit (oversized="chunk")
    shortened: bool = False  # only the beginning of the input was sent because it did not fit (oversized="truncate")
    artifacts: Mapping[str, Path] = field(default_factory=dict)  # files that a worker saved, by name
    # With samples: by field the ``counts`` of each value, and the samples ``against`` the winner. None: no vote.
    votes: Mapping[str, Mapping[str, Any]] | None = None
    samples: tuple[T_co | None, ...] = ()  # the outputs of the samples that were asked; None for one that failed
    doubts: Mapping[str, float | None] | None = None  # with doubt=True, by field; None for a field: not known
    # With a cascade: the name of the entry that gave the output. With a standby: the model that gave the answers, or
    # "A + B" for turns of both. None: the run has neither.
    answered_by: str | None = None
    earlier: tuple[Earlier, ...] = ()  # with a cascade: the answers that did not stay, in the order they were asked
    waits_for: str | None = None  # with a cascade: "people", or an entry that could not answer; else None

    def __new__(
        cls, index: int = 0, job_id: str = "", input: object = None, ok: bool | None = None, *rest: Any, **named: Any
    ) -> Self:
        kind: Any = cls
        if cls is BaseResult:
            kind = Success if ok else Failure
        # As created by dataclasses.replace.
        elif ok is not None and issubclass(cls, Success | Failure) and ok != issubclass(cls, Success):
            raise TypeError(f"a {cls.__name__} cannot have ok={ok}; see as_failure")
        made: Self = object.__new__(kind)
        return made

    @property
    def doubt(self) -> float | None:
        """The largest doubt of a field: a rank from 0, certain, to 1. None if no doubt is known."""
        return largest_doubt(self.doubts)

    @property
    def escalated(self) -> bool:
        """Whether the row still waits for an answer of people, or of an entry of its cascade that could not answer."""
        return self.waits_for is not None

    def as_failure(self, error: AgentError) -> Failure:
        """Return the same job as a failure, when its output turns out to be unusable."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return Failure(**{**known, "ok": False, "output": None, "error": error, "doubts": None, "answered_by": None})

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        outcome = f"ok: {_shown(self.output)}" if self.ok else f"failed: {cut(str(self.error))}"
        name = "" if self.job_id == str(self.index) else f" {cut(self.job_id)!r}"
        return f"<AgentResult {self.index}{name} {outcome}>"


@value_type
class Success(BaseResult[T_co]):
    """A job that succeeded. ``output`` is an instance of the given schema, or text without one."""

    ok: Literal[True]
    output: T_co
    error: None = None

    __repr__ = BaseResult.__repr__

    def unwrap(self) -> T_co:
        """The output."""
        return self.output

    def __bool__(self) -> Literal[True]:
        return True


@value_type
class Failure(BaseResult[Never]):
    """A job that failed; ``error`` says why."""

    ok: Literal[False]
    output: None
    error: AgentError = AgentError("run", JobError.type, "no reason was given")

    __repr__ = BaseResult.__repr__

    def unwrap(self) -> Never:
        """Raise the error: a JobError, of the class that ``batch_agent.errors`` has for it."""
        error = self.error.exception()
        error.add_note(f"in row {self.index}" + ("" if self.job_id == str(self.index) else f" ({self.job_id})"))
        raise error

    def __bool__(self) -> Literal[False]:
        return False


if TYPE_CHECKING:
    AgentResult: TypeAlias = Success[T_co] | Failure
else:
    AgentResult = BaseResult


def is_interrupted(result: AgentResult[object]) -> bool:
    """Return whether a row was stopped before its end: it has not failed, and a resumed run works on it."""
    return result.error is not None and result.error.type == Interrupted.type


def largest_doubt(doubts: Mapping[str, float | None] | None) -> float | None:
    return max((doubt for doubt in (doubts or {}).values() if doubt is not None), default=None)


def cut(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Return ``text`` on one line of at most ``limit`` characters, with unprintable characters escaped."""
    line = " ".join(text[: 4 * limit].split())
    if not line.isprintable():
        line = repr(line)[1:-1]
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def _shown(output: object) -> str:
    try:
        return cut(repr(output))
    except Exception as error:  # the output's class is user code  # noqa: BLE001
        return f"{type(output).__name__} ({cut(describe(error))})"

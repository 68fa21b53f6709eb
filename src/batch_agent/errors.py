"""The error tree.

    BatchAgentError
    ├── SpecError            the request is wrong; raised before any job starts (also a ValueError)
    │   └── RunRejected      the server refuses every request of this run: wrong key, unknown model, wrong path
    ├── RunUnreachable       the server could not be reached for so long that the run was given up before any result
    ├── JobError             one job cannot go on; lands on its result, siblings untouched
    │   ├── InputError       this row cannot be rendered            type InputError
    │   │   └── Oversized    it can never fit the model's context   type OVERSIZED
    │   ├── BackendError     Timeout · RateLimited · Unavailable · Rejected · ContextOverflow · Truncated · BadResponse
    │   ├── ToolError        ToolTimeout · ToolFailed · UnknownTool · BadArguments · OutcomeUnknown
    │   │                    (the model sees these)
    │   ├── OutputError      NotJSON · Invalid
    │   ├── LimitExceeded    turns or time
    │   ├── WorkerFailed     a worker of the user's own raised something, or returned what is not JSON
    │   │   └── RowEnded     it asked or called something after its row had ended
    │   ├── ReplayMismatch   the next request is not the one that the record answers
    │   ├── RecordUnreadable the row's record is damaged, and a write was begun in it
    │   ├── Cancelled        somebody cancelled this job alone
    │   └── Interrupted      the run ended before this job did
    ├── StoreError           the run cannot be recorded; stops the run
    └── InternalError        a broken invariant

Whether an error is tried again is a property of its type (``retryable``), not of the place that catches it. ``type`` is
the stable string users see in ``AgentError.type``; ``stage`` says where in a job's life it happened. Messages are built
by whoever raises and never contain a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, cast

from batch_agent.messages import Quota, Usage

Stage = Literal["compile", "infer", "tools", "validate", "record", "deliver", "run"]


class BatchAgentError(Exception):
    """Everything this package raises on purpose."""


class SpecError(BatchAgentError, ValueError):
    """The request is wrong. The message names what is wrong and what is allowed."""


class RunRejected(SpecError):
    """The server refuses what every job of this run would send, so the run stopped before it had one result."""


class RunUnreachable(BatchAgentError):
    """The server did not answer for so long that the run ended before it had one result."""


class StoreError(BatchAgentError):
    """The run cannot be recorded."""


class InternalError(BatchAgentError):
    """A broken invariant of this package: please report it."""


class JobError(BatchAgentError):
    """One job cannot go on. ``str(error)`` is the message for people."""

    stage: Stage = "run"
    type: str = "JobError"
    retryable: bool = False


class InputError(JobError):
    stage = "compile"
    type = "InputError"


class Oversized(InputError):
    type = "OVERSIZED"


class BackendError(JobError):
    stage = "infer"
    type = "BackendError"
    overload: bool = False  # the server is there and has too much to do: ask less, not only later

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        text: str = "",
        usage: Usage | None = None,
        overload: bool | None = None,
        unreached: bool = False,
        quota: Quota | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        if overload is not None:
            self.overload = overload
        self.unreached = unreached  # nothing of the request was read: no fault of what it asked
        self.paid_elsewhere = False  # it was another's request, which this one shared
        self.second_hand = False  # a server that works told of it: it says nothing against that one
        self.retry_after = retry_after  # seconds the server asks to be left alone
        self.text = text  # what the model had said when it broke off
        self.usage = usage  # what was computed all the same, where the server says so
        self.quota = quota  # what the server says of its budgets, where it does


class Timeout(BackendError):
    """No complete answer in ``timeout_per_turn``, or no connection."""

    type = "TimeoutError"
    retryable = True


class RateLimited(BackendError):
    type = "RateLimited"
    retryable = True
    overload = True


class Unavailable(BackendError):
    """The server is down, overloaded, restarting, or dropped the connection."""

    type = "Unavailable"
    retryable = True


class BadResponse(BackendError):
    """An answer that is no answer: malformed, cut off, empty, aborted by the server. ``text`` is what came of it."""

    type = "BadResponse"
    retryable = True


class EmptyAnswer(BadResponse):
    """A complete answer with no text and no tool call: the model's fault, not the server's."""


class Truncated(BackendError):
    """The model ran into its token limit; asking again would cost the same and end the same. ``text`` is its part.
    ``in_call`` says that a tool call was cut, so that the text is not the answer."""

    type = "Truncated"

    def __init__(self, message: str, *, text: str = "", usage: Usage | None = None, in_call: bool = False) -> None:
        super().__init__(message, text=text, usage=usage)
        self.in_call = in_call


class Rejected(BackendError):
    """The server understood and refused (400, 401, 403, 404, 413, 422). Never tried again."""

    type = "Rejected"


class ContextOverflow(Rejected):
    """The conversation no longer fits the model's context."""

    type = "ContextOverflow"


class ToolError(JobError):
    """What a tool raises to tell the model, politely, that a call did not work. The agent goes on."""

    stage = "tools"
    type = "ToolError"


class ToolTimeout(ToolError):
    type = "ToolTimeout"


class ToolFailed(ToolError):
    """A tool raised something that is not a ToolError."""

    type = "ToolFailed"


class UnknownTool(ToolError):
    """The model named a tool that this batch does not offer."""

    type = "UnknownTool"


class BadArguments(ToolError):
    """The model's arguments do not fit the tool's signature."""

    type = "BadArguments"


class OutcomeUnknown(ToolError):
    """The run was interrupted while the call, which may write, was running. It is not run again."""

    type = "OutcomeUnknown"


class OutputError(JobError):
    stage = "validate"
    type = "OutputError"


class NotJSON(OutputError):
    type = "NotJSON"


class Invalid(OutputError):
    """JSON, but not the schema's."""

    type = "Invalid"


class LimitExceeded(JobError):
    type = "LimitExceeded"


class AgentTimeout(LimitExceeded):
    """``timeout_per_agent`` is over, waiting included."""

    type = "TimeoutError"


class WorkerFailed(JobError):
    """A worker that is not ours raised something that is not a JobError, or returned what is not JSON."""

    type = "WorkerFailed"


class RowEnded(WorkerFailed):
    """A worker asked or called something after its row had ended."""


class ReplayMismatch(JobError):
    """A resumed agent would ask something else than what its record answers."""

    stage = "record"
    type = "ReplayMismatch"


class RecordUnreadable(JobError):
    """The record of a row cannot be read, and a write was begun in it. Working on the row again could write twice."""

    stage = "record"
    type = "RecordUnreadable"


class Cancelled(JobError):
    """This job was cancelled; the others went on."""

    type = "Cancelled"
    retryable = True


class Interrupted(JobError):
    """The run was stopped before this job finished."""

    type = "Interrupted"


def error_of(kind: str, message: str, stage: str, retryable: bool) -> JobError:
    """An error as its record tells of it: of the class above that has this type and stage; where there is none, a
    JobError that carries them."""
    classes = (known for known in _family(JobError) if known.__module__ == __name__)
    error = next((known for known in classes if (known.type, known.stage) == (kind, stage)), JobError)(message)
    error.type, error.stage, error.retryable = kind, cast("Stage", stage), retryable
    return error


def _family(error: type[JobError]) -> Iterator[type[JobError]]:
    yield error
    for child in error.__subclasses__():
        yield from _family(child)


def error_types(error: type[JobError]) -> set[str]:
    """The type names of an error and of all that derive from it, those of a user's own backend included."""
    return {error.type}.union(*map(error_types, error.__subclasses__()))


def check_error_types(option: str, given: str | Iterable[str]) -> None:
    """Raise ValueError for a name that is no error type of a row; ``option`` is where it was given."""
    known = error_types(JobError)
    for name in (given,) if isinstance(given, str) else given:
        if name not in known:
            raise ValueError(f"{option}: there is no error type {name!r}; there are {', '.join(sorted(known))}")

"""The error tree.

    BatchAgentError
    ├── SpecError            the request is wrong; raised before any job starts (also a ValueError)
    │   └── RunRejected      the server refuses every request of this run: wrong key, unknown model, wrong path
    ├── RunUnreachable       the server was unreachable for too long; the run ended before any result
    ├── JobError             one job failed; the error is on its result, other jobs continue
    │   ├── InputError       this row cannot be rendered            type InputError
    │   │   └── Oversized    it can never fit the model's context   type OVERSIZED
    │   ├── BackendError     Timeout · RateLimited · Unavailable · Rejected · ContextOverflow · Truncated · BadResponse
    │   ├── ToolError        ToolTimeout · ToolFailed · UnknownTool · BadArguments · OutcomeUnknown
    │   │                    (the model sees these)
    │   ├── OutputError      NotJSON · Invalid
    │   ├── LimitExceeded    turns or time
    │   ├── WorkerFailed     the user's worker raised an exception, or returned a value that is not JSON
    │   │   └── RowEnded     it called a model or a tool after its row had ended
    │   ├── ReplayMismatch   the next request differs from the recorded one
    │   ├── RecordUnreadable the row's record is damaged, and a tool that writes had started
    │   ├── Cancelled        only this job was cancelled
    │   └── Interrupted      the run ended before this job did
    ├── StoreError           the run cannot be recorded; stops the run
    └── InternalError        a broken invariant

Whether an error is retried is a property of its type (``retryable``), not of the code that catches it. ``type`` is the
stable string that users see in ``AgentError.type``; ``stage`` is the stage of the job in which it happened. The code
that raises an error writes its message, which never contains a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Literal, cast

from batch_agent.messages import Quota, Usage

Stage = Literal["compile", "infer", "tools", "validate", "record", "deliver", "run"]


class BatchAgentError(Exception):
    """Base class of all errors that this package raises intentionally."""


class SpecError(BatchAgentError, ValueError):
    """The request is wrong. The message names what is wrong and what is allowed."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the line of the cell and the message. Frames of this package would tell nothing."""
        here = [frame for frame, _ in walk_tb(self.__traceback__) if frame.f_globals.get("__name__") == "__main__"]
        lines = [f"line {frame.f_lineno} of {frame.f_code.co_name}" for frame in here[-1:]]
        place = lines[0].replace(" of <module>", " of this cell") + "\n" if lines else ""
        return [f"{place}{type(self).__name__}: {self}"]


class RunRejected(SpecError):
    """The server refuses what every job of this run would send, so the run stopped before its first result."""


class RunUnreachable(BatchAgentError):
    """The server was unreachable for too long, so the run ended before its first result."""


class StoreError(BatchAgentError):
    """The run cannot be recorded."""


class InternalError(BatchAgentError):
    """A broken invariant of this package: please report it."""


class JobError(BatchAgentError):
    """One job failed. ``str(error)`` is the message for people."""

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
    overload: bool = False  # the server is up but overloaded: send fewer requests, not only later

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
        self.unreached = unreached  # the server has read nothing of the request, so its content is not the cause
        self.stale = False  # a kept connection was closed at once: the server may not have read the request
        self.paid_elsewhere = False  # another caller's request, shared by this one, has been charged
        self.second_hand = False  # reported by a healthy server: no evidence against that server
        self.retry_after = retry_after  # seconds to wait, as the server requests
        self.text = text  # the model's text before the failure
        self.usage = usage  # tokens used nevertheless, if the server reports them
        self.quota = quota  # the provider's rate limits, if the server reports them
        self.fields: Mapping[str, str | int] = {}  # type, param and code of the server's error object


class Timeout(BackendError):
    """No complete answer within ``timeout_per_turn``, or no connection."""

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
    """An unusable answer: malformed, cut off, empty, aborted by the server. ``text`` is the part that arrived."""

    type = "BadResponse"
    retryable = True


class EmptyAnswer(BadResponse):
    """A complete answer without text and tool call: caused by the model, not by the server."""


class Truncated(BackendError):
    """The answer reached the token limit; a retry would cost the same and end the same. ``text`` is the part before the
    limit. ``in_call``: a tool call was cut, so the text is not the answer."""

    type = "Truncated"

    def __init__(self, message: str, *, text: str = "", usage: Usage | None = None, in_call: bool = False) -> None:
        super().__init__(message, text=text, usage=usage)
        self.in_call = in_call


class Rejected(BackendError):
    """The server understood and refused the request (400, 401, 403, 404, 413, 422). Never retried."""

    type = "Rejected"


class ContextOverflow(Rejected):
    """The conversation no longer fits the model's context."""

    type = "ContextOverflow"


class ToolError(JobError):
    """Raised by a tool to tell the model that a call did not work. The agent continues."""

    stage = "tools"
    type = "ToolError"


class ToolTimeout(ToolError):
    type = "ToolTimeout"


class ToolFailed(ToolError):
    """A tool raised an exception other than ToolError."""

    type = "ToolFailed"


class UnknownTool(ToolError):
    """The model named a tool that this batch does not offer."""

    type = "UnknownTool"


class BadArguments(ToolError):
    """The model's arguments do not fit the tool's signature."""

    type = "BadArguments"


class OutcomeUnknown(ToolError):
    """The run was interrupted during a call of a tool that may write. The call is not repeated."""

    type = "OutcomeUnknown"


class OutputError(JobError):
    stage = "validate"
    type = "OutputError"


class NotJSON(OutputError):
    type = "NotJSON"


class Invalid(OutputError):
    """Valid JSON that does not fit the schema."""

    type = "Invalid"


class LimitExceeded(JobError):
    type = "LimitExceeded"


class AgentTimeout(LimitExceeded):
    """``timeout_per_agent`` is over, including waiting time."""

    type = "TimeoutError"


class WorkerFailed(JobError):
    """A user's worker raised an exception other than JobError, or returned a value that is not JSON. ``traceback`` is
    that of the exception, as text; "" without one."""

    type = "WorkerFailed"
    traceback = ""


class RowEnded(WorkerFailed):
    """A worker called a model or a tool after its row had ended."""


class ReplayMismatch(JobError):
    """A resumed agent would send another request than the recorded one."""

    stage = "record"
    type = "ReplayMismatch"


class RecordUnreadable(JobError):
    """The record of a row is unreadable, and a tool that writes had started. Repeating the row could write twice."""

    stage = "record"
    type = "RecordUnreadable"


class Cancelled(JobError):
    """This job was cancelled; the others continued."""

    type = "Cancelled"
    retryable = True


class Interrupted(JobError):
    """The run was stopped before this job finished."""

    type = "Interrupted"


@contextmanager
def explained(what: str, kind: type[BatchAgentError] = SpecError) -> Iterator[None]:
    """Turn an OSError of the block into an error of type ``kind`` that says that ``what`` failed, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror}") from None


def meant(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return the hint ``; did you mean 'x'?`` with the known name that is nearest to ``name``; "" if none is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {form.format(near[0])}?" if near else ""


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Put the subject, such as the name of an option, before the message of a SpecError that the block raises."""
    try:
        yield
    except SpecError as error:
        raise type(error)(f"{subject}{error}") from None


def error_of(kind: str, message: str, stage: str, retryable: bool) -> JobError:
    """Return a recorded error as an instance of the class with this type and stage; as a JobError with this type if
    there is no such class."""
    classes = (known for known in _family(JobError) if known.__module__ == __name__)
    error = next((known for known in classes if (known.type, known.stage) == (kind, stage)), JobError)(message)
    error.type = kind
    error.stage = cast("Stage", stage)
    error.retryable = retryable
    return error


def _family(error: type[JobError]) -> Iterator[type[JobError]]:
    yield error
    for child in error.__subclasses__():
        yield from _family(child)


def error_types(error: type[JobError]) -> set[str]:
    """Return the type names of an error and of all its subclasses, including those of a user's own backend."""
    return {error.type}.union(*map(error_types, error.__subclasses__()))

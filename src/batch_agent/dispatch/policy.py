"""How one request is sent, and who observes its attempts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, TypeAlias

from batch_agent.backends.base import ModelRequest
from batch_agent.errors import BackendError, JobError
from batch_agent.messages import Reply

Replies: TypeAlias = Sequence[Reply | JobError]


class TakenBack(Exception):
    """The request was cancelled because its caller wants to ask later. No failure of the row, nor of the server."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one request is sent. ``timeout``: seconds for one attempt. ``hedge``: seconds after which the request is also
    sent to a second endpoint."""

    max_retries: int = 3
    _: KW_ONLY
    max_attempts: int | None = None  # requests that are sent at most, whatever the cause of failures; None: no limit
    wait_out: bool = True  # wait while every endpoint is down; False: fail at once with Unavailable
    wait_until: float | None = None  # loop time after which no outage is waited out; None: no limit
    timeout: float | None = None
    timeout_option: str = ""  # the user's name for the timeout, for the error message
    hedge: float | None = None
    wanted: Callable[[BackendError], bool] | None = None  # whether this failure is worth a retry; None: always


class Question(Protocol):
    """One thing to ask of any endpoint. Subclasses implement ``send``; the other methods have defaults."""

    @property
    def request(self) -> ModelRequest | None:
        """Return the request that is priced; None if it costs nothing."""
        return None

    @property
    def text(self) -> str:
        """Return the part of a streamed answer that has arrived."""
        return ""

    @property
    def heard_at(self) -> float:
        """Return the loop time of the latest piece of a streamed answer; 0 if none has arrived."""
        return 0.0

    def send(self, endpoint: str) -> Awaitable[Reply]:
        """Send the question once. Raises BackendError."""
        ...

    def ended(self) -> None:
        """Called when the attempt has ended, with an answer or without."""
        return

    def instead(self, error: BackendError) -> Reply | None:
        """Return an answer in place of the error; None if there is none."""
        return None

    def check(self, reply: Reply) -> None:
        """Raise a BackendError if the answer is unusable."""
        return

    def lost(self) -> None:
        """Called when another request was answered first."""
        return

    def again(self) -> Question:
        """Return the same question for a second request beside the first."""
        return self


class Questions(Protocol):
    """Several things to ask in one request."""

    async def send(self, endpoint: str) -> Replies:
        """Return the answers in order, with an error in place of each answer that failed. Raises BackendError if the
        whole request failed."""
        ...


class Observer:
    """Called for each attempt. The default does nothing."""

    __slots__ = ()

    def sent(self, queued: float) -> None:
        """An attempt is sent, after ``queued`` seconds in the queue."""

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        """An attempt failed. ``delay``: seconds until the retry; None means no retry."""

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        """An attempt was answered."""

"""How one request is asked, and who is told how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, TypeAlias

from batch_agent.backends.base import ModelRequest
from batch_agent.errors import BackendError, JobError
from batch_agent.messages import Reply

Replies: TypeAlias = Sequence[Reply | JobError]


@dataclass(frozen=True, slots=True)
class Policy:
    """``timeout`` is seconds for one attempt, ``hedge`` seconds after which another endpoint is asked too."""

    max_retries: int = 3
    _: KW_ONLY
    wait_out: bool = True  # wait while every endpoint is down; False: fail at once with Unavailable
    wait_until: float | None = None  # of the event loop's clock, from when on no outage is waited out; None: never
    timeout: float | None = None
    timeout_option: str = ""  # what the caller's user calls it, for the message
    hedge: float | None = None
    wanted: Callable[[], bool] | None = None  # whether the answer is still worth a retry; None: it is


class Question(Protocol):
    """One thing to ask of any endpoint. A class derived from it has these defaults, and writes ``send``."""

    @property
    def request(self) -> ModelRequest | None:
        """What is priced; None for a request that costs nothing."""
        return None

    @property
    def text(self) -> str:
        """What has come of a streamed answer so far."""
        return ""

    async def send(self, endpoint: str) -> Reply:
        """Sends it once. Raises BackendError."""
        ...

    def lost(self) -> None:
        """Another request answered it."""
        return

    def again(self) -> Question:
        """The same question as a second request beside the first."""
        return self


class Questions(Protocol):
    """Several things to ask in one request."""

    async def send(self, endpoint: str) -> Replies:
        """The answers in order; one that failed is an error in its own place. Raises BackendError when the request as a
        whole failed."""
        ...


class Observer:
    """Told of each attempt. The default ignores it."""

    __slots__ = ()

    def sent(self, queued: float) -> None:
        """An attempt is sent, after so many seconds in the queue."""

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        """It failed. ``delay`` is seconds until it is sent again; None: it is not."""

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        """It was answered."""

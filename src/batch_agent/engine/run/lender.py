"""The seam through which a run that several processes share gets its shares of slots, rate limits and budget."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from batch_agent.backends.base import Backend
from batch_agent.backends.once import Once
from batch_agent.engine.run.shared import Shared
from batch_agent.engine.run.steering import Controls
from batch_agent.errors import StoreError
from batch_agent.store.base import Account


class Lender(Protocol):
    """``once`` shares tool calls and answers with the other workers."""

    @property
    def once(self) -> Once: ...

    def at_work(self, shared: Shared, controls: Controls, backend: Backend) -> AbstractAsyncContextManager[None]:
        """The run uses no more than the shares that it holds, from the beginning of this to its end."""
        ...

    def soon(self) -> None:
        """The run needs more of the budget."""
        ...


class WorkerAccount:
    """What one worker spends, for the record. Its lease is with the lender."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def so_far(self) -> tuple[int, float | None]:
        return self._account.so_far()

    def lease(self) -> tuple[int, float] | None:
        return None

    def learnt(self) -> tuple[int, ...] | None:
        return self._account.learnt()

    def leased(self, error: StoreError | None = None) -> None:
        """Nothing waits for a commit."""

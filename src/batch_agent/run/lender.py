"""Runs that several processes share: how one of them gets its part of the slots, rate limits and budget, and clusters
that bring the processes, such as Ray (``batch_agent.ray``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import JsonValue

from batch_agent.backends.base import Backend
from batch_agent.backends.once import Once
from batch_agent.events import Sink
from batch_agent.record.base import Account
from batch_agent.run.shared import Shared
from batch_agent.run.steering import Controls

if TYPE_CHECKING:
    from batch_agent.agent.prepare import Prepared
    from batch_agent.run.run import Run


class Cluster(Protocol):
    """A value of ``cluster=``."""

    def open_run(
        self, prepared: Prepared, command: Mapping[str, JsonValue] | None = None, sinks: Sequence[Sink] = ()
    ) -> Run[Any]:
        """Return the run for the process that reads the inputs and delivers the results."""


class Lender(Protocol):
    """``once`` shares tool calls and answers with the other workers."""

    @property
    def once(self) -> Once: ...

    def at_work(self, shared: Shared, controls: Controls, backend: Backend) -> AbstractAsyncContextManager[None]:
        """Return a context manager during which the run uses no more than the shares that it holds."""

    def soon(self) -> None:
        """Request more of the budget."""


class WorkerAccount(Account):
    """Reports what one worker spends, for the record. The lender has its lease."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def so_far(self) -> tuple[int, float | None]:
        return self._account.so_far()

    def learnt(self) -> tuple[int, ...] | None:
        return self._account.learnt()

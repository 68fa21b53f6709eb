"""The state that a run works with, and that inner runs share: slots, budget, tool pool, record, events.

The outermost run owns what must exist once: the ledger, the lock of its run directory, the jobs at batch APIs, the rate
limits. An inner run may have its own directory, for its journal and its results.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from batch_agent.backends.base import Backend
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.rate_mark import RateMark
from batch_agent.dispatch.spending import Spending
from batch_agent.events import Sink
from batch_agent.observe.prometheus import LiveNumbers
from batch_agent.record.session import RunSession
from batch_agent.run.clock import Clock
from batch_agent.run.observers import Observers
from batch_agent.spec import BatchSpec
from batch_agent.tools.pool import ToolPool

logger = logging.getLogger("batch_agent")


@dataclass(slots=True, eq=False)
class Shared:
    """``dispatchers`` are those of all backends, by name; ``dispatcher`` is this run's. ``pool`` and ``session`` are
    set while the outermost run works, the session only if it has a run directory."""

    clock: Clock
    emit: Sink
    dispatcher: Dispatcher
    spending: Spending
    dispatchers: dict[str, Dispatcher]
    directory: Path | None  # the run directory of the outermost run
    rate_mark: RateMark | None  # in that directory
    observers: Observers
    models: dict[str, set[str]] = field(default_factory=dict)  # the models that runs use, by name of the backend
    pool: ToolPool | None = None
    session: RunSession | None = None
    _was_overdue: bool = False

    def live(self) -> LiveNumbers:
        """Return the current numbers that no event reports."""
        places = self.dispatchers.items()
        endpoints = [(each.name or name, each) for name, of in places for each in of.scheduler.endpoints]
        waiting = sum(of.scheduler.waiting for of in self.dispatchers.values())
        return LiveNumbers(endpoints, waiting, None if self.session is None else self.session.lag)

    def keep_jobs(self, backend: Backend) -> None:
        """Let a backend whose answers take hours record its jobs in the run directory."""
        if backend.capabilities.patient:
            backend.keep(self.directory)
            if self.directory is None:
                logger.warning("%s: without run_dir an interrupted job is lost, but still charged", backend.name)

    def keep_rates(self, spec: BatchSpec) -> None:
        """Keep the usage of the user's rate limits across kills."""
        mark = self.rate_mark
        if mark is not None and (spec.rpm is not None or spec.tpm is not None):
            self.dispatcher.endpoints.budgets.keep(mark, self.dispatcher.scheduler.endpoints)

    def set_overdue(self, journal: str, overdue: bool) -> None:
        """Send nothing while a journal waits for the disk: answers could not be recorded soon."""
        if overdue and not self._was_overdue:
            self._was_overdue = True
            where = self.directory or "the record of the run"
            logger.warning("%s is slow, or in use: no request is sent while a commit waits", where)
        for dispatcher in self.dispatchers.values():
            dispatcher.slots.set_paused_by(journal, overdue)

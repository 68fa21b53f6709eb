"""One agent while it is worked on: what every kind of worker has, whatever it does with it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from batch_agent.engine.agent.resources import Resources
from batch_agent.engine.agent.tally import Tally
from batch_agent.errors import JobError, StoreError
from batch_agent.job import AgentError, Job
from batch_agent.messages import Message
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.forecast import Progress
from batch_agent.store.steps import Spent
from batch_agent.store.trail import Trail

NO_ARTIFACTS: Mapping[str, Path] = {}


class WorkState(ABC):
    """``text`` is the model's latest. ``failure`` is an error that a worker cannot make up for, whatever it returns.
    ``repaired``: the output was read from JSON that had to be mended."""

    __slots__ = ("_began", "_loop", "_r", "_trail", "failure", "job", "progress", "repaired", "tally", "text", "ticket")

    def __init__(self, job: Job, resources: Resources, trail: Trail) -> None:
        self.job = job
        self.tally = Tally()
        self.progress = Progress(key=job.affinity, model=resources.shapes.first.model)
        self.text = ""
        self.repaired = False
        self.failure: JobError | StoreError | None = None
        self.ticket: Ticket | None = None  # a claim to a slot that was made already
        self._r = resources
        self._trail = trail
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    @abstractmethod
    def work(self) -> Awaitable[object]:
        """The worker's output. Raises JobError."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """What the result holds of the conversation."""

    @property
    def artifacts(self) -> Mapping[str, Path]:
        return NO_ARTIFACTS

    @abstractmethod
    def end(self, verdict: AgentError | None) -> None:
        """Record how the agent ended, where that is new."""

    @abstractmethod
    async def close(self) -> None:
        """The worker is done: what was started for it and is not needed any more is given up."""

    def seconds(self) -> float:
        """How long the agent was worked on, in all sessions."""
        return self.tally.before + (self._loop.time() - self._began if self._trail.fresh else 0.0)

    def _spent(self) -> Spent:
        return self.tally.spent(self._loop.time() - self._began)

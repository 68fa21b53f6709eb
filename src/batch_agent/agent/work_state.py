"""The state of one agent while it works, for every kind of worker."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from batch_agent.agent.resources import Resources
from batch_agent.agent.tally import Tally
from batch_agent.backends.base import ModelRequest
from batch_agent.errors import JobError, StoreError
from batch_agent.job import AgentError, Job
from batch_agent.messages import JsonObject, Message
from batch_agent.record.steps import Spent
from batch_agent.record.trail import Trail
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.forecast import Progress

NO_ARTIFACTS: Mapping[str, Path] = {}


class WorkState(ABC):
    """``text`` is the model's latest text. ``failure`` is a final error: the worker's return value cannot replace it.
    ``repaired``: the JSON of the output was repaired. ``truncated``: the output is text that was cut at max_tokens."""

    def __init__(self, job: Job, resources: Resources, trail: Trail) -> None:
        self.job = job
        self.tally = Tally()
        self.progress = Progress(key=job.affinity, model=resources.shapes.first.model)
        self.text = ""
        self.repaired = False
        self.truncated = False
        self.failure: JobError | StoreError | None = None
        self.ticket: Ticket | None = None  # a slot that was already requested
        self._asking: ModelRequest | None = None  # the latest request in flight
        self._r = resources
        self._trail = trail
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    @abstractmethod
    def work(self) -> Awaitable[object]:
        """Return the worker's output. Raises JobError."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """The messages for the result."""

    @property
    def artifacts(self) -> Mapping[str, Path]:
        return NO_ARTIFACTS

    @abstractmethod
    def end(self, verdict: AgentError | None) -> None:
        """Record the end of the agent, unless it is recorded."""

    @abstractmethod
    async def close(self) -> None:
        """Stop everything that was started for the worker and is no longer needed."""

    def seconds(self) -> float:
        """Return how long the agent has worked, in all sessions."""
        return self.tally.before + (self._loop.time() - self._began if self._trail.fresh else 0.0)

    def shown(self) -> JsonObject:
        """Return the conversation so far. ``saying``: the answer being streamed; None without a request."""
        asking, tally = self._asking, self.tally
        return {
            "index": self.job.index,
            "job_id": self.job.job_id,
            "messages": cast("list[JsonValue]", [message.to_dict() for message in self.messages]),
            "saying": None if asking is None else "".join(asking.said),
            "endpoint": None if asking is None else asking.endpoint or None,
            "turns": tally.turns,
            "attempts": tally.attempts,
            "seconds": round(self.seconds()),
            "timings": {"queued": tally.queued, "inference": tally.inference, "tool_wait": tally.tool_wait},
            "usage": {"prompt_tokens": tally.usage.prompt_tokens, "completion_tokens": tally.usage.completion_tokens},
            "cost": tally.cost,
        }

    def _spent(self) -> Spent:
        return self.tally.spent(self._loop.time() - self._began)

"""Controls of a running run, for Python, the command line and the page."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from batch_agent.agent.prepare import Prepared
from batch_agent.agent.tool_prewarm import ToolPrewarm
from batch_agent.dispatch.feed import Feed
from batch_agent.errors import SpecError
from batch_agent.events import DrainStarted
from batch_agent.messages import JsonObject
from batch_agent.observe.metrics import Metrics, Statistics
from batch_agent.observe.recorder import Recorder
from batch_agent.observe.status import LabelledEndpoint, sample_line, status_json
from batch_agent.record.timeline import Line
from batch_agent.run.batch import Batch
from batch_agent.run.shared import Shared
from batch_agent.run.sinks import Sinks
from batch_agent.tools.pool import ToolStatistics


class Controls(Protocol):
    """The controls that a run and a pipeline have in common. A row is named by its id or its index; in a pipeline, as
    ``STAGE/ROW``. Methods that name a row raise SpecError if it is not running."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def drain(self) -> None: ...

    def cancel(self) -> None: ...

    def resize(self, max_inflight: int | None) -> None: ...

    def cancel_row(self, row: str | int) -> None: ...

    def retry_row(self, row: str | int) -> None: ...

    def status(self) -> JsonObject: ...

    def statistics(self) -> Statistics: ...

    def sample(self) -> Line: ...

    def live_rows(self, limit: int = 200) -> list[JsonObject]: ...

    def live_row(self, row: str | int) -> JsonObject: ...


class Steered:
    """The base class of ``Run`` with its controls."""

    id: str
    shared: Shared
    _prepared: Prepared
    _outer: Shared | None
    _metrics: Metrics
    _emit: Sinks
    _feed: Feed
    _recorder: Recorder
    _batch: Batch | None
    _prewarm: ToolPrewarm | None
    _supervisor: asyncio.Task[None] | None
    _cancelled: bool
    _paused: bool = False

    # Reading

    def statistics(self) -> Statistics:
        statistics = self._metrics.statistics()
        return replace(statistics, prewarm=self._prewarm.statistics()) if self._prewarm is not None else statistics

    def tool_statistics(self) -> dict[str, ToolStatistics]:
        return self.shared.pool.statistics() if self.shared.pool is not None else {}

    def status(self) -> JsonObject:
        """Return the current state of the run as one JSON object."""
        return self.status_of(self.statistics())

    def status_of(self, statistics: Statistics) -> JsonObject:
        return status_json(
            statistics,
            self._endpoints(),
            self.tool_statistics(),
            self._prepared.spec,
            slots=self._slots(),
            at=self.shared.clock(),
            paused=self._paused,
        )

    def sample(self) -> Line:
        return self.sample_of(self._metrics.statistics())

    def sample_of(self, statistics: Statistics) -> Line:
        return sample_line(statistics, self._endpoints(), self._slots(), self.shared.clock())

    def live_rows(self, limit: int = 200) -> list[JsonObject]:
        """Return the oldest running rows with their activity. Only for a run with a run directory."""
        return self._recorder.live(limit)

    def live_row(self, row: str | int) -> JsonObject:
        """Return the conversation of a running row, with the text that is being streamed."""
        return self._steered_batch.conversation(row)

    def _endpoints(self) -> list[LabelledEndpoint]:
        """Return the endpoints of all backends; for a run inside another, those of its own."""
        own = self._prepared.backend.name
        places = self.shared.dispatchers if self._outer is None else {own: self.shared.dispatcher}
        models = {name: ", ".join(sorted(self.shared.models.get(name, ()))) for name in places}
        return [
            LabelledEndpoint(endpoint.name or name, models[name], endpoint)
            for name, each in places.items()
            for endpoint in each.scheduler.endpoints
        ]

    def _slots(self) -> int | None:
        """Return the total slots of all backends; None: no limit."""
        slots = [each.scheduler.slots for each in self.shared.dispatchers.values()]
        return None if None in slots else sum(each for each in slots if each is not None)

    # Controlling

    def pause(self) -> None:
        """Send nothing more until ``resume``. Requests in flight and tools continue."""
        self._paused = True
        for dispatcher in self.shared.dispatchers.values():
            dispatcher.pause()

    def resume(self) -> None:
        self._paused = False
        for dispatcher in self.shared.dispatchers.values():
            dispatcher.resume()

    def resize(self, max_inflight: int | None) -> None:
        """Change ``max_inflight`` of each backend. A lower limit is reached as answers arrive."""
        if max_inflight is not None and (type(max_inflight) is not int or max_inflight < 1):
            raise SpecError("max_inflight is a whole number above 0, or None for no limit")
        dispatchers = [self.shared.dispatcher] if self._outer is not None else self.shared.dispatchers.values()
        for dispatcher in dispatchers:
            dispatcher.resize(max_inflight)

    def drain(self) -> None:
        """Start no new agents. Running agents finish, and ``results`` ends after them. Agents whose first request waits
        in the queue of a server end as failed results of type Interrupted; a resumed run does them."""
        if not self._feed.closed:
            self._emit(DrainStarted(self.shared.clock(), self.id))
            self._feed.close()
            for dispatcher in self.shared.dispatchers.values() if self._outer is None else ():
                dispatcher.drain()

    def cancel(self) -> None:
        """Stop now. Running agents end as failed results of type Interrupted."""
        self._cancelled = True
        self.stop()

    def cancel_row(self, row: str | int) -> None:
        """End a running row, which fails as Cancelled. Raises SpecError if it is not running."""
        self._steered_batch.cancel_row(row)

    def retry_row(self, row: str | int) -> None:
        """Start a running row again from its beginning. Raises SpecError if the row is not running."""
        self._steered_batch.retry_row(row)

    def stop(self) -> None:
        """Stop without results: no further request is sent, and all running work is cancelled."""
        self._feed.close()
        if self._outer is None:
            for dispatcher in self.shared.dispatchers.values():
                dispatcher.slots.stop()
        if self._supervisor is not None:
            self._supervisor.cancel()

    @property
    def _steered_batch(self) -> Batch:
        if self._batch is None:
            raise SpecError("the run has not begun its first row")
        return self._batch

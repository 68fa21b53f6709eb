"""A run: a feeder, a worker, or both, on one record.

A run on one machine has both in one process. ``feed_only`` has no worker; ``batch-agent work`` has no feeder. A
pipeline is a run around the runs of its stages, which share its slots, its budget and its record.

One supervisor task (``opened.supervise``) owns everything that runs: the feeder, the agents, the tool calls. The holder
of the Run only takes results from the delivery and calls pause, drain or cancel. Leaving the Run cancels the supervisor
and waits for it. So nothing outlives it except a tool that does not stop (``tools/pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, Self, TypeVar, cast, final

from pydantic import JsonValue

from batch_agent.agent.agent import InnerWorker
from batch_agent.agent.prepare import Prepared
from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import outlast
from batch_agent.errors import SpecError
from batch_agent.events import DrainStarted, Sink
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.status import sample_line, status_json
from batch_agent.option import check_positive
from batch_agent.record.promise import PromiseStanding
from batch_agent.record.scoring import RunGold
from batch_agent.record.store import RunStore, WorkStore
from batch_agent.record.timeline import Line
from batch_agent.results import Results
from batch_agent.run.changes import Changes, OnChange, compare
from batch_agent.run.control import Controls, Inside
from batch_agent.run.garbage import collecting_rarely
from batch_agent.run.leases import Over
from batch_agent.run.lending import Lending
from batch_agent.run.opened import Opened, Setup, supervise
from batch_agent.run.pilot import Pilot, results_of_pilot
from batch_agent.run.record_server import RecordServer
from batch_agent.run.recording import open_record
from batch_agent.run.scoring import gold_of_run, score_of_run
from batch_agent.run.shared_state import SharedState
from batch_agent.run.worker import Worker
from batch_agent.spec import BatchSpec
from batch_agent.tools.pool import ToolStatistics
from batch_agent.trust.score import Score

T = TypeVar("T")
logger = logging.getLogger("batch_agent")


@final
class Run(Generic[T]):
    """Use it with ``async with``: ``results()``, ``statistics()``, ``pause``, ``drain``, ``cancel``.

    ``command`` is how to start this run again, for the record. ``worker`` is a built-in one that replaces the tool
    loop; the user's is in the spec. ``record`` opens the record of the run. ``work_on`` is the record of a run that
    another process feeds: this one works on its rows, and waits ``patience`` seconds for a feeder. ``within`` is
    the state of an outer run, of which this run is the ``stage``; ``row_schema`` is the class of its rows, if they
    are outputs of another stage. ``inside`` are the stages of the pipeline that this run is, or that has the
    ``pilot``. ``controls`` is what the control socket controls and the summary counts.
    """

    def __init__(
        self,
        prepared: Prepared,
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        worker: InnerWorker | None = None,
        record: Callable[[BatchSpec], RunStore] = open_record,
        work_on: WorkStore | None = None,
        within: SharedState | None = None,
        stage: str = "",
        row_schema: type[object] | None = None,
        inside: Inside | None = None,
        controls: Controls | None = None,
        patience: float = float("inf"),
        pilot: Pilot | None = None,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.on_change: OnChange = prepared.spec.on_change  # may be set before the run is entered
        self._setup = setup = Setup(
            id=self.id,
            prepared=prepared,
            sinks=sinks,
            command=command,
            function=worker,
            open_record=record,
            work_on=work_on,
            outer=within,
            stage=stage,
            row_schema=row_schema,
            inside=inside,
            controls=controls or self,
            patience=patience,
            pilot=pilot,
        )
        self.shared = setup.shared
        self.scoring = setup.scoring
        self.pilot_rows = setup.pilot
        self._supervisor: asyncio.Task[None] | None = None

    # For the user of a run

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise RuntimeError("a Run can be entered only once")
        if self._setup.is_outermost:
            self.shared.clock.start()
        self._setup.on_change = self.on_change
        life = collecting_rarely(lambda: supervise(self, self._setup))
        self._supervisor = asyncio.create_task(life, name="batch-agent run")
        # A task that is cancelled before its first step runs nothing, not even its ``finally``.
        self._supervisor.add_done_callback(lambda _: self._setup.delivery.close())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._supervisor is not None
        self.stop()
        await outlast(self._supervisor)
        self._setup.rows.close()

    async def results(self) -> AsyncGenerator[AgentResult[T], None]:
        """Yield each result as it finishes. Then raises the exception that the run failed with, if any."""
        self._begin_results()
        while (result := await self._setup.delivery.take()) is not None:
            yield cast("AgentResult[T]", result)

    def each(self) -> AsyncIterator[AgentResult[T]]:
        """Return what ``results`` returns. A pipeline has a method of this name too."""
        return self.results()

    async def pass_to(self, consumer: Callable[[AgentResult[T]], None]) -> None:
        """Call ``consumer`` with each result as it finishes, until the end: quicker than ``results``, because no task
        is woken. Then raises the exception that the run failed with, if any."""
        self._begin_results()
        await self._setup.delivery.pass_to(cast("Callable[[AgentResult[object]], None]", consumer))

    def _begin_results(self) -> None:
        if self._supervisor is None:
            raise RuntimeError("enter a Run before you take its results: async with BatchAgent.open(...) as run")
        if self.pilot_rows is not None and self._setup.is_outermost:
            self.pilot_rows.go_on()

    async def pilot(self) -> Results[T]:
        """Wait until the rows of the pilot are done, and return their results in input order. No other row starts until
        ``results`` is called, which yields these results too."""
        return await results_of_pilot(self)

    async def finish(self) -> None:
        """Enter the run, and wait for its end. Its results are not taken."""
        async with self:
            async for _ in self.results():
                pass

    @property
    def plan(self) -> Plan:
        return self._setup.prepared.plan

    @property
    def schema(self) -> OutputSchema[object] | None:
        """Schema of the outputs; None for text."""
        return self._setup.prepared.schema

    @property
    def metrics_url(self) -> str | None:
        """URL of the Prometheus page of a run with ``metrics_port``; None before and after the run."""
        return self.shared.observers.metrics_url

    @property
    def over(self) -> Over:
        """Reason why this worker takes no more rows, or ""."""
        return "" if self._opened is None else self._opened.leases.over

    @property
    def finished(self) -> int:
        """Number of rows whose results this worker recorded."""
        return 0 if self._opened is None else self._opened.leases.finished

    @property
    def holds_rows(self) -> bool:
        return self._opened is not None and bool(self._opened.leases.held)

    def statistics(self) -> Statistics:
        statistics = self.shared.spending.counted(self._setup.metrics.statistics(), whole=self._setup.is_outermost)
        if self._setup.metrics.elsewhere:
            statistics = replace(statistics, peak_running=self.shared.at_most_slots(statistics.peak_running))
        prewarm = None if self._opened is None else self._opened.resources.prewarm
        return statistics if prewarm is None else replace(statistics, prewarm=prewarm.statistics())

    @property
    def recorded(self) -> JsonObject:  # {} before it begins
        return {} if self._opened is None else self._opened.known()

    def score(self, *, count: bool = True) -> Score:
        """Return how many answers are right so far. Raises SpecError without gold. ``count``: this counts as a look at
        the gold."""
        return score_of_run(self, count=count)

    def gold(self) -> RunGold | None:
        """The right answers that the run knows; None without gold."""
        if self.scoring is None:
            return None
        return gold_of_run(self, self._setup.prepared, None if self._opened is None else self._opened.rows_read)

    @property
    def promise(self) -> PromiseStanding | None:
        """How the promise of the run stands; None without one. Reads the record, so it may block."""
        promise = self._setup.promise
        return None if promise is None else promise.standing()

    def tool_statistics(self) -> dict[str, ToolStatistics]:
        return self.shared.pool.statistics() if self.shared.pool is not None else {}

    def status(self, statistics: Statistics | None = None) -> JsonObject:
        """Return the current state of the run as one JSON object. ``statistics`` are those of a pipeline."""
        setup, shared = self._setup, self.shared
        now = statistics or self.statistics()
        numbers, paused = (now, self._setup.endpoints(), self.tool_statistics()), "pause" in setup.requests
        return status_json(*numbers, setup.prepared.spec, slots=shared.slots, clock=shared.clock, paused=paused)

    def sample(self, statistics: Statistics | None = None) -> Line:
        return sample_line(
            statistics or self.statistics(), self._setup.endpoints(), self.shared.slots, self.shared.clock()
        )

    def live_rows(self, limit: int = 200) -> list[JsonObject]:
        """Return the oldest running rows with their activity. Only for a run with a run directory."""
        return self._setup.recorder.live(limit)

    def live_row(self, row: str | int) -> JsonObject:
        """Return the conversation of a running row, with the text that is being streamed; {} if it is at a worker in
        another process, which reports it within a second or two."""
        run, row = self._at(row)
        stage = run._setup.stage
        try:
            return run._worker.conversation(row)
        except SpecError:
            if self._opened is None or not self._setup.feeds or self.shared.lender is None:
                raise
            return self._opened.store.fed.follow_row(f"{stage}/{row}" if stage else str(row)) or {}

    # Controlling

    def pause(self) -> None:
        """Send nothing more until ``resume``. Requests in flight and tools continue."""
        self._set_paused({"do": "pause"})

    def resume(self) -> None:
        self._set_paused({"do": "resume"})

    def _set_paused(self, request: JsonObject) -> None:
        if not self._passes_on(request):
            paused, requests = request["do"] == "pause", self._setup.requests
            requests.update(pause=request) if paused else requests.pop("pause", None)
            self.shared.set_paused(paused)
            if self._opened is not None:
                self._opened.tell(paused=paused)

    def resize(self, max_inflight: int | None) -> None:
        """Change ``max_inflight`` of each backend. A lower limit is reached as answers arrive."""
        check_positive(int, max_inflight=max_inflight)
        dispatchers = self.shared.dispatchers.values() if self._setup.is_outermost else [self.shared.dispatcher]
        request: JsonObject = {"do": "resize", "inflight": max_inflight}
        if max_inflight is None or not self._passes_on(request):
            self._setup.requests["resize"] = request
            for dispatcher in dispatchers:
                dispatcher.resize(max_inflight)

    def drain(self) -> None:
        """Start no new agents. Running agents finish, and ``results`` ends after them. Agents whose first request waits
        in the queue of a server end as failed results of type Interrupted; a resumed run does them."""
        setup = self._setup
        setup.leaving = True
        if setup.inside is not None:
            setup.inside.drain()
        self.stop_feeding()
        if self._opened is not None:
            self._opened.leases.leave()
        if not self._setup.feed.closed:
            self._setup.emit(DrainStarted(self.shared.clock(), self.id))
            self._setup.feed.close()
            for dispatcher in self.shared.dispatchers.values() if setup.is_outermost else ():
                dispatcher.drain()

    def stop_feeding(self) -> None:
        """Feed no more rows; started rows finish."""
        self._setup.stop_feeding()

    def cancel(self) -> None:
        """Stop now. Running agents end as failed results of type Interrupted."""
        self._setup.cancelled = True
        self.stop()

    def changes(self) -> Changes:
        """Compare a resumed run with its record. Reads files or Redis, and all inputs, so it may block."""
        run_dir, resend = str(self._setup.prepared.spec.run_dir), self.on_change == "resend"
        known = self.shared.changes
        self.shared.changes = compare(run_dir, self.parts, self._setup.function, resend=resend, known=known)
        return self.shared.changes

    @property
    def parts(self) -> Mapping[str, Prepared]:
        """The stages by name; a plain run is its only part."""
        return {"": self._setup.prepared} if self._setup.inside is None else self._setup.inside.parts

    def cancel_row(self, row: str | int) -> None:
        """End a running row, which fails as Cancelled. Raises SpecError if it is not running."""
        if not self._passes_on({"do": "cancel-row", "row": str(row)}):
            run, row = self._at(row)
            run._worker.cancel_row(row)

    def retry_row(self, row: str | int) -> None:
        """Start a running row again from its beginning. Raises SpecError if the row is not running."""
        if not self._passes_on({"do": "retry-row", "row": str(row)}):
            run, row = self._at(row)
            run._worker.retry_row(row)

    def _passes_on(self, request: JsonObject) -> bool:
        """Send a request to all workers, if the run has some in other processes."""
        return self._setup.feeds and self.shared.lender is not None and self.shared.lender.steer(request)

    def stop(self) -> None:
        """Stop without results: no further request is sent, and all running work is cancelled."""
        self._setup.feed.close()
        if self._setup.is_outermost:
            for dispatcher in self.shared.dispatchers.values():
                dispatcher.slots.stop()
        if self._supervisor is not None:
            self._supervisor.cancel()

    def _at(self, row: str | int) -> tuple[Run[object], str | int]:
        """Return the run that contains a row, and the name of the row in that run."""
        inside = self._setup.inside
        return (cast("Run[object]", self), row) if inside is None else inside.stage_row(row)

    @property
    def _worker(self) -> Worker:
        if self._opened is None:
            raise SpecError("the run has not begun its first row")
        return self._opened.resources.worker

    # Workers in other processes

    @property
    def record_server(self) -> RecordServer | None:
        """The server of the record while an outermost run works; else None."""
        return self._opened.record_server if self._opened is not None and self._setup.is_outermost else None

    def serve(self) -> Path:
        """Make the record available to other processes of this machine, and return the path of the socket. Raises
        SpecError if other processes cannot work on the run."""
        if self.record_server is None:
            raise SpecError("the run has not begun yet, or it has ended")
        return self.record_server.path

    async def begin_sharing(self, lender: Lending | None = None) -> None:
        """Let workers in other processes take rows of this run, which was alone until now. ``lender`` is that of the
        outer run of a stage."""
        if self._opened is not None:
            await self._opened.begin_sharing(lender)
            return
        self._setup.is_shared = True  # it begins so
        self.shared.lender = lender or self.shared.lender

    @property
    def wants_workers(self) -> bool:
        """Whether new rows are started. Only for a run whose record is in this process."""
        assert self._opened is not None, "its workers ask while it works"
        standing = self._opened.store.blocking.standing()
        over = self._setup.leaving or self.shared.cannot_continue or standing.done
        return not over and standing.phase == "running"

    @property
    def _opened(self) -> Opened | None:
        """The run after it has begun; None before."""
        return self._setup.opened

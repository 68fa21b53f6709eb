"""A run: a feeder, a worker, or both, on one record.

A run on one machine has both in one process. ``feed_only`` has no worker; ``batch-agent work`` has no feeder. A
pipeline is a run around the runs of its stages, which share its slots, its budget and its record.

One supervisor task owns everything that runs: the feeder, the agents, the tool calls. The holder of the Run only takes
results from the delivery and calls pause, drain or cancel. Leaving the Run cancels the supervisor and waits for it. So
nothing outlives it except a tool that does not stop (``tools/pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, Self, TypeVar, cast, final

from pydantic import JsonValue

from batch_agent.agent.agent import InnerWorker
from batch_agent.agent.fingerprint import fingerprint_of, rows_under
from batch_agent.agent.prepare import Prepared, choose_model, learn_context
from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import first_error, outlast
from batch_agent.dispatch.members import following
from batch_agent.errors import RunUnreachable, SpecError
from batch_agent.events import DrainStarted, Ended, LimitChanged, ModelChosen, RunFinished, RunStarted, Sink
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.observe.metrics import Clock, Emit, Metrics, Recorder
from batch_agent.observe.numbers import degraded_words
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.status import LabelledEndpoint, health_of, sample_line, status_json
from batch_agent.observe.summary import summary_json
from batch_agent.option import check_positive
from batch_agent.record.address import directory_of
from batch_agent.record.journal import Journal, to_its_end
from batch_agent.record.keys import Keys
from batch_agent.record.promise import PromiseStanding
from batch_agent.record.scoring import RunGold
from batch_agent.record.store import LEASE, RunStore, Store, WorkStore
from batch_agent.record.timeline import Line
from batch_agent.results import Results
from batch_agent.run import recording
from batch_agent.run.cascade import Ladder, look_for_models
from batch_agent.run.changes import Changes, OnChange, compare
from batch_agent.run.control import Controls, Inside
from batch_agent.run.crew import crew_of
from batch_agent.run.delivery import Delivery
from batch_agent.run.feeder import WAIT, Feeder
from batch_agent.run.garbage import collecting_rarely
from batch_agent.run.leases import Leases, Over
from batch_agent.run.observers import is_observed
from batch_agent.run.pilot import Pilot, results_of_pilot
from batch_agent.run.promise import PromiseOfRun
from batch_agent.run.recording import in_thread, open_record
from batch_agent.run.rows import Rows
from batch_agent.run.scoring import RunScoring, gold_of_run, measured, score_of_run
from batch_agent.run.serving import Serving
from batch_agent.run.shared import Shared, health_change, labelled, open_shared, tell_unanswered
from batch_agent.run.shares import Shares
from batch_agent.run.sharing import Lending, shared_budgets
from batch_agent.run.spec_json import spec_json
from batch_agent.run.watch import Watch
from batch_agent.run.worker import Worker
from batch_agent.run.workshop import Workshop
from batch_agent.scheduler.server import Endpoint
from batch_agent.spec import BatchSpec
from batch_agent.tools.pool import ToolStatistics
from batch_agent.trust.score import Score

T = TypeVar("T")
logger = logging.getLogger("batch_agent")


@final
class Run(Generic[T]):
    """Use it with ``async with``: ``results()``, ``statistics()``, ``pause``, ``drain``, ``cancel``."""

    def __init__(
        self,
        prepared: Prepared,
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        worker: InnerWorker | None = None,
        record: Callable[[BatchSpec], RunStore] = open_record,
        work_on: WorkStore | None = None,
        within: Shared | None = None,
        stage: str = "",
        row_schema: type[object] | None = None,
        inside: Inside | None = None,
        controls: Controls | None = None,
        patience: float = float("inf"),
        pilot: Pilot | None = None,
    ) -> None:
        """``command`` is how to start this run again, for the record. ``worker`` is a built-in one that replaces the
        tool loop; the user's is in the spec. ``record`` opens the record of the run. ``work_on`` is the record of a run
        that another process feeds: this one works on its rows, and waits ``patience`` seconds for a feeder. ``within``
        is the state of an outer run, of which this run is the ``stage``; ``row_schema`` is the class of its rows, if
        they are outputs of another stage. ``inside`` are the stages of the pipeline that this run is, or that has the
        ``pilot``. ``controls`` is what the control socket controls and the summary counts."""
        spec, feeds = prepared.spec, work_on is None
        self.id, self._prepared, self._command, self._function = secrets.token_hex(8), prepared, command, worker
        self._loops = worker is None and spec.worker is None  # the tool loop processes the rows
        self._open_record, self._feeds, self._outer, self._stage = record, feeds, within, stage
        self._row_schema, self._inside, self._patience = row_schema, inside, patience
        self.on_change: OnChange = spec.on_change  # may be set before the run is entered
        self._crew = crew_of(spec) if feeds else None
        self._promise = PromiseOfRun.of(prepared) if feeds and within is None else None
        feeds_only = feeds and (spec.feed_only or self._crew is not None)
        self._works, self._is_shared = inside is None and not feeds_only, feeds_only or not feeds
        self._directory = directory_of(spec.run_dir) if feeds else None  # that this process feeds
        in_redis = feeds and spec.run_dir is not None and self._directory is None
        if feeds_only or in_redis:
            spec_json(prepared)  # raises before anything starts, if workers cannot use an option
        clock = Clock() if within is None else within.clock
        self._recorder = Recorder(self.id)
        self._metrics = Metrics(clock, None if self._directory is None else self._recorder)
        self._controls = controls or self
        self._watch = Watch(self._recorder, self._controls, socket=within is None)
        own: list[Sink] = [*([] if self._directory is None else [self._recorder]), *sinks]
        self._emit = Emit(self._metrics, [*own, *(spec.sinks if within is None else (within.emit,))])
        self.shared = self._share(clock, within)
        self.shared.observed = self.shared.observed or bool(sinks) or is_observed(spec)
        self._feed = self.shared.dispatcher.feed(self._stop_reading)
        self._feed.reading, self._feed.paced = not self._works, self.shared.paced  # it starts no agent itself
        self._backlogs: set[str] = set()
        self.pilot_rows = Pilot.of_spec(spec) if feeds and within is None and inside is None else pilot
        deliver = partial(Delivery[object], spec.on_result, partial(self._backlog, "delivery"))
        self._delivery = deliver(self.pilot_rows if within is None else None)
        self._rows = Rows(spec.inputs, None if inside is not None else self.pilot_rows, spec.id_column)
        self._first: object = None  # the first input
        self.scoring = None if prepared.gold is None or not feeds else RunScoring(prepared.gold, prepared.schema)
        if self._rows.channel is not None and not self._is_shared and not in_redis:
            self._feed.take_from(self._rows.channel)
        self._store: Store | None = None if work_on is None else Store(work_on)
        self._record: Store | None = None  # of a run that this process feeds
        self._journal: Journal | None = None
        self._feeder: Feeder | None = None
        self._leases: Leases | None = None
        self._workshop: Workshop | None = None
        self._ledger: Shares | None = None
        self.serving: Serving | None = None  # set while an outermost run works
        self._supervisor: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None  # the task that reads inputs
        self._cancelled = self._leaving = False
        self._requests: dict[str, JsonObject] = {}  # what holds from then on: pause, resize
        self._failed_by: BaseException | None = None

    def _share(self, clock: Clock, within: Shared | None) -> Shared:
        """Return the shared state: slots belong to a backend, the budget to the outermost run."""
        prepared, on_health = self._prepared, self._health_changed
        if within is not None:
            return within.inside(prepared, self.id, self._emit, on_health, self._stage)
        return open_shared(prepared, self.id, clock, self._emit, on_health, self._directory, self._out_of_budget)

    # For the user of a run

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise RuntimeError("a Run can be entered only once")
        if self._outer is None:
            self.shared.clock.start()
        self._supervisor = asyncio.create_task(collecting_rarely(self._supervise), name="batch-agent run")
        # A task that is cancelled before its first step runs nothing, not even its ``finally``.
        self._supervisor.add_done_callback(lambda _: self._delivery.close())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._supervisor is not None
        self.stop()
        await outlast(self._supervisor)
        self._rows.close()

    async def results(self) -> AsyncGenerator[AgentResult[T], None]:
        """Yield each result as it finishes. Then raises the exception that the run failed with, if any."""
        if self._supervisor is None:
            raise RuntimeError("enter a Run before you take its results: async with BatchAgent.open(...) as run")
        if self.pilot_rows is not None and self._outer is None:
            self.pilot_rows.go_on()
        while (result := await self._delivery.take()) is not None:
            yield cast("AgentResult[T]", result)

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
        return self._prepared.plan

    @property
    def schema(self) -> OutputSchema[object] | None:
        """Schema of the outputs; None for text."""
        return self._prepared.schema

    @property
    def metrics_url(self) -> str | None:
        """URL of the Prometheus page of a run with ``metrics_port``; None before and after the run."""
        return self.shared.observers.metrics_url

    @property
    def over(self) -> Over:
        """Reason why this worker takes no more rows, or ""."""
        return "" if self._leases is None else self._leases.over

    @property
    def finished(self) -> int:
        """Number of rows whose results this worker recorded."""
        return 0 if self._leases is None else self._leases.finished

    @property
    def holds_rows(self) -> bool:
        return self._leases is not None and bool(self._leases.held)

    def statistics(self) -> Statistics:
        statistics = self.shared.spending.counted(self._metrics.statistics(), whole=self._outer is None)
        if self._metrics.elsewhere:
            statistics = replace(statistics, peak_running=self.shared.at_most_slots(statistics.peak_running))
        prewarm = None if self._workshop is None else self._workshop.prewarm
        return statistics if prewarm is None else replace(statistics, prewarm=prewarm.statistics())

    @property
    def recorded(self) -> JsonObject:  # {} before it begins
        return {} if self._feeder is None else self._feeder.known()

    def score(self, *, count: bool = True) -> Score:
        """Return how many answers are right so far. Raises SpecError without gold. ``count``: it is a look at it."""
        return score_of_run(self, count=count)

    def gold(self) -> RunGold | None:
        """What the run knows of right answers; None without gold."""
        return None if self.scoring is None else gold_of_run(self, self._prepared, self._feeder)

    @property
    def promise(self) -> PromiseStanding | None:
        """How the promise of the run stands; None without one. Reads the record, so it may block."""
        return None if self._promise is None else self._promise.standing()

    def tool_statistics(self) -> dict[str, ToolStatistics]:
        return self.shared.pool.statistics() if self.shared.pool is not None else {}

    def status(self, statistics: Statistics | None = None) -> JsonObject:
        """Return the current state of the run as one JSON object. ``statistics`` are those of a pipeline."""
        numbers = (statistics or self.statistics(), self._endpoints(), self.tool_statistics(), self._prepared.spec)
        paused = "pause" in self._requests
        return status_json(*numbers, slots=self.shared.slots, clock=self.shared.clock, paused=paused)

    def sample(self, statistics: Statistics | None = None) -> Line:
        return sample_line(statistics or self.statistics(), self._endpoints(), self.shared.slots, self.shared.clock())

    def live_rows(self, limit: int = 200) -> list[JsonObject]:
        """Return the oldest running rows with their activity. Only for a run with a run directory."""
        return self._recorder.live(limit)

    def live_row(self, row: str | int) -> JsonObject:
        """Return the conversation of a running row, with the text that is being streamed; {} if it is at a worker in
        another process, which reports it within a second or two."""
        run, row = (self, row) if self._inside is None else self._inside.stage_row(row)
        try:
            return run._worker_here.conversation(row)
        except SpecError:
            if self._record is None or self.shared.lender is None:
                raise
            return self._record.fed.follow_row(f"{run._stage}/{row}" if run._stage else str(row)) or {}

    def _endpoints(self) -> list[LabelledEndpoint]:
        """Return the endpoints of all backends; for a run inside another, those of its own."""
        return labelled(self.shared, None if self._outer is None else self._prepared.backend.name)

    # Controlling

    def pause(self) -> None:
        """Send nothing more until ``resume``. Requests in flight and tools continue."""
        self._set_paused({"do": "pause"})

    def resume(self) -> None:
        self._set_paused({"do": "resume"})

    def _set_paused(self, request: JsonObject) -> None:
        if not self._passes_on(request):
            paused = request["do"] == "pause"
            self._requests.update(pause=request) if paused else self._requests.pop("pause", None)
            self.shared.set_paused(paused)
            if self._feeder is not None:
                self._feeder.tell(paused=paused)

    def resize(self, max_inflight: int | None) -> None:
        """Change ``max_inflight`` of each backend. A lower limit is reached as answers arrive."""
        check_positive(int, max_inflight=max_inflight)
        dispatchers = [self.shared.dispatcher] if self._outer is not None else self.shared.dispatchers.values()
        request: JsonObject = {"do": "resize", "inflight": max_inflight}
        if max_inflight is None or not self._passes_on(request):
            self._requests["resize"] = request
            for dispatcher in dispatchers:
                dispatcher.resize(max_inflight)

    def drain(self) -> None:
        """Start no new agents. Running agents finish, and ``results`` ends after them. Agents whose first request waits
        in the queue of a server end as failed results of type Interrupted; a resumed run does them."""
        self._leaving = True
        if self._inside is not None:
            self._inside.drain()
        self.stop_feeding()
        if self._leases is not None:
            self._leases.leave()
        if not self._feed.closed:
            self._emit(DrainStarted(self.shared.clock(), self.id))
            self._feed.close()
            for dispatcher in self.shared.dispatchers.values() if self._outer is None else ():
                dispatcher.drain()

    def stop_feeding(self) -> None:
        """Feed no more rows; started rows finish."""
        if self._feeder is not None:
            self._feeder.stop()
        if self._inside is not None:
            self._inside.stop_feeding()

    def cancel(self) -> None:
        """Stop now. Running agents end as failed results of type Interrupted."""
        self._cancelled = True
        self.stop()

    def changes(self) -> Changes:
        """Compare a resumed run with its record. Reads files or Redis, and all inputs, so it may block."""
        run_dir, known, resend = str(self._prepared.spec.run_dir), self.shared.changes, self.on_change == "resend"
        self.shared.changes = compare(run_dir, self.parts, self._function, resend=resend, known=known)
        return self.shared.changes

    @property
    def parts(self) -> Mapping[str, Prepared]:
        """The stages by name; a plain run is its only part."""
        return {"": self._prepared} if self._inside is None else self._inside.parts

    def cancel_row(self, row: str | int) -> None:
        """End a running row, which fails as Cancelled. Raises SpecError if it is not running."""
        if not self._passes_on({"do": "cancel-row", "row": str(row)}):
            run, row = (self, row) if self._inside is None else self._inside.stage_row(row)
            run._worker_here.cancel_row(row)

    def retry_row(self, row: str | int) -> None:
        """Start a running row again from its beginning. Raises SpecError if the row is not running."""
        if not self._passes_on({"do": "retry-row", "row": str(row)}):
            run, row = (self, row) if self._inside is None else self._inside.stage_row(row)
            run._worker_here.retry_row(row)

    def _passes_on(self, request: JsonObject) -> bool:
        """Send a request to all workers, if the run has some in other processes."""
        return self._feeds and self.shared.lender is not None and self.shared.lender.steer(request)

    def stop(self) -> None:
        """Stop without results: no further request is sent, and all running work is cancelled."""
        self._feed.close()
        if self._outer is None:
            for dispatcher in self.shared.dispatchers.values():
                dispatcher.slots.stop()
        if self._supervisor is not None:
            self._supervisor.cancel()

    @property
    def _worker_here(self) -> Worker:
        worker = None if self._workshop is None else self._workshop.worker
        if worker is None:
            raise SpecError("the run has not begun its first row")
        return worker

    # Workers in other processes

    def serve(self) -> Path:
        """Make the record available to other processes of this machine, and return the path of the socket. Raises
        SpecError if other processes cannot work on the run."""
        if self.serving is None:
            raise SpecError("the run has not begun yet, or it has ended")
        return self.serving.path

    @property
    def wants_workers(self) -> bool:
        """Whether new rows are started. Only for a record in this process."""
        standing = self._opened.blocking.standing()
        return not (self._leaving or self.shared.cannot_continue or standing.done) and standing.phase == "running"

    # The supervisor

    async def _supervise(self) -> None:
        failure: BaseException | None = None
        ended: Ended = "failed"
        try:
            if self._outer is None:
                add, numbers = self._emit.sinks.add, (self._controls.statistics, self.shared.live)
                await self.shared.observers.open(self._prepared.spec, add, *numbers)
            if self._feeds:
                outer = None if self._outer is None else self._outer.store
                spec, how = self._prepared.spec, recording.resuming_of(self._prepared, self.on_change)
                self._store = self._record = await recording.open_to_feed(
                    spec, how, self._open_record, outer, self._stage
                )
                if self._outer is None and (spec.resume or self.on_change == "keep"):
                    await recording.refuse_changes(self.changes, self.on_change)
                async with asyncio.TaskGroup() as first:
                    self._reader = first.create_task(self._check_first())
            self._emit_start()
            if not self._feeds or self._rows.seen:  # without inputs nothing is sent or recorded
                backend = self._prepared.backend
                async with recording.announced(self._record), self.shared.backends(self._prepared, self._opened):
                    with following(backend, self.shared.dispatcher) as follower:
                        unanswered = partial(tell_unanswered, self._emit, self.id, self.shared.clock)
                        prepared = await learn_context(await choose_model(self._prepared, unanswered))
                        if follower is not None:
                            follower.use(filter(None, (prepared.model, prepared.spec.compaction_model)))
                        await self._work(prepared)
            elif not self._feed.closed:
                self._feed.end()
            ended, failure = self._how_ended()
        except asyncio.CancelledError:
            ended = "cancelled"
            await self._deliver_interrupted()
            raise
        except BaseException as error:
            failure = self._failed_by = first_error(error)
            ended = "unreachable" if isinstance(failure, RunUnreachable) else "failed"
            if isinstance(failure, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._feed.close()
            if self._outer is None:
                for dispatcher in self.shared.dispatchers.values():
                    dispatcher.close()
                    await dispatcher.wait_closed()
            reason = self.shared.why(ended) if self._failed_by is None else str(self._failed_by)
            if self._feeder is not None:  # a record that cannot be read any more ends the run below
                await to_its_end(asyncio.ensure_future(self._feeder.pass_events()))
            self._emit(RunFinished(self.shared.clock(), self.id, ended, reason))
            failure = await self._end_record(ended, reason, failure) or failure
            if self._outer is None:
                await self.shared.close()
            self._delivery.close(failure)

    def _emit_start(self) -> None:
        """Emit the start events, before the backend loads an engine's weights: that is part of the run's time."""
        prepared, now, price = self._prepared, self.shared.clock(), self.shared.spending.per_second
        self._emit(RunStarted(now, self.id, prepared.plan.total, prepared.backend.name, prepared.model or "", price))
        self._emit(LimitChanged(now, self.id, self.shared.dispatcher.scheduler.slots, "start"))

    async def _check_first(self) -> None:
        """Check, before anything is sent, that there is an input and that it has the task's fields."""
        if self._promise is not None:
            await self._promise.draw(self._opened, self.pilot_rows)
        self._first = await self._rows.first(self._prepared.plan)
        if self._prepared.plan.warning and self._loops:  # a worker may read its rows in its own way
            logger.warning("%s", self._prepared.plan.warning)

    # Its work

    async def _work(self, prepared: Prepared) -> None:
        shared, spending, store = self.shared, self.shared.spending, self._opened
        if self._prepared.model is None and prepared.model is not None:
            self._emit(ModelChosen(shared.clock(), self.id, prepared.model))
        if prepared.model is not None:
            shared.models.setdefault(prepared.backend.name, set()).add(prepared.model)
        self._prepared = prepared = await recording.as_recorded(prepared, self._record)
        if prepared.cascade is not None and self._inside is None:
            self._prepared = prepared = await look_for_models(prepared)
            self.shared.ladder = Ladder(prepared, self.shared.dispatchers, self._metrics, store.facts)
        shapes = prepared.shapes
        spending.set_terms((shapes.first, shapes.later, shapes.repair), prepared.prices, prepared.backend)
        if self._outer is not None:
            shared.lender, shared.journal = self._outer.lender, self._outer.journal
        if self._crew is not None and await self.shared.is_time_spent(self._record, self._outer):
            # Only what is recorded is delivered, for which no worker is needed.
            self._crew, self._works, self._is_shared = None, self._inside is None, False
            self._feed.reading = not self._works
            if self._rows.channel is not None and not store.wait:
                self._feed.take_from(self._rows.channel)
        self._is_shared = self._is_shared or store.wait > 0 or shared.lender is not None
        number = await self._begin_record(prepared)
        if self._outer is None:
            how = (str(prepared.spec.run_dir) if store.wait else None, self._facts_for_workers, self.begin_sharing)
            self.serving = Serving(store, *how, is_shared=self._is_shared)
        shared.keep_limits(prepared.spec, self.id, self._feeder)
        async with AsyncExitStack() as extent:
            if self._outer is None:
                own = (shared, self._controls, prepared.backend, store, self._record, self._lease, number)
                here = (self._feeder, self._leases, self._journal)
                self._ledger = Shares(*own, *here, requests=self._requests)
                await extent.enter_async_context(self._ledger.opened(is_shared=self._is_shared))
            elif shared.lender is not None:
                self._lend(shared.lender)
            if self._crew is not None and self._outer is None:
                await extent.enter_async_context(self._crew.at_work(cast("Run[object]", self)))
            if self._inside is not None:
                await self._work_inside(self._inside)
            elif self._feeder is None:
                await self._work_here(prepared)
            else:
                await self._feed_and_work(prepared, self._feeder)
        await self._delivery.settle()

    async def _work_inside(self, inside: Inside) -> None:
        async with nullcontext() if self._feeder is None else self._feeder.at_work():
            if self._feeder is not None and self._is_shared:
                await self._share_feed(self._feeder)
            complete = await inside.work(cast("Run[object]", self))
            if self._feeder is not None:
                self._feeder.stop_keeping()
                if self._crew is not None:
                    await self._feeder.dismiss()
        if complete and not self._feed.closed:
            self._feed.end()

    async def _feed_and_work(self, prepared: Prepared, feeder: Feeder) -> None:
        async with feeder.at_work() as tasks:
            working = None
            delivering = tasks.create_task(feeder.deliver(min(WAIT, self._lease / 4)))
            if self._is_shared:
                if self.shared.cannot_continue:  # before this stage began
                    feeder.stop()
                await self._share_feed(feeder)
            if self._works:
                working = tasks.create_task(self._work_here(prepared))
                await asyncio.wait({delivering, working}, return_when=asyncio.FIRST_COMPLETED)
            if not feeder.ahead and working is not None:
                await asyncio.wait({working})
                feeder.deliver_recorded()
                delivering.cancel()
            elif not delivering.done() and self.shared.cannot_continue:  # the other workers cannot either
                self._feed.close()
                delivering.cancel()
            await asyncio.wait({delivering})
            if feeder.fed and feeder.outstanding <= 0 and not self._feed.closed:
                self._feed.end()
            feeder.stop_keeping()
            if self._leases is not None:
                self._leases.leave()

    async def _share_feed(self, feeder: Feeder) -> None:
        """Feed the rows to several workers."""
        filling = await feeder.share(self._lease, self._facts_for_workers, has_rows=self._inside is None)
        self._reader = self._reader if self._works else filling

    async def _work_here(self, prepared: Prepared) -> None:
        """Work on rows in this process."""
        assert self._leases is not None and self._journal is not None
        self._workshop = workshop = Workshop(
            prepared, self.shared, self.id, self._emit, self._feed, self._leases, self._journal, self._feeder
        )
        hold = partial(self._backlog, "the engine's queue")
        try:
            async with workshop.opened(self._function, hold) as worker:
                worker.row_schema = None if self._row_schema is None else OutputSchema.of(self._row_schema)
                worker.on_unfinished = self._row_unfinished
                if self._leaving or self.shared.dispatcher.scheduler.closed:  # asked to, or the budget was used up
                    self._leases.leave()
                self._leases.on_need()
                async with asyncio.TaskGroup() as agents:
                    task = agents.create_task(worker.work(agents))
                    if self._reader is None or self._reader.done():
                        self._reader = task
        finally:
            if not self._cancelled:
                await self._leave()

    def _row_unfinished(self, result: AgentResult[object]) -> None:
        """A row was interrupted. If the run stopped early, unfinished rows have no result."""
        if self._feeder is not None:
            stopped = self.shared.dispatcher.over is not None
            self._feeder.finish_unrecorded(result, (lambda _: None) if stopped else self._delivery.deliver)

    # Its record

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "the record is opened first"
        return self._store

    @property
    def _lease(self) -> float:
        return self._prepared.spec.lease if self._is_shared else LEASE

    async def _begin_record(self, prepared: Prepared) -> int:
        """Begin the session of the feeder, and join as a worker. Returns the number of the worker, or 0."""
        store = self._opened
        if self._outer is None:
            self.shared.store = self._record
        fingerprint = fingerprint_of(prepared, self._function)
        row_schema = None if self._row_schema is None else OutputSchema.of(self._row_schema)
        store.blocking.describe(prepared.schema, row_schema, messages=prepared.spec.keep != "results")
        if self._record is not None:
            await self._begin_feed(prepared, self._record, fingerprint)
        if self._feeds and not self._works and store.blocking.folder is None and self._inside is None:
            return 0  # it neither works nor has files
        number = await store.join({"host": platform.node(), "process": os.getpid(), "feeder": self._feeds})
        spending, outer = self.shared.spending, self._outer
        account = spending if outer is None else recording.StageAccount(self._metrics, outer.journal)
        budgets = () if outer is not None else shared_budgets(spending)
        work = recording.WorkSince(account, budgets, self.id, None if self._feeds else self._emit)
        standing = await store.standing()
        if standing.observed:
            work.send_events()
        if self._works:
            waits = self._patience
            self._leases = leases = Leases(
                store, number, lease=self._lease, generation=standing.generation, source=self._feeder, patience=waits
            )
            if self._is_shared:
                leases.share()
            leases.on_away = partial(self.shared.set_overdue, f"{self.id} leases")
            leases.on_observed = work.send_events
        late = partial(self._backlog, "journal"), partial(self.shared.set_overdue, self.id)
        self._journal = recording.open_journal(store, number, account, work, self._leases, *late)
        if self._feeder is not None:
            self._feeder.worker = number
        if self._outer is None:
            self.shared.journal = self._journal
        if self._feeds and (folder := store.blocking.folder) is not None:
            await self._watch.begin(store, folder, recording.asked_json(prepared), self.shared.clock())
        return number

    async def _begin_feed(self, prepared: Prepared, store: Store, fingerprint: bytes) -> None:
        spec = prepared.spec
        self._feeder = feeder = Feeder(
            store,
            self._rows,
            prepared.plan,
            run=self.id,
            emit=self._emit,
            clock=self.shared.clock,
            delivery=self._delivery,
            traces=self.shared.observers.traces,
            originals=recording.originals_of(spec.inputs),
        )
        feeder.is_outermost, feeder.paced, feeder.pilot = self._outer is None, self.shared.paced, self.pilot_rows
        feeder.scoring = self.scoring if self._inside is None else None
        stages = () if self._inside is None else self._inside.names
        facts = recording.facts_of(prepared, fingerprint, self._command, stages, observed=self.shared.observed)
        facts |= {} if self._promise is None else self._promise.facts()
        if self._is_shared:
            feeder.work_ahead()
            facts |= self._facts_for_workers()
        if self._crew is None and self._outer is None:
            feeder.joining = recording.say_joining(spec, facts, alone=not self._is_shared)
        how = recording.resuming_of(prepared, self.on_change, (self._outer or self.shared).changes, self._stage)
        await feeder.begin(facts, how, Keys(rows_under(prepared, self._function)), prepared.schema, spec.keep)
        if self.scoring is not None:
            await in_thread(partial(self.scoring.keep, store.fed))
        if self._promise is not None:
            await self._promise.begin(prepared, feeder, self._rows, self._delivery)
        if self._leaving:
            feeder.stop()

    def _facts_for_workers(self) -> JsonObject:
        """Return what workers in other processes need. Raises SpecError if they cannot work on the run."""
        return recording.facts_for_workers(self._prepared, self._first, self._inside, self._row_schema)

    async def begin_sharing(self, lender: Lending | None = None) -> None:
        """Let workers in other processes take rows of this run, which was alone until now. ``lender`` is that of the
        outer run of a stage."""
        if self._is_shared:
            return
        self._is_shared = True
        if self._ledger is not None:
            await self._ledger.begin_sharing()
        elif lender is not None:
            self.shared.lender = lender
            self._lend(lender)
        if self._leases is not None:
            self._leases.share()
        if self._feeder is not None and self._feeder.tasks is not None:
            await self._share_feed(self._feeder)
        if self._inside is not None and self.shared.lender is not None:
            await self._inside.begin_sharing(self.shared.lender)

    def _lend(self, lender: Lending) -> None:
        """Use the shares of the outer run in this stage."""
        lender.share_answers(self._prepared.backend)
        if self._leases is not None:
            self._leases.on_need = lender.soon
        if self.shared.pool is not None:
            self.shared.pool.once = lender.once

    async def _deliver_interrupted(self) -> None:
        """Deliver the rows of a run that was cancelled: those that are recorded, and the others as Interrupted."""
        if self._cancelled:  # else the Run was left, and results are no longer taken
            if self._journal is not None:
                await to_its_end(self._journal.flush())
            if self._feeder is not None and self._workshop is not None and self._workshop.worker is not None:
                self._feeder.deliver_recorded(callback=False)
                for result in self._workshop.worker.interrupt("the run was cancelled before this job finished"):
                    self._feeder.finish_unrecorded(result, self._delivery.put)
        await self._delivery.cancel()

    async def _leave(self) -> None:
        """Hand back rows, after everything that is recorded of them is written."""
        if self._journal is not None:
            await to_its_end(self._journal.flush())
        if self._leases is not None:
            await self._leases.close()

    async def _end_record(self, ended: Ended, reason: str, failure: BaseException | None) -> BaseException | None:
        """End the session, and close the record. Returns the exception of that, if there was none before."""
        store = self._store
        if store is None:
            return None
        await self._watch.end()
        failed: BaseException | None = None if self._journal is None else await self._journal.end()
        if self._leases is not None:
            await self._leases.close()
        why = str(failure or reason or failed or "")
        if self._feeder is not None:
            state = "failed" if failed is not None else recording.RECORDED_STATES[ended]
            facts: JsonObject = {"state": state, "why": why or None, "ended": recording.now_text()}
            try:
                await to_its_end(asyncio.ensure_future(self._feeder.count_work()))
                if self.scoring is not None and self._record is not None:
                    await in_thread(partial(self.scoring.keep, self._record.fed))
                score = measured(self._controls, self._prepared, store.blocking)
                facts["summary"] = summary_json(self._controls.statistics()) | score
                if ended == "pilot":
                    self._feeder.record_pilot()
                failed = await self._feeder.end(facts) or failed
            except Exception as error:  # any error: the run must not appear successful  # noqa: BLE001
                failed = failed or error
        if self.serving is not None:
            await to_its_end(asyncio.ensure_future(self.serving.close()))
        if self._journal is not None:
            self._journal.close()
        if self._record is not None:
            failed = await to_its_end(store.close()) or failed
        else:
            store.end_threads()
        if self._promise is not None and self._feeder is not None and failed is None:
            failed = await to_its_end(asyncio.ensure_future(in_thread(self._promise.settle)))
        return failure or failed

    # How it ends

    def _how_ended(self) -> tuple[Ended, BaseException | None]:
        """Return how the run ended, and an error for the consumer if the inputs raised or there is no result."""
        if self._feeder is not None and self._feeder.failure is not None:
            self._failed_by = self._feeder.failure
            return "failed", self._feeder.failure
        statistics, over = self._metrics.statistics(), self.shared.dispatcher.over
        # A drain or a limit that came after the last request had no effect.
        total = None if self._inside is not None else self._prepared.plan.total
        every = self._feed.ended or (total is not None and statistics.done == total)
        if every and not statistics.interrupted:
            return "unreachable" if self.shared.unasked else "complete", None
        if over is None:
            stopped = self.pilot_rows is not None and self.pilot_rows.stopped and not self._leaving
            return "out of budget" if self.shared.spending.exhausted else "pilot" if stopped else "drained", None
        return over[0], recording.given_up(*over, has_results=bool(statistics.done))

    def _out_of_budget(self, limit: str) -> None:
        logger.warning("out of budget: %s; calls in flight finish and no new one is sent", limit)
        for dispatcher in self.shared.dispatchers.values():
            dispatcher.slots.drain()
        if self._is_shared:
            self.stop_feeding()
            if self._leases is not None:
                self._leases.leave()

    # Callbacks of its parts

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()  # it may wait for an input that never comes

    def _backlog(self, where: str, full: bool) -> None:
        (self._backlogs.add if full else self._backlogs.discard)(where)
        self.shared.dispatcher.set_backlogged(bool(self._backlogs))
        if where == "delivery" and self._feeder is not None:
            self._feeder.hold(full)

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        changed = health_change(endpoint, now, self.id, self.shared.clock.at)
        self._emit(changed)
        if self._feeder is not None and changed.state != "on trial":
            blocked = changed.reason if endpoint.health.is_down else None
            self._feeder.set_trouble(blocked, changed.since, degraded_words(health_of(self._endpoints())))
        if self.shared.ladder is not None:
            self.shared.ladder.wake()

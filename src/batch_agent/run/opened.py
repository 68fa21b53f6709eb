"""What exists between the beginning and the end of a run: its record, its feeder, what works on its rows, its limits.

``Setup`` is what a run consists of before that. ``Opened`` is the run in a process that works on rows which another
process feeds. ``Fed`` is the run in the process that feeds it, and that usually also works on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from batch_agent.agent.agent import InnerWorker
from batch_agent.agent.fingerprint import fingerprint_of, rows_under
from batch_agent.agent.prepare import Prepared, choose_model, learn_context
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import first_error
from batch_agent.dispatch.members import following
from batch_agent.errors import RunUnreachable
from batch_agent.events import Ended, LimitChanged, ModelChosen, RunFinished, RunStarted, Sink
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.observe.metrics import Clock, Emit, Metrics, Recorder
from batch_agent.observe.numbers import degraded_words
from batch_agent.observe.status import LabelledEndpoint, health_of
from batch_agent.observe.summary import summary_json
from batch_agent.record.address import directory_of
from batch_agent.record.commits import to_its_end
from batch_agent.record.keys import Keys
from batch_agent.record.store import LEASE, RunStore, Store, WorkStore
from batch_agent.run import recording
from batch_agent.run.budget import RunBudget
from batch_agent.run.cascade import Ladder, look_for_models
from batch_agent.run.changes import OnChange
from batch_agent.run.control import Controls, Inside
from batch_agent.run.delivery import Delivery
from batch_agent.run.feeder import WAIT, Feeder
from batch_agent.run.leases import Leases
from batch_agent.run.lending import Lending
from batch_agent.run.observers import is_observed
from batch_agent.run.pilot import Pilot
from batch_agent.run.promise import PromiseOfRun
from batch_agent.run.record_server import RecordServer
from batch_agent.run.recording import in_thread
from batch_agent.run.resources import RunResources
from batch_agent.run.rows import Rows
from batch_agent.run.scoring import RunScoring, measured
from batch_agent.run.shared_state import SharedState, health_change, labelled, open_shared, tell_unanswered
from batch_agent.run.spec_json import spec_json
from batch_agent.run.timeline_writer import TimelineWriter
from batch_agent.run.worker import Worker
from batch_agent.run.worker_processes import crew_of
from batch_agent.scheduler.server import Endpoint
from batch_agent.spec import BatchSpec

if TYPE_CHECKING:
    from batch_agent.run.run import Run

logger = logging.getLogger("batch_agent")


@dataclass(eq=False)
class Setup:
    """What a run consists of before it begins, and what users have asked of it since. ``prepared`` gets the model when
    the run begins. ``function`` is a built-in worker. ``work_on`` is the record of a run that another process feeds;
    None: this process feeds the run. ``outer`` is the state of the run around this one, of which this one is the
    ``stage``."""

    id: str
    prepared: Prepared
    sinks: Sequence[Sink]
    command: Mapping[str, JsonValue] | None
    function: InnerWorker | None
    open_record: Callable[[BatchSpec], RunStore]
    work_on: WorkStore | None
    outer: SharedState | None
    stage: str
    row_schema: type[object] | None
    inside: Inside | None
    controls: Controls
    patience: float
    pilot: Pilot | None
    on_change: OnChange = None
    opened: Opened | None = None  # from the begin on
    first: object = None  # the first input
    reader: asyncio.Task[None] | None = None  # the task that reads inputs
    leaving: bool = False  # the user asked for the end
    cancelled: bool = False
    requests: dict[str, JsonObject] = field(default_factory=dict)  # what holds from then on: pause, resize
    backlogs: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        prepared = self.prepared
        spec = self.prepared.spec
        outer = self.outer
        feeds = self.feeds
        self.crew = crew_of(spec) if feeds else None
        self.promise = PromiseOfRun.of(prepared) if feeds and outer is None else None
        self.scoring = None if prepared.gold is None or not feeds else RunScoring(prepared.gold, prepared.schema)
        feeds_only = feeds and (spec.feed_only or self.crew is not None)
        self.works = self.inside is None and not feeds_only  # this process works on rows
        self.is_shared = feeds_only or not feeds  # other processes do
        directory = directory_of(spec.run_dir) if feeds else None  # that this process feeds
        in_redis = feeds and spec.run_dir is not None and directory is None
        if feeds_only or in_redis:
            spec_json(prepared)  # raises before anything starts, if workers cannot use an option
        clock = Clock() if outer is None else outer.clock
        self.recorder = Recorder(self.id)
        self.metrics = Metrics(clock, None if directory is None else self.recorder)
        own: list[Sink] = [*([] if directory is None else [self.recorder]), *self.sinks]
        self.emit = Emit(self.metrics, [*own, *(spec.sinks if outer is None else (outer.emit,))])
        self.timeline = TimelineWriter(self.recorder, self.controls, socket=outer is None)
        if outer is None:  # slots belong to a backend, the budget to the outermost run
            callbacks = self.emit, self._health_changed, directory, self._out_of_budget
            self.shared = open_shared(prepared, self.id, clock, *callbacks)
        else:
            self.shared = outer.inside(prepared, self.id, self.emit, self._health_changed, self.stage)
        self.shared.observed = self.shared.observed or bool(self.sinks) or is_observed(spec)
        if feeds and outer is None and self.inside is None:
            self.pilot = Pilot.of_spec(spec)
        self.delivery = Delivery[object](spec.on_result, self._delivery_full, self.pilot if outer is None else None)
        self.rows = Rows(spec.inputs, None if self.inside is not None else self.pilot, spec.id_column)
        self.feed = self.shared.dispatcher.feed(self._stop_reading)
        self.feed.reading, self.feed.paced = not self.works, self.shared.paced  # it starts no agent itself
        if self.rows.channel is not None and not self.is_shared and not in_redis:
            self.feed.take_from(self.rows.channel)

    @property
    def feeds(self) -> bool:
        return self.work_on is None

    @property
    def is_outermost(self) -> bool:
        return self.outer is None

    @property
    def lease(self) -> float:
        return self.prepared.spec.lease if self.is_shared else LEASE

    @property
    def schema_of_rows(self) -> OutputSchema[object] | None:
        return None if self.row_schema is None else OutputSchema.of(self.row_schema)

    def facts_for_workers(self) -> JsonObject:
        """Return what workers in other processes need. Raises SpecError if they cannot work on the run."""
        return recording.facts_for_workers(self.prepared, self.first, self.inside, self.row_schema)

    def backlog(self, where: str, full: bool) -> None:
        """Start no agents while the buffer named ``where`` is full."""
        (self.backlogs.add if full else self.backlogs.discard)(where)
        self.shared.dispatcher.set_backlogged(bool(self.backlogs))

    def endpoints(self) -> list[LabelledEndpoint]:
        """Return the endpoints of all backends; for a run inside another, those of its own."""
        return labelled(self.shared, None if self.is_outermost else self.prepared.backend.name)

    def stop_feeding(self) -> None:
        """Feed no more rows; started rows finish."""
        if self.opened is not None:
            self.opened.stop_feeding()
        if self.inside is not None:
            self.inside.stop_feeding()

    # Its parts call these

    def _out_of_budget(self, limit: str) -> None:
        logger.warning("out of budget: %s; calls in flight finish and no new one is sent", limit)
        for dispatcher in self.shared.dispatchers.values():
            dispatcher.slots.drain()
        if self.is_shared:
            self.stop_feeding()
            if self.opened is not None:
                self.opened.leases.leave()

    def _stop_reading(self) -> None:
        if self.reader is not None:
            self.reader.cancel()  # it may wait for an input that never comes

    def _delivery_full(self, full: bool) -> None:
        self.backlog("delivery", full)
        if self.opened is not None:
            self.opened.hold(full)

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        changed = health_change(endpoint, now, self.id, self.shared.clock.at)
        self.emit(changed)
        if self.opened is not None and changed.state != "on trial":
            blocked = changed.reason if endpoint.health.is_down else None
            self.opened.set_trouble(blocked, changed.since, degraded_words(health_of(self.endpoints())))
        if self.shared.ladder is not None:
            self.shared.ladder.wake()


@dataclass(slots=True)
class Writer:
    """This process as a writer of the record. ``number`` is 0 if it only feeds a record elsewhere. ``observed``: the
    feeder has observers, which need the events of workers."""

    number: int = 0
    generation: int = 0
    observed: bool = False


class Opened:
    """A run from its beginning to its end, in a process that works on it. ``run`` is passed to its stages and its
    worker processes. ``number`` is that of this process as a writer of the record; 0 if it only feeds a record
    elsewhere. If this process does not work on rows, ``leases`` take none and ``resources`` are not opened. A run
    inside another one uses that run's ledger and limits, and serves no record."""

    def __init__(
        self,
        run: Run[Any],
        setup: Setup,
        store: Store,
        writer: Writer,
        feeder: Feeder | None = None,
    ) -> None:
        number, generation = writer.number, writer.generation
        self._run = run
        self.setup = setup
        self.store = store
        self.number = number
        shared = setup.shared
        sent = recording.SentWork(setup.id, setup.emit)
        if writer.observed and not setup.feeds:
            sent.send_events()
        lease, waits = setup.lease, setup.patience
        self.leases = leases = Leases(store, number, lease=lease, generation=generation, source=feeder, patience=waits)
        if setup.is_shared and setup.works:
            leases.share()
        leases.on_away = partial(shared.set_overdue, f"{setup.id} leases")
        if not setup.feeds:
            leases.on_observed = sent.send_events
        late = partial(setup.backlog, "journal"), partial(shared.set_overdue, setup.id)
        told = shared.spending, setup.metrics, setup.outer, feeder, sent, leases
        self.commits = recording.open_commits(store, number, *told, *late)
        self.resources = RunResources(setup, leases, self.commits, feeder)
        self._budget = RunBudget(setup, store, number, feeder, leases, self.commits)
        url = str(setup.prepared.spec.run_dir) if store.wait else None
        self.record_server = RecordServer(
            store, url, setup.facts_for_workers, self.begin_sharing, is_shared=setup.is_shared
        )

    # Its work

    async def work(self) -> None:
        """Do what this process does for the run, until nothing is left."""
        setup, shared = self.setup, self.setup.shared
        async with AsyncExitStack() as extent:
            if setup.is_outermost:
                await extent.enter_async_context(self._budget.opened(is_shared=setup.is_shared))
                if setup.crew is not None:
                    await extent.enter_async_context(setup.crew.at_work(self._run))
            elif shared.lender is not None:
                self._lend(shared.lender)
            if setup.inside is not None:
                complete = await self._work_inside(setup.inside)
                if complete and not setup.feed.closed:
                    setup.feed.end()
            else:
                await self._work()
        await setup.delivery.settle()

    async def _work_inside(self, inside: Inside) -> bool:
        """Run the stages. Returns whether all of them ended normally."""
        return await inside.work(self._run)

    async def _work(self) -> None:
        """Work on rows in this process."""
        setup, leases = self.setup, self.leases
        hold = partial(setup.backlog, "the engine's queue")
        try:
            async with self.resources.opened(setup.function, hold) as worker:
                worker.row_schema = setup.schema_of_rows
                worker.on_unfinished = self._row_unfinished
                if setup.leaving or setup.shared.dispatcher.scheduler.closed:  # asked to, or the budget was used up
                    leases.leave()
                leases.on_need()
                async with asyncio.TaskGroup() as agents:
                    task = agents.create_task(worker.work(agents))
                    if setup.reader is None or setup.reader.done():
                        setup.reader = task
        finally:
            if not setup.cancelled:  # hand back rows, after everything that is recorded of them is written
                await to_its_end(self.commits.flush())
                await leases.close()

    # Workers in other processes

    async def begin_sharing(self, lender: Lending | None = None) -> None:
        """Let workers in other processes take rows of this run, which was alone until now. ``lender`` is that of the
        outer run of a stage."""
        setup = self.setup
        if setup.is_shared:
            return
        setup.is_shared = True
        if setup.is_outermost:
            await self._budget.begin_sharing()
        elif lender is not None:
            setup.shared.lender = lender
            self._lend(lender)
        if setup.works:
            self.leases.share()
        await self._share_feed()
        if setup.inside is not None and setup.shared.lender is not None:
            await setup.inside.begin_sharing(setup.shared.lender)

    def _lend(self, lender: Lending) -> None:
        """Use the shares of the outer run in this stage."""
        lender.share_answers(self.setup.prepared.backend)
        self.leases.on_need = lender.soon
        if self.setup.shared.pool is not None:
            self.setup.shared.pool.once = lender.once

    # Its end

    async def deliver_interrupted(self) -> None:
        """Deliver the rows of a run that was cancelled: recorded results, and for all others a result of type
        Interrupted."""
        await to_its_end(self.commits.flush())
        if self.resources.has_begun:
            self._deliver_rest(self.resources.worker)

    async def close(self, ended: Ended, reason: str, failure: BaseException | None) -> BaseException | None:
        """End the session, and close the record. Returns the first exception."""
        setup = self.setup
        await setup.timeline.end()
        failed: BaseException | None = await self.commits.end() if self.number else None
        if setup.works:
            await self.leases.close()
        failed = await self._end_session(ended, str(failure or reason or failed or ""), failed)
        await to_its_end(asyncio.ensure_future(self.record_server.close()))
        self.commits.close()
        failed = await self._close_record(failed)
        return failure or failed

    # What only a feeder does

    @property
    def failure(self) -> Exception | None:
        """The error that reading the inputs raised; None if there is none."""
        return None

    @property
    def rows_read(self) -> int | None:
        """The number of inputs when all were read; None before."""
        return None

    def known(self) -> JsonObject:
        """Return the facts of the run in its record; {} if another process writes them."""
        return {}

    def tell(self, **facts: JsonValue) -> None:
        """Record facts about the present state of the run."""

    def set_trouble(self, trouble: str | None, since: float, degraded: str) -> None:
        """Record what blocks the run."""

    def stop_feeding(self) -> None:
        """Feed no more rows; started rows finish."""

    def hold(self, full: bool) -> None:
        """Stop reading results while too many wait to be taken."""

    async def pass_events(self) -> None:
        """Pass the events of worker processes to the observers."""

    async def _share_feed(self) -> None:
        """Feed the rows to several workers."""

    def _row_unfinished(self, result: AgentResult[object]) -> None:
        """Handle a row that was interrupted: it is not recorded."""

    def _deliver_rest(self, worker: Worker) -> None:
        """Deliver recorded results, and for the rows that are running results of type Interrupted."""

    async def _end_session(self, ended: Ended, why: str, failed: BaseException | None) -> BaseException | None:
        """Write how the run ended. Returns the first exception of that, or ``failed``."""
        return failed

    async def _close_record(self, failed: BaseException | None) -> BaseException | None:
        """Close the record, which belongs to the feeder. Returns the first exception of that, or ``failed``."""
        self.store.end_threads()
        return failed


class Fed(Opened):
    """A run that this process feeds."""

    def __init__(self, run: Run[Any], setup: Setup, store: Store, writer: Writer, feeder: Feeder) -> None:
        super().__init__(run, setup, store, writer, feeder)
        self.feeder = feeder
        feeder.worker = writer.number

    async def _work_inside(self, inside: Inside) -> bool:
        async with self.feeder.at_work():
            if self.setup.is_shared:
                await self._share_feed()
            complete = await inside.work(self._run)
            self.feeder.stop_keeping()
            if self.setup.crew is not None:
                await self.feeder.dismiss()
        return complete

    async def _work(self) -> None:
        setup = self.setup
        feeder = self.feeder
        shared = self.setup.shared
        async with feeder.at_work() as tasks:
            working = None
            delivering = tasks.create_task(feeder.deliver(min(WAIT, setup.lease / 4)))
            if setup.is_shared:
                if shared.cannot_continue:  # before this stage began
                    feeder.stop()
                await self._share_feed()
            if setup.works:
                working = tasks.create_task(super()._work())
                await asyncio.wait({delivering, working}, return_when=asyncio.FIRST_COMPLETED)
            if not feeder.ahead and working is not None:
                await asyncio.wait({working})
                feeder.deliver_recorded()
                delivering.cancel()
            elif not delivering.done() and shared.cannot_continue:  # the other workers cannot either
                setup.feed.close()
                delivering.cancel()
            await asyncio.wait({delivering})
            if feeder.fed and feeder.outstanding <= 0 and not setup.feed.closed:
                setup.feed.end()
            feeder.stop_keeping()
            self.leases.leave()

    async def _share_feed(self) -> None:
        setup, feeder = self.setup, self.feeder
        if feeder.tasks is None:
            return
        filling = await feeder.share(setup.lease, setup.facts_for_workers, has_rows=setup.inside is None)
        setup.reader = setup.reader if setup.works else filling

    @property
    def failure(self) -> Exception | None:
        return self.feeder.failure

    @property
    def rows_read(self) -> int | None:
        return self.feeder.read if self.feeder.fed else None

    def known(self) -> JsonObject:
        return self.feeder.known()

    def tell(self, **facts: JsonValue) -> None:
        self.feeder.tell(**facts)

    def set_trouble(self, trouble: str | None, since: float, degraded: str) -> None:
        self.feeder.set_trouble(trouble, since, degraded)

    def stop_feeding(self) -> None:
        self.feeder.stop()

    def hold(self, full: bool) -> None:
        self.feeder.hold(full)

    async def pass_events(self) -> None:
        await to_its_end(asyncio.ensure_future(self.feeder.pass_events()))

    def _row_unfinished(self, result: AgentResult[object]) -> None:
        """Handle a row that was interrupted. If the run stopped early, unfinished rows have no result."""
        stopped = self.setup.shared.dispatcher.over is not None
        self.feeder.finish_unrecorded(result, (lambda _: None) if stopped else self.setup.delivery.deliver)

    def _deliver_rest(self, worker: Worker) -> None:
        self.feeder.deliver_recorded(callback=False)
        for result in worker.interrupt("the run was cancelled before this job finished"):
            self.feeder.finish_unrecorded(result, self.setup.delivery.put)

    async def _end_session(self, ended: Ended, why: str, failed: BaseException | None) -> BaseException | None:
        setup, feeder = self.setup, self.feeder
        state = "failed" if failed is not None else recording.RECORDED_STATES[ended]
        facts: JsonObject = {"state": state, "why": why or None, "ended": recording.now_text()}
        try:
            await to_its_end(asyncio.ensure_future(feeder.count_work()))
            if setup.scoring is not None:
                await in_thread(partial(setup.scoring.keep, self.store.fed))
            score = measured(setup.controls, setup.prepared, self.store.blocking)
            facts["summary"] = summary_json(setup.controls.statistics()) | score
            if ended == "pilot":
                feeder.record_pilot()
            failed = await feeder.end(facts) or failed
        except Exception as error:  # any error: the run must not appear successful  # noqa: BLE001
            failed = failed or error
        return failed

    async def _close_record(self, failed: BaseException | None) -> BaseException | None:
        failed = await to_its_end(self.store.close()) or failed
        if (promise := self.setup.promise) is not None and failed is None:
            failed = await to_its_end(asyncio.ensure_future(in_thread(promise.settle)))
        return failed


async def supervise(run: Run[Any], setup: Setup) -> None:
    """Take a run from its begin to its end. ``setup.opened`` is what exists meanwhile."""
    shared = setup.shared
    feed = setup.feed
    store = None
    failure: BaseException | None = None  # that the user gets
    broke: BaseException | None = None  # that ended the run
    ended: Ended = "failed"
    try:
        if setup.is_outermost:
            add, numbers = setup.emit.sinks.add, (setup.controls.statistics, shared.live)
            await shared.observers.open(setup.prepared.spec, add, *numbers)
        store = await _open_record(setup)
        if setup.feeds:
            await _check(run, setup, store)
        _emit_start(setup)
        if not setup.feeds or setup.rows.seen:  # without inputs nothing is sent or recorded
            await _begin_and_work(run, setup, store)
        elif not feed.closed:
            feed.end()
        broke = None if setup.opened is None else setup.opened.failure
        ended, failure = ("failed", broke) if broke is not None else _how_ended(setup)
    except asyncio.CancelledError:
        ended = "cancelled"
        if setup.cancelled and setup.opened is not None:  # else the Run was left, and results are no longer taken
            await setup.opened.deliver_interrupted()
        await setup.delivery.cancel()
        raise
    except BaseException as error:
        failure = broke = first_error(error)
        ended = "unreachable" if isinstance(failure, RunUnreachable) else "failed"
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise
    finally:
        feed.close()
        if setup.is_outermost:
            for dispatcher in shared.dispatchers.values():
                dispatcher.close()
                await dispatcher.wait_closed()
        reason = shared.why(ended) if broke is None else str(broke)
        if setup.opened is not None:  # a record that cannot be read any more ends the run below
            await setup.opened.pass_events()
        setup.emit(RunFinished(shared.clock(), setup.id, ended, reason))
        if setup.opened is not None:
            failure = await setup.opened.close(ended, reason, failure)
        elif store is not None and setup.feeds:
            failed = await to_its_end(store.close())
            failure = failure or failed
        elif store is not None:
            store.end_threads()
        if setup.is_outermost:
            await shared.close()
        setup.delivery.close(failure)


async def _open_record(setup: Setup) -> Store:
    if setup.work_on is not None:
        return Store(setup.work_on)
    outer = None if setup.outer is None else setup.outer.store
    how = recording.resuming_of(setup.prepared, setup.on_change)
    return await recording.open_to_feed(setup.prepared.spec, how, setup.open_record, outer, setup.stage)


async def _check(run: Run[Any], setup: Setup, store: Store) -> None:
    """Check, before anything is sent, that no recorded answer would be lost, that there is an input, and that it has
    the task's fields."""
    if setup.is_outermost and (setup.prepared.spec.resume or setup.on_change == "keep"):
        await recording.refuse_changes(run.changes, setup.on_change)
    async with asyncio.TaskGroup() as first:
        setup.reader = first.create_task(_check_first(setup, store))


async def _check_first(setup: Setup, store: Store) -> None:
    plan, spec = setup.prepared.plan, setup.prepared.spec
    if setup.promise is not None:
        await setup.promise.draw(store, setup.pilot)
    setup.first = await setup.rows.first(plan)
    if plan.warning and setup.function is None and spec.worker is None:  # a worker may read its rows in its own way
        logger.warning("%s", plan.warning)


def _emit_start(setup: Setup) -> None:
    """Emit the events of the start. They come before the backend loads an engine's weights, because that time is part
    of the run."""
    prepared = setup.prepared
    shared = setup.shared
    emit = setup.emit
    now, price = shared.clock(), shared.spending.per_second
    emit(RunStarted(now, setup.id, prepared.plan.total, prepared.backend.name, prepared.model or "", price))
    emit(LimitChanged(now, setup.id, shared.dispatcher.scheduler.slots, "start"))


def _how_ended(setup: Setup) -> tuple[Ended, BaseException | None]:
    """Return how the run ended, and an error for the consumer if there is no result."""
    shared, over = setup.shared, setup.shared.dispatcher.over
    statistics = setup.metrics.statistics()
    # A drain or a limit that came after the last request had no effect.
    total = None if setup.inside is not None else setup.prepared.plan.total
    every = setup.feed.ended or (total is not None and statistics.done == total)
    if every and not statistics.interrupted:
        return "unreachable" if shared.unasked else "complete", None
    if over is None:
        stopped = setup.pilot is not None and setup.pilot.stopped and not setup.leaving
        return "out of budget" if shared.spending.exhausted else "pilot" if stopped else "drained", None
    return over[0], recording.given_up(*over, has_results=bool(statistics.done))


async def _begin_and_work(run: Run[Any], setup: Setup, store: Store) -> None:
    """Open the backend, find out the model and what the record says about it, and work."""
    shared, backend = setup.shared, setup.prepared.backend
    record = store if setup.feeds else None
    async with recording.announced(record), shared.backends(setup.prepared, store):
        with following(backend, shared.dispatcher) as follower:
            unanswered = partial(tell_unanswered, setup.emit, setup.id, shared.clock)
            prepared = await learn_context(await choose_model(setup.prepared, unanswered))
            if follower is not None:
                follower.use(filter(None, (prepared.model, prepared.spec.compaction_model)))
            if setup.prepared.model is None and prepared.model is not None:
                setup.emit(ModelChosen(shared.clock(), setup.id, prepared.model))
            if prepared.model is not None:
                shared.models.setdefault(prepared.backend.name, set()).add(prepared.model)
            setup.prepared = prepared = await recording.as_recorded(prepared, record)
            if prepared.cascade is not None and setup.inside is None:
                setup.prepared = prepared = await look_for_models(prepared)
                shared.ladder = Ladder(prepared, shared.dispatchers, setup.metrics, store.facts)
            shapes = prepared.shapes
            shared.spending.set_terms((shapes.first, shapes.later, shapes.repair), prepared.prices, prepared.backend)
            await _choose_workers(setup, store)
            await _open(run, setup, store)
            assert setup.opened is not None, "it was opened"
            await setup.opened.work()


async def _choose_workers(setup: Setup, store: Store) -> None:
    """Decide which processes work on the rows: this one, others, or both."""
    shared, outer = setup.shared, setup.outer
    if outer is not None:
        shared.lender, shared.commits = outer.lender, outer.commits
    if setup.crew is not None and await shared.is_time_spent(store if setup.feeds else None, outer):
        # Only what is recorded is delivered, for which no worker is needed.
        setup.crew = None
        setup.works = setup.inside is None
        setup.is_shared = False
        setup.feed.reading = not setup.works
        if setup.rows.channel is not None and not store.wait:
            setup.feed.take_from(setup.rows.channel)
    setup.is_shared = setup.is_shared or store.wait > 0 or shared.lender is not None


async def _open(run: Run[Any], setup: Setup, store: Store) -> None:
    """Begin the session of the feeder, and join as a writer of the record. If that fails, the run still counts as
    opened, because its session must be ended."""
    shared, writer = setup.shared, Writer()
    messages = setup.prepared.spec.keep != "results"
    store.blocking.describe(setup.prepared.schema, setup.schema_of_rows, messages=messages)
    feeder = _feeder(setup, store) if setup.feeds else None
    try:
        if feeder is not None:
            await _begin_feed(setup, feeder)
        if setup.works or store.blocking.folder is not None or setup.inside is not None or feeder is None:
            writer.number = await store.join({"host": platform.node(), "process": os.getpid(), "feeder": setup.feeds})
            standing = await store.standing()
            writer.generation, writer.observed = standing.generation, standing.observed
    finally:
        opened = Opened(run, setup, store, writer) if feeder is None else Fed(run, setup, store, writer, feeder)
        setup.opened = opened
    if setup.is_outermost and writer.number:
        shared.commits = opened.commits
    if writer.number and setup.feeds and (folder := store.blocking.folder) is not None:
        await setup.timeline.begin(store, folder, recording.asked_json(setup.prepared), shared.clock())
    shared.keep_limits(setup.prepared.spec, setup.id, feeder)
    if setup.leaving:
        opened.stop_feeding()


def _feeder(setup: Setup, store: Store) -> Feeder:
    prepared = setup.prepared
    shared = setup.shared
    spec = setup.prepared.spec
    feeder = Feeder(
        store,
        setup.rows,
        prepared.plan,
        run=setup.id,
        emit=setup.emit,
        clock=shared.clock,
        delivery=setup.delivery,
        traces=shared.observers.traces,
        originals=recording.originals_of(spec.inputs),
    )
    feeder.is_outermost = setup.is_outermost
    feeder.paced = shared.paced
    feeder.pilot = setup.pilot
    feeder.scoring = setup.scoring if setup.inside is None else None
    return feeder


async def _begin_feed(setup: Setup, feeder: Feeder) -> None:
    """Begin the session of the feeder."""
    prepared = setup.prepared
    spec = setup.prepared.spec
    shared = setup.shared
    store = feeder.store
    if setup.is_outermost:
        shared.store = store
    stages = () if setup.inside is None else setup.inside.names
    fingerprint = fingerprint_of(prepared, setup.function)
    facts = recording.facts_of(prepared, fingerprint, setup.command, stages, observed=shared.observed)
    facts |= {} if setup.promise is None else setup.promise.facts()
    if setup.is_shared:
        feeder.work_ahead()
        facts |= setup.facts_for_workers()
    if setup.crew is None and setup.is_outermost:
        feeder.joining = recording.say_joining(spec, facts, alone=not setup.is_shared)
    how = recording.resuming_of(prepared, setup.on_change, (setup.outer or shared).changes, setup.stage)
    await feeder.begin(facts, how, Keys(rows_under(prepared, setup.function)), prepared.schema, spec.keep)
    if setup.scoring is not None:
        await in_thread(partial(setup.scoring.keep, store.fed))
    if setup.promise is not None:
        await setup.promise.begin(prepared, feeder, setup.rows, setup.delivery)

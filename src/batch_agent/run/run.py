"""A run: a batch, its resources, and its end.

One supervisor task owns everything that runs: the feed, the agents, the tool calls. The holder of the Run only takes
results from the delivery and calls pause, drain or cancel. Leaving the Run cancels the supervisor and waits for it. So
nothing outlives it except a tool that does not stop (``tools/pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Generic, Self, TypeVar, cast

from pydantic import JsonValue

from batch_agent.agent.agent import open_worker
from batch_agent.agent.compaction import open_compactor
from batch_agent.agent.fingerprint import rows_under
from batch_agent.agent.loop_context import InnerWorker
from batch_agent.agent.prefix_leader import PrefixLeader, lead_of
from batch_agent.agent.prepare import Prepared, choose_model, learn_context
from batch_agent.agent.resources import Resources
from batch_agent.agent.tool_prewarm import ToolPrewarm, open_tool_prewarm
from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.calibration import calibration
from batch_agent.dispatch.cancellation import first_error, outlast
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.load_poller import poll_load
from batch_agent.dispatch.members import following
from batch_agent.dispatch.policy import Policy
from batch_agent.dispatch.rate_mark import RateMark
from batch_agent.dispatch.spending import Spending
from batch_agent.errors import RunRejected, RunUnreachable
from batch_agent.events import Ended, HealthChanged, LimitChanged, ModelChosen, RunFinished, RunStarted, Sink
from batch_agent.job import AgentResult, Placed
from batch_agent.observe.metrics import Metrics
from batch_agent.observe.recorder import Recorder
from batch_agent.observe.summary import summary_json
from batch_agent.record.base import Account, OpenStore
from batch_agent.record.session import Record, RunSession, Session
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.run.batch import Batch
from batch_agent.run.cache_watch import cache_watch, touches_for
from batch_agent.run.clock import Clock
from batch_agent.run.delivery import Delivery
from batch_agent.run.lender import Lender, WorkerAccount
from batch_agent.run.observers import Observers
from batch_agent.run.recording import RECORDED_STATES, StageAccount, asked_json, begin_session, open_session
from batch_agent.run.rows import Rows
from batch_agent.run.shared import Shared
from batch_agent.run.sinks import Sinks
from batch_agent.run.steering import Controls, Steered
from batch_agent.run.watch import Watch
from batch_agent.scheduler.budget import Amount
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.kvflow import KvParts
from batch_agent.tools.pool import ToolPool

T = TypeVar("T")
logger = logging.getLogger("batch_agent")


class Run(Steered, Generic[T]):
    """Use it with ``async with``: ``results()``, ``statistics()``, ``pause``, ``drain``, ``cancel``."""

    def __init__(
        self,
        prepared: Prepared,
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        worker: InnerWorker | None = None,
        open_store: OpenStore = SqliteJournal.open,
        session: RunSession | None = None,
        within: Shared | None = None,
        stages: Sequence[str] = (),
        controls: Controls | None = None,
        lender: Lender | None = None,
    ) -> None:
        """``command`` is how to start this run again, for the record. ``worker`` is a built-in one that replaces the
        tool loop; the user's is in the spec. ``open_store`` opens the journal of a run directory; ``session`` records
        the run elsewhere. ``within`` is the state of an outer run: this run then uses its slots and budget, is recorded
        in its journal (unless it has its own record) and appears in its view. ``stages`` are the names of the runs with
        directories inside this one. ``controls`` is what the control socket controls and the summary counts, if not
        this run. ``lender`` lends it the shares of one process among several."""
        self.id = secrets.token_hex(8)
        self._prepared, self._command, self._worker = prepared, command, worker
        self._loops = worker is None and prepared.spec.worker is None  # the tool loop processes the rows
        self._open_store, self._outer = open_store, within
        self._stages, self._lender = stages, lender
        clock = Clock() if within is None else within.clock
        self._metrics, self._recorder = Metrics(clock), Recorder(self.id)
        self._controls = controls or self
        self._watch = Watch(self._recorder, self._controls, socket=within is None)
        own: list[Sink] = [self._metrics] if prepared.spec.run_dir is None else [self._metrics, self._watch]
        outside = prepared.spec.sinks if within is None else (within.emit,)
        self._emit = Sinks([*own, *sinks, *outside])
        self.shared = self._share(clock, within)
        self._feed = self.shared.dispatcher.feed(self._stop_feeding)
        self._backlogs: set[str] = set()
        self._delivery: Delivery[object] = Delivery(prepared.spec.on_result, partial(self._backlog, "delivery"))
        self._rows = Rows(prepared.spec.inputs)
        if self._rows.channel is not None:
            self._feed.take_from(self._rows.channel)
        self._batch: Batch | None = None
        self._prewarm: ToolPrewarm | None = None
        self._session = session  # of this run
        self._supervisor: asyncio.Task[None] | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._cancelled = False
        self._failed_by: BaseException | None = None

    def _share(self, clock: Clock, within: Shared | None) -> Shared:
        """Return the shared state: slots belong to a backend, the budget to the outermost run."""
        name = self._prepared.backend.name
        dispatchers = {} if within is None else within.dispatchers
        spending = self._new_spending(dispatchers) if within is None else within.spending
        dispatcher = dispatchers.get(name)
        if dispatcher is None:
            dispatcher = dispatchers[name] = self._new_dispatcher()
            dispatcher.spending = spending
        if within is not None:
            directory, rate_mark, observers = within.directory, within.rate_mark, within.observers
        else:
            run_dir, observers = self._prepared.spec.run_dir, Observers()
            directory = None if run_dir is None else Path(run_dir)
            rate_mark = None if directory is None else RateMark(directory)
        return Shared(clock, self._emit, dispatcher, spending, dispatchers, directory, rate_mark, observers)

    def _new_dispatcher(self) -> Dispatcher:
        prepared, backend = self._prepared, self._prepared.backend
        dispatcher = Dispatcher(
            backend,
            prepared.max_inflight,
            prepared.max_agents,
            servers=backend.servers,
            terms=prepared.terms,
            max_outage=prepared.spec.max_outage,
            control_requests=prepared.spec.control_requests,
            on_limit=self._limit_changed,
            on_health=self._health_changed,
        )
        if backend.capabilities.reports_load:
            dispatcher.scheduler.use(KvParts.of(prepared.spec.kvflow))
        for endpoint in dispatcher.scheduler.endpoints:
            endpoint.health.patient = backend.capabilities.patient
        return dispatcher

    def _new_spending(self, dispatchers: Mapping[str, Dispatcher]) -> Spending:
        def time_is_up() -> None:
            why = str(self.shared.spending.refusal())
            for dispatcher in dispatchers.values():
                dispatcher.refuse_now(why)
                dispatcher.cut_off(self.shared.spending.add_reason)

        def short(is_short: bool) -> None:
            for dispatcher in dispatchers.values():
                dispatcher.slots.set_short_of_budget(is_short)

        prepared = self._prepared
        return Spending(prepared.spec, prepared.prices, short, self._out_of_budget, time_is_up)

    # For the user of a run

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise RuntimeError("a Run can be entered only once")
        if self._outer is None:
            self.shared.clock.start()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise(), name="batch-agent run")
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
        while (result := await self._delivery.take()) is not None:
            yield cast("AgentResult[T]", result)

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

    # The supervisor

    async def _supervise(self) -> None:
        failure: BaseException | None = None
        ended: Ended = "failed"
        try:
            if self._outer is None:
                whole = self.id if self._stages else ""
                await self.shared.observers.open(self._prepared.spec, self._emit.add, self.shared.live, whole)
            self._session = self._session or await open_session(self._prepared.spec, self._open_store)
            async with asyncio.TaskGroup() as first:
                self._feeder = first.create_task(self._check_first())
            self._emit_start()
            self.shared.keep_jobs(self._prepared.backend)
            if self._rows.seen:  # without inputs nothing is sent or recorded
                backend = self._prepared.backend
                async with backend:
                    with following(backend, self.shared.dispatcher) as follower:
                        prepared = await learn_context(await choose_model(self._prepared))
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
            reason = self._why(ended)
            self._emit(RunFinished(self.shared.clock(), self.id, ended, reason))
            failure = await self._end_session(ended, reason, failure) or failure
            if self._outer is None:
                await self.shared.observers.close()
            self._delivery.close(failure)

    def _emit_start(self) -> None:
        """Emit the start events, before the backend loads an engine's weights: that is part of the run's time."""
        prepared, now, price = self._prepared, self.shared.clock(), self.shared.spending.per_second
        self._emit(RunStarted(now, self.id, prepared.plan.total, prepared.backend.name, prepared.model or "", price))
        self._emit(LimitChanged(now, self.id, self.shared.dispatcher.scheduler.slots, "start"))

    async def _check_first(self) -> None:
        """Check, before anything is sent, that there is an input and that it has the task's fields."""
        for value in await self._rows.peek():
            self._prepared.plan.check_first(value.value if isinstance(value, Placed) else value)
        if self._prepared.plan.warning and self._loops:  # a worker may read its rows in its own way
            logger.warning("%s", self._prepared.plan.warning)

    async def _work(self, prepared: Prepared) -> None:
        spec, shared = prepared.spec, self.shared
        if self._prepared.model is None and prepared.model is not None:
            self._emit(ModelChosen(shared.clock(), self.id, prepared.model))
        shapes = prepared.shapes
        shared.spending.set_prices((shapes.first, shapes.later, shapes.repair), prepared.prices)
        record = await self._begin_record(prepared)
        shared.keep_rates(spec)
        hold = partial(self._backlog, "the engine's queue")
        touches = touches_for(prepared, shared.dispatcher) if self._loops else None
        watch = cache_watch(prepared.plan, shared.dispatcher.scheduler, self._emit, self.id, shared.clock, touches)
        async with (
            self._tools(prepared) as pool,
            open_tool_prewarm(spec, pool) as prewarm,
            poll_load(prepared.backend, shared.dispatcher, spec.backpressure_ceiling, hold, watch),
            calibration(prepared.backend, shared.dispatcher, prepared.model or "", wanted=spec.calibrate_backend),
            AsyncExitStack() as extent,
        ):
            shared.pool, self._prewarm = pool, prewarm
            resources = Resources(
                backend=prepared.backend,
                dispatcher=shared.dispatcher,
                policy=Policy(
                    spec.max_retries,
                    timeout=prepared.turn_limit_seconds,
                    timeout_option="timeout_per_turn",
                    hedge=spec.hedge,
                ),
                tools=pool,
                schema=prepared.schema,
                shared=prepared.plan.shared,
                shapes=prepared.shapes,
                emit=self._emit,
                run=self.id,
                clock=shared.clock,
                max_turns=spec.turn_limit if self._loops else spec.max_turns,
                timeout_per_agent=spec.timeout_per_agent,
                early_tools=(
                    spec.streaming_tool_dispatch
                    and prepared.backend.capabilities.streaming
                    and any(pool.can_start_early(tool.name) for tool in prepared.tools)
                ),
                ends_with_answer=self._loops,
                keeps_cut_text=self._loops and prepared.schema is None and spec.truncated == "keep",
                prewarm=prewarm,
                touches=touches if shared.dispatcher.scheduler.parts.touch else None,
                lead=self._lead(prepared),
                traces=shared.observers.traces,
                hints=spec.nvext_agent_hints,
            )
            resources.compactor = await extent.enter_async_context(open_compactor(prepared, resources))
            worker = await extent.enter_async_context(open_worker(prepared, self._worker, shared.spending))
            self._batch = batch = Batch(
                self._rows,
                prepared.plan,
                resources,
                self._feed,
                self._delivery,
                record,
                worker,
                asks_first=self._loops,
                parts_record=self._record_of_parts(prepared),
            )
            async with self._budget(), asyncio.TaskGroup() as agents:
                self._feeder = agents.create_task(batch.feed(agents))
            watch.tell()

    async def _begin_record(self, prepared: Prepared) -> Record | None:
        """Return where the rows are recorded: in a session of this run, or as a part of the outer run's."""
        outer = None if self._outer is None else self._outer.session
        if self._session is None:
            self.shared.session = outer
            return None if outer is None else outer.part(rows_under(prepared, self._worker, part=True))
        await begin_session(
            self._session,
            prepared,
            self._command,
            self._worker,
            account=self._account(outer),
            stages=self._stages,
            on_backlog=partial(self._backlog, "journal"),
            on_overdue=partial(self.shared.set_overdue, self.id),
        )
        self.shared.session = self._session
        if prepared.spec.run_dir is not None and isinstance(self._session, Session):
            where = Path(prepared.spec.run_dir)
            await self._watch.begin(self._session, where, asked_json(prepared), self.shared.clock())
        return self._session

    def _account(self, outer: RunSession | None) -> Account:
        if self._outer is not None:
            return StageAccount(self._metrics, outer)
        return self.shared.spending if self._lender is None else WorkerAccount(self.shared.spending)

    def _record_of_parts(self, prepared: Prepared) -> Record | None:
        session = self.shared.session
        return None if session is None else session.part(rows_under(prepared, self._worker, part=True))

    def _lead(self, prepared: Prepared) -> PrefixLeader | None:
        """Return the prefix leader, or None. A user's worker may send other requests first, or none."""
        if not self._loops:
            return None
        return lead_of(prepared.plan, prepared.backend.capabilities, prepared.max_inflight)

    @asynccontextmanager
    async def _tools(self, prepared: Prepared) -> AsyncIterator[ToolPool]:
        """Yield the outer run's tool pool if it has the same tools, so that calls are shared; else a new one."""
        outer = None if self._outer is None else self._outer.pool
        if outer is not None and outer.has(prepared.tools):
            yield outer
            return
        spec = prepared.spec
        async with ToolPool(
            prepared.tools,
            timeout=spec.timeout_per_tool,
            spawn=asyncio.get_running_loop().create_task,
            on_waiting=self.shared.dispatcher.set_at_tools,
            prewarm_max_age=spec.prewarm_max_age if spec.predictive_prewarm else None,
            once=None if self._lender is None else self._lender.once,
        ) as pool:
            yield pool

    @asynccontextmanager
    async def _budget(self) -> AsyncIterator[None]:
        if self._outer is not None:
            yield
            return
        spending = self.shared.spending
        if self._lender is not None:
            spending.start(commit=self._lender.soon)
            try:
                async with self._lender.at_work(self.shared, self._controls, self._prepared.backend):
                    yield
            finally:
                spending.close()
            return
        if self._session is None:
            spending.start()
        else:
            tokens, cost, learnt = await self._session.spent_before()
            spending.start(Amount(tokens, cost), learnt, self._session.touch)
        try:
            yield
        finally:
            spending.close()

    async def _deliver_interrupted(self) -> None:
        if self._cancelled and self._batch is not None:  # else the Run was left, and results are no longer taken
            recorded = self._session is not None and await self._session.flush()
            await self._batch.interrupt("the run was cancelled before this job finished", recorded=recorded)

    async def _end_session(self, ended: Ended, reason: str, failure: BaseException | None) -> BaseException | None:
        """End the session and unlock the run directory. Returns the exception of that, if there was none before."""
        if self._session is None:
            return None
        why = reason if failure is None else str(failure)
        await self._watch.end()
        try:
            await self._session.end(RECORDED_STATES[ended], why, summary_json(self._controls.statistics()))
        except Exception as error:  # any error: the run must not appear successful
            return failure or error
        return None

    # How it ends

    def _how_ended(self) -> tuple[Ended, BaseException | None]:
        """Return how the run ended, and an error for the consumer if the inputs raised or there is no result."""
        if self._batch is not None and self._batch.failure is not None:
            self._failed_by = self._batch.failure
            return "failed", self._batch.failure
        statistics, over = self._metrics.statistics(), self.shared.dispatcher.over
        # A drain or a limit that came after the last request had no effect.
        every = self._feed.ended or statistics.done == self._prepared.plan.total
        if every and not statistics.interrupted:
            return "complete", None
        if over is None:
            return ("out of budget" if self.shared.spending.exhausted else "drained"), None
        ended, why = over
        if statistics.done:
            logger.warning("%s: %s", ended, why)
            return ended, None
        return ended, RunUnreachable(why) if ended == "unreachable" else RunRejected(why)

    def _why(self, ended: Ended) -> str:
        if self._failed_by is not None:
            return str(self._failed_by)
        if ended == "out of budget":
            return self.shared.spending.exhausted
        over = self.shared.dispatcher.over
        return over[1] if over is not None and ended == over[0] else ""

    def _out_of_budget(self, limit: str) -> None:
        logger.warning("out of budget: %s; calls in flight finish and no new one is sent", limit)
        for dispatcher in self.shared.dispatchers.values():
            dispatcher.slots.drain()

    # Callbacks of its parts

    def _stop_feeding(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()  # it may wait for an input that never comes

    def _backlog(self, where: str, full: bool) -> None:
        (self._backlogs.add if full else self._backlogs.discard)(where)
        self.shared.dispatcher.set_backlogged(bool(self._backlogs))

    def _limit_changed(self, endpoint: Endpoint, reason: str) -> None:
        self._emit(LimitChanged(self.shared.clock(), self.id, endpoint.capacity.limit, reason, endpoint.name))

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        health, wall = endpoint.health, self.shared.clock.at
        since = next_trial = 0.0
        if health.is_down:
            since, next_trial = wall(health.down_since), wall(max(health.next_trial, endpoint.server.held_until))
        self._emit(HealthChanged(wall(now), self.id, endpoint.name, health.state, health.reason, since, next_trial))
        if self._session is not None and health.state != "on trial":
            self._session.say_trouble(health.reason if health.is_down else None, since)

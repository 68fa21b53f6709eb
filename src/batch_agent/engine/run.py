"""A run: reads inputs as they are needed, keeps one task per live agent, and ends in exactly one way.

One supervisor task owns everything that runs: the feed, the agents, the tool calls. Whoever holds the Run only takes
results from the delivery and says pause, drain or cancel. Leaving the Run cancels the supervisor and waits for it, so
nothing outlives it but a tool that does not stop (``tools/pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

from pydantic import JsonValue

from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.engine.agent import Agent, bounded
from batch_agent.engine.cancellation import outlast
from batch_agent.engine.clock import Clock
from batch_agent.engine.context import Worker
from batch_agent.engine.delivery import Delivery
from batch_agent.engine.limiter import Limiter
from batch_agent.engine.loop import tool_loop
from batch_agent.engine.prepare import Prepared, choose_model
from batch_agent.engine.recording import RECORDED_STATES, begin_session, open_session
from batch_agent.engine.rows import Rows
from batch_agent.engine.spending import Spending
from batch_agent.engine.turn import Resources
from batch_agent.errors import BatchAgentError, Interrupted, JobError, RunRejected, RunUnreachable, SpecError
from batch_agent.events import (
    DrainStarted,
    Ended,
    Event,
    HealthChanged,
    JobFinished,
    JobStarted,
    LimitChanged,
    ModelChosen,
    RunFinished,
    RunStarted,
    Sink,
)
from batch_agent.job import AgentError, AgentResult, Job
from batch_agent.observe.metrics import Metrics, Statistics
from batch_agent.observe.summary import summary_json
from batch_agent.scheduler.budget import Amount
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.store.base import OpenStore
from batch_agent.store.session import Session
from batch_agent.store.sqlite import SqliteJournal
from batch_agent.store.trail import Trail
from batch_agent.tools.pool import ToolPool, ToolStatistics

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

BREATHER = 128  # inputs taken in a row before the event loop gets a turn
LOOKED_UP = 256  # inputs whose records are looked up at once
FOLLOWING = 64  # agents that ended in an earlier session and are being delivered at once


class Run(Generic[T]):
    """``async with`` it, take ``results()``, look at ``statistics()``; ``pause``, ``drain`` or ``cancel`` at will."""

    def __init__(
        self,
        prepared: Prepared,
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        worker: Worker | None = None,
        open_store: OpenStore = SqliteJournal.open,
    ) -> None:
        """``command`` is how to start this run again, for the record. ``worker`` works on the rows in place of the loop
        of a model with tools; ``open_store`` is what is behind the journal of a run directory."""
        self.id = secrets.token_hex(8)
        self._prepared = prepared
        self._command = command
        self._worker = worker
        self._work_on: Worker = tool_loop if worker is None else bounded(worker)
        self._open_store = open_store
        self._session: Session | None = None
        self._backlogs: set[str] = set()
        self._following = asyncio.Semaphore(FOLLOWING)
        self._nowhere = Trail()  # of all agents of a run that is not recorded
        self._clock = Clock()
        self._metrics = Metrics(self._clock)
        self._sinks: list[Sink] = [self._metrics, *sinks]
        self._limiter = Limiter(
            prepared.max_inflight,
            prepared.max_agents,
            self._limit_changed,
            endpoints=prepared.backend.capabilities.endpoints,
            max_outage=prepared.spec.max_outage,
            on_health=self._health_changed,
            on_over=self._over,
        )
        self._spending = Spending(prepared.spec, prepared.prices, self._limiter, self._out_of_budget)
        self._delivery: Delivery[object] = Delivery(prepared.spec.on_result, partial(self._backlog, "delivery"))
        self._rows = Rows(prepared.spec.inputs)
        self._live: dict[int, Agent] = {}
        self._pool: ToolPool | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._cancelled = False
        self._fed = False  # every input was read
        self._ended_by: tuple[Ended, str] | None = None  # what kept the run from going on, and why

    # What a user does with a run

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise RuntimeError("a Run is entered once")
        self._clock.start()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise(), name="batch-agent run")
        # A task that is cancelled before its first step runs nothing, not even its finally.
        self._supervisor.add_done_callback(lambda _: self._delivery.close())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._supervisor is not None
        self.stop()
        await outlast(self._supervisor)

    async def results(self) -> AsyncGenerator[AgentResult[T], None]:
        """Each result as it finishes. Raises what the run failed with, after the results that came before it."""
        if self._supervisor is None:
            raise RuntimeError("a Run gives results once it is entered: async with BatchAgent.open(...) as run")
        while (result := await self._delivery.take()) is not None:
            yield cast("AgentResult[T]", result)

    @property
    def plan(self) -> Plan:
        return self._prepared.plan

    @property
    def schema(self) -> OutputSchema[object] | None:
        """What the outputs are instances of; None for text."""
        return self._prepared.schema

    def statistics(self) -> Statistics:
        return self._metrics.statistics()

    def tool_statistics(self) -> dict[str, ToolStatistics]:
        return self._pool.statistics() if self._pool is not None else {}

    def pause(self) -> None:
        """Send nothing more until ``resume``; requests on their way and tools go on."""
        self._limiter.pause()

    def resume(self) -> None:
        self._limiter.resume()

    def resize(self, max_inflight: int | None) -> None:
        """Change ``max_inflight``. Lowered, it is reached as answers come in; nothing is interrupted."""
        if max_inflight is not None and (type(max_inflight) is not int or max_inflight < 1):
            raise SpecError("max_inflight is a whole number above 0, or None for no limit")
        self._limiter.resize(max_inflight)

    def drain(self) -> None:
        """Start nothing new; agents under way finish, and ``results`` ends after them."""
        if not self._limiter.scheduler.closed:
            self._emit(DrainStarted(self._clock(), self.id))
        self._limiter.drain()
        self._stop_feeding()

    def cancel(self) -> None:
        """Stop now. Agents under way end as failed results of type Interrupted."""
        self._cancelled = True
        self.stop()

    def stop(self) -> None:
        """Nobody wants the results any more: not one more request leaves, and everything under way is cancelled."""
        self._limiter.stop()
        if self._supervisor is not None:
            self._supervisor.cancel()

    def _stop_feeding(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()  # it may be waiting for an input that never comes

    # The supervisor

    async def _supervise(self) -> None:
        failure: BaseException | None = None
        ended: Ended = "failed"
        try:
            self._session = await open_session(self._prepared.spec, self._open_store)
            async with asyncio.TaskGroup() as first:
                self._feeder = first.create_task(self._check_first())
            self._emit_start()
            if self._rows.seen:  # without inputs nothing is asked, and nothing recorded
                async with self._prepared.backend:
                    await self._work(await choose_model(self._prepared))
            else:
                self._fed = True
            ended = self._how_ended()
            failure = self._without_any_result(ended)
        except asyncio.CancelledError:
            ended = "cancelled"
            await self._deliver_interrupted()
            raise
        except BaseException as error:
            failure = _first(error)
            if isinstance(failure, RunUnreachable):
                ended, self._ended_by = "unreachable", ("unreachable", str(failure))
            if isinstance(failure, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._limiter.close()
            reason = self._why(ended)
            self._emit(RunFinished(self._clock(), self.id, ended, reason))
            failure = await self._end_session(ended, reason, failure) or failure
            self._delivery.close(failure)

    def _emit_start(self) -> None:
        """Before the backend is entered: an engine that loads its weights is part of the run's time."""
        prepared, now, price = self._prepared, self._clock(), self._spending.per_second
        self._emit(RunStarted(now, self.id, prepared.plan.total, prepared.backend.name, prepared.model or "", price))
        self._emit(LimitChanged(now, self.id, self._limiter.scheduler.max_inflight, "start"))

    async def _work(self, prepared: Prepared) -> None:
        spec = prepared.spec
        if self._prepared.model is None and prepared.model is not None:
            self._emit(ModelChosen(self._clock(), self.id, prepared.model))
        if self._session is not None:
            await begin_session(
                self._session,
                prepared,
                self._command,
                self._worker,
                spent=self._spending.so_far,
                on_backlog=partial(self._backlog, "journal"),
            )
        spawn = asyncio.get_running_loop().create_task
        async with ToolPool(prepared.tools, timeout=spec.timeout_per_tool, spawn=spawn) as pool:
            self._pool = pool
            resources = Resources(
                backend=prepared.backend,
                limiter=self._limiter,
                spending=self._spending,
                tools=pool,
                schema=prepared.schema,
                shared=prepared.plan.shared,
                shapes=prepared.shapes,
                emit=self._emit,
                run=self.id,
                clock=self._clock,
                max_turns=spec.turn_limit if self._worker is None else spec.max_turns,
                max_retries=spec.max_retries,
                timeout_per_agent=spec.timeout_per_agent,
                timeout_per_turn=spec.timeout_per_turn,
                early_tools=spec.streaming_tool_dispatch and prepared.backend.capabilities.streaming,
            )
            try:
                before = await self._session.spent_before() if self._session is not None else (0, 0.0)
                self._spending.start(Amount(*before))
                async with asyncio.TaskGroup() as agents:
                    self._feeder = agents.create_task(self._feed(agents, prepared.plan, resources))
            finally:
                self._spending.close()

    async def _check_first(self) -> None:
        """Before anything is sent: is there an input, and does it have the task's fields?"""
        for value in await self._rows.peek():
            self._prepared.plan.check_first(value)

    async def _feed(self, agents: asyncio.TaskGroup, plan: Plan, resources: Resources) -> None:
        count = LOOKED_UP if self._session is not None and self._session.has_past else 1
        index = 0
        while await self._limiter.wait_room():
            values = await self._rows.read(count)
            if not values:
                self._fed = True
                self._limiter.fed()
                return
            for value in values:
                plan.check_first(value)
            compiled = [_compile(plan, index + place, value) for place, value in enumerate(values)]
            trails = await self._trails([job for job in compiled if isinstance(job, Job)], plan)
            for job in compiled:
                if not await self._limiter.wait_room():
                    return
                self._limiter.expect(None if plan.total is None else max(0, plan.total - index - 1))
                if isinstance(job, Job):
                    await self._start(job, trails.get(job.index, self._nowhere), agents, resources)
                else:
                    self._emit(JobStarted(self._clock(), self.id, job.index, job.job_id))
                    self._publish(job)
                    await self._finish(job)
                index += 1
                if index % BREATHER == 0:
                    await asyncio.sleep(0)

    async def _trails(self, jobs: Sequence[Job], plan: Plan) -> dict[int, Trail]:
        """Where each job, by index, is recorded; nothing without a run directory."""
        session = self._session
        if session is None:
            return {}
        identities = [session.identity(job, plan.question(job)) for job in jobs]
        if session.has_past:
            trails = await session.trails(identities)
        else:
            trails = [session.new_trail(identity) for identity in identities]
        return {job.index: trail for job, trail in zip(jobs, trails, strict=True)}

    async def _start(self, job: Job, trail: Trail, agents: asyncio.TaskGroup, resources: Resources) -> None:
        if trail.ended:
            await self._following.acquire()
        self._emit(JobStarted(self._clock(), self.id, job.index, job.job_id))
        agent = self._live[job.index] = Agent(job, resources, trail, self._work_on)
        if self._worker is None and not trail.has_past:  # it begins with a question to the model
            ticket = self._limiter.start_agent(agent.progress)
            agents.create_task(self._accompany(agent, ticket, resources))
            return
        self._limiter.scheduler.start_agent()
        task = agents.create_task(self._accompany(agent, None, resources))
        if trail.ended:
            task.add_done_callback(lambda _: self._following.release())
        await asyncio.sleep(0)  # it claims its slot now, where its record is not enough

    async def _accompany(self, agent: Agent, ticket: Ticket | None, resources: Resources) -> None:
        """One agent from its first turn to its delivered result."""
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            self._publish(result)
            await agent.settle()
            del self._live[agent.job.index]
            await self._finish(result)
        finally:
            self._limiter.end_agent(agent.progress, agent.turns)

    async def _finish(self, result: AgentResult[object]) -> None:
        self._emit_end(result)
        if self._ended_by is None or not _is_interrupted(result):
            await self._delivery.deliver(result)

    def _emit_end(self, result: AgentResult[object]) -> None:
        self._emit(
            JobFinished(
                self._clock(),
                self.id,
                result.index,
                result.job_id,
                result.error,
                result.attempts,
                result.turns,
                result.usage,
                result.cost,
                result.timings,
                result.resumed,
            )
        )

    def _publish(self, result: AgentResult[object]) -> None:
        """A line in the run's files, after the commit that makes the result durable. A job that was interrupted has no
        line: it has not failed, it is not done."""
        if self._session is not None and not _is_interrupted(result):
            self._session.publish(result)

    async def _deliver_interrupted(self) -> None:
        if not self._cancelled:  # the Run was left: nobody takes results any more
            return
        recorded = self._session is not None and await self._session.flush()
        for agent in self._live.values():
            result = agent.recorded if recorded else None
            if result is None:
                agent.fail(Interrupted("the run was cancelled before this job finished"))
                result = agent.result()
            self._emit_end(result)
            self._delivery.put(result)

    async def _end_session(self, ended: Ended, reason: str, failure: BaseException | None) -> BaseException | None:
        """Lets go of the run directory. What went wrong with that, where nothing had gone wrong before."""
        if self._session is None:
            return None
        why = reason if failure is None else str(failure)
        try:
            await self._session.end(RECORDED_STATES[ended], why, summary_json(self.statistics()))
        except Exception as error:  # whatever it is, the caller must not take the run for one that went well
            return failure or error
        return None

    def _backlog(self, where: str, full: bool) -> None:
        if full:
            self._backlogs.add(where)
        else:
            self._backlogs.discard(where)
        self._limiter.set_backlogged(bool(self._backlogs))

    def _out_of_budget(self, limit: str) -> None:
        logger.warning("out of budget: %s; calls in flight finish and no new one is sent", limit)
        self.drain()

    def _over(self, ended: Ended, why: str) -> None:
        """Nobody is left to ask: requests on their way finish, and what is not done stays not done."""
        logger.warning("%s: %s", ended, why)
        self._ended_by = (ended, why)
        self._stop_feeding()
        self._limiter.refuse(f"the run ended before this job was done: {why}")

    def _how_ended(self) -> Ended:
        if not self._limiter.scheduler.closed:
            return "complete"
        # A drain or a limit that came when everything had been sent kept nothing from being done.
        statistics = self._metrics.statistics()
        every = self._fed or statistics.done == self._prepared.plan.total
        if every and not statistics.interrupted:
            return "complete"
        if self._ended_by is not None:
            return self._ended_by[0]
        return "out of budget" if self._spending.exhausted else "drained"

    def _why(self, ended: Ended) -> str:
        if ended == "out of budget":
            return self._spending.exhausted
        return self._ended_by[1] if self._ended_by is not None and ended == self._ended_by[0] else ""

    def _without_any_result(self, ended: Ended) -> BatchAgentError | None:
        """What whoever waits for results is told when there is not one."""
        if self._metrics.statistics().done:
            return None
        if ended == "failed":
            return RunRejected(self._why(ended))
        return RunUnreachable(self._why(ended)) if ended == "unreachable" else None

    def _limit_changed(self, endpoint: Endpoint, reason: str) -> None:
        self._emit(LimitChanged(self._clock(), self.id, endpoint.capacity.limit, reason, endpoint.name))

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        health, wall = endpoint.health, self._clock.at
        since = next_trial = 0.0
        if health.is_down:
            since, next_trial = wall(health.down_since), wall(max(health.next_trial, endpoint.held_until))
        self._emit(HealthChanged(wall(now), self.id, endpoint.name, health.state, health.reason, since, next_trial))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("a sink of events raised and gets no more of them")
                self._sinks = [other for other in self._sinks if other is not sink]


def _compile(plan: Plan, index: int, value: object) -> Job | AgentResult[object]:
    """A row's job; or, for one that cannot be rendered, the result it ends in."""
    try:
        return plan.job(index, value)
    except JobError as error:
        return AgentResult(index, str(index), value, False, None, AgentError.of(error))


def _is_interrupted(result: AgentResult[object]) -> bool:
    return result.error is not None and result.error.type == Interrupted.type


def _first(error: BaseException) -> BaseException:
    """The failure itself, out of the groups that task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

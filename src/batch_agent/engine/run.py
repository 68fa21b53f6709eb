"""A run: reads inputs as they are needed, keeps one task per live agent, and ends in exactly one way.

One supervisor task owns everything that runs: the feed, the agents, the tool calls. Whoever holds the Run only takes
results from the delivery and says pause, drain or cancel. Leaving the Run cancels the supervisor and waits for it, so
nothing outlives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, cast

from batch_agent.compiler.plan import Plan
from batch_agent.engine.agent import Agent
from batch_agent.engine.delivery import Delivery
from batch_agent.engine.limiter import Limiter
from batch_agent.engine.prepare import Prepared, choose_model
from batch_agent.engine.rows import END, Rows
from batch_agent.engine.turn import Resources
from batch_agent.errors import Interrupted, JobError, Rejected, RunRejected
from batch_agent.events import Event, JobFinished, JobStarted, LimitChanged, RunFinished, RunStarted, Sink
from batch_agent.job import AgentError, AgentResult
from batch_agent.observe.metrics import Metrics, Statistics
from batch_agent.scheduler.core import Ticket
from batch_agent.tools.pool import ToolPool, ToolStatistics

T = TypeVar("T")
Ended = Literal["complete", "drained", "cancelled", "failed"]
logger = logging.getLogger("batch_agent")

REFUSED_FOR_ALL = frozenset({401, 403, 404})  # wrong key, no access, no such model or path: not one row's fault
BREATHER = 128  # inputs taken in a row before the event loop gets a turn


class Run(Generic[T]):
    """``async with`` it, take ``results()``, look at ``statistics()``; ``pause``, ``drain`` or ``cancel`` at will."""

    def __init__(self, prepared: Prepared, sinks: Sequence[Sink] = ()) -> None:
        self._prepared = prepared
        self._metrics = Metrics()
        self._sinks: list[Sink] = [self._metrics, *sinks]
        self._limiter = Limiter(prepared.max_inflight, prepared.spec.max_agents, self._limit_changed)
        self._delivery: Delivery[object] = Delivery(prepared.spec.on_result, self._limiter.set_backlogged)
        self._live: dict[int, Agent] = {}
        self._pool: ToolPool | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._cancelled = False

    # What a user does with a run

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise RuntimeError("a Run is entered once")
        self._supervisor = asyncio.create_task(self._supervise(), name="batch-agent run")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._supervisor is not None
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])

    async def results(self) -> AsyncGenerator[AgentResult[T], None]:
        """Each result as it finishes. Raises what the run failed with, after the results that came before it."""
        while (result := await self._delivery.take()) is not None:
            yield cast("AgentResult[T]", result)

    @property
    def plan(self) -> Plan:
        return self._prepared.plan

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
        if max_inflight is not None and max_inflight < 1:
            raise ValueError("max_inflight is at least 1, or None for no limit")
        self._limiter.resize(max_inflight)

    def drain(self) -> None:
        """Start nothing new; agents under way finish, and ``results`` ends after them."""
        self._limiter.drain()
        if self._feeder is not None:
            self._feeder.cancel()  # it may be waiting for an input that never comes

    def cancel(self) -> None:
        """Stop now. Agents under way end as failed results of type Interrupted."""
        self._cancelled = True
        self.drain()
        if self._supervisor is not None:
            self._supervisor.cancel()

    # The supervisor

    async def _supervise(self) -> None:
        failure: BaseException | None = None
        ended: Ended = "failed"
        try:
            async with self._prepared.backend:
                await self._work(await choose_model(self._prepared))
            ended = "drained" if self._limiter.scheduler.closed else "complete"
        except asyncio.CancelledError:
            ended = "cancelled"
            self._deliver_interrupted()
            raise
        except Exception as error:
            failure = _first(error)
        finally:
            self._limiter.close()
            self._emit(RunFinished(asyncio.get_running_loop().time(), ended))
            self._delivery.close(failure)

    async def _work(self, prepared: Prepared) -> None:
        spec = prepared.spec
        now = asyncio.get_running_loop().time()
        self._emit(RunStarted(now, prepared.plan.total, prepared.backend.name, prepared.model or ""))
        self._emit(LimitChanged(now, self._limiter.scheduler.max_inflight, "start"))
        async with asyncio.TaskGroup() as tool_tasks:
            pool = ToolPool(prepared.tools, timeout=spec.timeout_per_tool, spawn=tool_tasks.create_task)
            self._pool = pool
            resources = Resources(
                backend=prepared.backend,
                limiter=self._limiter,
                tools=pool,
                schema=prepared.schema,
                shared=prepared.plan.shared,
                shapes=prepared.shapes,
                emit=self._emit,
                max_turns=spec.turn_limit,
                max_retries=spec.max_retries,
                timeout_per_agent=spec.timeout_per_agent,
                timeout_per_turn=spec.timeout_per_turn,
                early_tools=spec.streaming_tool_dispatch and prepared.backend.capabilities.streaming,
            )
            try:
                async with asyncio.TaskGroup() as agents:
                    self._feeder = agents.create_task(self._feed(agents, prepared.plan, resources))
            finally:
                await pool.close()

    async def _feed(self, agents: asyncio.TaskGroup, plan: Plan, resources: Resources) -> None:
        rows = Rows(self._prepared.spec.inputs)
        index = 0
        while await self._limiter.wait_room():
            value = await rows.read()
            if value is END:
                return
            plan.check_first(value)
            await self._start(index, value, agents, plan, resources)
            index += 1
            if index % BREATHER == 0:
                await asyncio.sleep(0)

    async def _start(
        self, index: int, value: object, agents: asyncio.TaskGroup, plan: Plan, resources: Resources
    ) -> None:
        now = asyncio.get_running_loop().time()
        try:
            job = plan.job(index, value)
        except JobError as error:
            self._emit(JobStarted(now, index, str(index)))
            await self._finish(AgentResult(index, str(index), value, False, None, AgentError.of(error)))
            return
        self._emit(JobStarted(now, index, job.job_id))
        agent = self._live[index] = Agent(job, resources)
        ticket = self._limiter.start_agent(agent.turns_left())
        agents.create_task(self._accompany(agent, ticket, resources))

    async def _accompany(self, agent: Agent, ticket: Ticket, resources: Resources) -> None:
        """One agent from its first turn to its delivered result."""
        result = await agent.run(ticket)
        error = agent.error
        if isinstance(error, Rejected) and error.status in REFUSED_FOR_ALL and not resources.answered:
            raise RunRejected(f"the run stopped at its first refusal, before any answer: {error}")
        del self._live[agent.job.index]
        await self._finish(result)
        self._limiter.end_agent()

    async def _finish(self, result: AgentResult[object]) -> None:
        self._emit(JobFinished(asyncio.get_running_loop().time(), result))
        await self._delivery.deliver(result)

    def _deliver_interrupted(self) -> None:
        if not self._cancelled:  # the Run was left: nobody takes results any more
            return
        for agent in self._live.values():
            agent.error = Interrupted("the run was cancelled before this job finished")
            result = agent.result(None)
            self._emit(JobFinished(asyncio.get_running_loop().time(), result))
            self._delivery.put(result)

    def _limit_changed(self, limit: int | None, reason: str) -> None:
        self._emit(LimitChanged(asyncio.get_running_loop().time(), limit, reason))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("a sink of events raised and gets no more of them")
                self._sinks = [other for other in self._sinks if other is not sink]


def _first(error: Exception) -> BaseException:
    """The failure itself, out of the groups that task groups wrap around it."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause

"""Reads the inputs of a run as they are needed, starts an agent for each, and delivers its result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial

from batch_agent.agent.agent import Agent, AgentWorker
from batch_agent.agent.loop import tool_loop
from batch_agent.agent.resources import Resources
from batch_agent.blocking import in_thread
from batch_agent.compiler.plan import Plan
from batch_agent.dispatch.feed import Feed
from batch_agent.errors import Cancelled, Interrupted, JobError, SpecError
from batch_agent.events import JobFinished, JobStarted
from batch_agent.job import AgentError, AgentResult, Failure, Job, Placed
from batch_agent.messages import JsonObject
from batch_agent.record.base import Identity
from batch_agent.record.session import Record
from batch_agent.record.trail import Trail
from batch_agent.run.delivery import Delivery
from batch_agent.run.parts import Parts
from batch_agent.run.rows import Rows
from batch_agent.scheduler.core import Ticket

BREATHER = 128  # inputs in a row before the event loop runs other tasks
LOOKED_UP = 256  # inputs whose records are looked up at once
READERS = max(2, min(8, os.cpu_count() or 1))  # documents that are read at once
FOLLOWING = 64  # agents that ended in an earlier session and are delivered at once


class Batch:
    """``asks_first``: the worker begins with a model request, so its slot can be requested before it runs. ``record``
    is None for a run without a record. ``parts_record`` records the parts of rows that do not fit."""

    def __init__(
        self,
        rows: Rows,
        plan: Plan,
        resources: Resources,
        feed: Feed,
        delivery: Delivery[object],
        record: Record | None,
        worker: AgentWorker,
        *,
        asks_first: bool,
        parts_record: Record | None,
    ) -> None:
        self.live: dict[int, Agent | Parts] = {}
        self.failure: Exception | None = None  # the exception that ended the inputs early
        self._rows, self._plan, self._r = rows, plan, resources
        self._feed, self._delivery, self._record, self._parts_record = feed, delivery, record, parts_record
        self._worker, self._asks_first = worker, asks_first
        self._lead = resources.lead  # until the first agent with a request has started
        self._nowhere = Trail()  # the trail of all agents of a run without a record
        self._following = asyncio.Semaphore(FOLLOWING)
        self._again: set[int] = set()  # rows that were stopped to start again

    async def feed(self, agents: asyncio.TaskGroup) -> None:
        """Start an agent for each input when there is room. An exception from the inputs ends them."""
        count = LOOKED_UP if self._record is not None and self._record.has_past else 1
        index, total = 0, self._plan.total
        while await self._feed.wait_room():
            self._feed.set_reading(True)
            try:
                values = await self._rows.read(count)
            except Exception as error:
                self.failure = error
                values = []
            finally:
                self._feed.set_reading(False)
            if not values:
                self._feed.end()
                return
            for value in values:
                self._plan.check_first(_unplaced(value))
            if count == 1 and self._plan.reads(_unplaced(values[0])):
                count = READERS
            jobs = await _compile_all(self._plan, index, values)
            trails = await self._trails([job for job in jobs if isinstance(job, Job)])
            for job in jobs:
                if not await self._feed.wait_room():
                    return
                left = self._rows.waiting if total is None else max(0, total - index - 1)
                self._feed.expect(left)
                if isinstance(job, Job) and job.parts:
                    await self._begin_parts(job, left, agents)
                else:
                    await self._begin(job, trails, agents)
                index += 1
                if index % BREATHER == 0:
                    await asyncio.sleep(0)

    async def interrupt(self, why: str, *, recorded: bool) -> None:
        """End the running agents. ``recorded``: their recorded steps are on disk."""
        for agent in self.live.values():
            result = agent.recorded if recorded else None
            if result is None:
                agent.fail(Interrupted(why))
                result = agent.result()
            self._tell(result)
            self._delivery.put(result)

    def drop(self, index: int) -> None:
        """End a row that another process took over: nothing more of it is recorded, and it has no result here."""
        agent = self.live.pop(index, None)
        if agent is not None:
            for task in agent.tasks:
                task.cancel()
            agent.fail(Interrupted("another process works on this row now"))
            self._tell(agent.result())

    # Steering

    def cancel_row(self, row: str | int) -> None:
        """Cancel a running row. Raises SpecError if it is not running."""
        self._agent(row).stop(Cancelled("this row was cancelled by the user"))

    def retry_row(self, row: str | int) -> None:
        """Start a running row again. Raises SpecError if it is not running."""
        agent = self._agent(row)
        agent.stop(Cancelled("this row was restarted by the user"))
        self._again.add(agent.job.index)

    def conversation(self, row: str | int) -> JsonObject:
        """Return the conversation of a running row. Raises SpecError if it is not running."""
        return self._agent(row).conversation()

    def _agent(self, row: str | int) -> Agent:
        """Return the agent of a row, by its id or its index."""
        name = str(row)
        agent = next((live for live in self.live.values() if live.job.job_id == name), None)
        if agent is None and name.isdecimal():
            agent = self.live.get(int(name))
        if isinstance(agent, Parts):
            raise SpecError(f"row {row} is processed in parts, which cannot be controlled one by one")
        if agent is None or agent.recorded is not None:
            raise SpecError(
                f"row {row} is not running: it has not begun, or it has its result; batch-agent retry-failed retries "
                "failed rows after the run has ended"
            )
        return agent

    async def _trails(self, jobs: Sequence[Job]) -> Mapping[int, Trail]:
        """Return the trail of each job, by index; empty without a record."""
        record = self._record
        if record is None:
            return {}
        identities = {job.index: record.identity(job, self._plan.question(job)) for job in jobs}
        whole = [job.index for job in jobs if not job.parts]  # a row in parts is recorded in the trails of its parts
        trails = await _trails_of(record, [identities[index] for index in whole])
        return dict(zip(whole, trails, strict=True))

    async def _begin(
        self, job: Job | AgentResult[object], trails: Mapping[int, Trail], agents: asyncio.TaskGroup
    ) -> None:
        self._r.emit(JobStarted(self._r.clock(), self._r.run, job.index, job.job_id))
        if isinstance(job, AgentResult):
            self._publish(job)
            await self._finish(job)
            return
        trail = trails.get(job.index, self._nowhere)
        if trail.ended:
            await self._following.acquire()
        if self._r.prewarm is not None and not trail.has_past:  # else it replays its own record
            await self._r.prewarm.begin(job, self._plan.question(job))
        agent = self.live[job.index] = Agent(job, self._r, trail, self._worker)
        ticket = self._claim(agent, asks_first=self._asks_first and not trail.has_past)
        task = agents.create_task(self._accompany(agent, ticket))
        agent.tasks = (task,)
        if ticket is not None:
            if (lead := self._lead) is not None:
                self._lead = None
                await lead.wait()
            return
        if trail.ended:
            task.add_done_callback(lambda _: self._following.release())
        await asyncio.sleep(0)  # it requests its slot now, unless its record is sufficient

    async def _accompany(self, agent: Agent, ticket: Ticket | None) -> None:
        """Run one agent from its first turn until its result is delivered."""
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            while agent.job.index in self._again and agent.stopped_by is not None:
                self._again.discard(agent.job.index)
                agent = self.live[agent.job.index] = agent.anew(self._r)
                result = await agent.run(None)
                agent.record_end(result)
            self._publish(result)
            await agent.settle()
            del self.live[agent.job.index]
            await self._finish(result)
        finally:
            if self._r.prewarm is not None:
                self._r.prewarm.end(agent.job.index)
            self._r.dispatcher.end_agent(agent.progress, agent.turns)

    # Rows in parts

    async def _begin_parts(self, job: Job, rows_left: int | None, agents: asyncio.TaskGroup) -> None:
        """Start an agent for each part when there is room. Later rows wait for this no longer than for other agents."""
        self._r.emit(JobStarted(self._r.clock(), self._r.run, job.index, job.job_id))
        row = self.live[job.index] = Parts(job)
        row.tasks.append(agents.create_task(self._accompany_parts(row)))
        try:
            trails = await self._part_trails(job.parts, [self._plan.question(part) for part in job.parts])
            for place, (part, trail) in enumerate(zip(job.parts, trails, strict=True)):
                if row.error is not None or not await self._feed.wait_room():
                    break
                if rows_left is not None:
                    self._feed.expect(rows_left + len(trails) - place - 1)
                agent = Agent(part, self._r, trail, self._worker)
                ticket = self._claim(agent, asks_first=self._asks_first and not trail.has_past)
                row.tasks.append(agents.create_task(self._accompany_part(row, row.begin(), agent, ticket)))
                if ticket is None:
                    await asyncio.sleep(0)
        finally:
            row.close()

    async def _accompany_part(self, row: Parts, place: int, agent: Agent, ticket: Ticket | None) -> None:
        row.end(place, await self._work_on(agent, ticket))

    async def _accompany_parts(self, row: Parts) -> None:
        await row.wait()
        schema = self._r.schema
        answers = row.answers(schema) if row.error is None else []
        while row.error is None:
            jobs = self._plan.merging(row.job, answers)
            trails = await self._part_trails(jobs, [job.prompt for job in jobs])
            merging = [Agent(job, self._r, trail, tool_loop) for job, trail in zip(jobs, trails, strict=True)]
            async with asyncio.TaskGroup() as level:
                tasks = [level.create_task(self._work_on(agent, self._claim(agent))) for agent in merging]
            answers = row.merged([task.result() for task in tasks], schema)
            if len(answers) == 1:
                break
        result = row.result()
        self._publish(result)
        del self.live[row.job.index]
        await self._finish(result)

    async def _work_on(self, agent: Agent, ticket: Ticket | None) -> AgentResult[object]:
        """Run an agent to its end, and wait until that is on disk."""
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            await agent.settle()
            return result
        finally:
            self._r.dispatcher.end_agent(agent.progress, agent.turns)

    def _claim(self, agent: Agent, *, asks_first: bool = False) -> Ticket | None:
        """Count an agent as started. With ``asks_first``, also request its slot and return the ticket."""
        if asks_first:
            return self._r.dispatcher.start_agent(agent.progress)
        self._r.dispatcher.scheduler.start_agent()
        return None

    async def _part_trails(self, jobs: Sequence[Job], questions: Sequence[str]) -> Sequence[Trail]:
        record = self._parts_record
        if record is None:
            return [self._nowhere] * len(jobs)
        identities = [record.identity(job, question) for job, question in zip(jobs, questions, strict=True)]
        return await _trails_of(record, identities)

    # Results

    def _publish(self, result: AgentResult[object]) -> None:
        """Write a line to the run's files, after its commit. An interrupted job gets none."""
        if self._record is not None and not _is_interrupted(result):
            self._record.publish(result)

    async def _finish(self, result: AgentResult[object]) -> None:
        self._tell(result)
        # When the run stopped early, unfinished rows have no result.
        if self._r.dispatcher.over is None or not _is_interrupted(result):
            await self._delivery.deliver(result)

    def _tell(self, result: AgentResult[object]) -> None:
        if self._r.traces is not None:
            self._r.traces.ended(self._r.run, result)
        self._r.emit(JobFinished.of(result, self._r.clock(), self._r.run))


async def _compile_all(plan: Plan, first: int, values: Sequence[object]) -> list[Job | AgentResult[object]]:
    """Return the jobs of inputs that begin at index ``first``. Images and documents are read outside the event loop."""
    bare = [_unplaced(value) for value in values]
    if not any(map(plan.shows, bare)):
        return _compile_each(plan, first, values)
    if any(map(plan.reads, bare)):
        return await _read_all(plan, first, values)
    return await in_thread(partial(_compile_each, plan, first, values))


def _compile_each(plan: Plan, first: int, values: Sequence[object]) -> list[Job | AgentResult[object]]:
    return [_compile(plan, first + place, value) for place, value in enumerate(values)]


async def _read_all(plan: Plan, first: int, values: Sequence[object]) -> list[Job | AgentResult[object]]:
    """Return the jobs of inputs with documents. Several documents are read at once."""
    free = asyncio.Semaphore(READERS)

    async def job(place: int, value: object) -> Job | AgentResult[object]:
        async with free:
            return await in_thread(partial(_compile, plan, first + place, value))

    async with asyncio.TaskGroup() as readers:
        tasks = [readers.create_task(job(place, value)) for place, value in enumerate(values)]
    return [task.result() for task in tasks]


def _unplaced(value: object) -> object:
    return value.value if isinstance(value, Placed) else value


def _compile(plan: Plan, index: int, value: object) -> Job | AgentResult[object]:
    """Return a row's job; or its failed result, if it cannot be rendered."""
    if isinstance(value, Placed):
        index, value = value.index, value.value
    try:
        return plan.job(index, value)
    except JobError as error:
        return Failure(index, str(index), value, False, None, AgentError.of(error))


async def _trails_of(record: Record, identities: Sequence[Identity]) -> list[Trail]:
    if record.has_past:
        return await record.trails(identities)
    return [record.new_trail(identity) for identity in identities]


def _is_interrupted(result: AgentResult[object]) -> bool:
    return result.error is not None and result.error.type == Interrupted.type

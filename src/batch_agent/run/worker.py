"""A worker: takes rows of a run when it has room, starts an agent for each, and records its steps and its result.

Every run has workers. In the feeder's process it takes rows from memory, as compiled jobs; in another process it gets
their inputs as JSON, and compiles those whose jobs cannot be sent. Results go to the record; the feeder delivers them
from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

from batch_agent.agent.agent import Agent, tool_loop
from batch_agent.agent.cascade import PEOPLE
from batch_agent.agent.dialogue import Resources
from batch_agent.agent.user_worker import AgentWorker
from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.feed import Feed
from batch_agent.errors import Cancelled, InputError, Interrupted, ReplayMismatch, SpecError, WorkerFailed
from batch_agent.events import JobStarted, RowTakenOver
from batch_agent.job import AgentError, AgentResult, Failure, Job, Placed, is_interrupted
from batch_agent.messages import JsonObject
from batch_agent.record.commits import NOWHERE, Commits, Trail
from batch_agent.record.keys import Keys
from batch_agent.record.row_json import decode_row
from batch_agent.record.steps import Past
from batch_agent.record.store import Identity, Lease
from batch_agent.run.budgeted_rows import BudgetedRows
from batch_agent.run.cascade import CascadeRow, EntryDesk, Ladder
from batch_agent.run.leases import Leases, is_retried, past_of
from batch_agent.run.parts import Parts, Several
from batch_agent.run.rows import compile_all
from batch_agent.run.samples import Samples, samples_of
from batch_agent.scheduler.core import Ticket
from batch_agent.trust.votes import Voting

BREATHER = 128  # rows that start one after another before the event loop runs other tasks
FOLLOWING = 64  # agents that ended in an earlier session and are delivered at once


class Worker:
    """``asks_first``: the worker function begins with a model request, so its slot can be requested before it runs.
    ``keys`` and ``part_keys`` make the identities of rows, and of the parts of rows that do not fit. ``row_schema`` is
    that of the rows, if they are outputs of another stage. ``left`` returns the number of rows that were not started;
    None if it is unknown. ``begun`` are the unfinished rows whose JobStarted the sinks have got, also from other
    processes. ``retry_from`` is the option. ``voting`` is how the samples of each row vote, if there are several.
    ``ladder`` has the entries of a cascade. ``on_unfinished`` is called with the result of a row that was interrupted:
    it is not recorded, so that a resumed run works on the row."""

    def __init__(
        self,
        leases: Leases,
        commits: Commits,
        plan: Plan,
        resources: Resources,
        feed: Feed,
        function: AgentWorker,
        *,
        asks_first: bool,
        keys: Keys,
        part_keys: Keys,
        begun: set[int],
        left: Callable[[], int | None] = lambda: None,
        retry_from: str = "auto",
        voting: Voting | None = None,
        ladder: Ladder | None = None,
    ) -> None:
        self.live: dict[int, Agent | Several] = {}
        self._leases, self._commits, self._plan, self._r, self._feed = leases, commits, plan, resources, feed
        self._function, self._asks_first = function, asks_first
        self._first, self._ladder = EntryDesk(resources, function, asks_first, voting), ladder
        self._keys, self._part_keys, self._left = keys, part_keys, left
        self._begun, self._retry_from, self._voting = begun, retry_from, voting
        self.row_schema: OutputSchema[object] | None = None
        self.on_unfinished: Callable[[AgentResult[object]], None] = lambda result: None
        # Called with results before they are recorded, and with those of rows that other workers have now.
        self._on_result: Callable[[AgentResult[object]], None] | None = None
        self._on_dropped: Callable[[AgentResult[object]], None] = self._let_go
        self._lead = resources.lead  # until the first agent with a request has started
        self._following = asyncio.Semaphore(FOLLOWING)
        self._again: set[int] = set()  # rows that were stopped to start again
        spending = resources.dispatcher.spending
        # With a budget, a row starts only if the budget pays for it to its end.
        self._budget = None if spending is None or spending.rows is None else BudgetedRows(spending, resources, feed)
        leases.on_lost, leases.on_leave, leases.on_wait = self._drop, self._wake, feed.set_reading
        leases.on_ended = lambda index: self.live.pop(index, None)

    async def work(self, agents: asyncio.TaskGroup) -> None:
        """Start an agent for each row when there is room, until no more rows are taken."""
        await self._start_agents(agents)
        if self._leases.failure is not None:
            raise self._leases.failure
        if self._leases.over == "done":  # else rows are left
            self._feed.end()

    async def _start_agents(self, agents: asyncio.TaskGroup) -> None:
        started, feed, leases = 0, self._feed, self._leases
        while await feed.wait_room(self._is_over):
            if self._ladder is not None:
                await self._ladder.wait_room(self._is_over)
            rows = await leases.next()
            if not rows:
                return
            for lease, job in zip(rows, await self._jobs(rows), strict=True):
                feed.has_row = True
                if not await feed.wait_room(self._is_over):
                    return
                feed.has_row = False
                left = self._left()
                feed.expect(left)
                if lease.row.index not in self._leases.held:  # its lease was lost meanwhile
                    continue
                if isinstance(job, Job) and job.parts:
                    await self._begin_parts(lease, job, left, agents)
                elif self._ladder is not None and (fitting := await self._ladder.fitting(job)) is not None:
                    await self._begin_cascade(lease, fitting, job, agents, self._ladder)
                elif self._voting is not None and isinstance(job, Job):
                    await self._begin_samples(lease, job, agents, self._voting)
                else:
                    await self._begin(lease, job, agents)
                started += 1
                if started % BREATHER == 0:
                    await asyncio.sleep(0)

    def _wake(self) -> None:
        self._feed.wake()
        if self._ladder is not None:
            self._ladder.wake()

    def _is_over(self) -> bool:
        return bool(self._leases.over)

    async def _jobs(self, rows: Sequence[Lease]) -> list[Job | AgentResult[object]]:
        """Return the jobs of leased rows: those that the feeder compiled, or compiled here."""
        jobs: list[Job | AgentResult[object]] = []
        for lease in rows:
            job = lease.row.job
            if isinstance(job, (Job, AgentResult)):  # a union would be made for each row
                jobs.append(job)
                continue
            index = lease.row.index
            try:
                value, name = decode_row(cast(bytes, lease.row.value), self.row_schema)
            except InputError as error:
                jobs.append(Failure(index, str(index), None, False, None, AgentError.of(error)))
                continue
            if isinstance(job, tuple) and name is not None:
                prompt, own_id, shortened, affinity = job
                jobs.append(Job(index, name, value, prompt, own_id, shortened=shortened, affinity=affinity))
            else:
                jobs += await compile_all(self._plan, index, [Placed(index, value, name)])
        return jobs

    def interrupt(self, why: str) -> list[AgentResult[object]]:
        """End the rows whose results are not recorded, and return their results."""
        results = []
        for index in [index for index in self.live if index in self._leases.held]:
            agent = self.live.pop(index)
            agent.fail(Interrupted(why))
            results.append(agent.result())
        return results

    def _drop(self, index: int) -> None:
        """End a row that another process took over. Nothing more of it is recorded, and it has no result here. A feeder
        in this process reports its end when the end is recorded."""
        agent = self.live.pop(index, None)
        if agent is not None:
            for task in agent.tasks:
                task.cancel()
            agent.fail(Interrupted("another process works on this row now"))
            self._on_dropped(agent.result())

    # Control

    def cancel_row(self, row: str | int) -> None:
        """Cancel a running row. Raises SpecError if it is not running."""
        self._working(row).stop(Cancelled("this row was cancelled by the user"))

    def retry_row(self, row: str | int) -> None:
        """Start a running row again. Raises SpecError if it is not running."""
        agent = self._working(row)
        if isinstance(agent, Samples | CascadeRow):
            what = "samples" if isinstance(agent, Samples) else "several entries of a cascade"
            raise SpecError(f"row {row} has {what}, which cannot start again one by one; cancel it")
        agent.stop(Cancelled("this row was restarted by the user"))
        self._again.add(agent.job.index)

    def conversation(self, row: str | int) -> JsonObject:
        """Return the conversation of a running row. Raises SpecError if it is not running."""
        return self._working(row).shown()

    def _working(self, row: str | int) -> Agent | Samples | CascadeRow:
        """Return the agents that work on a row, which is given by its id or its index."""
        name = str(row)
        agent = next((live for live in self.live.values() if live.job.job_id == name), None)
        if agent is None and name.isdecimal():
            agent = self.live.get(int(name))
        if isinstance(agent, Parts):
            raise SpecError(f"row {row} is processed in parts, which cannot be controlled one by one")
        if not isinstance(agent, Agent | Samples | CascadeRow) or agent.recorded is not None or not agent.works:
            raise SpecError(
                f"row {row} is not running: it has not begun, or it has its result; batch-agent retry-failed retries "
                "failed rows after the run has ended"
            )
        return agent

    # Rows

    def _follow(
        self, lease: Lease, identity: Identity, past: Past | None, *, retries: bool = True, stays: bool = False
    ) -> Trail:
        """Return the trail of an agent with this record. ``retries``: a failed one may be tried again. ``stays``: its
        end stays as it is, because a later entry of the cascade has begun."""
        if past is None:
            return self._commits.trail(lease, identity)
        retried = retries and is_retried(lease, past)
        restarts = (past.several or not stays) and self._restarts(past, retried=retried)
        return self._commits.trail(lease, identity, past, retried=retried, restarts=restarts)

    def _restarts(self, past: Past, *, retried: bool) -> bool:
        """Return whether a recorded row starts again in a new conversation: because it failed by its own fault, its
        answer was cut and max_tokens is higher now, or it has answers to several questions."""
        if past.several:
            return past.failed is None or retried
        if past.failed is None:
            cut, raised = past.cut_at, self._r.shapes.raised_from
            return cut is not None and raised is not None and cut <= raised
        if not retried or not (past.turns or past.worked):
            return False
        return starts_afresh(past.failed.error, self._retry_from)

    async def _begin(self, lease: Lease, job: Job | AgentResult[object], agents: asyncio.TaskGroup) -> None:
        if isinstance(job, AgentResult):
            self._tell_start(job)
            self._publish(lease, None, job)
            return
        trail = NOWHERE
        if self._commits.keeps:
            identity = self._identity(lease, job)
            trail = self._follow(lease, identity, past_of(lease, identity, lease.steps) if lease.steps else None)
        if self._budget is not None and not await self._budget.begin(job, [trail], self._plan, self._is_over):
            return
        self._tell_start(job)
        if trail.ended:
            await self._following.acquire()
        if self._r.prewarm is not None and not trail.has_past:  # else it replays its own record
            await self._r.prewarm.begin(job, self._plan.question(job))
        agent = self.live[job.index] = Agent(job, self._r, trail, self._function)
        ticket = self._claim(agent, asks_first=self._asks_first and not trail.has_past)
        task = agents.create_task(self._accompany(lease, agent, ticket))
        agent.tasks = (task,)
        if ticket is not None:
            if (lead := self._lead) is not None:
                self._lead = None
                await lead.wait()
            return
        if trail.ended:
            task.add_done_callback(lambda _: self._following.release())
        if not self._feed.paced:
            await asyncio.sleep(0)  # it requests its slot now, unless its record is sufficient

    async def _accompany(self, lease: Lease, agent: Agent, ticket: Ticket | None) -> None:
        """Run one agent from its first turn to its result, which the next commit records."""
        result: AgentResult[object] | None = None
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            while agent.job.index in self._again and agent.stopped_by is not None:
                self._again.discard(agent.job.index)
                agent = self.live[agent.job.index] = agent.anew()
                result = await agent.run(None)
                agent.record_end(result)
            self._publish(lease, agent, result)
        finally:
            if self._r.prewarm is not None:
                self._r.prewarm.end(agent.job.index)
            self._r.dispatcher.end_agent(agent.progress, agent.tally.turns)
            if self._budget is not None:
                self._budget.end(agent.job.index, result)

    # Rows in parts

    async def _begin_parts(self, lease: Lease, job: Job, rows_left: int | None, agents: asyncio.TaskGroup) -> None:
        """Start an agent for each part when there is room. Later rows wait for this no longer than for other agents."""
        trails = await self._part_trails(lease, job.parts, [self._plan.question(part) for part in job.parts])
        if self._budget is not None and not await self._budget.begin(job, trails, self._plan, self._is_over):
            return
        self._tell_start(job)
        row = self.live[job.index] = Parts(job)
        row.tasks.append(agents.create_task(self._accompany_parts(lease, row)))
        try:
            for place, (part, trail) in enumerate(zip(job.parts, trails, strict=True)):
                if row.error is not None or not await self._feed.wait_room():
                    break
                if rows_left is not None:
                    self._feed.expect(rows_left + len(trails) - place - 1)
                agent = Agent(part, self._r, trail, self._function)
                ticket = self._claim(agent, asks_first=self._asks_first and not trail.has_past)
                row.tasks.append(agents.create_task(self._accompany_part(row, row.begin(), agent, ticket)))
                if ticket is None:
                    await asyncio.sleep(0)
        finally:
            row.close()

    async def _accompany_part(self, row: Parts, place: int, agent: Agent, ticket: Ticket | None) -> None:
        row.end(place, await self._work_on(agent, ticket))

    async def _accompany_parts(self, lease: Lease, row: Parts) -> None:
        await row.wait()
        schema = self._r.schema
        answers = row.answers(schema) if row.error is None else []
        while row.error is None:
            jobs = self._plan.merging(row.job, answers)
            trails = await self._part_trails(lease, jobs, [job.prompt for job in jobs])
            merging = [Agent(job, self._r, trail, tool_loop) for job, trail in zip(jobs, trails, strict=True)]
            async with asyncio.TaskGroup() as level:
                tasks = [level.create_task(self._work_on(agent, self._claim(agent))) for agent in merging]
            answers = row.merged([task.result() for task in tasks], schema)
            if len(answers) == 1:
                break
        result = row.result()
        self._publish(lease, row, result)
        if self._budget is not None:
            self._budget.end(row.job.index, result)

    async def _work_on(self, agent: Agent, ticket: Ticket | None) -> AgentResult[object]:
        """Run an agent to its end, and wait until that is on disk."""
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            await agent.trail.settle()
            return result
        finally:
            agent.r.dispatcher.end_agent(agent.progress, agent.tally.turns)

    # Rows with samples

    async def _begin_samples(self, lease: Lease, job: Job, agents: asyncio.TaskGroup, voting: Voting) -> None:
        """Start the samples that may be needed, when there is room. Others follow when these end."""
        begun, many = bool(lease.steps or lease.more), voting.samples
        if self._budget and not await self._budget.begin(job, (), self._plan, self._is_over, samples=many, begun=begun):
            return
        self._tell_start(job)
        row = self.live[job.index] = Samples(job, voting, self._r.schema)
        identities = samples_of(self._identity(lease, job), many)
        pasts = await self._leases.claim(lease, identities)
        end = partial(self._end_samples, lease, row)
        start = self._sampler(lease, row, self._first, identities, pasts, agents, end)
        while (number := row.next()) is not None:
            await self._lead_the_way(start(number))
            await self._feed.wait_room(self._is_over)  # without room too the row continues: it was begun

    async def _lead_the_way(self, ticket: Ticket | None) -> None:
        """Let the first agent with a request start before the others, if computing their shared prefix only once is
        worth the wait."""
        if ticket is not None and (lead := self._lead) is not None:
            self._lead = None
            await lead.wait()

    def _identity(self, lease: Lease, job: Job) -> Identity:
        if lease.row.key:
            return Identity(lease.row.key, lease.row.content)
        return self._keys.identity(job, self._plan.question(job))

    def _sampler(
        self,
        lease: Lease,
        row: Samples,
        desk: EntryDesk,
        identities: Sequence[Identity],
        pasts: Sequence[Past | None],
        agents: asyncio.TaskGroup,
        on_end: Callable[[], None],
        *,
        may_retry: bool = True,
        stays: bool = False,
    ) -> Callable[[int], Ticket | None]:
        """Return a function that starts a sample, with what an earlier session has recorded of it. ``may_retry``: the
        row may be tried again; ``stays``: as in ``_follow``."""
        voting = desk.voting
        assert voting is not None
        # A failed sample is not replaced. But if the row failed by that, it is tried again.
        failed = sum(past is not None and past.failed is not None for past in pasts)
        retries = may_retry and voting.must_fail(failed)

        def start(number: int) -> Ticket | None:
            trail = self._follow(lease, identities[number], pasts[number], retries=retries, stays=stays)
            agent = Agent(row.job_of(number, identities[0].key), desk.resources, trail, desk.function)
            ticket = self._claim(agent, asks_first=desk.asks_first and not trail.has_past)
            row.begin(number, agent)
            row.tasks.append(agents.create_task(accompany(number, agent, ticket)))
            return ticket

        async def accompany(number: int, agent: Agent, ticket: Ticket | None) -> None:
            row.end(number, await self._work_on(agent, ticket))
            while (more := row.next()) is not None:
                start(more)
            if row.is_done:
                on_end()

        return start

    def _end_samples(self, lease: Lease, row: Samples) -> None:
        result = self._counted(row)
        self._publish(lease, row, result)
        if self._budget is not None:
            self._budget.end(row.job.index, result)

    def _counted(self, row: Samples) -> AgentResult[object]:
        """Return the result of the samples of a row, and count the samples."""
        result = row.result()
        if not is_interrupted(result):
            self._r.emit.metrics.samples_ended(row.asked, row.spared, identical=row.are_identical)
        return result

    def _claim(self, agent: Agent, *, asks_first: bool = False) -> Ticket | None:
        """Count an agent as started. With ``asks_first``, also request its slot and return the ticket."""
        dispatcher = agent.r.dispatcher
        if asks_first:
            return dispatcher.start_agent(agent.progress)
        dispatcher.scheduler.start_agent()
        return None

    # Rows of a cascade

    async def _begin_cascade(
        self, lease: Lease, job: Job, made: object, agents: asyncio.TaskGroup, ladder: Ladder
    ) -> None:
        """Ask the first entry about a row. The others follow as their turns come. ``made`` is the job as the first
        entry has it, or its failure: the row does not fit its context."""
        begun, many = bool(lease.steps or lease.more), 1 if self._voting is None else self._voting.samples
        if self._budget and not await self._budget.begin(job, (), self._plan, self._is_over, samples=many, begun=begun):
            return
        self._tell_start(job)
        row = self.live[job.index] = CascadeRow(job, ladder, self._identity(lease, job), many)
        answer: Awaitable[AgentResult[object]]
        if isinstance(made, AgentResult):
            answer, ticket = asyncio.sleep(0, made), None
        else:
            answer, ticket = await self._ask_entry(lease, row, self._first, agents)
        row.tasks.append(agents.create_task(self._accompany_cascade(lease, row, answer, agents)))
        await self._lead_the_way(ticket)
        await self._feed.wait_room(self._is_over)

    async def _accompany_cascade(
        self, lease: Lease, row: CascadeRow, answer: Awaitable[AgentResult[object]], agents: asyncio.TaskGroup
    ) -> None:
        """Ask one entry after the other until an answer stays, or no entry is left."""
        try:
            await self._climb(lease, row, answer, agents)
        finally:
            row.leave()
        result = row.result()
        self._publish(lease, row, result)
        if self._budget is not None:
            self._budget.end(row.job.index, result)

    async def _climb(
        self, lease: Lease, row: CascadeRow, answer: Awaitable[AgentResult[object]], agents: asyncio.TaskGroup
    ) -> None:
        while row.end(await answer):
            if not (await self._has_begun(lease, row, row.place) or row.escalates() or await row.is_sent()):
                return
            if row.place == len(row.ladder.names):
                row.waits_for = PEOPLE if row.ladder.cascade.people else None
                return
            desk = await row.ladder.later[row.place - 1].desk() if row.move() else None
            if row.error is not None:  # it was stopped meanwhile
                return
            if desk is None:
                row.waits_for = row.ladder.names[row.place]
                return
            answer, _ = await self._ask_entry(lease, row, desk, agents)

    async def _ask_entry(
        self, lease: Lease, row: CascadeRow, desk: EntryDesk, agents: asyncio.TaskGroup
    ) -> tuple[Awaitable[AgentResult[object]], Ticket | None]:
        """Start the agents of the next entry. Returns their result to be awaited, and the ticket of the first."""
        pasts, identities = await self._pasts_of(lease, row, row.place), row.identities(row.place)
        stays = await self._has_begun(lease, row, row.place + 1)
        may_retry = not stays and row.may_retry(pasts)
        if desk.voting is None:
            trail = self._follow(lease, identities[0], pasts[0], retries=may_retry, stays=stays)
            agent = row.asking = Agent(row.job, desk.resources, trail, desk.function, row.wrote)
            ticket = self._claim(agent, asks_first=desk.asks_first and not trail.has_past)
            return self._work_on(agent, ticket), ticket
        samples = row.asking = Samples(row.job, desk.voting, desk.resources.schema)
        samples.tasks = row.tasks
        done: asyncio.Future[AgentResult[object]] = asyncio.get_running_loop().create_future()
        first: Ticket | None = None

        def end() -> None:
            if not done.done():
                done.set_result(self._counted(samples))

        start = self._sampler(lease, samples, desk, identities, pasts, agents, end, may_retry=may_retry, stays=stays)
        while (number := samples.next()) is not None:
            ticket = start(number)
            first = first or ticket
        return done, first

    async def _pasts_of(self, lease: Lease, row: CascadeRow, place: int) -> list[Past | None]:
        """Return what earlier sessions recorded of a row at an entry. Each record is claimed once."""
        if place not in row.pasts:
            row.pasts[place] = await self._leases.claim(lease, row.identities(place))
        return row.pasts[place]

    async def _has_begun(self, lease: Lease, row: CascadeRow, place: int) -> bool:
        """Return whether an earlier session has asked an entry: then its row is sent there again."""
        if place >= len(row.ladder.names) or not (lease.steps or lease.more):
            return False
        return any(past is not None for past in await self._pasts_of(lease, row, place))

    async def _part_trails(self, lease: Lease, jobs: Sequence[Job], questions: Sequence[str]) -> Sequence[Trail]:
        identities = [self._part_keys.identity(job, question) for job, question in zip(jobs, questions, strict=True)]
        found = await self._leases.claim(lease, identities)
        return [self._follow(lease, identity, past) for identity, past in zip(identities, found, strict=True)]

    # Results

    def _publish(self, lease: Lease, agent: Agent | Several | None, result: AgentResult[object]) -> None:
        """Record a result. After the commit the feeder delivers it, and its agent is no longer live."""
        if self._on_result is not None:
            self._on_result(result)
        if is_interrupted(result):
            if agent is not None and self.live.get(result.index) is agent:
                del self.live[result.index]
            self.on_unfinished(result)
        else:
            self._leases.ending.add(lease.row.index)
            self._commits.publish(lease, result)

    def _tell_start(self, job: Job | AgentResult[object]) -> None:
        r, at = self._r, self._r.clock()
        r.emit.metrics.job_started(at, r.run, job.index, job.job_id)
        if JobStarted in r.emit.sinks.wanted:
            kind = RowTakenOver if job.index in self._begun else JobStarted
            self._begun.add(job.index)
            r.emit.sinks(kind(at, r.run, job.index, job.job_id))

    def tell_ends(self) -> None:
        """Report the ends of rows in this process, because the feeder, which reports the ends of recorded rows, is in
        another one."""
        self._on_result = self._on_dropped = self._tell

    def _let_go(self, result: AgentResult[object]) -> None:
        self._r.emit.row_left(self._r.clock(), self._r.run, result.index)

    def _tell(self, result: AgentResult[object]) -> None:
        self._begun.discard(result.index)
        if self._r.traces is not None:
            self._r.traces.ended(self._r.run, result)
        self._r.emit.job_finished(result, self._r.clock(), self._r.run)


def starts_afresh(error: AgentError, retry_from: str) -> bool:
    """Return whether a row that failed with this error is tried again in a new conversation. If the cause was outside
    of the row, its conversation may continue."""
    outside = error.retryable or error.type in (ReplayMismatch.type, WorkerFailed.type)
    return retry_from == "start" or (retry_from == "auto" and not outside)

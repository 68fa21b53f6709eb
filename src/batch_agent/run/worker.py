"""A worker: takes rows of a run when it has room, starts an agent for each, and records its steps and its result.

Every run has workers. In the feeder's process it takes rows from memory, as compiled jobs; in another process it gets
their inputs as JSON, and compiles those whose jobs cannot be sent. Results go to the record; the feeder delivers them
from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, cast

from batch_agent.agent.agent import Agent, tool_loop
from batch_agent.agent.dialogue import Resources
from batch_agent.agent.user_worker import AgentWorker
from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import outlast, shielded, wait_event
from batch_agent.dispatch.feed import Feed
from batch_agent.errors import Cancelled, InputError, Interrupted, ReplayMismatch, SpecError, StoreError, WorkerFailed
from batch_agent.events import JobStarted, RowTakenOver
from batch_agent.job import AgentError, AgentResult, Failure, Job, Placed
from batch_agent.messages import JsonObject
from batch_agent.record.codec import CALL_BEGUN, RANKS, decode
from batch_agent.record.journal import OVERDUE, Journal, LeasedIdentity, Trail, to_its_end
from batch_agent.record.keys import Keys
from batch_agent.record.row_json import decode_row
from batch_agent.record.steps import Past, read_past
from batch_agent.record.store import Identity, KeptStep, LeasedRow, RowLease, RunStanding, Store
from batch_agent.run.budgeted_rows import BudgetedRows, is_interrupted
from batch_agent.run.parts import Parts, Several
from batch_agent.run.rows import compile_all
from batch_agent.run.samples import Samples, identity_of
from batch_agent.scheduler.core import Ticket
from batch_agent.trust.votes import Voting

if TYPE_CHECKING:
    from batch_agent.run.feeder import Feeder

# The rows that one worker holds. It takes rows when it has room, renews their leases, and hands back the rest.
#
# The event loop starts each renewal. This is intentional: a worker whose loop is stuck cannot record anything, and
# should lose its rows. In the feeder's process leases do not end, and the worker itself asks the feeder to read inputs
# when it needs rows.

logger = logging.getLogger("batch_agent")

RENEWALS = 3  # per lease time
Over = Literal["", "done", "asked to leave", "no feeder", "replaced", "the run is draining", "the run has ended"]


def past_of(row: LeasedRow, identity: Identity, steps: Sequence[KeptStep]) -> Past | None:
    """Return what an earlier agent with that identity recorded, or None. A finished agent is preferred to a running
    one, and a running one to a failed one. Each agent is returned once."""
    agents: dict[int, list[KeptStep]] = {}
    for step in steps:
        same = step.key == identity.key or (not row.checks and step.content == identity.row)
        if same and step.agent not in row.claimed:
            agents.setdefault(step.agent, []).append(step)
    for agent in sorted(agents, key=lambda agent: (RANKS.get(agents[agent][-1].kind, 1), agent)):
        row.claimed.add(agent)
        kept = agents[agent]
        try:
            return read_past(agent, [decode(step.kind, step.body) for step in kept])
        except ValueError as error:
            if any(step.kind == CALL_BEGUN for step in kept):
                return Past(agent, (), unreadable=str(error))
            logger.warning("the record of row %d cannot be read and is ignored: %s", row.lease.index, error)
    return None


def is_retried(row: LeasedRow, past: Past | None) -> bool:
    """Return whether the row failed before and is tried again."""
    if past is None or past.failed is None:
        return False
    retry: bool | Collection[str] = row.retry
    return retry if isinstance(retry, bool) else past.failed.error.type in retry


class Leases:
    """``over`` is the reason why no more rows are taken, or "". ``source`` is the feeder in this process, if there is
    one. ``patience`` is the number of seconds to wait if the queue is empty and there is no feeder. ``on_lost`` is
    called with the index of a row whose lease is lost, ``on_ended`` with that of a row whose result is recorded.
    ``on_away`` is called with True when the store does not answer, and with False when it answers again. ``on_wait`` is
    called with True when the next row must be waited for, and with False after that. ``on_need`` is called when slots
    may be needed: at the begin, and when rows arrive after the queue was empty. ``on_leave`` is called when no more
    rows are taken. ``on_observed`` is called, perhaps repeatedly, if the feeder has observers. ``failure`` is the error
    of a store that no longer answers, or of a commit."""

    def __init__(
        self,
        store: Store,
        worker: int,
        *,
        lease: float,
        generation: int,
        source: Feeder | None = None,
        patience: float = float("inf"),
    ) -> None:
        self.store, self.worker = store, worker
        self.held: dict[int, LeasedRow] = {}  # by index: rows that this worker works on
        self.ending: set[int] = set()  # held rows whose results are not committed yet
        self.finished = 0  # rows whose results this worker recorded
        self.over: Over = ""
        self.alone = True  # no other process works on the run
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_ended: Callable[[int], object] = lambda _: None
        self.on_away: Callable[[bool], None] = lambda _: None
        self.on_wait: Callable[[bool], None] = lambda _: None
        self.on_need: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        self.on_observed: Callable[[], None] = lambda: None
        self.failure: StoreError | None = None
        self._source = source
        self._lease, self._generation, self._patience = lease, generation, patience
        self._ready: deque[LeasedRow] = deque()
        self._taking: asyncio.Future[list[LeasedRow]] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._lonely_since: float | None = None  # when the worker first found no feeder
        self._fed = False  # every input was fed
        self._wait = min(0.25, lease / (2 * RENEWALS))  # seconds that a call waits for rows
        self._changed, self._leaving = asyncio.Event(), asyncio.Event()
        self._news = asyncio.Event()  # an instant store has changed
        self._closed = False

    def begin(self) -> None:
        """Start to renew the leases."""
        self.on_need()
        if not self.store.instant:
            self.store.listen(self._changed.set)
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="batch-agent leases")

    async def next(self) -> list[LeasedRow]:
        """Return the next rows, for which it may wait; none if no more rows are taken."""
        most = self.store.group
        if not self._ready and not self.over and self._is_at_hand:
            self._ready.extend(await self._take(most))
        if not self._ready:
            self.on_wait(True)
            try:
                await self._wait_for_row()
            finally:
                self.on_wait(False)
        taken: list[LeasedRow] = []
        while self._ready and len(taken) < most:
            taken.append(self._hold(self._ready.popleft()))
        return taken

    async def _wait_for_row(self) -> None:
        """Wait until a row is there to be taken, or no more rows are taken."""
        waited, source = False, self._source
        if self.alone and source is not None and not self.over:
            await source.refill()
        while not self.over:
            if rows := await self._take(self.store.group):
                self._lonely_since = None
                self._ready.extend(rows)
                if waited:
                    self.on_need()
                return
            waited = True
            if not await self._wait_for_rows():
                return

    @property
    def _is_at_hand(self) -> bool:
        """Whether a row is in the queue of this process."""
        return self.store.blocking.unstarted > 0

    def _hold(self, row: LeasedRow) -> LeasedRow:
        index = row.lease.index
        if self.held.pop(index, None) is not None:  # its lease expired, and this worker took the row again
            self.on_lost(index)
        self.held[index] = row
        return row

    async def _wait_for_rows(self) -> bool:
        """Wait until a call may find rows. Returns False if there will be none."""
        if self.store.instant:
            source = self._source
            if self.alone and source is not None and not source.fed and await source.refill():
                return True
            if self.alone:
                self.leave("done" if source is not None and source.fed else "asked to leave")
                return False
            self._judge(await self.store.standing())
            if not self.over:
                self._news.clear()
                await self._news.wait()
            return not self.over
        standing = await self.store.standing()
        self._judge(standing)
        self._fed = standing.counts.fed
        if self._fed and not self.over:  # only rows of dead workers can arrive now
            await wait_event(self._leaving, self._wait)
        return not self.over

    async def _take(self, most: int) -> list[LeasedRow]:
        """Return the next rows. If this is cancelled, the next call or ``close`` takes the result of the running
        call."""
        if self.store.instant:
            return await self.store.take(self.worker, most, 0.0)
        if self._taking is None:
            self._taking = self.store.take(self.worker, self.store.group, 0.0 if self._fed else self._wait)
        rows = await asyncio.shield(self._taking)
        self._taking = None
        if rows and self.over:
            await self._hand_back(rows)
            return []
        return rows

    async def claim(self, held: LeasedRow, identities: Sequence[Identity]) -> list[Past | None]:
        """Return what earlier agents of the row recorded under these identities."""
        found = [past_of(held, identity, held.steps) for identity in identities]
        missing = [place for place, past in enumerate(found) if past is None]
        if not missing or not held.more:
            return found
        wanted = [identities[place] for place in missing]
        for place, steps in zip(missing, await self.store.claim(held.lease, wanted), strict=True):
            found[place] = past_of(held, identities[place], steps)
        return found

    def share(self) -> None:
        """Other processes work on the run too: rows may come back from them."""
        self.alone = False
        if self.store.instant:
            self.store.listen(self._news.set)

    def leave(self, why: Over = "asked to leave") -> None:
        """Take no more rows, and hand back rows that were not started."""
        self.over = self.over or why
        self._changed.set()
        self._leaving.set()
        self._news.set()
        self.on_leave()

    def fail(self, error: StoreError) -> None:
        """Take no more rows: nothing can be recorded any more."""
        self.failure = self.failure or error
        self.leave()

    def committed(self, lost: set[str], ended: Sequence[RowLease]) -> None:
        """Forget rows whose results are recorded, and drop rows that other workers have."""
        self.lose(lost)
        for lease in ended:
            self.finished += lease.place not in lost
            self.held.pop(lease.index, None)
            self.ending.discard(lease.index)
            self.on_ended(lease.index)

    def lose(self, places: set[str]) -> None:
        """Drop the rows at these places of the queue: other workers have them."""
        for index in [index for index, row in self.held.items() if row.lease.place in places] if places else ():
            del self.held[index]
            self.ending.discard(index)
            logger.info("the lease of row %d is lost: another worker has it", index)
            self.on_lost(index)
        if places and any(row.lease.place in places for row in self._ready):
            self._ready = deque(row for row in self._ready if row.lease.place not in places)

    async def close(self) -> None:
        """Hand back all rows and leave the run. If the store is unreachable, the leases expire. May be called again."""
        self.over = self.over or "asked to leave"
        if self._closed:
            return
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await outlast(self._renewing)
        rows = [*self.held.values(), *self._ready]
        self.held.clear()
        self._ready.clear()
        if self._taking is not None and await to_its_end(self._taking) is None:
            rows += self._taking.result()
        with suppress(StoreError):
            await self._hand_back(rows)
            await to_its_end(self.store.leave(self.worker))

    def _judge(self, standing: RunStanding) -> None:
        counts = standing.counts
        if standing.generation != self._generation:
            self.leave("replaced")
        elif counts.fed and not counts.unstarted and not counts.leased:  # also if the feeder has ended the run already
            self.leave("done")
        elif standing.phase != "running":
            self.leave("asked to leave")
        elif standing.feeder or counts.unstarted:
            self._lonely_since = None
        else:
            now = asyncio.get_running_loop().time()
            self._lonely_since = self._lonely_since or now
            if now - self._lonely_since >= self._patience and not self.held:
                self.leave("no feeder")

    async def _renew(self) -> None:
        while not self._closed:
            await wait_event(self._changed, self._lease / RENEWALS)
            self._changed.clear()
            waiting: list[LeasedRow] = []
            if self.over:
                waiting, self._ready = list(self._ready), deque()
            leases = [*(held.lease for held in self.held.values()), *(row.lease for row in self._ready)]
            alarm = asyncio.get_running_loop().call_later(OVERDUE, self.on_away, True)
            try:
                await self._hand_back(waiting)
                lost, standing = await self.store.renew(self.worker, leases)
            except StoreError as error:  # the store has waited for the end of the outage: nothing can be recorded
                self.fail(error)
                self.lose({held.lease.place for held in self.held.values()})
                return
            finally:
                alarm.cancel()
            self.on_away(False)
            if standing.observed:  # also if a new feeder has some
                self.on_observed()
            # For rows whose results are being committed, the commit decides: a finished row has no lease.
            self.lose(lost - {self.held[index].lease.place for index in self.ending if index in self.held})
            if not self.over and (standing.phase != "running" or standing.generation != self._generation):
                self._judge(standing)

    async def _hand_back(self, rows: list[LeasedRow]) -> None:
        if leases := [row.lease for row in rows]:
            await shielded(self.store.hand_back(self.worker, leases))


BREATHER = 128  # rows that start one after another before the event loop runs other tasks
FOLLOWING = 64  # agents that ended in an earlier session and are delivered at once


class Worker:
    """``asks_first``: the worker function begins with a model request, so its slot can be requested before it runs.
    ``keys`` and ``part_keys`` make the identities of rows, and of the parts of rows that do not fit. ``row_schema`` is
    that of the rows, if they are outputs of another stage. ``left`` returns the number of rows that were not started;
    None if it is unknown. ``tells``: the feeder is in another process, so this worker reports the ends of its rows.
    ``begun`` are the unfinished rows whose JobStarted the sinks have got, also from other processes. ``retry_from`` is
    the option. ``voting`` is how the samples of each row vote, if there are several. ``on_unfinished`` is called with
    the result of a row that was interrupted: it is not recorded, so that a resumed run works on the row."""

    def __init__(
        self,
        leases: Leases,
        journal: Journal,
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
        tells: bool = True,
        retry_from: str = "auto",
        voting: Voting | None = None,
    ) -> None:
        self.live: dict[int, Agent | Several] = {}
        self._leases, self._journal, self._plan, self._r, self._feed = leases, journal, plan, resources, feed
        self._function, self._asks_first = function, asks_first
        self._keys, self._part_keys, self._left, self._tells = keys, part_keys, left, tells
        self._begun, self._retry_from, self._voting = begun, retry_from, voting
        self.row_schema: OutputSchema[object] | None = None
        self.on_unfinished: Callable[[AgentResult[object]], None] = lambda result: None
        self._lead = resources.lead  # until the first agent with a request has started
        self._nowhere = Trail()  # the trail of all agents of a run without files
        self._following = asyncio.Semaphore(FOLLOWING)
        self._again: set[int] = set()  # rows that were stopped to start again
        spending = resources.dispatcher.spending
        # With a budget, a row starts only if the budget pays for it to its end.
        self._budget = None if spending is None or spending.rows is None else BudgetedRows(spending, resources, feed)
        leases.on_lost, leases.on_leave, leases.on_wait = self._drop, feed.wake, feed.set_reading
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
            rows = await leases.next()
            if not rows:
                return
            for held, job in zip(rows, await self._jobs(rows), strict=True):
                feed.has_row = True
                if not await feed.wait_room(self._is_over):
                    return
                feed.has_row = False
                left = self._left()
                feed.expect(left)
                if held.lease.index not in self._leases.held:  # its lease was lost meanwhile
                    continue
                if isinstance(job, Job) and job.parts:
                    await self._begin_parts(held, job, left, agents)
                elif self._voting is not None and isinstance(job, Job):
                    await self._begin_samples(held, job, agents, self._voting)
                else:
                    await self._begin(held, job, agents)
                started += 1
                if started % BREATHER == 0:
                    await asyncio.sleep(0)

    def _is_over(self) -> bool:
        return bool(self._leases.over)

    async def _jobs(self, rows: Sequence[LeasedRow]) -> list[Job | AgentResult[object]]:
        """Return the jobs of leased rows: those that the feeder compiled, or compiled here."""
        jobs: list[Job | AgentResult[object]] = []
        for held in rows:
            job = held.job
            if isinstance(job, (Job, AgentResult)):  # a union would be made for each row
                jobs.append(job)
                continue
            index = held.lease.index
            try:
                value, name = decode_row(cast(bytes, held.value), self.row_schema)
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
        """End a row that another process took over: nothing more of it is recorded, and it has no result here. A feeder
        in this process tells its end when that is recorded."""
        agent = self.live.pop(index, None)
        if agent is not None:
            for task in agent.tasks:
                task.cancel()
            agent.fail(Interrupted("another process works on this row now"))
            if self._tells:
                self._tell(agent.result())
            else:
                self._r.emit.row_left(self._r.clock(), self._r.run, index)

    # Control

    def cancel_row(self, row: str | int) -> None:
        """Cancel a running row. Raises SpecError if it is not running."""
        self._working(row).stop(Cancelled("this row was cancelled by the user"))

    def retry_row(self, row: str | int) -> None:
        """Start a running row again. Raises SpecError if it is not running."""
        agent = self._working(row)
        if isinstance(agent, Samples):
            raise SpecError(f"row {row} has samples, which cannot start again one by one; cancel it")
        agent.stop(Cancelled("this row was restarted by the user"))
        self._again.add(agent.job.index)

    def conversation(self, row: str | int) -> JsonObject:
        """Return the conversation of a running row. Raises SpecError if it is not running."""
        return self._working(row).conversation()

    def _working(self, row: str | int) -> Agent | Samples:
        """Return what works on a row, by its id or its index."""
        name = str(row)
        agent = next((live for live in self.live.values() if live.job.job_id == name), None)
        if agent is None and name.isdecimal():
            agent = self.live.get(int(name))
        if isinstance(agent, Parts):
            raise SpecError(f"row {row} is processed in parts, which cannot be controlled one by one")
        if not isinstance(agent, Agent | Samples) or agent.recorded is not None or not agent.works:
            raise SpecError(
                f"row {row} is not running: it has not begun, or it has its result; batch-agent retry-failed retries "
                "failed rows after the run has ended"
            )
        return agent

    # Rows

    async def _trail(self, held: LeasedRow, job: Job) -> Trail:
        if self._journal.in_memory:
            return self._nowhere
        if held.key:
            identity = LeasedIdentity(held.key, held.content, held.lease)
        else:
            own = self._keys.identity(job, self._plan.question(job))
            identity = LeasedIdentity(own.key, own.row, held.lease)
        return self._follow(held, identity, past_of(held, identity, held.steps) if held.steps else None)

    def _follow(self, held: LeasedRow, identity: LeasedIdentity, past: Past | None, *, retries: bool = True) -> Trail:
        """Return the trail of an agent with this record. ``retries``: a failed one may be tried again."""
        retried = retries and is_retried(held, past)
        restarts = past is not None and self._restarts(past, retried=retried)
        return Trail(self._journal, identity, past, retried=retried, restarts=restarts, checks=held.checks)

    def _restarts(self, past: Past, *, retried: bool) -> bool:
        """Return whether a recorded row starts again in a new conversation: one that failed by its own fault, or whose
        answer was cut at a max_tokens that is higher now."""
        if past.failed is None:
            cut, raised = past.cut_at, self._r.shapes.raised_from
            return cut is not None and raised is not None and cut <= raised
        if not retried or not (past.turns or past.worked):
            return False
        return starts_afresh(past.failed.error, self._retry_from)

    async def _begin(self, held: LeasedRow, job: Job | AgentResult[object], agents: asyncio.TaskGroup) -> None:
        if isinstance(job, AgentResult):
            self._tell_start(job)
            self._publish(held, None, job)
            return
        trail = await self._trail(held, job)
        if self._budget is not None and not await self._budget.begin(job, [trail], self._plan, self._is_over):
            return
        self._tell_start(job)
        if trail.ended:
            await self._following.acquire()
        if self._r.prewarm is not None and not trail.has_past:  # else it replays its own record
            await self._r.prewarm.begin(job, self._plan.question(job))
        agent = self.live[job.index] = Agent(job, self._r, trail, self._function)
        ticket = self._claim(agent, asks_first=self._asks_first and not trail.has_past)
        task = agents.create_task(self._accompany(held, agent, ticket))
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

    async def _accompany(self, held: LeasedRow, agent: Agent, ticket: Ticket | None) -> None:
        """Run one agent from its first turn to its result, which the next commit records."""
        result: AgentResult[object] | None = None
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            while agent.job.index in self._again and agent.stopped_by is not None:
                self._again.discard(agent.job.index)
                agent = self.live[agent.job.index] = agent.anew(self._r)
                result = await agent.run(None)
                agent.record_end(result)
            self._publish(held, agent, result)
        finally:
            if self._r.prewarm is not None:
                self._r.prewarm.end(agent.job.index)
            self._r.dispatcher.end_agent(agent.progress, agent.turns)
            if self._budget is not None:
                self._budget.end(agent.job.index, result)

    # Rows in parts

    async def _begin_parts(self, held: LeasedRow, job: Job, rows_left: int | None, agents: asyncio.TaskGroup) -> None:
        """Start an agent for each part when there is room. Later rows wait for this no longer than for other agents."""
        trails = await self._part_trails(held, job.parts, [self._plan.question(part) for part in job.parts])
        if self._budget is not None and not await self._budget.begin(job, trails, self._plan, self._is_over):
            return
        self._tell_start(job)
        row = self.live[job.index] = Parts(job)
        row.tasks.append(agents.create_task(self._accompany_parts(held, row)))
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

    async def _accompany_parts(self, held: LeasedRow, row: Parts) -> None:
        await row.wait()
        schema = self._r.schema
        answers = row.answers(schema) if row.error is None else []
        while row.error is None:
            jobs = self._plan.merging(row.job, answers)
            trails = await self._part_trails(held, jobs, [job.prompt for job in jobs])
            merging = [Agent(job, self._r, trail, tool_loop) for job, trail in zip(jobs, trails, strict=True)]
            async with asyncio.TaskGroup() as level:
                tasks = [level.create_task(self._work_on(agent, self._claim(agent))) for agent in merging]
            answers = row.merged([task.result() for task in tasks], schema)
            if len(answers) == 1:
                break
        result = row.result()
        self._publish(held, row, result)
        if self._budget is not None:
            self._budget.end(row.job.index, result)

    async def _work_on(self, agent: Agent, ticket: Ticket | None) -> AgentResult[object]:
        """Run an agent to its end, and wait until that is on disk."""
        try:
            result = await agent.run(ticket)
            agent.record_end(result)
            await agent.settle()
            return result
        finally:
            self._r.dispatcher.end_agent(agent.progress, agent.turns)

    # Rows with samples

    async def _begin_samples(self, held: LeasedRow, job: Job, agents: asyncio.TaskGroup, voting: Voting) -> None:
        """Start the samples that could be needed, when there is room. Later ones follow when these end."""
        begun, many = bool(held.steps or held.more), voting.samples
        if self._budget and not await self._budget.begin(job, (), self._plan, self._is_over, samples=many, begun=begun):
            return
        self._tell_start(job)
        row = self.live[job.index] = Samples(job, voting, self._r.schema)
        start = await self._sampler(held, row, voting, agents)
        while (number := row.next()) is not None:
            ticket = start(number)
            if ticket is not None and (lead := self._lead) is not None:
                self._lead = None
                await lead.wait()
            await self._feed.wait_room(self._is_over)  # without room too the row continues: it was begun

    async def _sampler(
        self, held: LeasedRow, row: Samples, voting: Voting, agents: asyncio.TaskGroup
    ) -> Callable[[int], Ticket | None]:
        """Return a function that starts a sample, with what an earlier session has recorded of it."""
        job, recorded = row.job, not self._journal.in_memory
        own = Identity(held.key, held.content)
        if not own.key:
            own = self._keys.identity(job, self._plan.question(job))
        leased = [
            LeasedIdentity(each.key, each.row, held.lease)
            for each in (identity_of(own, number) for number in range(voting.samples))
        ]
        pasts = await self._leases.claim(held, leased) if recorded else [None] * voting.samples
        # A failed sample is not replaced. But if the row failed by that, it is tried again.
        retries = voting.must_fail(sum(past is not None and past.failed is not None for past in pasts))

        def start(number: int) -> Ticket | None:
            trail = self._nowhere
            if recorded:
                trail = self._follow(held, leased[number], pasts[number], retries=retries)
            agent = Agent(row.job_of(number, own.key), self._r, trail, self._function)
            ticket = self._claim(agent, asks_first=self._asks_first and not trail.has_past)
            row.begin(number, agent)
            row.tasks.append(agents.create_task(accompany(number, agent, ticket)))
            return ticket

        async def accompany(number: int, agent: Agent, ticket: Ticket | None) -> None:
            row.end(number, await self._work_on(agent, ticket))
            while (more := row.next()) is not None:
                start(more)
            if row.is_done:
                self._end_samples(held, row)

        return start

    def _end_samples(self, held: LeasedRow, row: Samples) -> None:
        result = row.result()
        if not is_interrupted(result):
            self._r.emit.metrics.samples_ended(row.asked, row.spared, identical=row.are_identical)
        self._publish(held, row, result)
        if self._budget is not None:
            self._budget.end(row.job.index, result)

    def _claim(self, agent: Agent, *, asks_first: bool = False) -> Ticket | None:
        """Count an agent as started. With ``asks_first``, also request its slot and return the ticket."""
        if asks_first:
            return self._r.dispatcher.start_agent(agent.progress)
        self._r.dispatcher.scheduler.start_agent()
        return None

    async def _part_trails(self, held: LeasedRow, jobs: Sequence[Job], questions: Sequence[str]) -> Sequence[Trail]:
        if self._journal.in_memory:
            return [self._nowhere] * len(jobs)
        identities: list[LeasedIdentity] = []
        for job, question in zip(jobs, questions, strict=True):
            own: Identity = self._part_keys.identity(job, question)
            identities.append(LeasedIdentity(own.key, own.row, held.lease))
        found = await self._leases.claim(held, identities)
        return [self._follow(held, identity, past) for identity, past in zip(identities, found, strict=True)]

    # Results

    def _publish(self, held: LeasedRow, agent: Agent | Several | None, result: AgentResult[object]) -> None:
        """Record a result. After the commit the feeder delivers it, and its agent is no longer live."""
        if self._tells:
            self._tell(result)
        if is_interrupted(result):
            if agent is not None and self.live.get(result.index) is agent:
                del self.live[result.index]
            self.on_unfinished(result)
        else:
            self._leases.ending.add(held.lease.index)
            self._journal.publish(held.lease, result)

    def _tell_start(self, job: Job | AgentResult[object]) -> None:
        r, at = self._r, self._r.clock()
        r.emit.metrics.job_started(at, r.run, job.index, job.job_id)
        if JobStarted in r.emit.sinks.wanted:
            kind = RowTakenOver if job.index in self._begun else JobStarted
            self._begun.add(job.index)
            r.emit.sinks(kind(at, r.run, job.index, job.job_id))

    def _tell(self, result: AgentResult[object]) -> None:
        self._begun.discard(result.index)
        if self._r.traces is not None:
            self._r.traces.ended(self._r.run, result)
        self._r.emit.job_finished(result, self._r.clock(), self._r.run)


def starts_afresh(error: AgentError, retry_from: str) -> bool:
    """Return whether a row that failed with this error is tried again in a new conversation. A cause outside of the row
    says nothing against its conversation."""
    outside = error.retryable or error.type in (ReplayMismatch.type, WorkerFailed.type)
    return retry_from == "start" or (retry_from == "auto" and not outside)

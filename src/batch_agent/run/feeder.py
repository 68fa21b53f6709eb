"""The feeder of a run: puts its inputs into the queue of its record, and delivers the results of all workers.

Inputs are read when rows are needed. If the only worker is in this process, it asks for them (``refill``), so that no
input is read before a slot is free. Otherwise a window of unstarted rows is kept in the queue (``share``). Results
are delivered in the order in which they are recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import wait_event
from batch_agent.errors import StoreError
from batch_agent.events import Event, JobStarted
from batch_agent.files.gold import GOLD_FACT, IN_KEYS, SEEN, WholeRows, in_keys, was_seen
from batch_agent.job import AgentResult, Job, Placed
from batch_agent.messages import JsonObject
from batch_agent.observe.event_lines import read_events
from batch_agent.observe.metrics import Emit
from batch_agent.record.commits import to_its_end
from batch_agent.record.keys import Keys
from batch_agent.record.row_json import decode_result
from batch_agent.record.store import (
    OBSERVED,
    Identity,
    Resuming,
    Row,
    RunStanding,
    SharedResult,
    Store,
)
from batch_agent.run.delivery import Delivery
from batch_agent.run.rows import READERS, Rows, UniqueIds, compile_all, unplaced

if TYPE_CHECKING:
    from batch_agent.observe.telemetry import Traces
    from batch_agent.run.pilot import Pilot
    from batch_agent.run.scoring import RunScoring

logger = logging.getLogger("batch_agent")

AT_ONCE = 256  # rows fed, results read, or records looked up per call
AHEAD = 16  # rows of a list or a file that are compiled at once
IDLE = 0.1  # seconds between two checks of a full queue
WAIT = 1.0  # seconds that a call waits for results
COUNTED = 1.0  # seconds between two looks at what worker processes have done


class Feeder:
    """``facts`` describe the run in its record. ``ahead`` is the number of rows that wait in the queue for several
    workers; 0 if the only worker is in this process: then it asks for each row that it needs. ``originals`` are the
    inputs, which results of other processes get instead of their JSON form; rows of another stage are kept in it while
    they are in progress."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        plan: Plan,
        *,
        run: str,
        emit: Emit,
        clock: Callable[[], float],
        delivery: Delivery[object],
        traces: Traces | None,
        originals: Sequence[object] | dict[int, object] | None,
    ) -> None:
        self.store = store
        self._rows = rows
        self._plan = plan
        self._ids = UniqueIds()
        self._run = run
        self._emit = emit
        self._clock = clock
        self._delivery = delivery
        self._traces = traces
        self._originals = originals
        self._schema: OutputSchema[object] | None = None
        self.facts: JsonObject = {}
        self.keys = Keys(b"")
        self.ahead = 0
        self.paced = False  # rows come only when an agent may start, so that all that are there are fed
        self.worker = 0  # number of the worker in this process
        self.is_outermost = True  # else the run is a stage, and workers report for all stages together
        self.joining = ""  # the command that starts a worker, if the run needs one
        self._had_workers: bool | None = None
        self.outstanding = 0  # rows that are queued or leased; below 0 if a result came before its row was counted
        self.tasks: asyncio.TaskGroup | None = None  # set while the run works
        self._keeping: list[asyncio.Task[None]] = []
        self._refilling: asyncio.Task[bool] | None = None  # reads inputs that must be waited for
        self._shared = asyncio.get_running_loop().create_future()  # done when the run has several workers
        self.failure: Exception | None = None  # the error that reading the inputs raised
        self.fed = False  # every input was read and fed
        self.read = 0  # inputs that were read
        self.session = 0  # number of the session, after its begin
        self._had_past = False
        self._reads_documents = False
        self._reading = asyncio.Lock()
        self._moved = asyncio.Event()  # set when a result arrives
        self._news = asyncio.Event()  # set when results may be there, or none will come
        self._telling: asyncio.Future[None] | None = None  # writes the facts
        self._ended = False
        self._held = asyncio.Event()  # cleared while the user takes no results
        self._held.set()
        self._stopping = asyncio.Event()
        self._draining = False  # the draining phase is set in the store
        self._position = "0"
        self._heard = "0"  # position of the latest events of workers
        self._hearing = asyncio.Lock()
        self.begun: set[int] = set()  # unfinished rows whose JobStarted the sinks have got
        self.ok = self.failed = self.resumed = 0
        self._answered_by = Counter[str]()  # rows by the models that answered them, in a run with a standby
        self._counting: asyncio.TimerHandle | None = None  # until they are recorded
        self.scoring: RunScoring | None = None
        self.pilot: Pilot | None = None
        self._whole: WholeRows | None = None  # if rows keep the keys that they had with their gold
        self._told = False  # that recorded answers have seen the gold

    # The session

    async def begin(
        self, facts: JsonObject, resuming: Resuming, keys: Keys, schema: OutputSchema[object] | None, keep: str
    ) -> None:
        """Begin a session of the run in its record."""
        self.keys, self._schema = keys, schema
        store = self.store
        previous = await store.facts() or {}
        # Answers that were kept by force stay valid until the spec changes again, or on_change="resend" drops them.
        changed = previous.get("fingerprint") not in (None, facts["fingerprint"])
        kept = bool(previous.get("forced")) and not changed
        forced = resuming.force or (kept and not resuming.drop)
        self.facts = {"command": previous.get("command"), **facts, "forced": forced}
        self.facts["started"] = previous.get("started", facts["started"])
        if self.pilot is not None:
            self.facts["pilot"] = self.pilot.begin(previous.get("pilot"), same=not changed or forced)
            if self.is_outermost:
                self.pilot.on_decided = self.record_pilot
        elif "pilot" in previous:
            self.facts["pilot"] = {**cast("JsonObject", previous["pilot"]), "stopped": False}
        self._keep_keys(previous)
        resuming = replace(resuming, force=forced, drop=resuming.drop and (changed or kept))
        only_results = keep == "results"
        opened = await store.open_feed(self.facts, resuming, keep_results_only=only_results)
        self.session, self._position = opened.number, opened.position
        self._had_past = bool(opened.previous)
        store.listen(self._news.set, results=True)

    def _keep_keys(self, previous: JsonObject) -> None:
        """Decide which rows keep the keys that they had when gold columns were a part of them."""
        gold = self.facts.get(GOLD_FACT)
        if self.scoring is None or not isinstance(gold, dict):
            return
        columns = in_keys(self.scoring.taken.taken, previous)
        self.facts[GOLD_FACT] = {**gold, IN_KEYS: [*columns], SEEN: was_seen(previous)}
        if columns:
            self._whole = self.scoring.taken.whole
        elif self.scoring.taken.whole is not None:
            self.scoring.taken.whole.forget()

    def _identity(self, job: Job, value: object) -> Identity:
        """Return the keys of a row. ``value`` is the row as it was read."""
        whole = value if self._whole is None else self._whole.of(value, job.index)
        if whole is value:
            return self.keys.identity(job, self._plan.question(job))
        question = self._plan.asks(whole)[1]
        if not self._told and question != self._plan.question(job):
            self._told = True
            self.facts[GOLD_FACT] = {**cast("JsonObject", self.facts[GOLD_FACT]), SEEN: True}
            logger.warning(
                "the recorded answers were made when the agents saw the columns of gold: their score says nothing. Run "
                "it again in another run directory"
            )
        return self.keys.identify(whole, job.own_id, question)

    def set_trouble(self, trouble: str | None, since: float, degraded: str = "") -> None:
        """Record what currently blocks the run, and since when, for readers outside. ``degraded``: words about servers
        that are down while others work."""
        trouble = None if degraded else trouble
        if self.facts.get("trouble") != trouble:
            self.tell(trouble=trouble, trouble_since=since if trouble else None)
        self.tell(degraded=degraded or None)

    def _tell_counts(self) -> None:
        self._counting = None
        self.tell(**self._counts())

    def _counts(self) -> JsonObject:
        """Return the facts about answers in a run with a standby."""
        if not self._answered_by:
            return {}
        return {"answered_by": dict(self._answered_by), "unpriced": self._emit.metrics.statistics().unpriced}

    def tell(self, **facts: JsonValue) -> None:
        """Record facts about the present state of the run, for readers in other processes."""
        if self.session and any(self.facts.get(name) != value for name, value in facts.items()):
            self.facts |= facts
            if self._telling is None:
                self._write_facts()

    async def record(self, facts: JsonObject) -> None:
        """Record facts, and return when others can read them. Raises StoreError if they cannot be written."""
        while self._telling is not None:
            await asyncio.wait({self._telling})
        self.facts |= facts
        await self.store.write_facts(self.session, dict(self.facts))

    def _write_facts(self) -> None:
        facts = dict(self.facts)
        self._telling = self.store.write_facts(self.session, facts)
        self._telling.add_done_callback(partial(self._facts_written, facts))

    def _facts_written(self, facts: JsonObject, written: asyncio.Future[None]) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            logger.warning("the state of the run could not be recorded: %s", error)
        self._telling = None
        if self.facts != facts and not self._ended:
            self._write_facts()

    def known(self) -> JsonObject:
        """Return the present facts."""
        return {**self.facts, **({} if self.pilot is None else {"pilot": self.pilot.to_json()})}

    def record_pilot(self) -> None:
        """Record that the pilot was passed, so that no later session stops after it."""
        if self.pilot is None or not self.pilot.complete:  # as when the run ends before
            return
        self.pilot.pass_by()
        self.facts["pilot"] = self.pilot.to_json()
        if self.session and not self.pilot.stopped and self._telling is None:
            self._write_facts()  # else the end of the session, or of the write that runs, records it

    async def end(self, facts: JsonObject) -> BaseException | None:
        """Write the end of the session, so that workers leave. A cancellation does not interrupt this. Returns its
        error, if it fails."""
        failure, self._ended = None, True
        if self._counting is not None:
            self._counting.cancel()
        if self._telling is not None:  # else it could be written after the end
            await to_its_end(self._telling)
        if self.session:
            rows: JsonObject = {
                "read": self.keys.count,
                "digest": self.keys.digest,
                "ok": self.ok,
                "failed": self.failed,
                "resumed": self.resumed,
            }
            if self.pilot is not None:  # its rows may have been chosen after the session began
                self.facts["pilot"] = self.pilot.to_json()
            last = {**self.facts, **facts, **self._counts(), "rows": rows}
            failure = await to_its_end(self.store.close_feed(self.session, last, "ended"))
        return failure

    # Inputs

    def stop(self) -> None:
        """Feed no more rows; started rows finish."""
        if not self._stopping.is_set() and not self._ended:
            self.tell(draining=True)
        self._stopping.set()
        self._news.set()

    def left(self) -> int | None:
        """Number of rows that were not taken by the worker; None if it is unknown."""
        total = self._plan.total
        if self.ahead:
            return None
        if total is None:
            return self._rows.waiting
        return max(0, total - self.read + self.store.blocking.unstarted)

    @property
    def made(self) -> int:
        """Number of rows that the stage before has made and that no worker has taken."""
        return self.store.blocking.unstarted + (self._rows.waiting or 0)

    async def refill(self) -> bool:
        """Read inputs and feed them, for the only worker. Returns False if there are none, or if no more are fed. Also
        returns when other workers join, because rows may come back from them while the next input is awaited."""
        if not self._rows.may_wait or self.tasks is None:
            return await self._fill()
        self._refilling = reading = self.tasks.create_task(self._fill())
        try:
            await asyncio.wait({reading, self._shared}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            reading.cancel()
            raise
        return not reading.done() or reading.result()

    async def _fill(self) -> bool:
        async with self._reading:
            return await self._read()

    async def _read(self) -> bool:
        if self._stopping.is_set() or self.fed:
            return False
        try:
            if not self.ahead and not self.paced:
                few = READERS if self._reads_documents else AHEAD if self._rows.at_hand else 1
                values = await self._rows.read(AT_ONCE if self._had_past else few)
            else:
                values = await self._rows.read_ready(AT_ONCE)
        except Exception as error:  # noqa: BLE001
            self.failure = error
            self.stop()
            return False
        if self._rows.stopped:
            self.stop()
            return False
        if not values:
            await self._end_inputs()
            return False
        first = self.read
        self.read = self.read + len(values)
        await self._feed(first, values)
        return True

    async def _end_inputs(self) -> None:
        await self.store.end_inputs(self.session)
        self.fed = True
        if self.outstanding <= 0:  # else a result sets it
            self._news.set()

    async def _feed(self, first: int, values: Sequence[object]) -> None:
        """Feed rows: their values, and the jobs made of them."""
        plan = self._plan
        given = [unplaced(value) for value in values]
        carried = self.store.fed.carried(given)
        if carried is not given:
            values = self._replaced(first, values, carried)
        for value in carried if self._rows.channel is None else ():
            plan.check_first(value)
        self._reads_documents = self._reads_documents or plan.reads(carried[0])
        jobs = [self._named(job) for job in await compile_all(plan, first, values)]
        rows = [self._row(*each) for each in zip(jobs, given, carried, strict=True)]
        self.outstanding += len(rows)
        for row, job, answer in zip(rows, jobs, await self.store.feed(self.session, rows), strict=True):
            if answer is not None:
                self._finish(self._answered(row.index, job.job_id, answer))
        self._news.set()

    def _replaced(self, first: int, values: Sequence[object], carried: Sequence[object]) -> Sequence[object]:
        """Return the inputs in the form in which workers get them, with their indexes and names."""
        placed = [each if isinstance(each, Placed) else Placed(first + n, each) for n, each in enumerate(values)]
        if isinstance(self._originals, dict):
            self._originals |= {each.index: each.value for each in placed}
        return [replace(each, value=value) for each, value in zip(placed, carried, strict=True)]

    def _row(self, job: Job | AgentResult[object], own: object, value: object) -> Row:
        if not isinstance(job, Job):
            return Row(job.index, b"", b"", value, replace(job, input=own))
        if not self.store.writes:  # rows without a record need no identity
            return Row(job.index, b"", b"", value, job)
        identity = self._identity(job, own)
        return Row(job.index, identity.key, identity.row, value, job)

    def _answered(self, index: int, name: str, answer: object) -> AgentResult[object]:
        """Return the result that the store has for a row that is fed: that of an earlier session, or the failure to
        read it."""
        self._emit(JobStarted(self._clock(), self._run, index, name))
        value = self._original(index)
        if not isinstance(answer, bytes):
            result = cast("AgentResult[object]", answer)
            return result if value is None else replace(result, input=value)
        result, _ = decode_result(answer, index, self._schema, resumed=True, value=value)
        return replace(result, job_id=name)  # it may have another id now

    def _named(self, job: Job | AgentResult[object]) -> Job | AgentResult[object]:
        """Return the job with its own id made unique. Rows of an earlier stage have unique names already."""
        if not isinstance(job, Job) or job.own_id is None or self._rows.channel is not None:
            return job
        name = self._ids.unique(job.job_id)
        return job if name == job.job_id else replace(job, job_id=name)

    async def _keep_full(self) -> None:
        """Keep a window of unstarted rows in the queue, for several workers, until every input is fed."""
        while await self._room() and await self._fill():
            pass

    async def _room(self) -> bool:
        """Wait until the queue has room. Returns False when the feeder is stopped."""
        while not self._stopping.is_set() and not self.fed:
            if self._held.is_set() and (await self.standing()).counts.unstarted < self.ahead:
                return True
            self._moved.clear()
            await wait_event(self._moved, IDLE)
        return False

    async def standing(self) -> RunStanding:
        return await self.store.keep_feed(self.session)

    def work_ahead(self) -> None:
        """Keep a window of rows in the queue from now on: other processes take some."""
        self.ahead = self.store.blocking.window

    async def share(
        self, lease: float, facts: Callable[[], JsonObject], *, has_rows: bool
    ) -> asyncio.Task[None] | None:
        """Feed several workers from now on. ``facts`` returns what they need. Returns the task that fills the queue, if
        the run ``has_rows`` of its own."""
        filling = None
        self.work_ahead()
        if not self._shared.done():
            self._shared.set_result(None)
        if "spec" not in self.facts:
            self.facts |= facts()
            await self.store.write_facts(self.session, dict(self.facts))
        if self.tasks is not None:
            self._keeping += (self.tasks.create_task(self._keep(lease)), self.tasks.create_task(self._keep_counting()))
            if has_rows:
                filling = self.tasks.create_task(self._keep_full())
                self._keeping.append(filling)
        return filling

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Own the tasks of the run in this block. A worker that joins after the block, or after a task failed, starts
        none."""
        async with asyncio.TaskGroup() as self.tasks:
            try:
                yield self.tasks
            finally:
                self.tasks = None

    def stop_keeping(self) -> None:
        """Feed nothing more: the run is over."""
        self.tasks = None
        for task in (*self._keeping, *((self._refilling,) if self._refilling is not None else ())):
            task.cancel()

    async def dismiss(self) -> None:
        """Tell workers to take no more rows, and to leave when their rows are done."""
        await self.store.set_phase(self.session, "draining")
        self._draining = True

    async def _keep(self, lease: float) -> None:
        """Renew the feeder's lease until this is cancelled. After ``stop``, set the draining phase once: workers then
        take no rows."""
        while True:
            if self._draining:
                await asyncio.sleep(lease / 3)
            else:
                await wait_event(self._stopping, lease / 3)
            if self._stopping.is_set() and not self._draining:
                await self.dismiss()
                self._news.set()
            await self.standing()
            if self.joining and not self._draining:
                await self._notice_workers()

    async def _keep_counting(self) -> None:
        while True:
            await asyncio.sleep(COUNTED)
            with suppress(StoreError):  # it is counted later
                await self.count_work()
                await self.pass_events()

    async def count_work(self) -> None:
        """Count what worker processes have done in this session, and the agents that they run now."""
        if not self.ahead or not self.session:
            return
        metrics, agents = self._emit.metrics, Counter[str]()
        metrics.elsewhere = await self.store.worked()
        if self.is_outermost:
            table, now = await self.store.table()
            for member in table.live(now).values():
                if not member.status.get("feeder"):  # else it is this process
                    agents.update(cast("dict[str, int]", member.status.get("agents") or {}))
            metrics.agents_elsewhere = agents

    async def pass_events(self) -> None:
        """Pass the events that workers in other processes have sent to the observers of the run, if it has some."""
        if not self.ahead or not self.session or not self.facts.get(OBSERVED):
            return
        async with self._hearing:
            while sent := await self.store.events(self.session, self._heard, AT_ONCE):
                for self._heard, lines in sent:  # the next call deletes them
                    for event in read_events(lines, self._run):
                        self._pass_event(event)

    def _pass_event(self, event: Event) -> None:
        if isinstance(event, JobStarted):
            if event.index in self.begun:  # another worker took the row over
                return
            self.begun.add(event.index)
            event = replace(event, elsewhere=True)
        self._emit.elsewhere(event)

    async def _notice_workers(self) -> None:
        """Log how to start a worker while a run that needs one has none."""
        table, now = await self.store.table()
        has_workers = len(table.live(now)) > 1  # this process is a member too
        if has_workers == self._had_workers:
            return
        had, self._had_workers = self._had_workers, has_workers
        if has_workers:
            self.set_trouble(None, 0.0)
            return
        what = "the run has no worker yet" if had is None else "every worker of the run has left or is lost"
        logger.warning("%s, so its rows wait. Start one: %s", what, self.joining)
        self.set_trouble(f"{what}: {self.joining}", self._clock())

    # Results

    def hold(self, full: bool) -> None:
        """Stop reading results while the buffer of untaken results is full."""
        if full:
            self._held.clear()
        else:
            self._held.set()

    async def deliver(self, wait: float) -> None:
        """Deliver results until every fed row has one. After ``stop``: until no row is leased."""
        wait = min(wait, self.store.wait)
        while not (self.fed and self.outstanding <= 0):
            await self._held.wait()
            found = await self._deliver_next(wait)
            self._moved.set()
            if not found and self._draining and not (await self.standing()).counts.leased:
                return
            if not found and not wait:
                await self._news.wait()
            elif not found and not (self.outstanding or self.fed or self._stopping.is_set()):
                self._news.clear()
                await self._news.wait()

    async def _deliver_next(self, wait: float) -> int:
        """Deliver the results that have arrived, after waiting for the first. Returns their number."""
        if not wait:
            self._news.clear()
        found = await self.store.results(self.session, self._position, AT_ONCE, wait)
        if found and self.ahead:
            await self.pass_events()  # those of a row are recorded with its result, or before it
        self._deliver(found)
        return len(found)

    def _deliver(self, found: Sequence[SharedResult], *, callback: bool = True) -> None:
        for each in found:
            self._position = each.position
            if not each.own:
                continue
            result, worker = self._read_result(each)
            if worker != self.worker:
                self._tell_start(result)
            self._finish(result, callback=callback)

    def _read_result(self, each: SharedResult) -> tuple[AgentResult[object], int]:
        """Return a result, and the number of its worker."""
        if isinstance(each.result, bytes):
            value = self._original(each.index) if each.value is None else each.value
            return decode_result(each.result, each.index, self._schema, resumed=False, value=value)
        return cast("AgentResult[object]", each.result), each.worker

    def deliver_recorded(self, *, callback: bool = True) -> None:
        """Deliver what is recorded in a store that does not wait, at the end of a run."""
        store, session = self.store, self.session
        while not store.wait and (found := store.results(session, self._position, AT_ONCE, 0.0).result()):
            self._deliver(found, callback=callback)

    def finish_unrecorded(self, result: AgentResult[object], deliver: Callable[[AgentResult[object]], None]) -> None:
        """End a row of the worker in this process that was interrupted, and so is not recorded."""
        self.outstanding -= 1
        self._tell_end(result)
        deliver(self._with_input(result))
        self._news.set()

    def _finish(self, result: AgentResult[object], *, callback: bool = True) -> None:
        self.outstanding -= 1
        self.ok += result.ok
        self.failed += not result.ok
        self.resumed += result.resumed
        if result.answered_by is not None:
            self._answered_by[result.answered_by] += 1
            self._counting = self._counting or asyncio.get_running_loop().call_later(COUNTED, self._tell_counts)
        if self.scoring is not None:
            self.scoring.took(result)
        self._tell_end(result)
        (self._delivery.deliver if callback else self._delivery.put)(result)

    def _tell_end(self, result: AgentResult[object]) -> None:
        self.begun.discard(result.index)
        if self._traces is not None:
            self._traces.ended(self._run, result)
        self._emit.job_finished(result, self._clock(), self._run)

    def _with_input(self, result: AgentResult[object]) -> AgentResult[object]:
        """Return a result that was made in this process, with its input as the user gave it."""
        original = self._original(result.index)
        return result if original is None else replace(result, input=original)

    def _original(self, index: int) -> object:
        """Return the input of a row as the user gave it; it can be taken once. None if the row's result has it
        already."""
        originals = self._originals
        if originals is None:
            return None
        return originals.pop(index, None) if isinstance(originals, dict) else originals[index]

    def _tell_start(self, result: AgentResult[object]) -> None:
        """Emit the start of a row on which another process worked, if that process has not sent it."""
        now = self._clock()
        run = self._run
        index = result.index
        self._emit.row_elsewhere(now, run, result)
        if JobStarted in self._emit.sinks.wanted and index not in self.begun:
            self._emit.elsewhere(JobStarted(now, run, index, result.job_id, elsewhere=True))

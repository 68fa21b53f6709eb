"""Moves inputs into the queue, and results from the record to the user, while a run is at work.

Inputs are read when the queue has room. Results of all workers are delivered in the order in which they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from batch_agent.cluster.feeder_session import FeederSession
from batch_agent.cluster.row_json import decode_result, decode_row, encode_row
from batch_agent.compiler.plan import Plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import JobError
from batch_agent.job import AgentError, AgentResult, Failure, Placed, UnreadableRow
from batch_agent.record.shared import NewRow, RunStanding
from batch_agent.run.rows import Rows

WINDOW = 4096  # most unstarted rows in the queue
AT_ONCE = 256  # rows fed, or results read, per call
IDLE = 0.1  # seconds between two checks of a full queue
WAIT = 1.0  # seconds that a call waits for results

Started = Callable[[int, str], None]
Finished = Callable[[AgentResult[object], int], Awaitable[None]]


class Feeder:
    """Feeds rows and delivers results.

    ``started`` is called with the index and the id of each row that is fed. ``finished`` is called with each result and
    the number of its worker. ``row_schema`` is that of the inputs, if they are outputs of another stage. ``originals``
    are the inputs, which the results get instead of their JSON form; rows of another stage are kept in it while they
    are in progress.
    """

    def __init__(
        self,
        session: FeederSession,
        rows: Rows,
        plan: Plan,
        schema: OutputSchema[object] | None,
        *,
        started: Started,
        finished: Finished,
        row_schema: OutputSchema[object] | None = None,
        originals: Sequence[object] | dict[int, object] | None = None,
    ) -> None:
        self._session, self._rows, self._plan, self._schema = session, rows, plan, schema
        self._started, self._finished = started, finished
        self._row_schema, self._originals = row_schema, originals
        self.outstanding = 0  # rows that are queued or leased; below 0 if a result came before its row was counted
        self.failure: Exception | None = None  # the error that reading the inputs raised
        self.fed = False  # every input was read and fed
        self._moved = asyncio.Event()  # set when a result arrives
        self._awaited = asyncio.Event()  # set when a result is to be waited for, or none will come
        self._held = asyncio.Event()  # cleared while the user takes no results
        self._held.set()
        self._stopping = asyncio.Event()
        self._draining = False  # the draining phase is set in the store

    def hold(self, full: bool) -> None:
        """Stop reading results while the buffer of untaken results is full."""
        if full:
            self._held.clear()
        else:
            self._held.set()

    def stop(self) -> None:
        """Feed no more rows; started rows finish."""
        self._stopping.set()
        self._awaited.set()

    async def feed(self) -> None:
        """Put the inputs into the queue while it has room."""
        session, sitting = self._session, self._session.feed.sitting
        index = 0
        while not self._stopping.is_set() and await self._room():
            try:
                values = await self._rows.read_ready(AT_ONCE)
            except Exception as error:
                self.failure = error
                self.stop()
                return
            if not values:
                break
            new: list[tuple[NewRow, str]] = []
            for value in values:
                place, value = (value.index, value.value) if isinstance(value, Placed) else (index, value)
                index += 1
                if isinstance(self._originals, dict):
                    self._originals[place] = value
                try:
                    new.append(self._compiled(place, value))
                except JobError as error:
                    shown = None if isinstance(value, UnreadableRow) else value
                    await self._deliver(Failure(place, str(place), shown, False, None, AgentError.of(error)), 0)
            rows = [row for row, _ in new]
            answers = await session.run(partial(session.store.feed, sitting, rows, session.retry))
            self.outstanding += answers.count(None)
            self._awaited.set()
            for (row, name), answer in zip(new, answers, strict=True):
                self._started(row.index, name)
                if answer is not None:
                    await self._deliver(*decode_result(answer, row.index, self._schema, resumed=True))
        if not self._stopping.is_set():
            await session.run(lambda: session.store.end_inputs(sitting))
            self.fed = True
            self._awaited.set()

    def _compiled(self, index: int, value: object) -> tuple[NewRow, str]:
        """Return the row as it is fed, and its id. Raises JobError if it cannot be a job."""
        if isinstance(value, UnreadableRow):
            self._plan.job(index, value)
        data = encode_row(value)
        value = decode_row(data, self._row_schema)
        self._plan.check_first(value)
        job = self._plan.job(index, value)
        identity = self._session.keys.identity(job, self._plan.question(job))
        return NewRow(index, identity.key, identity.row, data), job.job_id

    async def _room(self) -> bool:
        """Wait until the queue has room. Returns False when the feeder is stopped."""
        while not self._stopping.is_set():
            if self._held.is_set():
                standing = await self.standing()
                if standing.counts.unstarted < WINDOW:
                    return True
            self._moved.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), IDLE)
        return False

    async def standing(self) -> RunStanding:
        session = self._session
        return await session.run(lambda: session.store.keep_feed(session.feed.sitting))

    async def keep(self) -> None:
        """Renew the feeder's lease until cancelled.

        After ``stop``, set the draining phase once: workers then take no rows.
        """
        session, pause = self._session, self._session.lease / 3
        while True:
            if self._draining:
                await asyncio.sleep(pause)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
            if self._stopping.is_set() and not self._draining:
                await session.run(lambda: session.store.set_phase(session.feed.sitting, "draining"))
                self._draining = True
            await self.standing()

    async def deliver(self) -> None:
        """Deliver results until every fed row has one. After ``stop``: until no row is leased."""
        session, sitting = self._session, self._session.feed.sitting
        position, wait = session.feed.position, min(WAIT, session.lease / 4)
        while not (self.fed and not self.outstanding):
            await self._held.wait()
            if not (self.outstanding or self.fed or self._stopping.is_set()):
                self._awaited.clear()
                await self._awaited.wait()
                continue
            found = await session.run(partial(session.store.results, sitting, position, AT_ONCE, wait))
            for each in found:
                position = each.position
                if each.own:
                    self.outstanding -= 1
                    await self._deliver(*decode_result(each.result, each.index, self._schema, resumed=False))
            self._moved.set()
            if self._draining and not found and not (await self.standing()).counts.leased:
                return

    async def _deliver(self, result: AgentResult[object], worker: int) -> None:
        session = self._session
        index, originals = result.index, self._originals
        if originals is not None:
            original = originals.pop(index) if isinstance(originals, dict) else originals[index]
            result = replace(result, input=original)
        session.ok += result.ok
        session.failed += not result.ok
        session.resumed += result.resumed
        await self._finished(result, worker)

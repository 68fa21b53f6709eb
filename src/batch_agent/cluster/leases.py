"""The leases of one worker. It takes rows when it has room, renews their leases, and hands back the rest at its end.

Calls of the store block, so they run in threads. The event loop starts each renewal. This is intentional: a worker
whose loop is stuck cannot record anything, and should lose its rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from batch_agent.cluster.row_json import decode_row
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import outlast
from batch_agent.errors import StoreError
from batch_agent.job import Placed
from batch_agent.record.journal import OVERDUE
from batch_agent.record.session import to_its_end
from batch_agent.record.shared import LeasedRow, RowLease, RunStanding, RunStore

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

GROUP = 16  # rows leased per call
RENEWALS = 3  # per lease time
Over = Literal["", "done", "asked to leave", "no feeder", "replaced"]


@dataclass(slots=True)
class HeldRow:
    """A row that this worker works on. ``claimed`` are the agents of its record that were continued."""

    row: LeasedRow
    claimed: set[int] = field(default_factory=set)

    @property
    def lease(self) -> RowLease:
        return self.row.lease


class WorkerLeases(AsyncIterator[Placed]):
    """An iterator over the rows of one worker.

    ``over`` is the reason why it ended, or "". ``patience`` is the number of seconds to wait if the queue is empty and
    there is no feeder. ``schema`` is that of the rows, if they are outputs of another stage. ``on_lost`` is called with
    the index of a row whose lease is lost. ``on_away`` is called with True when the store does not answer, and with
    False when it answers again. ``on_need`` is called when slots may be needed: at the begin, and when rows arrive
    after the queue was empty.
    """

    def __init__(
        self,
        store: RunStore,
        worker: int,
        *,
        lease: float,
        generation: int,
        patience: float,
        schema: OutputSchema[object] | None = None,
    ) -> None:
        self.store, self.worker, self._schema = store, worker, schema
        self.held: dict[int, HeldRow] = {}  # by index: rows that this worker works on
        self.ending: set[int] = set()  # held rows whose results are not committed yet
        self.over: Over = ""
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_away: Callable[[bool], None] = lambda _: None
        self.on_need: Callable[[], None] = lambda: None
        self._lease, self._generation, self._patience = lease, generation, patience
        self._ready: deque[LeasedRow] = deque()
        self._taking: asyncio.Future[list[LeasedRow]] | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="batch-agent-leases")
        self._renewing: asyncio.Task[None] | None = None
        self._lonely_since: float | None = None  # when the worker first found no feeder
        self._fed = False  # every input was fed
        self._wait = min(0.25, lease / (2 * RENEWALS))  # seconds that a call waits for rows
        self._changed, self._leaving = asyncio.Event(), asyncio.Event()

    def begin(self) -> None:
        """Start to renew the leases."""
        self.on_need()
        self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="batch-agent leases")

    async def __anext__(self) -> Placed:
        waited = False
        while not self._ready:
            if self.over:
                raise StopAsyncIteration
            if rows := await self._take():
                self._lonely_since = None
                self._ready.extend(rows)
                if waited:
                    self.on_need()
                continue
            waited = True
            standing = await self._run(self.store.standing)
            self._judge(standing)
            self._fed = standing.counts.fed
            if self._fed and not self.over:  # only rows of dead workers can arrive now
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), self._wait)
        row = self._ready.popleft()
        index = row.lease.index
        if self.held.pop(index, None) is not None:  # its lease expired, and this worker took the row again
            self.on_lost(index)
        self.held[index] = HeldRow(row)
        return Placed(index, decode_row(row.value, self._schema))

    async def _take(self) -> list[LeasedRow]:
        """Return the next rows.

        If this is cancelled, the next call or ``close`` takes the result of the running call.
        """
        if self._taking is None:
            wait = 0.0 if self._fed else self._wait
            self._taking = self._run(lambda: self.store.take(self.worker, GROUP, wait))
        rows = await asyncio.shield(self._taking)
        self._taking = None
        if rows and self.over:
            await self._hand_back(rows)
            return []
        return rows

    def leave(self, why: Over = "asked to leave") -> None:
        """Take no more rows, and hand back rows that were not started."""
        self.over = self.over or why
        self._changed.set()
        self._leaving.set()

    def finished(self, indices: Iterable[int]) -> None:
        """Forget these rows: their results are recorded."""
        for index in indices:
            self.held.pop(index, None)
            self.ending.discard(index)

    def lose(self, places: set[str]) -> None:
        """Drop the rows at these places of the queue: other workers have them."""
        for index in [index for index, row in self.held.items() if row.lease.place in places] if places else ():
            del self.held[index]
            self.ending.discard(index)
            logger.info("the lease of row %d is lost: another worker has it", index)
            self.on_lost(index)
        if any(row.lease.place in places for row in self._ready):
            self._ready = deque(row for row in self._ready if row.lease.place not in places)

    async def close(self) -> None:
        """Hand back all rows and leave the run. If the store is unreachable, the leases expire."""
        self.over = self.over or "asked to leave"
        if self._renewing is not None:
            self._renewing.cancel()
            await outlast(self._renewing)
        rows = [*(held.row for held in self.held.values()), *self._ready]
        self.held.clear()
        self._ready.clear()
        if self._taking is not None and await to_its_end(self._taking) is None:
            rows += self._taking.result()
        try:
            with suppress(StoreError):
                await self._hand_back(rows)
                await to_its_end(self._run(lambda: self.store.leave(self.worker)))
        finally:
            self._threads.shutdown(wait=False)

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
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._lease / RENEWALS)
            if self._changed.is_set():
                self._changed.clear()
                waiting, self._ready = list(self._ready), deque()
                await self._hand_back(waiting)
            leases = [*(held.lease for held in self.held.values()), *(row.lease for row in self._ready)]
            alarm = asyncio.get_running_loop().call_later(OVERDUE, self.on_away, True)
            try:
                lost, standing = await self._run(partial(self.store.renew, self.worker, leases))
            except StoreError as error:  # if the outage lasts, the journal stops the run
                logger.warning("leases cannot be renewed: %s", error)
                continue
            finally:
                alarm.cancel()
            self.on_away(False)
            # For rows whose results are being committed, the commit decides: a finished row has no lease.
            self.lose(lost - {self.held[index].lease.place for index in self.ending if index in self.held})
            if not self.over and (standing.phase != "running" or standing.generation != self._generation):
                self._judge(standing)

    async def _hand_back(self, rows: list[LeasedRow]) -> None:
        leases = [row.lease for row in rows]
        if leases:
            await asyncio.shield(self._run(lambda: self.store.hand_back(self.worker, leases)))

    def _run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function)

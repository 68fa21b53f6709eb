"""The rows that one worker holds. It takes rows when it has room, renews their leases, and hands back the rest.

Calls of a store outside this process block, so they run in threads. The event loop starts each renewal. This is
intentional: a worker whose loop is stuck cannot record anything, and should lose its rows. In the feeder's process the
store answers at once, leases do not end, and the worker itself asks the feeder to read inputs when it needs rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeVar

from batch_agent.blocking import on_this_loop
from batch_agent.dispatch.cancellation import outlast, wait_event
from batch_agent.errors import StoreError
from batch_agent.record.base import Identity
from batch_agent.record.codec import DONE, ENDED, FAILED, WRITES, decode
from batch_agent.record.journal import OVERDUE, to_its_end
from batch_agent.record.memory import MemoryStore
from batch_agent.record.steps import Past, read_past
from batch_agent.record.store import KeptStep, LeasedRow, RowLease, RunStanding, WorkStore

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

GROUP = 16  # rows leased per call
RENEWALS = 3  # per lease time
Over = Literal["", "done", "asked to leave", "no feeder", "replaced"]
_RANKS = {DONE: 0, ENDED: 0, FAILED: 2}


class RowSource(Protocol):
    """The feeder of the run, if it is in this process."""

    fed: bool  # every input was read and fed

    async def refill(self) -> bool:
        """Read inputs and feed them. Returns False if there are none, or if no more are fed."""
        ...


@dataclass(slots=True, eq=False)
class HeldRow:
    """A row that this worker works on. ``claimed`` are the agents of its record that were continued."""

    row: LeasedRow
    lease: RowLease
    claimed: set[int] = field(default_factory=set)

    def past(self, identity: Identity, steps: Sequence[KeptStep]) -> Past | None:
        """Return what an earlier agent with that identity recorded, or None. A finished agent is preferred to a running
        one, and a running one to a failed one. Each agent is returned once."""
        agents: dict[int, list[KeptStep]] = {}
        for step in steps:
            same = step.key == identity.key or (not self.row.checks and step.content == identity.row)
            if same and step.agent not in self.claimed:
                agents.setdefault(step.agent, []).append(step)
        for agent in sorted(agents, key=lambda agent: (_RANKS.get(agents[agent][-1].kind, 1), agent)):
            self.claimed.add(agent)
            kept = agents[agent]
            try:
                return read_past(agent, [decode(step.kind, step.body) for step in kept])
            except ValueError as error:
                if any(step.kind in WRITES for step in kept):
                    return Past(agent, (), unreadable=str(error))
                logger.warning("the record of row %d cannot be read and is ignored: %s", self.lease.index, error)
        return None

    def retries(self, past: Past | None) -> bool:
        """Return whether the row failed before and is tried again."""
        if past is None or past.failed is None:
            return False
        retry: bool | Collection[str] = self.row.retry
        return retry if isinstance(retry, bool) else past.failed.error.type in retry


class Leases:
    """``over`` is the reason why no more rows are taken, or "". ``source`` is the feeder in this process, if there is
    one. ``patience`` is the number of seconds to wait if the queue is empty and there is no feeder. ``on_lost`` is
    called with the index of a row whose lease is lost. ``on_away`` is called with True when the store does not answer,
    and with False when it answers again. ``on_need`` is called when slots may be needed: at the begin, and when rows
    arrive after the queue was empty. ``on_leave`` is called when no more rows are taken. ``failure`` is the error of a
    store that no longer answers."""

    def __init__(
        self,
        store: WorkStore,
        worker: int,
        *,
        lease: float,
        generation: int,
        source: RowSource | None = None,
        patience: float = float("inf"),
    ) -> None:
        self.store, self.worker = store, worker
        self.held: dict[int, HeldRow] = {}  # by index: rows that this worker works on
        self.ending: set[int] = set()  # held rows whose results are not committed yet
        self.finished = 0  # rows whose results this worker recorded
        self.over: Over = ""
        self.alone = True  # no other process works on the run
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_away: Callable[[bool], None] = lambda _: None
        self.on_need: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        self.failure: StoreError | None = None
        self._source = source
        self._lease, self._generation, self._patience = lease, generation, patience
        self._ready: deque[LeasedRow] = deque()
        self._taking: asyncio.Future[list[LeasedRow]] | None = None
        self._threads = None if store.instant else ThreadPoolExecutor(2, thread_name_prefix="batch-agent-leases")
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
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="batch-agent leases")

    async def next(self, most: int) -> list[HeldRow]:
        """Wait for rows and return at most ``most``; none if no more rows are taken."""
        waited, source = False, self._source
        if self.alone and source is not None and isinstance(self.store, MemoryStore) and self.store.is_empty:
            await source.refill()
        while not self._ready:
            if self.over:
                return []
            if rows := await self._take(most):
                self._lonely_since = None
                self._ready.extend(rows)
                if waited:
                    self.on_need()
                break
            waited = True
            if not await self._wait_for_rows():
                return []
        taken: list[HeldRow] = []
        while self._ready and len(taken) < most:
            row = self._ready.popleft()
            index = row.lease.index
            if self.held.pop(index, None) is not None:  # its lease expired, and this worker took the row again
                self.on_lost(index)
            held = self.held[index] = HeldRow(row, row.lease)
            taken.append(held)
        return taken

    async def _wait_for_rows(self) -> bool:
        """Wait until a call may find rows. Returns False if there will be none."""
        if self.store.instant:
            source = self._source
            if source is not None and not source.fed and await source.refill():
                return True
            if self.alone:
                self.leave("done" if source is not None and source.fed else "asked to leave")
                return False
            self._judge(self.store.standing())
            if not self.over:
                self._news.clear()
                await self._news.wait()
            return not self.over
        standing = await self._run(self.store.standing)
        self._judge(standing)
        self._fed = standing.counts.fed
        if self._fed and not self.over:  # only rows of dead workers can arrive now
            await wait_event(self._leaving, self._wait)
        return not self.over

    async def _take(self, most: int) -> list[LeasedRow]:
        """Return the next rows. If this is cancelled, the next call or ``close`` takes the result of the running
        call."""
        if self._threads is None:
            return self.store.take(self.worker, most, 0.0)
        if self._taking is None:
            wait = 0.0 if self._fed else self._wait
            self._taking = self._run(lambda: self.store.take(self.worker, GROUP, wait))
        rows = await asyncio.shield(self._taking)
        self._taking = None
        if rows and self.over:
            await self._hand_back(rows)
            return []
        return rows

    async def claim(self, held: HeldRow, identities: Sequence[Identity]) -> list[Past | None]:
        """Return what earlier agents of the row recorded under these identities."""
        found = [held.past(identity, held.row.steps) for identity in identities]
        missing = [place for place, past in enumerate(found) if past is None]
        if not missing or not held.row.more:
            return found
        wanted = [identities[place] for place in missing]
        claimed = await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self.store.claim, held.lease, wanted)
        )
        for place, steps in zip(missing, claimed, strict=True):
            found[place] = held.past(identities[place], steps)
        return found

    def share(self) -> None:
        """Other processes work on the run too: rows may come back from them."""
        self.alone = False
        if self.store.instant:
            self.store.listen(on_this_loop(self._news.set))

    def leave(self, why: Over = "asked to leave") -> None:
        """Take no more rows, and hand back rows that were not started."""
        self.over = self.over or why
        self._changed.set()
        self._leaving.set()
        self._news.set()
        self.on_leave()

    def committed(self, lost: set[str], ended: Sequence[RowLease]) -> None:
        """Forget rows whose results are recorded, and drop rows that other workers have."""
        self.lose(lost)
        for lease in ended:
            self.finished += lease.place not in lost
            self.held.pop(lease.index, None)
            self.ending.discard(lease.index)

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
        rows = [*(held.row for held in self.held.values()), *self._ready]
        self.held.clear()
        self._ready.clear()
        if self._taking is not None and await to_its_end(self._taking) is None:
            rows += self._taking.result()
        try:
            with suppress(StoreError):
                await self._hand_back(rows)
                if self._threads is None:
                    self.store.leave(self.worker)
                else:
                    await to_its_end(self._run(lambda: self.store.leave(self.worker)))
        finally:
            if self._threads is not None:
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
        while not self._closed:
            await wait_event(self._changed, self._lease / RENEWALS)
            if self._changed.is_set():
                self._changed.clear()
                waiting, self._ready = list(self._ready), deque()
                await self._hand_back(waiting)
            leases = [*(held.lease for held in self.held.values()), *(row.lease for row in self._ready)]
            alarm = asyncio.get_running_loop().call_later(OVERDUE, self.on_away, True)
            try:
                lost, standing = await self._run(partial(self.store.renew, self.worker, leases))
            except StoreError as error:  # the store has waited for the end of the outage: nothing can be recorded
                self.failure = error
                self.leave()
                return
            finally:
                alarm.cancel()
            self.on_away(False)
            # For rows whose results are being committed, the commit decides: a finished row has no lease.
            self.lose(lost - {self.held[index].lease.place for index in self.ending if index in self.held})
            if not self.over and (standing.phase != "running" or standing.generation != self._generation):
                self._judge(standing)

    async def _hand_back(self, rows: list[LeasedRow]) -> None:
        leases = [row.lease for row in rows]
        if not leases:
            return
        if self._threads is None:
            self.store.hand_back(self.worker, leases)
        else:
            await asyncio.shield(self._run(lambda: self.store.hand_back(self.worker, leases)))

    def _run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function)

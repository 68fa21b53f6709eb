"""The rows that one worker holds: it takes rows when it has room, renews their leases, and hands back the rest."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from batch_agent.dispatch.cancellation import outlast, shielded, wait_event
from batch_agent.errors import StoreError
from batch_agent.record.codec import CALL_BEGUN, RANKS, decode, since_restart
from batch_agent.record.commits import OVERDUE, to_its_end
from batch_agent.record.steps import Past, read_past
from batch_agent.record.store import Identity, KeptStep, Lease, RunStanding, Store

if TYPE_CHECKING:
    from batch_agent.run.feeder import Feeder

# The event loop starts each renewal. This is intentional: a worker whose loop is stuck cannot record anything, and
# should lose its rows. In the feeder's process leases do not end, and the worker itself asks the feeder to read inputs
# when it needs rows.

logger = logging.getLogger("batch_agent")

RENEWALS = 3  # per lease time
Over = Literal["", "done", "asked to leave", "no feeder", "replaced", "the run is draining", "the run has ended"]


def past_of(lease: Lease, identity: Identity, steps: Sequence[KeptStep]) -> Past | None:
    """Return the record of an earlier agent with that identity, or None. A finished agent is preferred to a running
    one, and a running one to a failed one. Each agent is returned once. If an agent continued from answers to another
    question, which were kept by force, and answers are checked now, its record has ``several`` set."""
    agents: dict[int, list[KeptStep]] = {}
    for step in steps:
        if step.agent not in lease.claimed:
            agents.setdefault(step.agent, []).append(step)

    def is_same(step: KeptStep) -> bool:
        return step.key == identity.key or (not lease.checks and step.content == identity.row)

    own = [agent for agent, kept in agents.items() if is_same(kept[-1])]
    for agent in sorted(own, key=lambda agent: (RANKS.get(agents[agent][-1].kind, 1), agent)):
        lease.claimed.add(agent)
        kept = agents[agent]
        try:
            past = read_past(agent, [decode(step.kind, step.body) for step in kept])
        except ValueError as error:
            if any(step.kind == CALL_BEGUN for step in kept):
                return Past(agent, (), unreadable=str(error))
            logger.warning("the record of row %d cannot be read and is ignored: %s", lease.row.index, error)
            continue
        return replace(past, several=True) if lease.checks and not all(map(is_same, since_restart(kept))) else past
    return None


def is_retried(lease: Lease, past: Past | None) -> bool:
    """Return whether the row failed in an earlier session and is tried again."""
    if past is None or past.failed is None:
        return False
    retry: bool | Collection[str] = lease.retry
    return retry if isinstance(retry, bool) else past.failed.error.type in retry


class Leases:
    """The rows that a worker holds. ``over`` is the reason why no more rows are taken, or "". ``source`` is the feeder
    in this process, if there is one. ``patience``: seconds to wait if the queue is empty and there is no feeder.
    ``failure`` is the error of a store that no longer answers, or of a commit.

    ``on_lost`` is called with the index of a row whose lease is lost, ``on_ended`` with that of a row whose result is
    recorded; ``on_away`` with True when the store does not answer, and with False when it answers again; ``on_wait``
    with True when the next row must be waited for, and with False after that; ``on_need`` when slots may be needed: at
    the beginning, and when rows arrive after the queue was empty; ``on_leave`` when no more rows are taken; and
    ``on_observed``, perhaps repeatedly, if the feeder has observers.
    """

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
        self.held: dict[int, Lease] = {}  # by index: rows that this worker works on
        self.ending: set[int] = set()  # held rows whose results are not committed yet
        self.finished = 0  # rows whose results this worker recorded
        self.over: Over = ""
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
        self._ready: deque[Lease] = deque()
        self._taking: asyncio.Future[list[Lease]] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._lonely_since: float | None = None  # when the worker first found no feeder
        self._fed = False  # every input was fed
        self._wait = min(store.wait, 0.25, lease / (2 * RENEWALS))  # seconds that a call waits for rows
        self._changed, self._leaving = asyncio.Event(), asyncio.Event()
        self._news = asyncio.Event()  # a store that does not wait has changed
        self._closed = False

    def share(self) -> None:
        """Renew the leases from now on, because other processes work on the run too. Rows may come back from them."""
        self.store.listen(self._changed.set if self.store.wait else self._news.set)
        self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="batch-agent leases")

    async def next(self) -> list[Lease]:
        """Return the next rows, after waiting for the first; [] if no more rows are taken."""
        if not self._ready and not (self.over or self.store.wait):  # the answer is there at once
            self._ready.extend(await self._take())
        if not self._ready:
            self.on_wait(True)
            try:
                await self._wait_for_row()
            finally:
                self.on_wait(False)
        rows: list[Lease] = []
        ready = self._ready
        while ready and len(rows) < self.store.group:
            rows.append(self._hold(ready.popleft()))
        return rows

    async def _wait_for_row(self) -> None:
        """Wait until there is a row to take, or until no more rows are taken."""
        waited = False
        if (source := self._supplier) is not None and not self.over:
            await source.refill()
        while not self.over:
            if rows := await self._take():
                self._lonely_since = None
                self._ready.extend(rows)
                if waited:
                    self.on_need()
                return
            waited = True
            if not await self._wait_for_rows():
                return

    @property
    def _supplier(self) -> Feeder | None:
        """The feeder in this process, if it reads inputs only when this worker needs a row; else None."""
        source = self._source
        return source if source is not None and not source.ahead else None

    def _hold(self, lease: Lease) -> Lease:
        index = lease.row.index
        if self.held.pop(index, None) is not None:  # its lease expired, and this worker took the row again
            self.on_lost(index)
        self.held[index] = lease
        return lease

    async def _wait_for_rows(self) -> bool:
        """Wait until a call may find rows. Returns False if there will be none."""
        if (source := self._supplier) is not None and not source.fed and await source.refill():
            return True
        if (source := self._supplier) is not None:  # also after that
            self.leave("done" if source.fed else "asked to leave")
            return False
        standing = await self.store.standing()
        self._judge(standing)
        self._fed = standing.counts.fed
        if self.over:
            return False
        if not self.store.wait:
            self._news.clear()
            await self._news.wait()
        elif self._fed:  # only rows of dead workers can arrive now
            await wait_event(self._leaving, self._wait)
        return not self.over

    async def _take(self) -> list[Lease]:
        """Return the next rows. If this is cancelled, the next call or ``close`` takes the result of the running
        call."""
        if self._taking is None:
            self._taking = self.store.take(self.worker, self.store.group, 0.0 if self._fed else self._wait)
        rows = await asyncio.shield(self._taking)
        self._taking = None
        if rows and self.over:
            await self._hand_back(rows)
            return []
        return rows

    async def claim(self, held: Lease, identities: Sequence[Identity]) -> list[Past | None]:
        """Return the records of earlier agents of the row with these identities; None for each that has none."""
        found = [past_of(held, identity, held.steps) for identity in identities]
        missing = [place for place, past in enumerate(found) if past is None]
        if not missing or not held.more:
            return found
        wanted = [identities[place] for place in missing]
        for place, steps in zip(missing, await self.store.claim(held, wanted), strict=True):
            found[place] = past_of(held, identities[place], steps)
        return found

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

    def committed(self, lost: set[str], ended: Sequence[Lease]) -> None:
        """Drop rows whose results are recorded, and rows that other workers have taken over."""
        self.lose(lost)
        for lease in ended:
            index = lease.row.index
            self.finished += lease.place not in lost
            self.held.pop(index, None)
            self.ending.discard(index)
            self.on_ended(index)

    def lose(self, places: set[str]) -> None:
        """Drop the rows at these places of the queue, because other workers have taken them over."""
        for index in [index for index, lease in self.held.items() if lease.place in places] if places else ():
            del self.held[index]
            self.ending.discard(index)
            logger.info("the lease of row %d is lost: another worker has it", index)
            self.on_lost(index)
        if places and any(lease.place in places for lease in self._ready):
            self._ready = deque(lease for lease in self._ready if lease.place not in places)

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
            waiting: list[Lease] = []
            if self.over:
                waiting, self._ready = list(self._ready), deque()
            leases = [*self.held.values(), *self._ready]
            alarm = asyncio.get_running_loop().call_later(OVERDUE, self.on_away, True)
            try:
                await self._hand_back(waiting)
                lost, standing = await self.store.renew(self.worker, leases)
            except StoreError as error:  # the store has waited for the end of the outage: nothing can be recorded
                self.fail(error)
                self.lose({lease.place for lease in self.held.values()})
                return
            finally:
                alarm.cancel()
            self.on_away(False)
            if standing.observed:  # also if a new feeder has some
                self.on_observed()
            # For rows whose results are being committed, the commit decides: a finished row has no lease.
            self.lose(lost - {self.held[index].place for index in self.ending if index in self.held})
            if not self.over and (standing.phase != "running" or standing.generation != self._generation):
                self._judge(standing)

    async def _hand_back(self, rows: list[Lease]) -> None:
        if rows:
            await shielded(self.store.hand_back(self.worker, rows))

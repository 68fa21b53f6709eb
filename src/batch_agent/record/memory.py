"""A record in the memory of this process: the queue, the leases, the results and the shares of the workers.

It is the whole record of a run without a run directory. The record of a run directory (``directory``) adds files to it.
Other processes reach it through ``store_server``. No worker outlives the process that has the queue, so no row is
leased when the store is opened. A lease of an earlier opening is never valid: its place names the opening.

One lock makes each call atomic. Calls that write files do so without the lock, so that the event loop never waits for a
disk.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from pathlib import Path
from threading import Condition, RLock
from typing import TypeVar

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError, StoreError
from batch_agent.messages import JsonObject
from batch_agent.record.store import (
    FOLLOWED_SECONDS,
    LARGEST_SHARED,
    LEASE,
    NOTHING_SPENT,
    NUMBERS,
    OBSERVED,
    UNKEPT_SECONDS,
    Commit,
    Counts,
    FeederReplaced,
    FeederSession,
    Identity,
    KeptStep,
    Lease,
    Phase,
    Resuming,
    Row,
    RowChange,
    RunStanding,
    SharedCall,
    SharedResult,
    Spent,
)
from batch_agent.share.table import (
    BUDGET_COST,
    BUDGET_TOKENS,
    FOREVER,
    Allotment,
    Claim,
    Grant,
    Learnt,
    Steering,
    Table,
    steered,
)

T = TypeVar("T")

MOST_ENDED = 1000  # number of the latest ended calls that waiting workers can still find


@dataclass(frozen=True, slots=True)
class _Shared:
    """A call that is run once for all workers. ``member`` runs it; after its end, its result is kept until
    ``until``."""

    member: str
    token: str
    text: str | None = None  # None: it is running
    ok: bool = True
    kept: bool = False  # for all workers; else only for those that waited
    until: float = 0.0


class MemoryStore:
    """The store. ``clock`` returns monotonic seconds; ``wall`` the time of day, which a next process continues."""

    wait = 0.0
    group = 1
    window = 1024
    gathering = 0.0
    writes = False
    lasts = False
    folder: Path | None = None

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._lock = RLock()
        self._rows_changed = Condition(self._lock)
        self._results_changed = Condition(self._lock)
        self._opening = secrets.randbits(40)
        self._mark = f"{self._opening}-"  # begin of the places of this opening
        self._facts: JsonObject | None = None
        self._stages: dict[str, MemoryStore] = {}
        self._parent: MemoryStore | None = None
        self._listeners: list[tuple[Callable[[], None], bool]] = []
        self._resuming = Resuming()
        self._phase: Phase | None = None
        self._fed = False
        self._session = 0  # 0: there is no feeder
        self._sessions = self._generation = 0
        self._lease_seconds = LEASE
        self._order = self._token = self._workers = self._position = 0
        self._here: set[int] = set()  # workers of this process: their leases end when they leave
        self._queued: dict[int, Row] = {}  # rows that have not ended, by order
        self._first_order = 0  # of the rows of this session; those before it were fed in an earlier one
        self._fresh: deque[int] = deque()  # orders of rows that were never leased; those of dropped rows are skipped
        self._returned: list[int] = []  # orders of rows whose lease has ended
        self._held: dict[int, tuple[Lease, int]] = {}  # leases and their workers, by order
        self._until: dict[int, float] = {}  # the ends of leases that end, by order
        # What earlier agents of a row recorded, in this opening or before it, by order. The steps of some agents of
        # rows of this process are in the files.
        self._steps: dict[int, list[KeptStep]] = {}
        self._in_files: dict[int, tuple[int, ...]] = {}
        self._first_end = inf  # no lease ends before
        self._commits: dict[int, tuple[int, set[str]]] = {}  # by worker: number and answer of its latest commit
        self._committing: set[int] = set()  # workers whose commit is being written
        self._results: deque[SharedResult] = deque()
        self._ok = self._failed = self._resumed = 0
        self._done = Spent()  # by all workers, in this session
        self._events: deque[tuple[int, bytes]] = deque()  # of these workers, with their positions
        self._event_position = 0
        # Shares, calls, files
        self._table = Table()
        self._lent = False  # the next commit writes it
        self._calls: dict[str, _Shared] = {}
        self._calls_changed = Condition(self._lock)
        self._kept: deque[tuple[float, str]] = deque()  # end of keeping, key; replaced results are skipped
        self._ended: deque[tuple[int, str]] = deque(maxlen=MOST_ENDED)
        self._call_position = 0
        self._files: dict[str, str] = {}
        self._jobs: list[bytes] = []
        self._followed: dict[str, float] = {}  # row that a viewer follows → until when
        self._reported: dict[str, tuple[JsonObject, float]] = {}  # its conversation, and until when it is shown

    def blocks(self, call: str) -> bool:
        return call == "wait_calls"

    def describe(
        self, schema: OutputSchema[object] | None, row_schema: OutputSchema[object] | None, *, messages: bool
    ) -> None:
        """Do nothing: rows and results are objects."""

    # What a store with files does in addition

    def _begin(self, facts: JsonObject, resuming: Resuming) -> JsonObject | None:
        """Begin a session in the files. Returns the facts of the session before, or None."""
        previous = self._facts
        if previous is not None and not (resuming.resume or resuming.force):
            raise SpecError("this run was fed before: resume it")
        return previous

    def _write_facts(self, facts: JsonObject) -> None: ...

    def _end(self, facts: JsonObject, phase: Phase) -> None: ...

    def _past(self, rows: Sequence[Row]) -> list[list[KeptStep]] | None:
        """Return what earlier sessions recorded for each row; None if nothing was recorded."""
        return None

    def _record(
        self, worker: int, changes: Sequence[RowChange], learnt: tuple[int, ...] | None
    ) -> Sequence[tuple[KeptStep, ...]]:
        """Write changes to the files, all of them or none. Returns the steps of each change as they were recorded."""
        return [change.steps for change in changes]

    def _read_steps(self, agent: int) -> Sequence[KeptStep]:
        """Return everything that the files have of an agent."""
        return ()

    def _keeps_past(self) -> bool:
        """Whether ``claim`` may find steps of earlier sessions."""
        return False

    def _write_table(self, table: JsonObject) -> None:
        """Write the table of shares before a worker gets its shares, because the table has the budget."""

    def _open_stage(self, name: str) -> MemoryStore:
        return MemoryStore(self._clock, self._wall)

    # The run

    def facts(self) -> JsonObject | None:
        with self._lock:
            return None if self._facts is None else dict(self._facts)

    def stage(self, name: str) -> MemoryStore:
        with self._lock:
            store = self._stages.get(name)
            if store is None:
                store = self._stages[name] = self._open_stage(name)
                store._parent = self
            return store

    def open(self, resuming: Resuming) -> None: ...

    def close(self) -> None:
        with self._lock:
            self._changed()

    def listen(self, changed: Callable[[], None], *, results: bool = False) -> None:
        self._listeners.append((changed, results))

    def _changed(self, *, results: bool = True) -> None:
        self._rows_changed.notify_all()
        self._results_changed.notify_all()
        for listener, only_results in self._listeners:
            if results or not only_results:
                listener()

    # The feeder

    def open_feed(self, facts: JsonObject, resuming: Resuming, *, keep_results_only: bool = False) -> FeederSession:
        previous = self._begin(facts, resuming)
        with self._lock:
            if previous is None or previous.get("fingerprint") != facts.get("fingerprint"):
                self._generation += 1
                self._drop(list(self._queued))
            self._facts = dict(facts)
            self._resuming = resuming
            self._phase = "running"
            self._fed = False
            self._sessions += 1
            self._session = self._sessions
            self._first_order = self._order + 1
            self._ok = self._failed = self._resumed = 0
            self._done = Spent()
            self._events.clear()
            lease = facts.get("lease")
            self._lease_seconds = float(lease) if isinstance(lease, int | float) else LEASE
            return FeederSession(self._session, previous, str(self._position))

    def keep_feed(self, session: int) -> RunStanding:
        with self._lock:
            self._check_feeder(session)
            if self._clock() >= self._first_end:  # no worker may be there that takes rows
                self._end_leases()
            return self.standing()

    def write_facts(self, session: int, facts: JsonObject) -> None:
        with self._lock:
            self._check_feeder(session)
            self._facts = dict(facts)
        self._write_facts(facts)

    def announce(self) -> bool:
        return False

    def stop_announcing(self) -> None: ...

    def carried(self, values: Sequence[object]) -> Sequence[object]:
        return values

    def feed(self, session: int, rows: Sequence[Row]) -> list[object]:
        past = self._past(rows)
        with self._lock:
            self._check_feeder(session)
            for place, row in enumerate(rows):
                self._order = order = self._order + 1
                self._queued[order] = row
                self._fresh.append(order)
                if past is not None and past[place]:
                    self._steps[order] = past[place]
            self._changed(results=False)
            return [None] * len(rows)

    def end_inputs(self, session: int) -> None:
        with self._lock:
            self._check_feeder(session)
            self._fed = True
            self._drop([order for order in self._queued if order < self._first_order])
            self._changed(results=False)

    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        position = int(after)
        with self._lock:
            if wait > 0:
                self._wait_for_result(position, wait)
            results = self._results
            while results and int(results[0].position) <= position:
                results.popleft()
            return [*islice(results, most)]

    def _wait_for_result(self, position: int, wait: float) -> None:
        until = self._clock() + wait
        while (not self._results or self._position <= position) and (left := until - self._clock()) > 0:
            self._results_changed.wait(left)

    def set_phase(self, session: int, phase: Phase) -> None:
        with self._lock:
            self._check_feeder(session)
            self._phase = phase
            self._changed()

    def close_feed(self, session: int, facts: JsonObject, phase: Phase) -> None:
        with self._lock:
            self._check_feeder(session)
        self._end(facts, phase)
        with self._lock:
            self._facts = dict(facts)
            self._phase, self._session = phase, 0
            self._events.clear()
            self._changed()

    def worked(self) -> Mapping[str, float]:
        with self._lock:
            return self._done.counts

    def events(self, session: int, after: str, most: int) -> list[tuple[str, bytes]]:
        position = int(after)
        with self._lock:
            self._check_feeder(session)
            while self._events and self._events[0][0] <= position:
                self._events.popleft()
            return [(str(place), events) for place, events in islice(self._events, most)]

    @property
    def _observed(self) -> bool:
        """Whether the feeder of this session has observers."""
        return self._session > 0 and bool(self._facts and self._facts.get(OBSERVED))

    def spent(self) -> Spent:
        with self._lock:
            tokens = self._table.spent_of(BUDGET_TOKENS)
            nano = self._table.spent_of(BUDGET_COST)
            return Spent(tokens, nano or None)

    def learnt(self) -> tuple[int, ...] | None:
        return None

    def lend(self, member: str, claims: Mapping[str, Claim]) -> Mapping[str, Grant]:
        with self._lock:
            self._lent = True
            return self._table.beat(member, self._wall(), FOREVER, claims).grants

    def _check_feeder(self, session: int) -> None:
        if session != self._session:
            raise FeederReplaced("another feeder feeds this run now")

    def _drop(self, orders: Iterable[int]) -> None:
        """Forget rows."""
        for order in orders:
            for kept in (self._queued, self._held, self._until, self._steps, self._in_files):
                kept.pop(order, None)

    # Workers

    def standing(self) -> RunStanding:
        with self._lock:
            if self._phase is None:
                raise StoreError("there is no run")
            held = len(self._held)
            counts = Counts(len(self._queued) - held, held, self._ok, self._failed, self._fed)
            # Workers of an earlier opening must leave, so the number is unique over all openings.
            number = self._opening + self._generation
            return RunStanding(self._phase, number, self._session > 0, counts, self._observed)

    def join(self, description: JsonObject) -> int:
        with self._lock:
            self._workers += 1
            if description.get("feeder"):
                self._here.add(self._workers)
            return self._workers

    def agent_numbers(self, worker: int) -> Iterator[int]:
        return count(worker << NUMBERS | 1)

    @property
    def unstarted(self) -> int:
        """The number of rows that can be leased, without rows whose lease has expired."""
        return len(self._fresh) + len(self._returned)

    def take(self, worker: int, most: int, wait: float) -> list[Lease]:
        with self._lock:
            return self._take(worker, most) or (self._take_later(worker, most, wait) if wait > 0 else [])

    def _take_later(self, worker: int, most: int, wait: float) -> list[Lease]:
        rows: list[Lease] = []
        until = self._clock() + wait
        while not rows and (left := until - self._clock()) > 0 and self._phase != "ended":
            self._rows_changed.wait(min(left, max(0.0, self._first_end - self._clock())))
            rows = self._take(worker, most)
        return rows

    def _take(self, worker: int, most: int) -> list[Lease]:
        if self._first_end != inf and self._clock() >= self._first_end:
            self._end_leases()
        rows: list[Lease] = []
        if self._phase != "running":  # the record is closed as soon as no row is leased
            return rows
        while len(rows) < most and (self._returned or self._fresh):
            order = heappop(self._returned) if self._returned else self._fresh.popleft()
            if order in self._queued and order not in self._held:
                rows.append(self._lease(order, worker))
        return rows

    def _lease(self, order: int, worker: int) -> Lease:
        self._token += 1
        row, resuming = self._queued[order], self._resuming
        if agents := self._in_files.pop(order, ()):  # the row is taken over
            later = [step for step in self._steps.get(order, ()) if step.agent not in agents]
            self._steps[order] = [*(step for agent in agents for step in self._read_steps(agent)), *later]
        lease = Lease(
            row,
            f"{self._mark}{order}",
            self._token,
            tuple(self._steps.get(order, ())),
            resuming.retry_of(row),
            not resuming.force,
            self._keeps_past(),
        )
        self._held[order] = lease, worker
        if worker not in self._here:
            self._extend((order,), worker)
        return lease

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> list[tuple[KeptStep, ...]]:
        return [()] * len(wanted)

    def _release(self, order: int) -> None:
        """End the lease of a row. The row comes before rows that were never leased."""
        del self._held[order]
        self._until.pop(order, None)
        heappush(self._returned, order)

    def _extend(self, orders: Iterable[int], worker: int) -> None:
        """Let the leases of these rows begin now."""
        until = self._clock() + self._lease_seconds
        for order in orders:
            if order in self._held and self._held[order][1] == worker:  # else another one has taken it meanwhile
                self._until[order] = until
        self._first_end = min(self._first_end, until)

    def _end_leases(self) -> None:
        """End the leases whose time is over. While a commit is being written, its worker keeps its rows."""
        now = self._clock()
        ended = (order for order, until in self._until.items() if until <= now)
        expired = [order for order in ended if self._held[order][1] not in self._committing]
        for order in expired:
            self._release(order)
        self._first_end = min(self._until.values(), default=inf)
        if expired:
            self._changed()  # also for a feeder that waits until no row is leased

    def _holder(self, worker: int, lease: Lease) -> int | None:
        """Return the order of the row if the worker holds this lease, else None."""
        if not lease.place.startswith(self._mark):
            return None
        order = int(lease.place[len(self._mark) :])
        held = self._held.get(order)
        return order if held is not None and held[1] == worker and held[0].token == lease.token else None

    def renew(self, worker: int, leases: Sequence[Lease]) -> tuple[set[str], RunStanding]:
        with self._lock:
            orders = [self._holder(worker, lease) for lease in leases]
            if worker not in self._here:  # its leases end when it leaves
                self._extend([order for order in orders if order is not None], worker)
            lost = {lease.place for lease, order in zip(leases, orders, strict=True) if order is None}
            return lost, self.standing()

    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        held: list[int] = []
        valid: list[RowChange] = []
        lost: set[str] = set()
        with self._lock:
            # A worker that lost the connection repeats its commit, even while the first one is being written.
            while worker in self._committing:
                self._rows_changed.wait()
            latest = self._commits.get(worker)
            if latest is not None and latest[0] == number:
                return latest[1]
            self._committing.add(worker)
            if commit.spent is not NOTHING_SPENT:
                self._done += commit.spent
            if commit.spent.events and self._observed:
                self._event_position += 1
                self._events.append((self._event_position, commit.spent.events))
            for change in commit.changes:
                order = self._holder(worker, change.lease)
                if order is None:
                    lost.add(change.lease.place)
                else:
                    held.append(order)
                    valid.append(change)
        recorded: Sequence[tuple[KeptStep, ...]] | None = None
        try:
            recorded = self._record(worker, valid, commit.learnt)
        finally:
            with self._lock:
                if worker not in self._here:
                    self._extend(held, worker)
                if recorded is not None:
                    self._apply(worker, held, valid, recorded)
                    self._commits[worker] = number, lost
                self._committing.discard(worker)
                self._rows_changed.notify_all()
        return lost

    def _apply(
        self,
        worker: int,
        held: Sequence[int],
        changes: Sequence[RowChange],
        recorded: Sequence[tuple[KeptStep, ...]],
    ) -> None:
        """Apply a commit to the queue after it was written. ``recorded`` are the steps of each change as they were
        written."""
        in_files = self.writes and worker in self._here
        ended = False
        for order, change, steps in zip(held, changes, recorded, strict=True):
            row = self._queued.get(order)  # None: it was dropped meanwhile
            if change.result is None:
                if row is None:
                    continue
                if not in_files:
                    self._steps.setdefault(order, []).extend(steps)
                    continue
                for step in steps:  # few rows of this process are taken over
                    agents = self._in_files.get(order, ())
                    if step.agent not in agents:
                        self._in_files[order] = (*agents, step.agent)
                continue
            ended = True
            self._position += 1
            index = change.lease.row.index
            value = None if row is None else row.value
            result = SharedResult(str(self._position), index, change.result, True, worker, value)
            self._results.append(result)
            self._drop((order,))
            if change.error:
                self._failed += 1
            else:
                self._ok += 1
            self._resumed += change.resumed
        if ended:
            self._changed()

    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        with self._lock:
            for order in [self._holder(worker, lease) for lease in leases]:
                if order is not None:
                    self._release(order)
            self._changed()

    def leave(self, worker: int) -> None:
        with self._lock:
            self._commits.pop(worker, None)
            self.hand_back(worker, [lease for lease, holder in self._held.values() if holder == worker])

    # Shares

    def beat(
        self,
        member: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        # The table keeps the membership longer than the worker expects, so the worker stops using its shares first.
        return self._change(lambda table, now: table.beat(member, now, 1.2 * seconds, claims, learnt, status))

    def resign(self, member: str) -> None:
        self._change(lambda table, now: table.leave(member, now))

    def table(self) -> tuple[Table, float]:
        whole = self._whole
        with whole._lock:
            return Table.from_json(whole._table.to_json()), whole._wall()

    def steer(self, request: JsonObject) -> Steering:
        def change(table: Table, _: float) -> Steering:
            table.steering = steered(table.steering, request)
            return table.steering

        return self._change(change)

    @property
    def _whole(self) -> MemoryStore:
        """The record of the pipeline that this stage belongs to: workers share its limits and its calls."""
        return self if self._parent is None else self._parent._whole

    def _change(self, change: Callable[[Table, float], T]) -> T:
        whole = self._whole
        with whole._lock:
            answer = change(whole._table, whole._wall())
            written = whole._table.to_json()
            whole._write_table(written)
            return answer

    # Calls that run once

    def begin_call(self, member: str, key: str, token: str, seen: str) -> SharedCall:
        whole = self._whole
        with whole._lock:
            now = whole._wall()
            whole._forget(now)
            call, position = whole._calls.get(key), str(whole._call_position)
            if call is not None and call.text is not None and (call.kept or call.token == seen):
                return SharedCall("done", call.token, position, call.text, call.ok)
            running = call is not None and call.text is None and call.member != member
            if call is not None and running and call.member in whole._table.live(now):
                return SharedCall("theirs", call.token, position)
            whole._calls[key] = _Shared(member, token)
            return SharedCall("mine", token, position)

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        whole = self._whole
        with whole._lock:
            call = whole._calls.get(key)
            if call is None or call.token != token:
                return
            if text is None or len(text) > LARGEST_SHARED:
                del whole._calls[key]
            else:
                until = whole._wall() + (keep or UNKEPT_SECONDS)
                whole._calls[key] = replace(call, text=text, ok=ok, kept=keep > 0, until=until)
                whole._kept.append((until, key))
            whole._call_position += 1
            whole._ended.append((whole._call_position, key))
            whole._calls_changed.notify_all()

    def _forget(self, now: float) -> None:
        """Drop expired results. A result behind one with a longer time is dropped a little later."""
        while self._kept and self._kept[0][0] <= now:
            until, key = self._kept.popleft()
            call = self._calls.get(key)
            if call is not None and call.text is not None and call.until <= until:
                del self._calls[key]

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        whole, after = self._whole, int(position)
        with whole._lock:
            whole._calls_changed.wait_for(lambda: whole._call_position > after, seconds)
            return str(whole._call_position), {key for number, key in whole._ended if number > after}

    # Files

    def put_file(self, name: str, text: str) -> None:
        with self._lock:
            self._whole._files[name] = text

    def get_file(self, name: str) -> str | None:
        with self._lock:
            return self._whole._files.get(name)

    # Jobs at batch APIs

    def outlasts(self) -> bool:
        return self.writes

    def job_lines(self) -> list[bytes]:
        return self._whole._read_jobs()

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        self._whole._write_jobs(lines)

    def _read_jobs(self) -> list[bytes]:
        with self._lock:
            return [*self._jobs]

    def _write_jobs(self, lines: Sequence[bytes]) -> None:
        with self._lock:
            self._jobs += lines

    # Rows that viewers follow

    def follow_row(self, row: str) -> JsonObject | None:
        whole = self._whole
        with whole._lock:
            now = whole._clock()
            whole._followed[row] = now + FOLLOWED_SECONDS
            told, until = whole._reported.get(row, (None, 0.0))
            return told if until > now else None

    def followed_rows(self) -> list[str]:
        whole = self._whole
        with whole._lock:
            now = whole._clock()
            whole._followed = {row: until for row, until in whole._followed.items() if until > now}
            return list(whole._followed)

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        whole = self._whole
        with whole._lock:
            now = whole._clock()
            kept = {row: told for row, told in whole._reported.items() if told[1] > now}
            whole._reported = kept | {row: (told, now + FOLLOWED_SECONDS) for row, told in rows.items()}

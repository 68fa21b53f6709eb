"""A run that several processes share, stored in one SQLite file that one process owns.

This is ``RunStore`` for a cluster without Redis: the driver of the cluster owns the file, and its workers reach it
through an actor (``ray/relay.py``). Rows, steps and results are in the file. The queue and the leases are in memory: no
worker outlives the driver, so no row is leased when the file is opened. Fencing tokens still grow from one opening to
the next. The lock of the run directory keeps a second driver out.

Calls may come from many threads. One lock makes each call atomic; ``take`` and ``results`` release it while they wait.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from threading import Condition, RLock
from typing import NoReturn, cast

from batch_agent.errors import SpecError, StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.record.lent_local import LocalLent
from batch_agent.record.private import private
from batch_agent.record.shared import (
    LEASE,
    Counts,
    FeederReplaced,
    FeederSitting,
    KeptStep,
    LeasedRow,
    NewRow,
    Phase,
    RowChange,
    RowLease,
    RunStanding,
    SharedResult,
)

SHARED = "shared.db"  # in the run directory
EPOCH = 1 << 40  # number of tokens reserved for one opening of the file

SCHEMA = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, key BLOB NOT NULL, sitting INTEGER NOT NULL, place INTEGER NOT NULL,
    value BLOB NOT NULL, result BLOB, error TEXT, position INTEGER, ended_in INTEGER
);
CREATE INDEX IF NOT EXISTS entry_key ON entry (key);
CREATE UNIQUE INDEX IF NOT EXISTS entry_position ON entry (position) WHERE position IS NOT NULL;
CREATE TABLE IF NOT EXISTS step (
    id INTEGER PRIMARY KEY, entry INTEGER NOT NULL, agent INTEGER NOT NULL, key BLOB NOT NULL, content BLOB NOT NULL,
    kind INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS step_entry ON step (entry);
"""
# Among rows with the same key, finished ones are used first, then unfinished ones, then failed ones.
FIND = """
SELECT id, name, place, result, error FROM entry WHERE key = ? AND sitting < ?
ORDER BY CASE WHEN error = '' THEN 0 WHEN error IS NULL THEN 1 ELSE 2 END, id LIMIT 1
"""
FED = "SELECT result, ended_in FROM entry WHERE key = ? AND sitting = ? AND place = ?"
RESULTS = "SELECT position, name, place, result, ended_in FROM entry WHERE position > ? ORDER BY position LIMIT ?"


@dataclass(slots=True)
class _Queued:
    """A row that has not ended. ``until`` is the end of its lease, by the store's clock."""

    id: int
    name: str
    order: int
    sitting: int
    lease: RowLease | None = None
    worker: int = 0
    until: float = 0.0


class SqliteRunStore:
    """``clock`` returns monotonic seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StoreError if the file cannot be used."""
        self._path, self._clock = path, clock
        self._lock = RLock()
        self._rows_changed, self._results_changed = Condition(self._lock), Condition(self._lock)
        self._queued: dict[int, _Queued] = {}
        self._waiting: list[tuple[int, int]] = []  # order and id of rows without a lease; outdated entries are skipped
        self._held: OrderedDict[str, _Queued] = OrderedDict()  # by place; the lease that ends first comes first
        self._commits: dict[int, tuple[int, set[str]]] = {}  # by worker: number and answer of its latest commit
        self._order = self._ok = self._failed = 0
        self._sitting = 0  # 0: there is no feeder
        self._lease_seconds = LEASE
        with suppress(OSError):  # SQLite reports the error below
            os.close(private(path, os.O_RDWR | os.O_CREAT))
        with self._explained():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(f"BEGIN; {SCHEMA} COMMIT")
            self._epoch = int(self._fact("epoch") or 0) + 1
            self._set_facts(epoch=str(self._epoch))
            self._position = int(self._db.execute("SELECT coalesce(max(position), 0) FROM entry").fetchone()[0])
            table = cast(JsonObject, from_json((self._fact("lent") or "{}").encode()))
        self._token = self._epoch * EPOCH
        self._lent = LocalLent(table, self._write_lent)

    def stage(self, name: str) -> NoReturn:
        raise SpecError("the stages of a pipeline are shared only through Redis")

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._rows_changed.notify_all()
            self._results_changed.notify_all()

    def facts(self) -> JsonObject | None:
        with self._explained():
            found = self._fact("facts")
            return None if found is None else cast(JsonObject, from_json(found.encode()))

    # What a run directory needs from its record

    def sessions(self) -> int:
        """Return how many feeder sessions have begun."""
        with self._explained():
            return int(self._fact("sitting") or 0)

    def next_agent(self) -> int:
        """Return 1 if no row was ever fed, else 2."""
        with self._explained():
            return int(self._db.execute("SELECT count(*) + 1 FROM (SELECT 1 FROM entry LIMIT 1)").fetchone()[0])

    def lent(self) -> LocalLent:
        return self._lent

    def _write_lent(self, table: JsonObject) -> None:
        with self._transaction():
            self._set_facts(lent=to_json(table).decode())

    # The feeder

    def open_feed(self, facts: JsonObject, *, resume: bool, keep_results_only: bool) -> FeederSitting:
        with self._transaction():
            previous = self.facts()
            if previous is not None and not resume:
                raise SpecError(
                    f"{self._path.parent} holds a run already: resume it (resume=True, or batch-agent resume), or "
                    "use another directory"
                )
            generation = int(self._fact("generation") or 0)
            if previous is None or previous.get("fingerprint") != facts.get("fingerprint"):
                generation += 1
                self._drop(self._queued.values())
            self._sitting = int(self._fact("sitting") or 0) + 1
            self._ok = self._failed = 0
            self._set_facts(
                facts=to_json(facts).decode(),
                sitting=str(self._sitting),
                generation=str(generation),
                phase="running",
                fed="",
                keep="results" if keep_results_only else "all",
            )
            self._lease_seconds = float(cast(float, facts.get("lease", LEASE)))
            return FeederSitting(self._sitting, previous, f"{self._position}-0")

    def keep_feed(self, sitting: int) -> RunStanding:
        with self._explained():
            self._check_feeder(sitting)
            return self.standing()

    def write_facts(self, sitting: int, facts: JsonObject) -> None:
        with self._transaction():
            self._check_feeder(sitting)
            self._set_facts(facts=to_json(facts).decode())

    def feed(self, sitting: int, rows: Sequence[NewRow], retry: bool | Collection[str]) -> list[bytes | None]:
        with self._transaction():
            self._check_feeder(sitting)
            found = [self._feed_row(sitting, row, retry) for row in rows]
            self._rows_changed.notify_all()
            return found

    def _feed_row(self, sitting: int, new: NewRow, retry: bool | Collection[str]) -> bytes | None:
        fed = self._db.execute(FED, (new.key, sitting, new.index)).fetchone()
        if fed is not None:  # the call is repeated
            return fed[0] if fed[1] is not None and fed[1] < sitting else None
        past = self._db.execute(FIND, (new.key, sitting)).fetchone()
        if past is None:
            count = self._db.execute("SELECT count(*) FROM entry WHERE key = ?", (new.key,)).fetchone()[0]
            name = f"{new.key.hex()}-{count}" if count else new.key.hex()
            query = "INSERT INTO entry (name, key, sitting, place, value) VALUES (?, ?, ?, ?, ?) RETURNING id"
            number = self._db.execute(query, (name, new.key, sitting, new.index, new.value)).fetchone()[0]
            self._enqueue(number, name, sitting)
            return None
        number, name, place, result, error = past
        self._db.execute("UPDATE entry SET sitting = ?, place = ? WHERE id = ?", (sitting, new.index, number))
        retried = error and (retry if isinstance(retry, bool) else error in retry)
        if error is not None and not retried:
            self._count(error)
            return cast(bytes, result)
        queued = self._queued.get(number)
        if queued is not None and place == new.index:
            queued.sitting = sitting
            return None
        if queued is not None:
            self._drop([queued])  # its worker would deliver the result under the old index
        cleared = "result = NULL, error = NULL, position = NULL, ended_in = NULL"
        self._db.execute(f"UPDATE entry SET {cleared} WHERE id = ?", (number,))
        self._enqueue(number, name, sitting)
        return None

    def _enqueue(self, number: int, name: str, sitting: int) -> None:
        self._order += 1
        self._queued[number] = _Queued(number, name, self._order, sitting)
        heappush(self._waiting, (self._order, number))

    def end_inputs(self, sitting: int) -> None:
        with self._transaction():
            self._check_feeder(sitting)
            self._set_facts(fed="yes")
            self._drop(queued for queued in self._queued.values() if queued.sitting < sitting)
            self._rows_changed.notify_all()

    def _drop(self, rows: Collection[_Queued] | Iterator[_Queued]) -> None:
        for queued in list(rows):
            del self._queued[queued.id]
            if queued.lease is not None:
                self._held.pop(queued.lease.place, None)

    def results(self, sitting: int, after: str, count: int, wait: float) -> list[SharedResult]:
        until, position = self._clock() + wait, int(after.partition("-")[0])
        with self._explained():
            while not (found := self._db.execute(RESULTS, (position, count)).fetchall()):
                left = until - self._clock()
                if left <= 0:
                    break
                self._results_changed.wait(left)
        return [
            SharedResult(f"{at}-0", name, place, result, ended_in == sitting)
            for at, name, place, result, ended_in in found
        ]

    def set_phase(self, sitting: int, phase: Phase) -> None:
        with self._transaction():
            self._check_feeder(sitting)
            self._set_facts(phase=phase)
            self._rows_changed.notify_all()

    def close_feed(self, sitting: int, facts: JsonObject, phase: Phase) -> None:
        with self._transaction():
            self._check_feeder(sitting)
            self._set_facts(facts=to_json(facts).decode(), phase=phase)
            self._sitting = 0
            self._rows_changed.notify_all()

    def _check_feeder(self, sitting: int) -> None:
        if sitting != self._sitting:
            raise FeederReplaced(f"another process feeds the run at {self._path.parent} now")

    # Workers

    def standing(self) -> RunStanding:
        with self._explained():
            phase = self._fact("phase")
            if phase is None:
                raise StoreError(f"there is no run at {self._path.parent}")
            held = len(self._held)
            counts = Counts(len(self._queued) - held, held, self._ok, self._failed, bool(self._fact("fed")))
            return RunStanding(cast(Phase, phase), int(self._fact("generation") or 0), self._sitting > 0, counts)

    def join(self, description: JsonObject) -> int:
        with self._transaction():
            worker = int(self._fact("workers") or 0) + 1
            self._set_facts(workers=str(worker))
            return worker

    def take(self, worker: int, count: int, wait: float) -> list[LeasedRow]:
        until = self._clock() + wait
        with self._explained():
            while True:
                self._end_leases()
                rows: list[LeasedRow] = []
                while len(rows) < count and (queued := self._next()) is not None:
                    rows.append(self._lease(queued, worker))
                left = until - self._clock()
                if rows or left <= 0 or self.standing().phase == "ended":
                    return rows
                first = next(iter(self._held.values()), None)
                self._rows_changed.wait(left if first is None else min(left, max(0.0, first.until - self._clock())))

    def _next(self) -> _Queued | None:
        while self._waiting:
            _, number = heappop(self._waiting)
            queued = self._queued.get(number)
            if queued is not None and queued.lease is None:
                return queued
        return None

    def _lease(self, queued: _Queued, worker: int) -> LeasedRow:
        index, value = self._db.execute("SELECT place, value FROM entry WHERE id = ?", (queued.id,)).fetchone()
        query = "SELECT agent, key, content, kind, body FROM step WHERE entry = ? ORDER BY id"
        steps = tuple(KeptStep(*step) for step in self._db.execute(query, (queued.id,)))
        self._token += 1
        lease = RowLease(queued.name, f"{self._epoch}-{queued.order}", self._token, index)
        queued.lease, queued.worker, queued.until = lease, worker, self._clock() + self._lease_seconds
        self._held[lease.place] = queued
        return LeasedRow(lease, value, steps)

    def _release(self, queued: _Queued) -> None:
        """End the lease of a row. The row comes before rows that were never leased."""
        assert queued.lease is not None
        del self._held[queued.lease.place]
        queued.lease = None
        heappush(self._waiting, (queued.order, queued.id))

    def _end_leases(self) -> None:
        now = self._clock()
        while self._held and (first := next(iter(self._held.values()))).until <= now:
            self._release(first)

    def _holder(self, worker: int, lease: RowLease) -> _Queued | None:
        """Return the row if the worker holds this lease, else None."""
        queued = self._held.get(lease.place)
        if queued is None or queued.lease is None or queued.worker != worker or queued.lease.token != lease.token:
            return None
        return queued

    def renew(self, worker: int, leases: Sequence[RowLease]) -> tuple[set[str], RunStanding]:
        with self._lock:
            lost = set()
            for lease in leases:
                queued = self._holder(worker, lease)
                if queued is None:
                    lost.add(lease.place)
                else:
                    queued.until = self._clock() + self._lease_seconds
                    self._held.move_to_end(lease.place)
            return lost, self.standing()

    def commit(self, worker: int, number: int, changes: Sequence[RowChange]) -> set[str]:
        with self._lock:
            latest = self._commits.get(worker)
            if latest is not None and latest[0] == number:
                return latest[1]
            holders = [(change, self._holder(worker, change.lease)) for change in changes]
            with self._transaction():
                for change, queued in holders:
                    if queued is not None:
                        self._record(queued, change)
            for change, queued in holders:  # only after the commit is on disk
                if queued is not None and change.result is not None:
                    self._drop([queued])
                    self._count(change.error)
            lost = {change.lease.place for change, queued in holders if queued is None}
            self._commits[worker] = number, lost
            self._results_changed.notify_all()
            return lost

    def _record(self, queued: _Queued, change: RowChange) -> None:
        self._db.executemany(
            "INSERT INTO step (entry, agent, key, content, kind, body) VALUES (?, ?, ?, ?, ?, ?)",
            ((queued.id, each.agent, each.key, each.content, each.kind, each.body) for each in change.steps),
        )
        if change.result is None:
            return
        self._position += 1
        self._db.execute(
            "UPDATE entry SET result = ?, error = ?, position = ?, ended_in = sitting WHERE id = ?",
            (change.result, change.error, self._position, queued.id),
        )
        if not change.error and self._fact("keep") == "results":
            self._db.execute("DELETE FROM step WHERE entry = ?", (queued.id,))

    def hand_back(self, worker: int, leases: Sequence[RowLease]) -> None:
        with self._lock:
            for queued in [self._holder(worker, lease) for lease in leases]:
                if queued is not None:
                    self._release(queued)
            self._rows_changed.notify_all()

    def leave(self, worker: int) -> None:
        with self._lock:
            self._commits.pop(worker, None)
            self.hand_back(worker, [q.lease for q in self._held.values() if q.worker == worker and q.lease])

    def _count(self, error: str) -> None:
        self._ok += not error
        self._failed += bool(error)

    # The file

    def _fact(self, name: str) -> str | None:
        found = self._db.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def _set_facts(self, **facts: str) -> None:
        self._db.executemany("INSERT OR REPLACE INTO fact VALUES (?, ?)", facts.items())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StoreError(f"the run at {self._path.parent} cannot be recorded: {error}") from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

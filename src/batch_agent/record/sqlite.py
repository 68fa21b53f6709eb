"""The journal in one SQLite file. All methods block, and run in the journal's thread.

Records are only appended, so a commit costs the same for the first row and for the millionth. No index on keys is
maintained during a run. A resumed run sorts the recorded agents by key once, into a temporary table, and claims from
it. The order is the order of appending; no clock is used.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self
from zlib import crc32

from batch_agent.errors import StoreError
from batch_agent.record.base import Identity, RunProgress
from batch_agent.record.codec import DONE, ENDED, FAILED, FORMAT, OLDEST, WRITES, decode
from batch_agent.record.private import private
from batch_agent.record.steps import Past, read_past
from batch_agent.record.store import KeptStep
from batch_agent.share.table import BUDGET_COST, BUDGET_TOKENS, DOLLAR, Table

logger = logging.getLogger("batch_agent")

LARGEST = 2**63 - 1  # the largest integer of SQLite
TABLE = "table"  # the fact that is the table of shares
FACTS = "facts"  # the fact that is a copy of run.json
APPLICATION_ID = 0x62614A6C  # marks the file as a journal: "baJl"
# Python releases its lock during each statement, and then waits for the event loop to get it back. So few large
# statements are faster.
COLUMNS = 6
INSERTS = tuple(
    (
        rows,
        f'INSERT INTO record (agent, key, row, kind, body, "check") VALUES {", ".join(["(?, ?, ?, ?, ?, ?)"] * rows)}',
    )
    for rows in (256, 64, 16, 4, 1)
)

SCHEMA = """
CREATE TABLE session (
    id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, started TEXT NOT NULL,
    ok INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, resumed INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0, cost REAL,
    leased_tokens INTEGER, leased_cost REAL, learnt TEXT
);
CREATE TABLE record (
    id INTEGER PRIMARY KEY, agent INTEGER NOT NULL, key BLOB NOT NULL, row BLOB NOT NULL,
    kind INTEGER NOT NULL, body BLOB NOT NULL, "check" INTEGER
);
CREATE INDEX record_agent ON record (agent);
CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
# What older formats lack, by the first format that has it.
RAISED = {
    4: """
ALTER TABLE session ADD COLUMN leased_tokens INTEGER;
ALTER TABLE session ADD COLUMN leased_cost REAL;
ALTER TABLE session ADD COLUMN learnt TEXT;
""",
    5: """
ALTER TABLE record ADD COLUMN "check" INTEGER;
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
""",
}
ADVANCES, CHECKS = 4, 5  # the first formats with advances, and with checksums and facts
BUSY = 60.0  # seconds to wait while another process locks the journal


@dataclass(frozen=True, slots=True)
class Glance:
    """A journal seen from outside. ``latest`` is the progress of its last session, but tokens and cost are those of all
    sessions."""

    sessions: int
    latest: RunProgress


class SqliteJournal:
    """May be used by one thread at a time."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self._path = path
        self._session = 0
        self._advance: tuple[int, float] = (0, 0.0)  # as written on disk
        self._full: bool | None = None  # whether commits are synced
        self._by_row = False
        self._claimed = bytearray()  # a bit for each recorded agent

    @classmethod
    def open(cls, path: Path, *, begun: bool = True) -> Self:
        """Open the journal at ``path``, or create it. An empty journal counts as damaged, unless no run has ``begun``
        here. Raises StoreError if it cannot be used."""
        was_there = begun and path.exists()
        with _explained(path):
            with suppress(OSError):  # SQLite reports the error below, and gives its side files the same mode
                os.close(private(path, os.O_RDWR | os.O_CREAT))
            journal = cls(_connect(path), path)
            try:
                journal._prepare(was_there)
            except BaseException:
                journal.close()
                raise
            return journal

    def _prepare(self, was_there: bool) -> None:
        db = self._db
        version = _version(db, self._path)
        if version is None and was_there:
            raise _damaged(self._path, "it is empty")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA temp_store = FILE")
        if version is None:
            db.executescript(
                f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT"
            )

    def begin(self, fingerprint: bytes, started: str) -> None:
        with _explained(self._path):
            # This format contains all older ones. Missing columns are added before anything new is written.
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            raised = "".join(added for since, added in RAISED.items() if version < since)
            self._db.executescript(f"BEGIN IMMEDIATE; {raised} PRAGMA user_version = {FORMAT}; COMMIT")
            row = self._db.execute(
                "INSERT INTO session (fingerprint, started) VALUES (?, ?) RETURNING id", (fingerprint, started)
            ).fetchone()
            self._session = row[0]

    def sessions(self) -> int:
        with _explained(self._path):
            return int(self._db.execute("SELECT count(*) FROM session").fetchone()[0])

    def next_agent(self) -> int:
        with _explained(self._path):
            return int(self._db.execute("SELECT coalesce(max(agent), 0) + 1 FROM record").fetchone()[0])

    def spent(self, *, shared: bool = True) -> tuple[int, float]:
        """Return the tokens and $ of all sessions. A session that did not return its advance counts as having spent all
        of it. ``shared``: with what is in the table of shares."""
        with _explained(self._path):
            tokens, cost = _spent(self._db, shared=shared)
            return tokens, cost or 0.0

    def learnt(self) -> tuple[int, ...] | None:
        with _explained(self._path):
            query = "SELECT learnt FROM session WHERE learnt IS NOT NULL ORDER BY id DESC LIMIT 1"
            found = self._db.execute(query).fetchone()
            try:
                return None if found is None else tuple(map(int, json.loads(found[0])))
            except (ValueError, TypeError):  # damaged: a budget learns again
                return None

    def commit(self, steps: Sequence[KeptStep], progress: RunProgress) -> None:
        """Write all steps, and an advance that grew, to disk before this returns, or write none of them. The progress
        is on disk at the latest together with the next steps."""
        values: list[object] = []
        for step in steps:
            check = crc32(step.body, crc32(step.key + step.content, step.agent & 0xFFFF_FFFF) ^ step.kind)
            values += (step.agent, step.key, step.content, step.kind, step.body, check)
        with _explained(self._path):
            if not self._path.exists():  # SQLite would continue writing to the deleted file
                raise StoreError(f"the journal {self._path} is gone, with everything that was recorded in it")
            # Progress alone need not survive a power failure: rows that come from the record are not worth an fsync.
            tokens, cost = advance = progress.advance or (0, 0.0)
            full = bool(steps) or tokens > self._advance[0] or cost > self._advance[1]
            if full is not self._full:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._full = full
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._insert(values)
                self._db.execute(
                    "UPDATE session SET ok = ?, failed = ?, resumed = ?, tokens = ?, cost = ?, "
                    "leased_tokens = ?, leased_cost = ?, learnt = ? WHERE id = ?",
                    (*_counts(progress), self._session),
                )
                self._db.execute("COMMIT")
                self._advance = advance
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _insert(self, values: list[object]) -> None:
        start = 0
        for rows, insert in INSERTS:
            while len(values) - start >= rows * COLUMNS:
                end = start + rows * COLUMNS
                self._db.execute(insert, values[start:end])
                start = end

    def sort_by(self, column: Literal["key", "row"]) -> None:
        self._by_row = column == "row"
        self._claimed = bytearray(self.next_agent() // 8 + 1)
        with _explained(self._path):
            self._db.execute(
                "CREATE TEMP TABLE past (sought BLOB, rank INTEGER, place INTEGER, PRIMARY KEY (sought, rank, place)) "
                "WITHOUT ROWID"
            )
            self._sort("key", "agent")
            if self._by_row:
                self._sort("row", "-agent")

    def _sort(self, column: str, place: str) -> None:
        # In a grouped row, SQLite takes the columns from the record with the maximum. Keys and rows are hashes of
        # different things, so they can share one table.
        rank = f"CASE WHEN kind IN ({DONE}, {ENDED}) THEN 0 WHEN kind = {FAILED} THEN 2 ELSE 1 END"
        self._db.execute(
            f"INSERT INTO past SELECT sought, {rank}, {place} "
            f"FROM (SELECT {column} AS sought, kind, agent, max(id) FROM record GROUP BY agent) ORDER BY 1, 2, 3"
        )

    def claim_steps(self, wanted: Sequence[Identity], rows: Sequence[int] = ()) -> list[tuple[KeptStep, ...]]:
        """Return the steps of a recorded agent for each row, or (). Each recorded agent is returned only once.
        ``rows`` are the indices of the rows, for warnings."""
        with _explained(self._path):
            named: Sequence[int | None] = rows or [None] * len(wanted)
            return [self._claim(identity, row) for identity, row in zip(wanted, named, strict=True)]

    def claim(self, wanted: Sequence[Identity]) -> list[Past | None]:
        """Return the record of each row, or None. Each recorded agent is returned only once."""
        return [self._read(steps) if steps else None for steps in self.claim_steps(wanted)]

    def _claim(self, identity: Identity, row: int | None) -> tuple[KeptStep, ...]:
        for sought in (identity.key, identity.row) if self._by_row else (identity.key,):
            while (agent := self._unclaimed(sought)) is not None:
                steps = self.kept_steps(agent)
                past = self._read(steps)
                if not past.unreadable or any(step.kind in WRITES for step in steps):
                    return steps
                # One unreadable record must not block the others.
                logger.warning(
                    "%s: the record of %s is unreadable and is ignored: %s",
                    self._path,
                    "one row" if row is None else f"row {row}",
                    past.unreadable,
                )
        return ()

    def _read(self, steps: Sequence[KeptStep]) -> Past:
        agent = steps[0].agent
        try:
            return read_past(agent, [decode(step.kind, step.body) for step in steps])
        except ValueError as error:
            return Past(agent, (), unreadable=str(error))

    def kept_steps(self, agent: int) -> tuple[KeptStep, ...]:
        """Return the steps of an agent. The body of a step whose checksum is wrong is b"", which cannot be read."""
        check = '"check"' if self._has_checks else "NULL"
        query = f"SELECT agent, key, row, kind, body, {check} FROM record WHERE agent = ? ORDER BY id"
        with _explained(self._path):
            found = [(KeptStep(*row[:5]), row[5]) for row in self._db.execute(query, (agent,))]
        return tuple(step if _is_whole(step, check) else replace(step, body=b"") for step, check in found)

    def steps(self, agent: int) -> list[tuple[int, bytes]]:
        """Return the kinds and bodies of the steps of an agent."""
        return [(step.kind, step.body) for step in self.kept_steps(agent)]

    def _unclaimed(self, sought: bytes) -> int | None:
        while True:
            found: tuple[int, int] | None = self._db.execute(
                "SELECT rank, place FROM past WHERE sought = ? ORDER BY rank, place LIMIT 1", (sought,)
            ).fetchone()
            if found is None:
                return None
            rank, place = found
            agent = abs(place)
            byte, bit = agent >> 3, 1 << (agent & 7)
            if not self._claimed[byte] & bit:
                self._claimed[byte] |= bit
                return agent
            # Already claimed. Most keys are never looked up again, so a row is deleted only here.
            self._db.execute("DELETE FROM past WHERE sought = ? AND rank = ? AND place = ?", (sought, rank, place))

    @property
    def _has_checks(self) -> bool:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0]) >= CHECKS

    def fact(self, name: str) -> str | None:
        """Return a fact about the run that was written with ``set_fact``, or None."""
        with _explained(self._path):
            if not self._has_checks:
                return None
            found = self._db.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
            return None if found is None else str(found[0])

    def set_fact(self, name: str, value: str) -> None:
        with _explained(self._path):
            self._db.execute("PRAGMA synchronous = FULL")
            self._full = True
            self._db.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))

    def fold(self, name: str, value: str) -> None:
        """Set a fact that has taken over what the sessions have spent: they count as having spent nothing."""
        with _explained(self._path):
            self._db.execute("PRAGMA synchronous = FULL")
            self._full = True
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))
            self._db.execute("UPDATE session SET tokens = 0, cost = NULL, leased_tokens = NULL, leased_cost = NULL")
            self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def _is_whole(step: KeptStep, check: int | None) -> bool:
    """Return whether a record is as it was written. The checksum also covers whose record it is, so that no record is
    taken for another. Older formats have no checksums."""
    body: object = step.body  # SQLite keeps any type
    whose = crc32(step.key + step.content, step.agent & 0xFFFF_FFFF)
    return isinstance(body, bytes) and (check is None or check == crc32(body, whose ^ step.kind))


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY, isolation_level=None, cached_statements=64, check_same_thread=False)


def glance(path: Path) -> Glance:
    """Return the progress in a journal, also while another process writes it."""
    with _explained(path, reading=True):
        db = connect_to_read(path)
        try:
            if _version(db, path) is None:
                return Glance(0, RunProgress())
            sessions = db.execute("SELECT count(*) FROM session").fetchone()[0]
            tokens, cost = _spent(db, looking=True)
            row = db.execute("SELECT ok, failed, resumed FROM session ORDER BY id DESC LIMIT 1").fetchone()
            ok, failed, resumed = row or (0, 0, 0)
            return Glance(sessions, RunProgress(ok, failed, resumed, tokens, cost))
        finally:
            db.close()


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a journal to read. Raises StoreError if this version cannot read its format."""
    with _explained(path, reading=True):
        db = connect_to_read(path)
        try:
            if _version(db, path) is None:
                raise _damaged(path, "it is empty")
        except BaseException:
            db.close()
            raise
        return db


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a read-only connection, which also works without permission to write. A closed journal is read without
    SQLite's side files, which a reader would create and leave behind."""
    address = path.resolve().as_uri()
    if path.exists() and not path.with_name(f"{path.name}-wal").exists():
        return sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True, isolation_level=None)
    db = sqlite3.connect(f"{address}?mode=ro", uri=True, isolation_level=None)
    try:
        db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        db.close()
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise StoreError(
                f"{path} cannot be read: {error}. It was not closed; to read it, you need permission to write in "
                f"{path.parent}"
            ) from None
        db = sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True, isolation_level=None)
    except BaseException:
        db.close()
        raise
    return db


def _counts(progress: RunProgress) -> tuple[int | float | str | None, ...]:
    tokens, cost = progress.advance or (None, None)
    ahead = None if tokens is None else min(tokens, LARGEST)
    learnt = None if progress.learnt is None else json.dumps(progress.learnt)
    spent = min(progress.tokens, LARGEST), progress.cost
    return progress.ok, progress.failed, progress.resumed, *spent, ahead, cost, learnt


def _spent(db: sqlite3.Connection, *, looking: bool = False, shared: bool = True) -> tuple[int, float | None]:
    """Return the tokens and $ of all sessions. An unreturned advance counts as spent. With ``looking``, the advance of
    the latest session does not count, because the session may still be running."""
    if int(db.execute("PRAGMA user_version").fetchone()[0]) < ADVANCES:
        query = "SELECT coalesce(sum(tokens), 0), sum(cost) FROM session"
    else:
        over = "id < (SELECT max(id) FROM session)" if looking else "TRUE"
        query = (
            f"SELECT coalesce(sum(CASE WHEN {over} AND leased_tokens > tokens THEN leased_tokens ELSE tokens END), 0), "
            f"sum(CASE WHEN {over} AND leased_cost > coalesce(cost, 0) THEN leased_cost ELSE cost END) FROM session"
        )
    tokens, cost = db.execute(query).fetchone()
    shared_tokens, shared_cost = _spent_by_workers(db) if shared else (0, 0.0)
    return int(tokens) + shared_tokens, cost if not shared_cost else (cost or 0.0) + shared_cost


def _spent_by_workers(db: sqlite3.Connection) -> tuple[int, float]:
    """Return the tokens and $ in the table from which several workers take their shares, if there is one."""
    if int(db.execute("PRAGMA user_version").fetchone()[0]) < CHECKS:
        return 0, 0.0
    found = db.execute("SELECT value FROM fact WHERE name = ?", (TABLE,)).fetchone()
    if found is None:
        return 0, 0.0
    table = Table.from_json(json.loads(found[0]))
    return table.spent_of(BUDGET_TOKENS), table.spent_of(BUDGET_COST) / DOLLAR


def _version(db: sqlite3.Connection, path: Path) -> int | None:
    """Return the format of a journal; None for an empty file."""
    tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if not tables:
        return None
    owner = db.execute("PRAGMA application_id").fetchone()[0]
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if owner != APPLICATION_ID:
        raise StoreError(f"{path} is the database of another program; use another run directory")
    if not OLDEST <= version <= FORMAT:
        age = "a newer" if version > FORMAT else "an older"
        raise StoreError(
            f"{path} was written by {age} version of this package (format {version}, this one reads {OLDEST} to "
            f"{FORMAT}): resume it with that version, or use another run directory"
        )
    return version


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(
        f"the journal {path} is damaged: {reason}. Restore a backup of it; or move {path.name} and the files "
        f"{path.name}-* away and resume: every row is then processed again"
    )


@contextmanager
def _explained(path: Path, *, reading: bool = False) -> Iterator[None]:
    """Turn SQLite's errors into StoreError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if reading:
            raise StoreError(f"{path} cannot be read: {error}") from error
        raise StoreError(
            f"the run cannot be recorded in {path}: {error}. Earlier records are kept: fix the cause, then resume"
        ) from error
    except OverflowError as error:
        raise StoreError(f"the run cannot be recorded in {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from error

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast
from zlib import crc32

from batch_agent.errors import StoreError
from batch_agent.record.codec import CALL_BEGUN, ENDED, FAILED, FORMAT, OLDEST, RANKS, decode, since_restart
from batch_agent.record.private import private
from batch_agent.record.steps import Ended, Past, read_past
from batch_agent.record.store import Adoption, Identity, KeptStep, RecordedRow, Spent, Totals
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
    leased_tokens INTEGER, leased_cost REAL, learnt TEXT, "check" INTEGER
);
CREATE TABLE record (
    id INTEGER PRIMARY KEY, agent INTEGER NOT NULL, key BLOB NOT NULL, row BLOB NOT NULL,
    kind INTEGER NOT NULL, body BLOB NOT NULL, "check" INTEGER
);
CREATE INDEX record_agent ON record (agent);
CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL, "check" INTEGER) WITHOUT ROWID;
"""
COUNTS = "ok, failed, resumed, tokens, cost, leased_tokens, leased_cost, learnt"
# The checksum of a record has two parts: the upper one is of its owner alone, so that whose record it is can be checked
# without reading its body; the lower 32 bits are of everything. Bit 62 is set in each.
UPDATE_SESSION = f'UPDATE session SET ({COUNTS}, "check") = (?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE id = ?'
OWNED, OWNER = 1 << 62, 0x3FFF_FFFF
CHECK = 'CAST("check" AS INTEGER)'
# A damaged value may have any type.
OWNER_COLUMNS = "ifnull(agent, 0) & -1, CAST(ifnull(key, '') AS BLOB), CAST(ifnull(row, '') AS BLOB)"
PIECE = 4096
SQLITE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError)
BUSY = 60.0  # seconds to wait while another process locks the journal


NO_FACTS: Mapping[str, str] = {}
Session = tuple[Any, ...]  # a line: number, fingerprint, start, and the columns COUNTS


@dataclass(frozen=True, slots=True)
class Glance:
    """The progress in a journal. ``latest`` is that of its last session, except that its tokens and cost are those of
    all sessions."""

    sessions: int
    latest: Totals


class SqliteJournal:
    """The journal. Only one thread at a time may use it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self._path = path
        self._session: tuple[int, bytes, str] = (0, b"", "")  # number, fingerprint, start
        self._full: bool | None = None  # whether commits are synced
        self._by_row = False
        self._claimed: dict[int, bytearray] = {}  # a byte for each recorded agent, in pieces of PIECE

    @classmethod
    def open(cls, path: Path, *, begun: bool = True) -> Self:
        """Open the journal at ``path``, or create it. An empty journal counts as damaged, unless no run has ``begun``
        here. Raises StoreError if it cannot be used."""
        was_there = begun and path.exists()
        with _explained(path):
            with suppress(OSError):  # SQLite reports the error below, and gives its side files the same mode
                os.close(private(path, os.O_RDWR | os.O_CREAT))
            journal = cls(_connect(path.resolve().as_uri(), BUSY, check_same_thread=False), path)
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
        # SQLite might return fewer records of a damaged file without an error.
        if version is not None and (faults := _faults(db)):
            raise _damaged(self._path, faults)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA temp_store = FILE")
        if version is None:
            db.executescript(
                f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT"
            )

    def begin(self, fingerprint: bytes, started: str) -> None:
        with _explained(self._path), self._db:  # all changes or none
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(f"PRAGMA user_version = {FORMAT}")  # this format contains those from OLDEST on
            number = self._db.execute("SELECT coalesce(max(id), 0) + 1 FROM session").fetchone()[0]
            self._session = int(number), fingerprint, started
            line = (*self._session, *_counts(Totals(), None))
            places = ", ".join("?" * len(line))
            self._db.execute(f"INSERT INTO session VALUES ({places}, ?)", (*line, _seal(line)))

    def sessions(self) -> int:
        with _explained(self._path):
            return int(self._db.execute("SELECT count(*) FROM session").fetchone()[0])

    def next_agent(self) -> int:
        with _explained(self._path):
            return int(self._db.execute("SELECT coalesce(max(agent), 0) + 1 FROM record").fetchone()[0])

    def spent(self) -> tuple[int, float]:
        """Return the tokens and $ of all sessions, without what the table of shares counts. A session of an earlier
        version that did not return its advance counts as having spent all of it."""
        with _explained(self._path):
            tokens, cost, damage = _spent(self._db)
            if damage:
                raise self._unknown(damage[0])
            return tokens, cost or 0.0

    def _unknown(self, what: str) -> StoreError:
        run = self._path.parent
        return StoreError(
            f"the journal {self._path} is damaged: {what}, so it is unknown what the run has spent. Restore a "
            f"backup of it; or copy the run, without what is damaged but with its answers (batch-agent copy {run} "
            f"NEW), and resume the copy with the limits that you want"
        )

    def learnt(self) -> tuple[int, ...] | None:
        with _explained(self._path):
            query = "SELECT learnt FROM session WHERE learnt IS NOT NULL ORDER BY id DESC LIMIT 1"
            found = self._db.execute(query).fetchone()
            try:
                return None if found is None else tuple(map(int, json.loads(found[0])))
            except (ValueError, TypeError):  # damaged: a budget learns again
                return None

    def commit(
        self,
        steps: Sequence[KeptStep],
        totals: Totals,
        learnt: tuple[int, ...] | None = None,
        facts: Mapping[str, str] = NO_FACTS,
    ) -> None:
        """Write all steps and facts to disk before this returns, or none of them. The totals of the session are on disk
        at the latest together with the next steps. ``learnt`` are statistics of calls, for the next session."""
        values: list[object] = []
        for step in steps:
            check = _checksum(step)
            # Python's sqlite3 looks for an adapter of each parameter that is bytes, which takes longer than the copy.
            key = bytearray(step.key)
            content = bytearray(step.content)
            body = bytearray(step.body)
            values += (step.agent, key, content, step.kind, body, check)
        if not self._path.exists():  # SQLite would continue writing to the deleted file
            raise StoreError(f"the journal {self._path} is gone, with everything that was recorded in it")
        try:
            # Totals alone need not survive a power failure: rows that come from the record are not worth an fsync.
            full = bool(steps or facts)
            if full is not self._full:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._full = full
            line = (*self._session, *_counts(totals, learnt))
            with self._db:  # all changes or none
                self._db.execute("BEGIN IMMEDIATE")
                self._insert(values)
                self._db.execute(UPDATE_SESSION, (*line[3:], _seal(line), line[0]))
                for name, value in facts.items():
                    self._put_fact(name, value)
        except SQLITE_ERRORS as error:
            raise _explanation(error, self._path) from error

    def _insert(self, values: list[object]) -> None:
        start = 0
        for rows, insert in INSERTS:
            while len(values) - start >= rows * COLUMNS:
                end = start + rows * COLUMNS
                self._db.execute(insert, values[start:end])
                start = end

    def sort_by(self, column: Literal["key", "row"]) -> None:
        self._by_row = column == "row"
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
        rank = f"CASE kind WHEN {ENDED} THEN {RANKS[ENDED]} WHEN {FAILED} THEN {RANKS[FAILED]} ELSE 1 END"
        damaged: list[int] = []

        def is_owned(agent: int, key: bytes, row: bytes, check: int | None) -> bool:
            if not (owned := _is_owned(agent, key, row, check)):
                damaged.append(agent)
            return owned

        self._db.create_function("is_owned", 4, is_owned)
        self._db.execute(
            f"INSERT INTO past SELECT sought, {rank}, {place} FROM "
            f"(SELECT CAST({column} AS BLOB) AS sought, kind, agent, "
            f"is_owned({OWNER_COLUMNS}, {CHECK}) AS owned, max(id) FROM record GROUP BY agent) "
            "WHERE owned ORDER BY 1, 2, 3"
        )
        if damaged:
            raise self._unowned(damaged[0])

    def _unowned(self, agent: int) -> StoreError:
        return _damaged(self._path, f"the key of agent {agent} is not as it was written")

    def recorded(self, fingerprint: str | None, *, forced: bool = False) -> Iterator[RecordedRow]:
        """Yield the recorded agents. ``fingerprint`` identifies the answers of the present user's worker: agents with
        answers to another one count as begun. ``forced``: agents whose answers belong to several questions are also
        found by a question."""
        body = "''" if fingerprint is None else "CAST(ifnull(body, '') AS BLOB)"
        columns = f"{OWNER_COLUMNS}, ifnull(kind, 0) & -1, {body}, {CHECK}, count(DISTINCT key) > 1, max(id)"
        with _explained(self._path):
            for agent, key, row, kind, last, check, keys, _ in self._db.execute(
                f"SELECT {columns} FROM record GROUP BY agent"
            ):
                if not _is_owned(agent, key, row, check):
                    raise self._unowned(agent)
                rank = RANKS.get(kind, 1)
                if rank == 0 and fingerprint is not None and not _is_answer(kind, last, fingerprint):
                    rank = 1
                if rank == 0 and keys and not forced:
                    steps = since_restart(self.kept_steps(agent))
                    key = key if all(step.key == key for step in steps) else b""  # an answer to no question
                yield RecordedRow(agent, key, row, rank)

    def adopt(self, adoptions: Iterable[Adoption]) -> None:
        """Let rows take over the records of other rows, before rows are claimed. A damaged record stays as it is."""
        with _explained(self._path), self._db:  # all changes or none
            self._db.execute("BEGIN IMMEDIATE")
            for adoption in adoptions:
                agent = cast(int, adoption.row)
                query = "SELECT id FROM record WHERE agent = ? ORDER BY id"
                places = [place for (place,) in self._db.execute(query, (agent,))]
                steps = self.kept_steps(agent)
                if not all(step.body for step in steps):
                    continue
                for place, step in zip(places, steps, strict=True):
                    # An answer that is kept by force keeps the key of its own question, under which it is found again.
                    key = step.key if adoption.forced else adoption.key
                    adopted = KeptStep(agent, key, adoption.content, step.kind, step.body)
                    self._db.execute(
                        'UPDATE record SET key = ?, row = ?, "check" = ? WHERE id = ?',
                        (key, adoption.content, _checksum(adopted), place),
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
                if not past.unreadable or any(step.kind == CALL_BEGUN for step in steps):
                    return steps
                # One unreadable record must not block the others.
                self._warn(row, past.unreadable)
        return ()

    def _warn(self, row: int | None, reason: str) -> None:
        whose = "one row" if row is None else f"row {row}"
        logger.warning("%s: the record of %s is unreadable and is ignored: %s", self._path, whose, reason)

    def _read(self, steps: Sequence[KeptStep]) -> Past:
        agent = steps[0].agent
        try:
            return read_past(agent, [decode(step.kind, step.body) for step in steps])
        except ValueError as error:
            return Past(agent, (), unreadable=str(error))

    def kept_steps(self, agent: int) -> tuple[KeptStep, ...]:
        """Return the steps of an agent. The body of a step whose checksum is wrong is b"", which cannot be read."""
        with _explained(self._path):
            return steps_in(self._db, agent)

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
            claimed = self._claimed.setdefault(agent // PIECE, bytearray(PIECE))
            if not claimed[agent % PIECE]:
                claimed[agent % PIECE] = True
                return agent
            # Already claimed. Most keys are never looked up again, so a row is deleted only here.
            self._db.execute("DELETE FROM past WHERE sought = ? AND rank = ? AND place = ?", (sought, rank, place))

    def fact(self, name: str) -> str | None:
        """Return a fact about the run that was written with ``set_fact``, or None."""
        with _explained(self._path):
            try:
                return _fact(self._db, name)
            except ValueError as error:
                raise self._unknown(str(error)) from None

    def set_fact(self, name: str, value: str) -> None:
        with _explained(self._path):
            self._db.execute("PRAGMA synchronous = FULL")
            self._full = True
            self._put_fact(name, value)

    def _put_fact(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO fact VALUES (?, ?, ?)", (name, value, _seal((name, value))))

    def close(self) -> None:
        self._db.close()


def steps_in(db: sqlite3.Connection, agent: int) -> tuple[KeptStep, ...]:
    """Return the steps of an agent. The body of a step whose checksum is wrong is b"", which cannot be read."""
    query = (
        f"SELECT {OWNER_COLUMNS}, ifnull(kind, 0) & -1, CAST(ifnull(body, '') AS BLOB), {CHECK} "
        "FROM record WHERE agent = ? ORDER BY id"
    )
    return tuple(_checked(*found) for found in db.execute(query, (agent,)))


def _checked(agent: int, key: bytes, row: bytes, kind: int, body: bytes, check: int | None) -> KeptStep:
    """Return a step as it was written, or with the body b"" if it is damaged. The checksum also covers its kind, and
    whose step it is, so that no step is taken for another."""
    own = (check or 0) & 0xFFFF_FFFF
    owner = _owner(agent, key, row)
    if crc32(body, owner ^ kind & 0xFFFF_FFFF) == own and _is_owned(agent, key, row, check):
        return KeptStep(agent, key, row, kind, body)
    began = crc32(body, owner ^ CALL_BEGUN) == own  # a write must not be forgotten if its kind is damaged
    return KeptStep(agent, key, row, CALL_BEGUN if began else kind, b"")


def _is_answer(kind: int, body: bytes, fingerprint: str) -> bool:
    try:
        ended = decode(kind, body)
    except ValueError:
        return False
    return not isinstance(ended, Ended) or ended.output is None or ended.fingerprint == fingerprint


def _checksum(step: KeptStep) -> int:
    owner = _owner(step.agent, step.key, step.content)
    return OWNED | (owner & OWNER) << 32 | crc32(step.body, owner ^ step.kind)


def _is_owned(agent: int, key: bytes, row: bytes, check: int | None) -> bool:
    """Return whether the checksum of a record confirms its agent, key and row."""
    return check is not None and check >> 32 == (OWNED >> 32 | _owner(agent, key, row) & OWNER)


def _owner(agent: int, key: bytes, row: bytes) -> int:
    return crc32(key + row, agent & 0xFFFF_FFFF)


def _seal(values: tuple[object, ...]) -> int:
    """Return the checksum of a session or a fact."""
    return crc32(repr(values).encode())


def _faults(db: sqlite3.Connection) -> str:
    """Return the faults that SQLite finds in the structure of a database, or ""."""
    found = [" ".join(line.split()) for (line,) in db.execute("PRAGMA integrity_check(20)")]
    # The checksum of a record shows that it has NULL where a value was.
    return "; ".join([line for line in found if line != "ok" and not line.startswith("NULL value in record.")][:3])


def _connect(address: str, timeout: float = 5.0, **options: bool) -> sqlite3.Connection:
    db = sqlite3.connect(address, timeout=timeout, isolation_level=None, cached_statements=64, uri=True, **options)
    db.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")  # it may be damaged
    return db


def glance(path: Path) -> Glance:
    """Return the progress in a journal, also while another process writes it."""
    with _explained(path, reading=True):
        db = connect_to_read(path)
        try:
            if _version(db, path) is None:
                return Glance(0, Totals())
            sessions = db.execute("SELECT count(*) FROM session").fetchone()[0]
            tokens, cost, damage = _spent(db, looking=True)
            for what in damage:
                logger.warning("%s is damaged: %s; what it spent is not counted", path, what)
            row = db.execute("SELECT ok, failed, resumed FROM session ORDER BY id DESC LIMIT 1").fetchone()
            ok, failed, resumed = row or (0, 0, 0)
            spent = Spent(tokens, None if cost is None else round(cost * DOLLAR))
            return Glance(sessions, Totals(ok, failed, resumed, spent))
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
        return _connect(f"{address}?mode=ro&immutable=1")
    db = _connect(f"{address}?mode=ro")
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
        db = _connect(f"{address}?mode=ro&immutable=1")
    except BaseException:
        db.close()
        raise
    return db


def _counts(totals: Totals, learnt: tuple[int, ...] | None) -> tuple[int | float | str | None, ...]:
    """Return the values of the columns COUNTS, with the types that SQLite returns. The columns of the advance are those
    of earlier versions."""
    tokens, nano = totals.spent.tokens, totals.spent.nano
    spent = min(tokens, LARGEST), None if nano is None else nano / DOLLAR, None, None
    return totals.ok, totals.failed, totals.resumed, *spent, None if learnt is None else json.dumps(learnt)


def _read_sessions(db: sqlite3.Connection) -> tuple[list[Session], list[str]]:
    """Return the lines of the undamaged sessions, and a message for each damaged one."""
    whole: list[Session] = []
    damage = []
    for *line, seal in db.execute(f'SELECT id, fingerprint, started, {COUNTS}, "check" FROM session ORDER BY id'):
        if seal == _seal(tuple(line)):
            whole.append(tuple(line))
        else:
            damage.append(f"the line of session {line[0]} is not as it was written")
    return whole, damage


def _spent(db: sqlite3.Connection, *, looking: bool = False) -> tuple[int, float | None, list[str]]:
    """Return the tokens and $ of all sessions, and messages about damaged ones, which are not counted. An advance that
    was not returned counts as spent. ``looking``: that of the latest session does not count, because the session may
    still be running; what the table of shares counts is included."""
    lines, damage = _read_sessions(db)
    total, costs = 0, []
    for line in lines:
        tokens, cost, ahead, ahead_cost = line[6:10]
        if not looking or line is not lines[-1]:
            tokens = max(tokens, ahead or 0)
            cost = ahead_cost if (ahead_cost or 0.0) > (cost or 0.0) else cost
        total += tokens
        costs += [] if cost is None else [cost]
    try:
        table = _fact(db, TABLE) if looking else None
    except ValueError as error:
        table = None
        damage.append(str(error))
    if table is not None:
        kept = Table.from_json(json.loads(table))
        total += kept.spent_of(BUDGET_TOKENS)
        costs += [amount / DOLLAR for amount in (kept.spent_of(BUDGET_COST),) if amount]
    return total, sum(costs) if costs else None, damage


def _fact(db: sqlite3.Connection, name: str) -> str | None:
    """Return a fact, or None. Raises ValueError if it is damaged."""
    found = db.execute('SELECT value, "check" FROM fact WHERE name = ?', (name,)).fetchone()
    if found is not None and found[1] != _seal((name, found[0])):
        raise ValueError(f"the fact {name!r} is not as it was written")
    return None if found is None else str(found[0])


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
        f"the journal {path} is damaged: {reason}. Restore a backup of it; or copy what can be read of the run "
        f"(batch-agent copy {path.parent} NEW) and resume the copy; or move {path.name} and the files {path.name}-* "
        "away and resume: every row is then processed again"
    )


@contextmanager
def _explained(path: Path, *, reading: bool = False) -> Iterator[None]:
    """Turn SQLite's errors into StoreError."""
    try:
        yield
    except SQLITE_ERRORS as error:
        raise _explanation(error, path, reading=reading) from error


def _explanation(error: Exception, path: Path, *, reading: bool = False) -> StoreError:
    if isinstance(error, OverflowError):
        return StoreError(f"the run cannot be recorded in {path}: {error}")
    # The message of an error may quote a damaged schema. A table is missing if the schema was changed.
    if not isinstance(error, sqlite3.OperationalError) or str(error).startswith("no such "):
        return _damaged(path, str(error))
    if reading:
        return StoreError(f"{path} cannot be read: {error}")
    return StoreError(
        f"the run cannot be recorded in {path}: {error}. Earlier records are kept: fix the cause, then resume"
    )

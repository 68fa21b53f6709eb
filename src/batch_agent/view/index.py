"""An index of a run's rows in a temporary directory, to sort, filter and page the table.

It is built from the result lines of the run, block by block, and grows with them. It is built again when a session
replaces them. Inputs and outputs stay in the record and are read when they are shown. Methods block. Use an object in
one thread only.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias, cast

import orjson

from batch_agent.files.columns import Record
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.record.reader import RunReader
from batch_agent.view.query import Query

Value: TypeAlias = int | float | str | bytes | None

COLUMNS = (
    *("idx", "job_id", "ok", "error", "turns", "attempts", "seconds", "queued", "model", "tools", "cost"),
    *("prompt", "cached", "completion", "repaired", "output", "place"),
)
SCHEMA = f"""
CREATE TABLE row (idx INTEGER PRIMARY KEY, {", ".join(COLUMNS[1:])});
CREATE INDEX row_failed ON row (error) WHERE ok = 0;
CREATE INDEX row_job ON row (job_id);
"""
INSERT = f"INSERT OR REPLACE INTO row VALUES ({', '.join('?' * len(COLUMNS))})"
SORTS = {
    "index": "idx",
    "id": "job_id",
    "state": "ok",
    "turns": "turns",
    "attempts": "attempts",
    "seconds": "seconds",
    "cost": "cost",
    "tokens": "prompt + completion",
}
AT_ONCE = 500  # records read together
MATCHES = 8  # searches that are remembered
WAITS, MOST_WAIT = 20.0, 10.0  # pause between two counts, in multiples of a count's duration; at most these seconds
UNUSUAL = 3.0  # standard deviations from the mean


class RowIndex:
    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._folder = tempfile.TemporaryDirectory(prefix="batch-agent-view-", ignore_cleanup_errors=True)
        self.file = Path(self._folder.name) / "rows.db"
        self._db = sqlite3.connect(self.file, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.executescript(SCHEMA)
        self._lines = run.lines()
        self._matches: dict[str, tuple[int, int]] = {}  # per search: the number of its table, and the bytes it covers
        self._searches = 0
        self.version = 0  # changes when rows change
        self._numbers: tuple[int, float, JsonObject] | None = None  # version, time of the next count, numbers

    def close(self) -> None:
        self._lines.close()
        self._db.close()
        self._folder.cleanup()

    # Growing

    def step(self) -> bool:
        """Read the next block of lines. Returns False when there is no more to read now."""
        if self._lines.replaced():
            self._lines.close()
            self._lines = self._run.lines()
            self._db.execute("DELETE FROM row")
            self.version += 1
        records = self._lines.block()
        if not records:
            return False
        rows = [_values(place, record) for place, record in records]
        self._db.execute("BEGIN")
        try:
            self._db.executemany(INSERT, rows)
        except (sqlite3.Error, OverflowError):  # a number that our runs do not write
            self._db.executemany(INSERT, map(_storable, rows))
        self._db.execute("COMMIT")
        self.version += 1
        return True

    def progress(self) -> JsonObject:
        """Return the progress of the index."""
        done, size = self._lines.progress()
        rows = self._one("SELECT count(*) FROM row")
        return {"rows": int(rows or 0), "complete": done >= size, "share": round(done / size, 4) if size else 1.0}

    # Asking

    def numbers(self) -> JsonObject:
        """Return counts, failures and unusual rows of the run. They may be a few seconds old."""
        now = time.monotonic()
        if self._numbers is None or (self._numbers[0] != self.version and now >= self._numbers[1]):
            found: JsonObject = {"counts": self.counts(), "failures": [*self.failures()], "unusual": [*self.unusual()]}
            took = time.monotonic() - now
            self._numbers = self.version, now + min(MOST_WAIT, WAITS * took), found
        return self._numbers[2]

    def counts(self) -> JsonObject:
        """Return the number of rows by state, and sums over all rows."""
        query = (
            "SELECT count(*), total(ok), total(repaired), total(prompt), total(cached), total(completion), sum(cost), "
            "total(turns), total(attempts - 1), avg(seconds) FROM row"
        )
        rows, ok, repaired, prompt, cached, completion, cost, turns, retries, seconds = self._db.execute(
            query
        ).fetchone()
        return {
            "rows": rows,
            "ok": int(ok),
            "failed": rows - int(ok),
            "repaired": int(repaired),
            "tokens": {"prompt": int(prompt), "cached": int(cached), "completion": int(completion)},
            "cost": cost,
            "turns": int(turns),
            "retries": max(0, int(retries)),
            "seconds": seconds,
        }

    def failures(self) -> list[JsonObject]:
        """Return the types of failure with their counts and first rows, the most frequent first."""
        query = "SELECT error, count(*), min(idx) FROM row WHERE ok = 0 GROUP BY error ORDER BY 2 DESC LIMIT 50"
        found: list[JsonObject] = []
        for error, count, first in self._db.execute(query).fetchall():
            record = self.record(first) or {}
            message = record.get("error")
            text = message.get("message") if isinstance(message, dict) else None
            found.append({"type": error, "count": count, "row": first, "message": text})
        return found

    def unusual(self) -> list[JsonObject]:
        """Return the rows with unusually many turns, or an unusually high time or cost."""
        found: list[JsonObject] = []
        names = ("turns", "seconds", "cost")
        asked = ", ".join(f"avg({name}), avg({name} * {name}), count({name})" for name in names)
        told = self._db.execute(f"SELECT {asked} FROM row WHERE ok = 1").fetchone()
        for place, name in enumerate(names):
            mean, square, rows = told[3 * place : 3 * place + 3]
            if rows < 10 or not mean:
                continue
            far = max(mean + UNUSUAL * max(0.0, square - mean * mean) ** 0.5, 2 * mean)
            query = f"SELECT idx, job_id, {name} FROM row WHERE {name} > ? ORDER BY {name} DESC LIMIT 3"
            for idx, job_id, value in self._db.execute(query, (far,)).fetchall():
                found.append({"kind": name, "row": idx, "job_id": job_id, "value": value, "usual": mean})
        return found

    def page(self, query: Query, sort: str, descending: bool, offset: int, limit: int) -> JsonObject:
        """Return a page of rows, shortened, with the number of all rows that match the query."""
        where, values = self._where(query)
        order = f"{SORTS.get(sort, 'idx')} {'DESC' if descending else 'ASC'}, idx"
        total = self._db.execute(f"SELECT count(*) FROM row {where}", values).fetchone()[0]
        found = self._db.execute(
            f"SELECT {', '.join(COLUMNS)} FROM row {where} ORDER BY {order} LIMIT ? OFFSET ?", (*values, limit, offset)
        ).fetchall()
        records = zip(found, self._lines.read([row[-1] for row in found]), strict=True)
        return {
            "total": total,
            "offset": offset,
            "rows": [_in_short(dict(zip(COLUMNS, row, strict=True)), record or {}) for row, record in records],
        }

    def records(self, query: Query, sort: str = "index", descending: bool = False) -> Iterator[Record]:
        """Yield all records that match the query."""
        where, values = self._where(query)
        order = f"{SORTS.get(sort, 'idx')} {'DESC' if descending else 'ASC'}, idx"
        places = self._db.execute(f"SELECT place FROM row {where} ORDER BY {order}", values)
        while some := places.fetchmany(AT_ONCE):
            yield from (record for record in self._lines.read([place for (place,) in some]) if record is not None)

    def record(self, row: str | int) -> Record | None:
        """Return the record of a row, by its id, else by its index; None if there is none."""
        found = self.placed(row)
        return None if found is None else found[1]

    def placed(self, row: str | int) -> tuple[int, Record] | None:
        """Return the place and the record of a row."""
        query = "SELECT place FROM row WHERE {} = ? LIMIT 1"
        found = self._db.execute(query.format("job_id"), (str(row),)).fetchone() if isinstance(row, str) else None
        if found is None and (isinstance(row, int) or row.isdecimal()):
            found = self._db.execute(query.format("idx"), (int(row),)).fetchone()
        if found is None or (record := self._lines.read([found[0]])[0]) is None:
            return None
        return found[0], record

    def neighbours(self, row: int) -> tuple[int | None, int | None]:
        """Return the indexes of the rows before and after a row."""
        before = self._one("SELECT max(idx) FROM row WHERE idx < ?", row)
        after = self._one("SELECT min(idx) FROM row WHERE idx > ?", row)
        return before, after

    def _one(self, query: str, *values: Value) -> int | None:
        found = self._db.execute(query, values).fetchone()[0]
        return None if found is None else int(found)

    # Comparing

    def differing(self, other: Path, offset: int, limit: int) -> tuple[JsonObject, list[tuple[str, int]]]:
        """Return the agreement of the runs on the rows that both have, matched by id; and the ids and places of those
        that differ."""
        self._db.execute("ATTACH ? AS other", (str(other),))
        try:
            joined = "FROM row AS a JOIN other.row AS b USING (job_id)"
            differs = "WHERE a.ok <> b.ok OR a.output IS NOT b.output"
            counts = self._db.execute(
                f"SELECT count(*), total(a.ok AND b.ok), total(a.ok AND b.ok AND a.output IS b.output), "
                f"total(a.ok AND NOT b.ok), total(b.ok AND NOT a.ok) {joined}"
            ).fetchone()
            total = self._db.execute(f"SELECT count(*) {joined} {differs}").fetchone()[0]
            found = self._db.execute(
                f"SELECT job_id, a.place {joined} {differs} ORDER BY a.idx LIMIT ? OFFSET ?",
                (limit, offset),
            ).fetchall()
        finally:
            self._db.execute("DETACH other")
        names = ("both", "both_ok", "same", "only_a_ok", "only_b_ok")
        summary: JsonObject = {name: int(count) for name, count in zip(names, counts, strict=True)}
        return {**summary, "different": total}, found

    def at(self, places: Sequence[int]) -> list[Record | None]:
        return self._lines.read(places)

    # Filtering

    def _where(self, query: Query) -> tuple[str, list[Value]]:
        terms, values = query.sql()
        if query.searches:
            terms.append(f"idx IN (SELECT idx FROM match_{self._matched(query)})")
        return (f"WHERE {' AND '.join(terms)}" if terms else ""), values

    def _matched(self, query: Query) -> int:
        """Return the number of a table of the rows whose text matches. It is made by reading all lines."""
        size, _ = self._lines.progress()
        known = self._matches.get(query.text)
        if known is not None and known[1] == size:
            return known[0]
        for text in [query.text, *list(self._matches)[: -MATCHES + 1]]:
            if (old := self._matches.pop(text, None)) is not None:
                self._db.execute(f"DROP TABLE match_{old[0]}")
        self._searches += 1
        table = f"match_{self._searches}"
        self._db.execute(f"CREATE TEMP TABLE {table} (idx INTEGER PRIMARY KEY)")
        found: list[tuple[int]] = []
        for line in self._lines.raw():
            if (index := query.matches(line)) is not None:
                found.append((index,))
        self._db.execute("BEGIN")
        self._db.executemany(f"INSERT OR IGNORE INTO {table} VALUES (?)", found)
        self._db.execute("COMMIT")
        self._matches[query.text] = self._searches, size
        return self._searches


def _in_short(row: dict[str, Value], record: Record) -> JsonObject:
    """Return a row of the table: its numbers, and the start of its input and output."""
    short = {name: value for name, value in row.items() if name not in ("output", "place", "idx")}
    error = record.get("error")
    return {
        **cast(JsonObject, short),
        "index": cast(int, row["idx"]),
        "input": beginning(record.get("input")),
        "output": beginning(record.get("output")),
        "message": error.get("message") if isinstance(error, dict) else None,
    }


TEXT_SHOWN, FIELDS_SHOWN = 240, 40


def beginning(value: object) -> JsonObject | str | int | float | bool | None:
    """Return a value for a table cell: long texts are cut, objects become a dict of fields."""
    if isinstance(value, dict):
        fields = list(value.items())[:FIELDS_SHOWN]
        return {str(name)[:TEXT_SHOWN]: _cut(field) for name, field in fields}
    return _cut(value)


def _cut(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else to_json(value).decode(errors="replace")
    return text if len(text) <= TEXT_SHOWN else text[: TEXT_SHOWN - 1] + "…"


def _values(place: int, record: Record) -> tuple[Value, ...]:
    error, index = record.get("error"), record["index"]
    usage: Any = record.get("usage") or {}
    timings: Any = record.get("timings") or {}
    values: Any = (
        index,
        str(record.get("job_id", index)),
        1 if record.get("ok") else 0,
        str(error.get("type")) if isinstance(error, dict) else None,
        record.get("turns", 0),
        record.get("attempts", 0),
        timings.get("total", 0.0),
        timings.get("queued", 0.0),
        timings.get("inference", 0.0),
        timings.get("tool_wait", 0.0),
        record.get("cost"),
        usage.get("prompt_tokens", 0),
        usage.get("cached_tokens", 0),
        usage.get("completion_tokens", 0),
        1 if record.get("repaired") else 0,
        _digest(record.get("output")),
        place,
    )
    return cast("tuple[Value, ...]", values)


def _storable(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the values with 0 for values that SQLite cannot store: integers beyond 64 bits, and other types."""
    fine = (value if value is None or isinstance(value, float | str | bytes) else _integer(value) for value in values)
    return tuple(fine)


def _integer(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 2**63 else 0


def _digest(output: object) -> bytes | None:
    if output is None:
        return None
    try:
        data = orjson.dumps(output, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        data = to_json(output)
    return blake2b(data, digest_size=8).digest()

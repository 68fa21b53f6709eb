"""The record of one run for the page, as values that can be sent as JSON.

Methods block. Use the object of a run in one thread only.
"""

from __future__ import annotations

import re
import shlex
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias, cast

import orjson
from pydantic import JsonValue

from batch_agent.errors import BatchAgentError
from batch_agent.files.results import to_json
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.observe.numbers import ALIVE, ShownNumbers, of_record
from batch_agent.record.promise import PROMISE
from batch_agent.record.reader import RunReader, RunSnapshot, parsed
from batch_agent.record.review import JudgedRows
from batch_agent.record.rundir import stage_names
from batch_agent.record.timeline import Line
from batch_agent.run.promise import standing_in
from batch_agent.trust.score import FAILED, OTHER
from batch_agent.view.conversation import conversation, failed_attempts
from batch_agent.view.gold import RunMarks

MOST_PROMISED = 50_000  # rows of a run that works, of which a promise is computed again and again

STATES = {
    "ok": "ok = 1",
    "failed": "ok = 0",
    "repaired": "repaired = 1",
    "retried": "attempts > 1",
    "wrong": "idx IN (SELECT idx FROM mark WHERE NOT is_right)",
}
COMPARED = {
    "turns": "turns",
    "seconds": "seconds",
    "cost": "cost",
    "attempts": "attempts",
    "index": "idx",
    "doubt": "doubt",
}
COMPARISON = re.compile(r"(>=|<=|>|<|=)?(-?\d+(?:\.\d+)?)")
WORD = re.compile(r'(?:([\w.-]+):)?(?:"([^"]*)"|(\S+))')


@dataclass(frozen=True)
class Query:
    """A filter of rows: a state, a type of error, and the text of the search box.

    Words are searched in a row's id, input, output and error. All of them must match; case is ignored. ``"two words"``
    is searched as a phrase. ``name:value`` matches a field of the input or the output. ``turns:>3``, ``seconds:<10``,
    ``cost:>0.01`` and ``attempts:>1`` compare numbers.
    """

    state: str = ""
    error: str = ""
    text: str = ""
    cell: str = ""  # of a confusion matrix: field, gold and answer as a JSON list

    @property
    def searches(self) -> bool:
        """Whether lines must be read to find the matching rows."""
        words, fields, _ = self._parts
        return bool(words or fields)

    def sql(self) -> tuple[list[str], list[int | float | str | bytes | None]]:
        """Return the SQL conditions that the index can answer, and their values."""
        terms = [STATES[self.state]] if self.state in STATES else []
        values: list[int | float | str | bytes | None] = []
        if self.error:
            terms.append("ok = 0 AND error = ?")
            values.append(self.error)
        if self.cell:
            try:
                field, gold, answer = map(str, orjson.loads(self.cell))
            except (ValueError, TypeError):
                field = gold = answer = ""
            values += [field, gold]
            if answer == OTHER:
                said = "answer <> ? AND answer NOT IN (SELECT gold FROM mark WHERE field = ?)"
                values += [FAILED, field]
            else:
                said = "answer = ?"
                values.append(answer)
            terms.append(f"idx IN (SELECT idx FROM mark WHERE field = ? AND gold = ? AND {said})")
        for column, sign, number in self._parts[2]:
            terms.append(f"{column} {sign} ?")
            values.append(number)
        return terms, values

    def matches(self, line: bytes) -> int | None:
        """Return the index of the row of a result line if the line matches, else None."""
        words, fields, _ = self._parts
        lower = line.decode(errors="replace").lower()
        # Search the raw JSON text first: most lines do not match, and parsing is slower.
        if "\\u" not in lower and not all(written in lower for written in self._written):
            return None
        record = parsed(line)
        if record is None:
            return None
        given, output = record.get("input"), record.get("output")
        said = [_lower(value) for value in (given, output, record.get("error"), record.get("raw_text"))]
        said.append(str(record.get("job_id", "")).lower())
        if not all(any(word in text for text in said) for word in words):
            return None
        for name, wanted in fields.items():
            has = [
                _lower(value)
                for each in (given, output)
                if isinstance(each, dict)
                for own, value in each.items()
                if str(own).lower() == name
            ]
            if not any(wanted in text for text in has):
                return None
        return int(str(record["index"]))

    @cached_property
    def _written(self) -> list[str]:
        words, fields, _ = self._parts
        return [to_json(word).decode()[1:-1] for word in (*words, *fields.values())]

    @cached_property
    def _parts(self) -> tuple[list[str], dict[str, str], list[tuple[str, str, float]]]:
        """The words, fields and comparisons in the text."""
        words: list[str] = []
        fields: dict[str, str] = {}
        compared: list[tuple[str, str, float]] = []
        for name, quoted, plain in WORD.findall(self.text):
            value = quoted or plain
            found = COMPARISON.fullmatch(value)
            if name in COMPARED and found is not None:
                compared.append((COMPARED[name], found[1] or "=", float(found[2])))
            elif name:
                fields[name.lower()] = value.lower()
            elif value:
                words.append(value.lower())
        return words, fields, compared


def _lower(value: object) -> str:
    """Return all texts of a value in lower case, joined by newlines."""
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, dict):
        return "\n".join(_lower(each) for each in value.values())
    if isinstance(value, list):
        return "\n".join(map(_lower, value))
    return "" if value is None else str(value).lower()


Value: TypeAlias = int | float | str | bytes | None

COLUMNS = (
    *("idx", "job_id", "ok", "error", "turns", "attempts", "seconds", "queued", "model", "tools", "cost"),
    *("prompt", "cached", "completion", "repaired", "output", "doubt", "place"),
)
SCHEMA = f"""
CREATE TABLE row (idx INTEGER PRIMARY KEY, {", ".join(COLUMNS[1:])});
CREATE INDEX row_failed ON row (error) WHERE ok = 0;
CREATE INDEX row_job ON row (job_id);
CREATE TABLE mark (idx, field, gold, answer, is_right, PRIMARY KEY (idx, field)) WITHOUT ROWID;
CREATE INDEX mark_cell ON mark (field, gold, answer);
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
    "doubt": "doubt",
}
UNKNOWN_LAST = ("cost", "doubt")  # rows may be without it
AT_ONCE = 500  # records read together
MATCHES = 8  # searches that are remembered
WAITS, MOST_WAIT = 20.0, 10.0  # pause between two counts, in multiples of a count's duration; at most these seconds
UNUSUAL = 3.0  # standard deviations from the mean


class RowIndex:
    """An index of a run's rows in a temporary directory, to sort, filter and page the table.

    It is built from the result lines of the run, block by block, and grows with them. It is built again when a session
    replaces them. Inputs and outputs stay in the record and are read when they are shown. Methods block. Use an object
    in one thread only.
    """

    def __init__(self, run: RunReader, marks: RunMarks | None = None) -> None:
        self._run, self._marks = run, marks
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
            self._db.execute("DELETE FROM mark")
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
        if self._marks is not None:
            marks = [mark for _, record in records for mark in self._marks.of(record)]
            self._db.executemany("INSERT OR REPLACE INTO mark VALUES (?, ?, ?, ?, ?)", marks)
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
        last = " NULLS LAST" if sort in UNKNOWN_LAST else ""
        order = f"{SORTS.get(sort, 'idx')} {'DESC' if descending else 'ASC'}{last}, idx"
        total = self._db.execute(f"SELECT count(*) FROM row {where}", values).fetchone()[0]
        found = self._db.execute(
            f"SELECT {', '.join(COLUMNS)} FROM row {where} ORDER BY {order} LIMIT ? OFFSET ?", (*values, limit, offset)
        ).fetchall()
        records = zip(found, self._lines.read([row[-1] for row in found]), strict=True)
        return {
            "total": total,
            "offset": offset,
            "rows": [
                {**_in_short(dict(zip(COLUMNS, row, strict=True)), record or {}), **self._marked(record)}
                for row, record in records
            ],
        }

    def _marked(self, record: Record | None) -> JsonObject:
        return {} if self._marks is None or record is None else self._marks.shown(record)

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
        record.get("doubt"),
        place,
    )
    return cast("tuple[Value, ...]", values)


def _storable(values: tuple[object, ...]) -> tuple[Value, ...]:
    """Return the values with 0 for values that SQLite cannot store: integers beyond 64 bits, and other types."""
    plain = float | str | bytes | None
    return tuple(
        value if isinstance(value, plain) or (isinstance(value, int) and abs(value) < 2**63) else 0 for value in values
    )


def _digest(output: object) -> bytes | None:
    if output is None:
        return None
    try:
        data = orjson.dumps(output, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        data = to_json(output)
    return blake2b(data, digest_size=8).digest()


SAMPLES_SHOWN = 600


def _progress(now: ShownNumbers) -> JsonObject:
    """Return the numbers of a run over all its sessions."""
    return {
        "total": now.total,
        "ok": now.ok,
        "failed": now.failed,
        "resumed": now.resumed,
        "tokens": now.tokens,
        "cost": now.cost,
        "cost_is_minimum": now.at_least,
        "rows_per_second": now.rate,
    }


class RunRecord:
    """The record of a run. ``key`` is its name in the URLs of the page. Closing it closes the reader."""

    def __init__(self, key: str, run: RunReader) -> None:
        self.key, self.run = key, run
        self._asked: JsonObject | None = None
        self._stages: dict[str, RunRecord] = {}  # the stages of a pipeline that have begun

    @cached_property
    def marks(self) -> RunMarks:
        return RunMarks(self.run)

    @cached_property
    def people(self) -> JudgedRows:
        return JudgedRows(self.run)

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex(self.run, self.marks)

    def index_more(self) -> bool:
        """Add the next rows to the index. Returns whether there are more to read. The first call creates the index, in
        the thread that calls."""
        if self.index.step() or any(stage.index.step() for stage in self._stages.values()):
            return True
        return self._take_stages(self.run.begun_stages())

    def _take_stages(self, begun: Iterable[str]) -> bool:
        """Open the stages that have begun; returns whether there are new ones."""
        new = [name for name in begun if name not in self._stages]
        self._stages |= {name: RunRecord(f"{self.key}/{name}", self.run.stage(name)) for name in new}
        return bool(new)

    def progress(self) -> JsonObject:
        """Return how many rows are indexed; for a pipeline, of each stage."""
        each = [stage.index.progress() for stage in self._stages.values()] or [self.index.progress()]
        return {
            "rows": sum(cast(int, one["rows"]) for one in each),
            "complete": all(one["complete"] for one in each),
            "share": min(cast(float, one["share"]) for one in each),
        }

    def numbers(self) -> JsonObject:
        """Return counts, failures and unusual rows; for a pipeline, those of its stages with ``stage``."""
        if not self._stages:
            return self.index.numbers()
        each = {name: stage.index.numbers() for name, stage in self._stages.items()}
        lists: JsonObject = {
            kind: [{**row, "stage": name} for name, one in each.items() for row in cast("list[JsonObject]", one[kind])]
            for kind in ("failures", "unusual")
        }
        return {**lists, "counts": _sum([cast(JsonObject, one["counts"]) for one in each.values()])}

    def close(self) -> None:
        for stage in self._stages.values():
            stage.close()
        if "index" in vars(self):
            self.index.close()
        if "people" in vars(self):
            self.people.close()
        self.run.close()

    # Pages

    def overview(self) -> JsonObject:
        """Return the numbers of the run: from the run itself, from its rows, and rows that need attention.

        ``progress`` has the rows, the tokens and the cost over all sessions; in a pipeline, of all stages.
        """
        view = self.run.view()
        now = of_record(view)
        timeline = self.run.timeline(spans=False)
        step = max(1, len(timeline.samples) // SAMPLES_SHOWN)
        return {
            "run": self._identity(view),
            "progress": _progress(now),
            "unfinished": self.run.unfinished_count() if view.state == "interrupted" else 0,
            "status": self.run.status(),
            "summary": view.summary,
            "index": self.progress(),
            **self.numbers(),
            "score": self.marks.score(again=True),
            "promise": self._promise(view),
            "answers": self.marks.stage if not self.marks.answers_here else "",
            "samples": [*timeline.samples[:-1:step], *timeline.samples[-1:]],
            "changes": [*timeline.changes[-200:]],
        }

    def _promise(self, view: RunSnapshot) -> JsonObject | None:
        """Return how the promise of the run stands, with its lines; None if it has none. Of a long run it is computed
        when the run does not work."""
        if PROMISE not in view.facts or (
            view.state in ALIVE and view.progress.ok + view.progress.failed > MOST_PROMISED
        ):
            return None
        try:
            standing = standing_in(self.run)
        except BatchAgentError:  # the rows are there without it
            return None
        return None if standing is None else {**standing.to_json(), "lines": [*standing.lines(self.run.name)]}

    def in_short(self) -> JsonObject:
        """Return one line of the list of runs."""
        view = self.run.view()
        return {**self._identity(view), **_progress(of_record(view))}

    def rows(self, query: Query, sort: str, descending: bool, offset: int, limit: int) -> JsonObject:
        page = self.index.page(query, sort, descending, offset, limit)
        return {**page, "index": self.index.progress()}

    def row(self, row: str) -> JsonObject:
        """Return a finished row with its conversation, by its index or else by its id. ``record`` is None if there is
        no result, or not in the index yet."""
        found = (self.index.placed(int(row)) if row.isdecimal() else None) or self.index.placed(row)
        if found is None:
            return {"record": None, "index": self.index.progress()}
        place, record = found
        spans = [span for span in self.run.timeline().spans if span[3] == record["index"]]
        try:
            past = self.run.past(place, record)
        except BatchAgentError:
            past = None
        before, after = self.index.neighbours(cast(int, record["index"]))
        return {
            "record": cast(JsonValue, record),
            **self.marks.shown(record),
            "people": self.people.to_json(cast(int, record["index"])),
            "recorded": past is not None,
            "conversation": [*conversation(record, past, self.asked(), spans)],
            "failed_attempts": [*failed_attempts(spans)],
            "before": before,
            "after": after,
            "command": self._named(),
        }

    def timeline(self, since: float | None, until: float | None, most: int) -> JsonObject:
        """Return samples, changes, and at most ``most`` spans of a period. A span of a pipeline names its row as
        STAGE/INDEX."""
        found, view = self.run.timeline(), self.run.view()
        found.spans[:] = [_labelled(span, span[3], view.facts.get("backend")) for span in found.spans]
        self._take_stages(view.stages)
        for stage, part in view.stages.items():
            server = f"{part.facts.get('backend')}, {part.facts.get('model')}"
            spans = self._stages[stage].run.timeline().spans
            found.spans.extend(_labelled(span, f"{stage}/{span[3]}", server) for span in spans)
        lines = (*found.samples, *found.changes, *found.spans)
        first = min((cast(float, line[1]) for line in lines), default=None)
        ends = (*(line[1] for line in (*found.samples, *found.changes)), *(span[2] for span in found.spans))
        last = max((cast(float, end) for end in ends), default=None)
        low = since if since is not None else first or 0.0
        high = until if until is not None else last or 0.0
        spans = [span for span in found.spans if cast(float, span[2]) >= low and cast(float, span[1]) <= high]
        return {
            "from": first,
            "to": last,
            "samples": [*found.samples],
            "changes": [*found.changes],
            "spans": [*spans[:most]],
            "left_out": max(0, len(spans) - most),
            "cut": found.cut,
        }

    def asked(self) -> JsonObject | None:
        """Return the recorded task and system prompt; None if the run did not record them."""
        if self._asked is None:
            headers = self.run.timeline(spans=False).headers
            self._asked = headers[-1] if headers else None
        return self._asked

    def _graph(self, view: RunSnapshot) -> list[JsonObject]:
        """Return the stages of a pipeline with the number of rows of each. A run in Redis does not record which stage
        follows which, so its stages are shown in order."""
        known = (self.run.status() or {}).get("stages")
        nodes = [cast(JsonObject, node) for node in known] if isinstance(known, list) else []
        names = stage_names(view.facts)
        if not nodes:
            befores = [None, *names[:-1]]
            nodes = [
                {"name": name, "kind": "", "after": [] if before is None else [before]}
                for name, before in zip(names, befores, strict=False)
            ]
        return [{**node, "status": _standing(view.stages.get(str(node["name"])))} for node in nodes]

    def _named(self) -> str:
        """Return the run's name as an argument of a command line."""
        return shlex.quote(self.run.whole)

    def _identity(self, view: RunSnapshot) -> JsonObject:
        facts, now = view.facts, of_record(view)
        return {
            "key": self.key,
            "path": self.run.name,
            "command": self._named(),
            "name": self.run.title,
            "state": now.state,
            "why": facts.get("why"),
            "model": now.model or None,
            "backend": facts.get("backend"),
            "total": view.total,
            "started": facts.get("started"),
            "session_started": facts.get("session_started"),
            "ended": facts.get("ended"),
            "trouble": now.blocked or None,
            "degraded": now.degraded or None,
            "answered_by": dict(now.answered_by),
            "sessions": view.sessions,
            "stages": [*view.stages],
            "graph": [*self._graph(view)] or None,
            "now": time.time(),
        }


def _standing(stage: RunSnapshot | None) -> JsonObject | None:
    if stage is None:
        return None
    now = stage.progress
    rows: JsonObject = {"total": stage.total, "done": now.ok + now.failed, "ok": now.ok, "failed": now.failed}
    return {"state": stage.state, "rows": rows}


def _sum(counts: list[JsonObject]) -> JsonObject:
    """Return the sums of the counts of several stages. Times per row are left out: different stages have no common
    mean."""
    whole: JsonObject = {"seconds": None}
    for name, value in counts[0].items():
        if isinstance(value, dict):
            whole[name] = _sum([cast(JsonObject, each[name]) for each in counts])
        elif name != "seconds":
            known = [each[name] for each in counts if each[name] is not None]
            whole[name] = sum(cast("list[float]", known)) if known else None
    return whole


def _labelled(span: Line, row: JsonValue, server: JsonValue) -> Line:
    """Return a span with the name of its row, and of its endpoint if the backend has only one."""
    label = span[5] or server if span[0] == "turn" else span[5]
    return [*span[:3], row, span[4], label, *span[6:]]

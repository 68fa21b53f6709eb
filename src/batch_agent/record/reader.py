"""Reads a recorded run: its facts and state, its rows with their steps, its timeline, and what it does now.

``RunReader`` is the only way in which commands, the page, the report and ``copy`` read a run. It has two
implementations: ``DirectoryReader`` here, and ``RedisReader`` in ``record/redis/reading.py``. ``open_run`` returns the
right one for what a command line names. Methods that are not coroutines block. Use a reader in one thread only.
"""

from __future__ import annotations

import os
import sqlite3
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from pathlib import Path
from typing import BinaryIO, Literal, Self, TypeAlias, TypeVar, cast

import orjson

from batch_agent.compiler.fields import fields_of, own_id
from batch_agent.errors import BatchAgentError, SpecError, StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.files.tables import Record, index_of, record_of
from batch_agent.messages import JsonObject
from batch_agent.record.address import RunPlace, place_of
from batch_agent.record.codec import CALL_BEGUN, ENDED, FAILED, decode
from batch_agent.record.control import CONTROL, ask, stream
from batch_agent.record.keys import row_of
from batch_agent.record.lock import is_locked
from batch_agent.record.rundir import (
    FAILURES,
    GOLD,
    JOURNAL,
    LOCK,
    RESULTS,
    RUN,
    SUMMARY,
    read_jobs,
    read_run,
    recounted,
    stage_names,
)
from batch_agent.record.sqlite import FACTS, Glance, SqliteJournal, glance, open_to_read, steps_in
from batch_agent.record.steps import Past, read_past
from batch_agent.record.store import KeptStep, RecordedRow, Spent, Totals
from batch_agent.record.timeline import TimelineRecord, read_status, read_timeline

T = TypeVar("T")
ShownState: TypeAlias = Literal[
    "starting", "running", "complete", "failed", "interrupted", "out of budget", "unreachable"
]
# A running row: as its process reports it, with ``messages``; or its ``input`` and what is recorded of it.
LiveRow: TypeAlias = tuple[JsonObject, Past | None]

# A later file has the valid line of a row: drafts belong to the session that is running or was killed.
LINE_FILES = (FAILURES, RESULTS, f"{FAILURES}.new", f"{RESULTS}.new")
BLOCK = 1 << 18  # bytes read at once, so that a request of the page waits at most for one block
ROWS_AT_ONCE = 500  # records read together
AGENTS_AT_ONCE = 20_000  # journal records read in one transaction


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run at one moment. ``latest`` counts its finished rows, and the tokens and $ of all its sessions.
    ``fresh``: number of rows that the latest session finished itself. ``stages``: the stages of a pipeline that have
    begun, by name and in order; ``stage_names`` returns all stages. The only row of a pipeline's own record is the
    pipeline itself."""

    name: str  # the place as given on a command line, without a password
    facts: JsonObject
    state: ShownState
    sessions: int
    latest: Totals
    fresh: int = 0
    stages: Mapping[str, RunSnapshot] = field(default_factory=dict)
    summary: JsonObject | None = None  # the totals of the last session, or None if it has not ended
    workers: Sequence[JsonObject] = ()  # what each process that works on a run in Redis reports

    @property
    def parts(self) -> Mapping[str, RunSnapshot]:
        """The runs with the user's rows: the stages of a pipeline, else the run itself under the name ""."""
        return self.stages if stage_names(self.facts) else {"": self}

    @property
    def progress(self) -> Totals:
        """The finished rows, summed over the parts; tokens and cost of the whole run. A process that was killed may
        have recorded what a stage has spent, and not yet that of the whole."""
        each = [part.latest for part in self.parts.values()]
        known = [part.spent.nano for part in each if part.spent.nano is not None]
        whole = self.latest.spent
        parts = Spent(sum(part.tokens for part in each), sum(known) if known else None)
        nano = max((nano for nano in (whole.nano, parts.nano) if nano is not None), default=None)
        ok, failed, resumed = (sum(getattr(part, name) for part in each) for name in ("ok", "failed", "resumed"))
        return Totals(ok, failed, resumed, Spent(max(whole.tokens, parts.tokens), nano))

    @property
    def fresh_rows(self) -> int:
        """The rows that the latest session finished itself, summed over the parts."""
        return sum(part.fresh for part in self.parts.values())

    @property
    def total(self) -> int | None:
        """Number of rows, summed over the parts. None if the number of a part is unknown, or a part has not begun."""
        totals = [_total(part) for part in self.parts.values()]
        known = [total for total in totals if total is not None]
        return sum(known) if len(known) == max(1, len(stage_names(self.facts))) else None


def _total(part: RunSnapshot) -> int | None:
    """Return the number of rows of a run: from its start, or counted if it is complete. None if unknown."""
    total, rows = part.facts.get("total"), part.facts.get("rows")
    if total is None and part.state == "complete" and isinstance(rows, dict):
        total = rows.get("read")
    return total if isinstance(total, int) else None


@dataclass(frozen=True, slots=True)
class UnfinishedRow:
    """A row without a result. ``row`` is the hash of its input. A directory does not record inputs: there ``index``,
    ``job_id`` and ``value`` are None."""

    row: bytes
    steps: Sequence[KeptStep]
    index: int | None = None
    job_id: str | None = None
    value: object = None

    @property
    def past(self) -> Past | None:
        """The latest agent of the row; None if no step is recorded."""
        return past_of(self.steps) if self.steps else None


class RowLines(ABC):
    """The result lines of a run, in the order in which rows end. ``read`` returns a line again by its ``place``. If a
    row has two lines, the later one is valid."""

    @property
    def torn(self) -> int:
        """Lines that are not complete."""
        return 0

    @abstractmethod
    def replaced(self) -> bool:
        """Return whether lines that were read are no longer valid, so that all must be read again."""

    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """Return how much of the lines was read, and how much there is."""

    @abstractmethod
    def block(self) -> list[tuple[int, Record]]:
        """Return the next records with their places; an empty list when all are read."""

    def counted_block(self) -> list[tuple[int, int, bool]]:
        """Return places and indexes of the next rows, and whether they are ok; it may be faster than ``block``, because
        it needs no records."""
        return [(place, cast(int, record["index"]), bool(record["ok"])) for place, record in self.block()]

    @abstractmethod
    def raw(self) -> Iterator[bytes]:
        """Yield all lines that were read so far."""

    @abstractmethod
    def read(self, places: Sequence[int]) -> list[Record | None]:
        """Return the records at these places; None for a place that no longer has one."""

    @abstractmethod
    def close(self) -> None: ...


class FinishedRows:
    """The finished rows of a run in input order. It can be iterated several times, also while the run continues. It
    stores nine bytes for each row, its place and whether it is ok, and no records."""

    def __init__(self, open_lines: Callable[[], RowLines]) -> None:
        self._open = open_lines
        self._lines: RowLines | None = None
        self._places = array("q")
        self._ok = bytearray()

    def __iter__(self) -> Iterator[Record]:
        return (record for _, record in self.placed())

    def placed(self) -> Iterator[tuple[int, Record]]:
        """Yield each row with its place."""
        lines = self._caught_up()
        places = (place for place in self._places if place >= 0)
        while some := list(islice(places, ROWS_AT_ONCE)):
            yield from ((at, record) for at, record in zip(some, lines.read(some), strict=True) if record is not None)

    def counts(self) -> tuple[int, int]:
        """Return the number of rows that are ok, and of rows that failed."""
        self._caught_up()
        ok = self._ok.count(1)
        return ok, len(self._places) - self._places.count(-1) - ok

    def has(self, index: int) -> bool:
        self._caught_up()
        return index < len(self._places) and self._places[index] >= 0

    @property
    def torn(self) -> int:
        """Lines that are not complete."""
        return self._caught_up().torn

    def _caught_up(self) -> RowLines:
        if self._lines is None or self._lines.replaced():
            self.close()
            self._lines = self._open()
            self._places = array("q")
            self._ok = bytearray()
            self._lines.replaced()
        places, oks = self._places, self._ok
        while page := self._lines.counted_block():
            for place, index, ok in page:
                if index >= len(places):
                    oks.extend(bytes(index + 1 - len(places)))
                    places.extend(repeat(-1, index + 1 - len(places)))
                places[index], oks[index] = place, ok
        return self._lines

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


class RunReader(ABC):
    """A recorded run, or a stage of it. Methods raise SpecError if there is no run, StoreError if it cannot be read."""

    def __init__(self, place: RunPlace, name: str, title: str, whole: str, stage_name: str) -> None:
        self.place = place
        self.rows = FinishedRows(self.lines)
        self.name = name  # as given on a command line, without a password
        self.title = title  # the last part of it
        self.whole = whole  # the whole run for a command line in any directory: an absolute path, or the URL
        self.stage_name = stage_name  # "" for a whole run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def facts(self) -> JsonObject:
        """Return the content of ``run.json``; for a run in Redis, with what workers need (``spec``)."""

    def kept_facts(self) -> JsonObject:
        """Return the content of ``run.json``; {} if there is no run, or if it cannot be read."""
        try:
            return self.facts()
        except (SpecError, StoreError):
            return {}

    @abstractmethod
    def view(self) -> RunSnapshot: ...

    @abstractmethod
    def stage(self, name: str) -> RunReader:
        """Return the reader of a stage. The caller closes it."""

    def begun_stages(self) -> list[str]:
        """Return the names of the stages that have a record, in order."""
        return list(self.view().stages)

    # Rows

    @abstractmethod
    def lines(self) -> RowLines: ...

    @abstractmethod
    def steps(self, place: int, record: Record) -> list[KeptStep]:
        """Return the recorded steps of a finished row; of its latest agent, if it had several."""

    @abstractmethod
    def unfinished(self) -> Iterator[UnfinishedRow]:
        """Yield the rows that have started and are not done. A run in Redis also has those in its queue."""

    @abstractmethod
    def unfinished_count(self) -> int:
        """Return how many rows have started and are not done."""

    @abstractmethod
    def recorded(self, fingerprint: str | None, *, forced: bool) -> Iterator[RecordedRow] | None:
        """Return the rows that have begun, with the digests by which they are found; None if there is no journal.
        ``fingerprint`` identifies the answers of the present user's worker: rows with answers to another one count as
        begun. ``forced``: answers that were kept by force count as answers."""

    def past(self, place: int, record: Record) -> Past | None:
        """Return the agent of a finished row; None if it is not recorded."""
        steps = self.steps(place, record)
        return past_of(steps) if steps else None

    def failures(self) -> Counter[str]:
        """Return the number of failed rows by type of error."""
        return Counter(_error_type(record) for record in self.rows if not record.get("ok"))

    # Times

    @abstractmethod
    def timeline(self, *, spans: bool = True) -> TimelineRecord: ...

    @abstractmethod
    def job_lines(self) -> list[bytes]:
        """Return what the whole run has recorded about jobs at batch APIs."""

    @abstractmethod
    def kept_lines(self, name: str) -> Iterator[bytes]:
        """Yield the lines of a file that the run keeps beside its rows; nothing if the file does not exist."""

    def gold_lines(self) -> list[bytes]:
        """Return the lines of the run's gold; [] if it has none."""
        return [*self.kept_lines(GOLD)]

    @abstractmethod
    def status(self) -> JsonObject | None:
        """Return the metrics that the run last reported, or None."""

    # A run that is running

    @abstractmethod
    def watch(self) -> AsyncGenerator[JsonObject, None]:
        """Yield the status and the running rows, about once per second. Raises NotAlive."""

    @abstractmethod
    def follow(self, row: str) -> AsyncGenerator[LiveRow, None]:
        """Yield a running row after each change, until it ends. Raises NotAlive or Refused."""

    @abstractmethod
    async def steer(self, request: JsonObject) -> JsonObject:
        """Send a control request to the run. Raises NotAlive or Refused."""

    @abstractmethod
    def close(self) -> None: ...


def open_run(run: str | RunPlace) -> RunReader:
    """Return the reader of a run, which need not exist yet. Raises SpecError for an invalid URL."""
    place = place_of(run) if isinstance(run, str) else run
    if isinstance(place, Path):
        return DirectoryReader(place)
    from batch_agent.record.redis.reading import RedisReader

    return RedisReader.at(place)


def look(run: str | RunPlace) -> RunSnapshot:
    """Return the state and progress of a run."""
    with open_run(run) as reader:
        return reader.view()


def runs_in(place: RunPlace) -> list[RunPlace]:
    """Return the runs in a directory or a Redis database; or the run itself, if ``place`` is one."""
    if isinstance(place, Path):
        return [*sorted({path.parent for path in (*place.glob(f"*/{RUN}"), *place.glob(RUN))})]
    from batch_agent.record.redis.reading import run_names

    return [place] if place.name else [place.at(name) for name in run_names(place)]


def past_of(steps: Sequence[KeptStep]) -> Past | None:
    """Return the latest agent in the steps of a row; None if they cannot be read and nothing was written."""
    agent = steps[-1].agent
    own = [step for step in steps if step.agent == agent]
    try:
        return read_past(agent, [decode(step.kind, step.body) for step in own])
    except ValueError as error:
        if any(step.kind == CALL_BEGUN for step in own):
            return Past(agent, (), unreadable=str(error))
        return None


def as_result(record: Record) -> Record:
    """Return a line of results or failures in the format of a result."""
    if "ok" in record:
        return record
    error = {name: record.pop(name, None) for name in ("stage", "type", "message", "retryable")}
    if "traceback" in record:
        error["traceback"] = record.pop("traceback")
    first = {name: record.pop(name, None) for name in ("index", "job_id")}
    return {**first, "ok": False, "output": None, "error": error, **record}


def _error_type(record: Record) -> str:
    error = record.get("error")
    return str(error.get("type")) if isinstance(error, dict) else ""


def row_name(value: object, index: int, id_column: object = None, name: str | None = None) -> str:
    """Return the id of a row, or its index if it has none. ``name`` is the id from an earlier stage; a row's own id
    comes before it only if the stage has an ``id_column``."""
    column = id_column if isinstance(id_column, str) else None
    if name is not None and column is None:
        return name
    try:
        own = own_id(fields_of(value), column)
    except (BatchAgentError, TypeError, ValueError):
        own = None
    return own or (str(index) if name is None else name)


class DirectoryReader(RunReader):
    """Reads a run directory, also while a process works there. ``whole`` is the reader of the pipeline, if this is one
    of its stages."""

    path: Path

    def __init__(self, path: Path, whole: DirectoryReader | None = None) -> None:
        stage_name, outer = ("", path) if whole is None else (path.name, whole.path)
        super().__init__(path, str(path), path.resolve().name or "run", str(outer.resolve()), stage_name)
        self.path = path
        self._stages: dict[str, DirectoryReader] = {}  # for ``view``
        self._whole = whole
        self._agents = _Agents(path / JOURNAL)

    def facts(self) -> JsonObject:
        return read_run(self.path)

    def kept_facts(self) -> JsonObject:
        journal = self.path / JOURNAL
        if (facts := super().kept_facts()) or not journal.exists():
            return facts
        try:
            with closing(SqliteJournal(open_to_read(journal), journal)) as kept:
                copy = kept.fact(FACTS)
        except StoreError:
            return {}
        return {} if copy is None else cast(JsonObject, from_json(copy.encode()))

    def view(self) -> RunSnapshot:
        locked = is_locked(self.path / LOCK)
        try:
            facts = self.facts()
        except SpecError:
            if locked is not True:
                raise
            facts = {}  # the process has the directory, and loads its model
        state = cast(ShownState, facts.get("state"))
        if state == "running" and locked is False:
            state = "interrupted"  # the process was killed, or the machine went down
        elif state != "running" and locked is True:
            state = "starting"  # run.json is still that of an earlier session
        journal = self.path / JOURNAL
        seen = glance(journal) if journal.exists() else Glance(0, Totals())
        session = latest = seen.latest
        if not (state == "complete" or (state in ("running", "starting") and seen.sessions == 1)) or not seen.sessions:
            # The session does not have all rows of the run: those of earlier ones are in the result files.
            ok, failed = self.rows.counts()
            latest = replace(session, ok=ok, failed=failed)
        names = [name for name in stage_names(facts) if (self.path / name / RUN).exists()]
        self._stages |= {name: self.stage(name) for name in names if name not in self._stages}
        stages = {name: self._stages[name].view() for name in names}
        fresh = max(0, session.ok + session.failed - session.resumed)
        facts = recounted(facts, self.rows) if state == "interrupted" else facts
        return RunSnapshot(self.name, facts, state, seen.sessions, latest, fresh, stages, self._summary())

    def stage(self, name: str) -> DirectoryReader:
        return DirectoryReader(self.path / name, self)

    def _summary(self) -> JsonObject | None:
        try:
            summary = from_json((self.path / SUMMARY).read_bytes())
        except (OSError, ValueError):
            return None
        return cast(JsonObject, summary) if isinstance(summary, dict) else None

    def lines(self) -> RowLines:
        return _DirectoryLines(self.path)

    def steps(self, place: int, record: Record) -> list[KeptStep]:
        return self._agents.steps_of(record, self._same_before)

    def recorded(self, fingerprint: str | None, *, forced: bool) -> Iterator[RecordedRow] | None:
        path = self.path / JOURNAL
        return self._recorded(path, fingerprint, forced=forced) if path.exists() else None

    def _recorded(self, path: Path, fingerprint: str | None, *, forced: bool) -> Iterator[RecordedRow]:
        with closing(SqliteJournal(open_to_read(path), path)) as journal:
            yield from journal.recorded(fingerprint, forced=forced)

    def _same_before(self, record: Record) -> int:
        """Return how many rows before this one have the same input."""
        value, index = record.get("input"), record["index"]
        earlier = (each for each in self.rows if cast(int, each["index"]) < cast(int, index))
        return sum(each.get("input") == value for each in earlier)

    def unfinished(self) -> Iterator[UnfinishedRow]:
        for row, agent in self._agents.under_way():
            yield UnfinishedRow(row, self._agents.steps(agent))

    def unfinished_count(self) -> int:
        return len(self._agents.under_way())

    def timeline(self, *, spans: bool = True) -> TimelineRecord:
        return read_timeline(self.path, spans=spans)

    def kept_lines(self, name: str) -> Iterator[bytes]:
        path = self.path / name
        if path.exists():
            with path.open("rb") as file:
                yield from (line.rstrip(b"\r\n") for line in file)

    def job_lines(self) -> list[bytes]:
        return read_jobs(self.path)

    def status(self) -> JsonObject | None:
        return read_status(self.path)

    # A pipeline answers for its stages.

    @property
    def _is_part(self) -> bool:
        return self._whole is not None and not (self.path / CONTROL).exists()

    @property
    def _control_dir(self) -> Path:
        return self._whole.path if self._whole is not None and self._is_part else self.path

    async def watch(self) -> AsyncGenerator[JsonObject, None]:
        async for answer in stream(self._control_dir, {"do": "watch"}):
            yield self._own(answer)

    async def follow(self, row: str) -> AsyncGenerator[LiveRow, None]:
        async for answer in stream(self._control_dir, {"do": "follow", "row": self._named(row)}):
            yield cast(JsonObject, answer["row"]), None

    async def steer(self, request: JsonObject) -> JsonObject:
        if "row" in request:
            request = {**request, "row": self._named(str(request["row"]))}
        return self._own(await ask(self._control_dir, request))

    def _named(self, row: str) -> str:
        return f"{self.stage_name}/{row}" if self._is_part else row

    def _own(self, answer: JsonObject) -> JsonObject:
        """Return the part of a pipeline's answer that is about this stage."""
        status, rows = answer.get("status"), answer.get("rows")
        if not self._is_part or not isinstance(status, dict):
            return answer
        stages = status.get("stages")
        own = [each for each in stages if isinstance(each, dict)] if isinstance(stages, list) else []
        found = next((each.get("status") for each in own if each.get("name") == self.stage_name), None)
        live = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        rows = [{name: row[name] for name in row if name != "stage"} for row in live if row["stage"] == self.stage_name]
        return {**answer, "status": found, "rows": [*rows]}

    def close(self) -> None:
        for stage in self._stages.values():
            stage.close()
        self.rows.close()
        self._agents.close()


class _Tail:
    """One file. It stays open, so that positions stay valid when another file replaces it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.done = 0  # bytes that were read as complete lines

    def replaced(self) -> bool:
        """Return whether the file was replaced or truncated."""
        if self._file is None:
            return False
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return True
        own = os.fstat(self._file.fileno())
        return (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino) or named.st_size < self.done

    def size(self) -> int:
        """Return the current size of the file in bytes."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return 0
        return os.fstat(self._file.fileno()).st_size

    def block(self) -> list[tuple[int, bytes]]:
        """Return the next complete lines, each with its offset in the file."""
        if self.size() <= self.done or self._file is None:
            return []
        wanted = BLOCK
        while True:
            data = os.pread(self._file.fileno(), wanted, self.done)
            end = data.rfind(b"\n") + 1
            if end or len(data) < wanted:
                break
            wanted *= 2  # one line is longer than that
        lines, start = [], self.done
        for line in data[:end].splitlines(keepends=True):
            lines.append((start, line))
            start += len(line)
        self.done += end
        return lines

    def read(self, start: int, length: int) -> bytes:
        return b"" if self._file is None else os.pread(self._file.fileno(), length, start)

    def line(self, start: int) -> bytes:
        if self._file is None:
            return b""
        self._file.seek(start)
        return self._file.readline()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _DirectoryLines(RowLines):
    """The result files of a directory while they grow. Open, use and close it in one thread at a time. A place is the
    offset of a line, times the number of files, plus the number of its file."""

    def __init__(self, path: Path) -> None:
        self._tails = [_Tail(path / name) for name in LINE_FILES]
        self._unread = 0  # lines that are not records

    def replaced(self) -> bool:
        return any(tail.replaced() for tail in self._tails)

    def progress(self) -> tuple[int, int]:
        return sum(tail.done for tail in self._tails), sum(tail.size() for tail in self._tails)

    def block(self) -> list[tuple[int, Record]]:
        return [(place, record) for place, _, record in self._next(parsed)]

    def counted_block(self) -> list[tuple[int, int, bool]]:
        found = self._next(index_of)
        return [(place, index, LINE_FILES[number].startswith(RESULTS)) for place, number, index in found]

    def _next(self, read: Callable[[bytes], T | None]) -> list[tuple[int, int, T]]:
        """Return the next lines: place, number of the file, and what ``read`` returns for the line."""
        for number, tail in enumerate(self._tails):
            while lines := tail.block():
                values = [(start * len(LINE_FILES) + number, number, read(line)) for start, line in lines]
                found = [(place, number, value) for place, _, value in values if value is not None]
                self._unread += len(lines) - len(found)
                if found:
                    return found
        return []

    @property
    def torn(self) -> int:
        return self._unread + sum(tail.size() > tail.done for tail in self._tails)

    def raw(self) -> Iterator[bytes]:
        for tail in self._tails:
            start = 0
            while start < tail.done:
                data = tail.read(start, min(BLOCK, tail.done - start))
                end = data.rfind(b"\n") + 1
                if not end:
                    end = tail.done - start
                    data = tail.read(start, end)
                yield from data[:end].splitlines(keepends=True)
                start += end

    def read(self, places: Sequence[int]) -> list[Record | None]:
        found = (divmod(place, len(LINE_FILES)) for place in places)
        return [parsed(self._tails[number].line(start)) for start, number in found]

    def close(self) -> None:
        for tail in self._tails:
            tail.close()


def parsed(line: bytes) -> Record | None:
    """Return a line of results or failures in the format of a result; None if it is neither."""
    try:
        record = orjson.loads(line)
    except ValueError:  # incomplete, or with values that orjson cannot read
        record = record_of(line)
    if not isinstance(record, dict) or not isinstance(record.get("index"), int):
        return None
    return as_result(record)


class _Agents:
    """The agents that a journal has recorded. The journal is ordered by agent; the row of an agent is known by the hash
    of its input.

    While a process writes the journal, it is read in small parts, with a new connection for each, so that the writer
    can truncate its log.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._closed: tuple[tuple[int, int, int], sqlite3.Connection] | None = None  # a journal without a writer
        self._by_row: dict[bytes, list[int]] = {}
        self._kinds: dict[int, int] = {}  # kind of each agent's last record
        self._read = 0  # id of the last record that was read

    def steps_of(self, record: Record, same_before: Callable[[Record], int]) -> list[KeptStep]:
        """Return the steps of the agent that made this result; [] if it is not recorded.

        Rows with the same input are distinguished by measured times, which are in the journal and in the result. If
        even these are equal, rows are taken in order: ``same_before`` counts the equal rows before this one.
        """
        if not self._journal.exists():
            return []
        row = row_of(record.get("input"), "")
        guess = self.steps(cast(int, record["index"]) + 1)  # agents usually start in the order of rows
        if guess and guess[0].content == row and _likeness(guess, record) == EXACT:
            return guess
        self._catch_up()
        found = [
            steps for agent in self._by_row.get(row, ()) if (steps := self.steps(agent))
        ]  # a damaged index has none
        best = max((_likeness(steps, record) for steps in found), default=0)
        alike = [steps for steps in found if _likeness(steps, record) == best]
        if len(alike) < 2:
            return alike[0] if alike else []
        return alike[min(same_before(record), len(alike) - 1)]

    def steps(self, agent: int) -> list[KeptStep]:
        return [*self._found(lambda db: steps_in(db, agent))]

    def under_way(self) -> list[tuple[bytes, int]]:
        """Return the agents that have started and not ended: the hash of the row, and the agent's number."""
        if not self._journal.exists():
            return []
        self._catch_up()
        open_agents = {agent for agent, kind in self._kinds.items() if kind not in (ENDED, FAILED)}
        found = [(row, agent) for row, agents in self._by_row.items() for agent in agents if agent in open_agents]
        return sorted(found, key=lambda pair: pair[1])

    def _catch_up(self) -> None:
        query = "SELECT id, agent, row, kind FROM record WHERE id > ? ORDER BY id LIMIT ?"
        while True:
            found = self._found(lambda db: db.execute(query, (self._read, AGENTS_AT_ONCE)).fetchall())
            for place, agent, row, kind in found:
                self._read = place
                if agent not in self._kinds:
                    self._by_row.setdefault(bytes(row), []).append(agent)
                self._kinds[agent] = kind
            if len(found) < AGENTS_AT_ONCE:
                return

    def _found(self, read: Callable[[sqlite3.Connection], Sequence[T]]) -> Sequence[T]:
        try:
            if self._journal.with_name(f"{self._journal.name}-wal").exists():
                with closing(open_to_read(self._journal)) as db:
                    return read(db)
            stat = self._journal.stat()
            version = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self._closed is None or self._closed[0] != version:
                self.close()
                self._closed = version, open_to_read(self._journal)
            return read(self._closed[1])
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self._journal} cannot be read: {error}") from None

    def close(self) -> None:
        if self._closed is not None:
            self._closed[1].close()
            self._closed = None


EXACT = 3


def _likeness(steps: Sequence[KeptStep], record: Record) -> int:
    """Return how well an agent fits a result: from 0, if it did not end like the result, to EXACT."""
    past, timings = past_of(steps), record.get("timings")
    if past is None or past.done != bool(record.get("ok")):
        return 0
    if len(past.replies) != record.get("turns"):
        return 1
    if past.spent is None or not isinstance(timings, dict):
        return 2
    same = (past.spent.queued, past.spent.inference) == (timings.get("queued"), timings.get("inference"))
    return EXACT if same else 2


def result_line_of(record: Record) -> tuple[str, bytes]:
    """Return the file that a result belongs to, and its line there. The line of a failure is a flat object."""
    kept = dict(record)
    if kept["ok"]:
        kept.pop("raw_text", None)
        return RESULTS, to_json(kept) + b"\n"
    error = cast("dict[str, object]", kept.pop("error"))
    first = {name: kept.pop(name) for name in ("index", "job_id")}
    for name in ("ok", "output"):
        del kept[name]
    return FAILURES, to_json({**first, **error, **kept}) + b"\n"

"""Reads runs in Redis in place. Also lists and deletes them.

Redis has no timeline. It is computed: the id of a result in the stream is the time at which its row ended, and its
steps have the times of its turns. What happens now is what the workers report with their beats.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeVar, cast

from batch_agent.blocking import in_thread
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.control import NotAlive, Refused
from batch_agent.record.keys import row_of
from batch_agent.record.reader import (
    LiveRow,
    RowLines,
    RunReader,
    RunSnapshot,
    ShownState,
    UnfinishedRow,
    past_of,
    row_name,
)
from batch_agent.record.redis.connection import Client, RedisConnection, entries
from batch_agent.record.redis.scripts import GROUP
from batch_agent.record.redis.store import RUNS, RedisRunStore, unpack_step
from batch_agent.record.row_json import decode_row
from batch_agent.record.rundir import FORGED, recounted, stage_names
from batch_agent.record.steps import Past, Used
from batch_agent.record.store import KeptStep, RecordedRow, Spent, Totals
from batch_agent.record.timeline import MOST_SAMPLES, SAMPLE, Line, TimelineRecord
from batch_agent.share.table import BUDGET_COST, BUDGET_TOKENS, Table, of_stage

T = TypeVar("T")

# Facts for workers only, or shown elsewhere.
INTERNAL = ("spec", "specs", "row_schema", "first", "pieces", "summary", "asked")
PAGE = 500  # entries read at once
STATES = {b"k": 0, b"f": 2}  # ranks of rows; others have begun
LIVE_ROWS = 200  # running rows in an answer
SPANS_OF_ROWS = 2000  # finished rows whose turns are in the timeline: this many first ones, and as many latest ones
SEQUENCE = 20  # bits of the number of an entry within its millisecond
EVERY = 1.0  # seconds between two looks at a run: other processes cannot be awaited
# ARGV: the ids of entries of the stream KEYS[1]
READ_ENTRIES = """
local found = {}
for place, id in ipairs(ARGV) do
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then found[#found + 1] = entry end
end
return found
"""


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """A row in the queue. ``row`` is the key of its record, ``place`` its id in the stream."""

    row: str
    place: str
    index: int
    value: bytes
    started: bool


class RedisReader(RunReader):
    """A run in Redis. It is thread-safe, apart from ``timeline``."""

    def __init__(self, store: RedisRunStore) -> None:
        self.store, self.address = store, store.address
        address = store.address
        whole = str(address.at(address.name))
        super().__init__(address, str(address), address.stage or address.name, whole, address.stage)
        self._history = _History(self)
        self._places: dict[str, str] = {}  # row that is followed → its place in the queue

    @classmethod
    def at(cls, address: StoreAddress) -> Self:
        return cls(RedisRunStore(RedisConnection(address, patience=0.0)))

    def close(self) -> None:
        self.store.close()

    def facts(self) -> JsonObject:
        facts = self.store.facts()
        if facts is None:
            raise SpecError(f"{self.address} holds no run")
        return facts

    def view(self) -> RunSnapshot:
        if self.store.facts() is None and self.store.is_announced():
            return RunSnapshot(self.name, {}, "starting", 0, Totals())
        facts = self.facts()
        table, now = self.store.table()
        return self._view(facts, table, [member.status for member in table.live(now).values()])

    def _view(self, facts: JsonObject, table: Table, workers: list[JsonObject]) -> RunSnapshot:
        standing = self.store.standing()
        session = int(self.command("HGET", self.store.key("run"), "sitting") or 0)
        state = cast(ShownState, facts.get("state"))
        if state == "running" and not standing.feeder:
            state = "interrupted"
        if state != "running" and self.store.is_announced():
            state = "starting"
        ended = facts.get("rows")
        summary = facts.get("summary")
        counts = standing.counts
        resumed = cast(int, ended.get("resumed", 0)) if isinstance(ended, dict) else 0
        ok, failed = counts.ok, counts.failed
        if session > 1 and not counts.fed:  # results of earlier sessions are not counted before they are fed again
            ok, failed = self.rows.counts()
        tokens, cost = (table.spent_of(of_stage(name, self.stage_name)) for name in (BUDGET_TOKENS, BUDGET_COST))
        if self.stage_name:  # the table is that of the whole run
            own_tokens, own_cost = self.store.spent_recorded()
            tokens, cost = tokens + own_tokens, cost + own_cost
        if forged := self.store.forged():
            facts = {**facts, FORGED: forged}
        facts = recounted(facts, self.rows) if state == "interrupted" else facts
        stages = {}
        for name in stage_names(facts):
            with self.stage(name) as stage:
                if (own := stage.store.facts()) is not None:
                    stages[name] = stage._view(own, table, workers)
        return RunSnapshot(
            self.name,
            {name: value for name, value in facts.items() if name not in INTERNAL},
            state,
            session,
            Totals(ok, failed, resumed, Spent(tokens, cost or None)),
            max(0, counts.ok + counts.failed - resumed),
            stages,
            summary if isinstance(summary, dict) else None,
            workers,
        )

    def stage(self, name: str) -> RedisReader:
        return RedisReader.at(self.address.at(self.address.name, name))

    # Rows

    def lines(self) -> RowLines:
        return _RedisLines(self)

    def steps(self, place: int, record: Record) -> list[KeptStep]:
        [(_, fields)] = self.entries_at([place]) or [("", {})]
        return self.steps_of(fields[b"row"].decode()) if fields else []

    def steps_of(self, row: str) -> list[KeptStep]:
        return [unpack_step(step) for step in self.command("LRANGE", self.store.key(f"steps:{row}"), 0, -1)]

    def recorded(self, fingerprint: str | None, *, forced: bool) -> Iterator[RecordedRow]:
        cursor = b"0"
        fed, latest, since = self.command("HMGET", self.store.key("run"), "fed", "sitting", "since")
        while True:
            cursor, found = self.command("HSCAN", self.store.key("rows"), cursor, "COUNT", PAGE)
            names = [name.decode() for name in found]
            marks = self.command("HMGET", self.store.key("contents"), *(f"={name}" for name in names)) if names else ()
            for name, mark, known in zip(names, marks, found.values(), strict=True):
                session, index, state, *_ = known.split(b" ")
                is_result = (fed != b"1" or session == latest) and int(session) >= int(since or 0)
                # An answer that was kept by force is one to another question.
                key = b"" if mark is not None and not forced else bytes.fromhex(name.partition("-")[0])
                yield RecordedRow(name, key, None, STATES.get(state, 1), int(index) if is_result else None)
            if cursor in (0, b"0"):
                return

    def unfinished(self) -> Iterator[UnfinishedRow]:
        column = self._id_column()
        waiting: list[QueuedRow] = []
        for row in self._queue():
            if row.started:
                yield self._unfinished(row, column)
            else:
                waiting.append(row)
        yield from (self._unfinished(row, column) for row in waiting)

    def _unfinished(self, row: QueuedRow, column: object) -> UnfinishedRow:
        value, name = _named(row, column)
        steps = self.steps_of(row.row) if row.started else ()
        return UnfinishedRow(row_of(value, ""), steps, row.index, name, value)

    def unfinished_count(self) -> int:
        return sum(1 for _ in self._pending())

    def _past(self, row: str) -> Past | None:
        steps = self.steps_of(row)
        return past_of(steps) if steps else None

    def _id_column(self) -> object:
        spec = self.facts().get("spec")
        return spec.get("id_column") if isinstance(spec, dict) else None

    def _queue(self) -> Iterator[QueuedRow]:
        leased, after = set(self._pending()), ""
        while page := self.page("queue", after, PAGE):
            for place, fields in self._rows_of(page):
                yield _queued(place, fields, place in leased or b"past" in fields)
            after = page[-1][0]

    def _rows_of(self, page: Sequence[tuple[str, dict[bytes, bytes]]]) -> Iterator[tuple[str, dict[bytes, bytes]]]:
        """Yield the entries of the queue that a feeder has added: the place of each is on record."""
        named = [(place, fields, fields.get(b"row", b"")) for place, fields in page]
        known = self.command("HMGET", self.store.key("rows"), *(row for _, _, row in named)) if named else []
        for (place, fields, _), about in zip(named, known, strict=True):
            _, index, state, at = (about or b"- - - -").split(b" ", 4)[:4]
            if (state, at, index) == (b"q", place.encode(), fields.get(b"index")) and b"value" in fields:
                yield place, fields

    def _pending(self) -> Iterator[str]:
        """Yield the places of rows that a worker holds, or whose lease has expired."""
        command, start = ("XPENDING", self.store.key("queue"), GROUP), "-"
        while page := self.command(*command, start, "+", PAGE, parse_detail=True):
            places = [cast(bytes, entry["message_id"]).decode() for entry in page]
            yield from places
            start = f"({places[-1]}"

    def _at(self, place: str) -> QueuedRow | None:
        """Return the row at a place in the queue, or None if it is done."""
        page = list(entries({"queue": self.command("XRANGE", self.store.key("queue"), place, place)}))
        return next((_queued(place, fields, started=True) for place, fields in self._rows_of(page)), None)

    # Results

    def checked(self, found: Sequence[tuple[str, dict[bytes, bytes]]]) -> list[tuple[int, Record | None]]:
        """Return the places and records of entries of the stream of results. The record is None if the result is no
        longer valid, because the row was retried or is no longer among the inputs."""
        if not found:
            return []
        known = self.command("HMGET", self.store.key("rows"), *(fields[b"row"] for _, fields in found))
        fed, latest, since = self.command("HMGET", self.store.key("run"), "fed", "sitting", "since")
        rows = []
        for (place, fields), now in zip(found, known, strict=True):
            session, index, _, at, *_ = (now or b"0 0 f 0").split(b" ")
            is_valid = at.decode() == place and (fed != b"1" or session == latest) and int(session) >= int(since or 0)
            rows.append((_place(place), _record(fields[b"result"], int(index)) if is_valid else None))
        return rows

    def page(self, name: str, after: str, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        start = f"({after}" if after else "-"
        return list(entries({name: self.command("XRANGE", self.store.key(name), start, "+", "COUNT", count)}))

    def entries_at(self, places: Sequence[int]) -> list[tuple[str, dict[bytes, bytes]]]:
        """Return the results at these places in the stream."""
        keys = [self.store.key("results")]
        ids = [f"{place >> SEQUENCE}-{place % (1 << SEQUENCE)}" for place in places]
        read = self.store.connection.call(lambda client: client.register_script(READ_ENTRIES)(keys=keys, args=ids))
        return list(entries([["results", read]]))

    def command(self, *arguments: object, **options: bool) -> Any:
        return self.store.connection.call(lambda client: client.execute_command(*arguments, **options))

    # Times

    def timeline(self, *, spans: bool = True) -> TimelineRecord:
        facts = self.facts()
        asked = facts.get("asked")
        found = self._history.read(running=facts.get("state") == "running", spans=spans)
        if isinstance(asked, dict):
            found.headers.append(asked)
        return found

    def job_lines(self) -> list[bytes]:
        return self.store.job_lines()

    def kept_lines(self, name: str) -> Iterator[bytes]:
        yield from (self.store.get_file(name) or "").encode().splitlines()

    def status(self) -> JsonObject | None:
        return None  # a run in Redis has no metrics of its own after its end; its summary has them

    def workers(self) -> list[JsonObject]:
        """Return what each live worker last reported."""
        table, now = self.store.table()
        return [member.status for member in table.live(now).values()]

    # A run that is running

    async def watch(self) -> AsyncGenerator[JsonObject, None]:
        while True:
            yield await self._alive(self._now)
            await asyncio.sleep(EVERY)

    def _now(self) -> JsonObject:
        facts = self.facts()
        table, now = self.store.table()
        workers = [member.status for member in table.live(now).values()]
        if not workers:
            raise NotAlive(f"{self.address} has no worker")
        view, rows = self._view(facts, table, workers), self._running()
        for name in reversed(list(view.stages)):  # later stages first
            with self.stage(name) as stage:
                rows += [{**row, "stage": name} for row in stage._running()]
        return {"status": live_status(view, paused=table.steering.paused), "rows": [*rows[:LIVE_ROWS]]}

    def _running(self) -> list[JsonObject]:
        rows: list[JsonObject] = []
        column = self._id_column()
        for place in islice(self._pending(), LIVE_ROWS):
            if (row := self._at(place)) is None:
                continue
            past, fed = self._past(row.row), int(place.partition("-")[0]) / 1000
            turn = 1 if past is None else 1 + len(past.replies)
            _, name = _named(row, column)
            rows.append({"index": row.index, "job_id": name, "state": "running", "began": fed, "turn": turn})
        return rows

    async def follow(self, row: str) -> AsyncGenerator[LiveRow, None]:
        before: LiveRow | None = None
        while (now := await self._alive(lambda: self._followed(row))) is not None:
            if now != before:
                yield now
                before = now
            await asyncio.sleep(EVERY)

    def _followed(self, row: str) -> LiveRow | None:
        """Return a row as its worker reports it, with the text that is being streamed; else as it is recorded. None if
        it is not in the queue."""
        place, column = self._places.get(row), self._id_column()
        found = None if place is None else self._at(place)
        if found is None:
            names = ((each, _named(each, column)[1]) for each in self._queue())
            found = next((each for each, name in names if row in (name, str(each.index))), None)
        if found is None:
            return None
        self._places[row] = found.place
        name = f"{self.stage_name}/{found.index}" if self.stage_name else str(found.index)
        if (told := self.store.follow_row(name)) is not None:
            return told, None
        (value, name), past = _named(found, column), self._past(found.row)
        facts: JsonObject = {"index": found.index, "job_id": name, "input": cast(Any, value), "saying": None}
        return facts, past

    async def steer(self, request: JsonObject) -> JsonObject:
        """Send a request to all workers. They act within a second or two."""
        return await in_thread(lambda: self._steer(request))

    def _steer(self, request: JsonObject) -> JsonObject:
        facts, lent = self.facts(), self.store
        table, now = lent.table()
        workers = [member.status for member in table.live(now).values()]
        if not workers:
            raise NotAlive(f"{self.address} has no worker: there is nothing to steer")
        steering = table.steering
        if request.get("do") != "status":
            if self.stage_name and "row" in request:
                request = {**request, "row": f"{self.stage_name}/{request['row']}"}
            try:
                steering = lent.steer(request)
            except SpecError as error:
                raise Refused(str(error)) from None
        return {"ok": True, "status": live_status(self._view(facts, table, workers), paused=steering.paused)}

    async def _alive(self, function: Callable[[], T]) -> T:
        try:
            return await in_thread(function)
        except (NotAlive, Refused):
            raise
        except BatchAgentError as error:
            raise NotAlive(str(error)) from None


def _named(row: QueuedRow, column: object) -> tuple[object, str]:
    """Return the input of a row, and its name: its own id, its id from an earlier stage, or its index."""
    value, name = decode_row(row.value)
    return value, row_name(value, row.index, column, name)


def _queued(place: str, fields: dict[bytes, bytes], started: bool) -> QueuedRow:
    return QueuedRow(fields[b"row"].decode(), place, int(fields[b"index"]), fields[b"value"], started)


def _record(result: bytes, index: int) -> Record:
    """Return a result in the format of a result line. The row may have another index than when it ended."""
    record = cast(Record, from_json(result.partition(b"\n")[0]))
    kept = {name: value for name, value in record.items() if name not in ("worker", "messages")}
    if kept["ok"]:
        kept.pop("raw_text", None)
    if kept["job_id"] == str(kept["index"]):
        kept["job_id"] = str(index)
    return {**kept, "index": index}


class _RedisLines(RowLines):
    """The stream of results. A place is the id of an entry: milliseconds and a number."""

    def __init__(self, reader: RedisReader) -> None:
        self._reader = reader
        self._after, self._count = "", 0
        self._version: object = None

    def replaced(self) -> bool:
        """Return whether the lines that were read are no longer valid. A new session may leave out rows of the earlier
        one, which is certain when all its rows are fed. After a run was deleted, another one may have its name."""
        session = self._reader.command("HMGET", self._reader.store.key("run"), "sitting", "fed")
        before, self._version = self._version, (session, self._reader.facts().get("started"))
        return before is not None and before != self._version

    def progress(self) -> tuple[int, int]:
        return self._count, int(self._reader.command("XLEN", self._reader.store.key("results")))

    def block(self) -> list[tuple[int, Record]]:
        while page := self._reader.page("results", self._after, PAGE):
            self._after = page[-1][0]
            self._count += len(page)
            records = self._reader.checked(page)
            if found := [(place, record) for place, record in records if record is not None]:
                return found
        return []

    def raw(self) -> Iterator[bytes]:
        after, left = "", self._count
        while left > 0 and (page := self._reader.page("results", after, min(PAGE, left))):
            after = page[-1][0]
            left -= len(page)
            yield from (to_json(record) for _, record in self._reader.checked(page) if record is not None)

    def read(self, places: Sequence[int]) -> list[Record | None]:
        found = dict(self._reader.checked(self._reader.entries_at(places)))
        return [found.get(place) for place in places]

    def close(self) -> None:
        """Do nothing: the reader has the connection."""


class _History:
    """The timeline of a run: rows that ended, by second, and samples taken since this object was created."""

    def __init__(self, reader: RedisReader) -> None:
        self._reader = reader
        self._lines = _RedisLines(reader)
        self._forget()

    def _forget(self) -> None:
        self._began: Counter[int] = Counter()
        self._ended: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * 6)
        self._totals = [0.0] * 6  # done, failed, prompt, cached and completion tokens, cost
        self._now: list[Line] = []  # samples of the present
        self._first: list[tuple[int, Record]] = []
        self._latest: deque[tuple[int, Record]] = deque(maxlen=SPANS_OF_ROWS)
        self._rows = 0
        self._spans: dict[int, list[Line]] = {}

    def read(self, *, running: bool, spans: bool) -> TimelineRecord:
        if self._lines.replaced():
            self._lines = _RedisLines(self._reader)
            self._lines.replaced()
            self._forget()
        while page := self._lines.block():
            for place, record in page:
                self._add(place, record)
        if running and (not self._now or time.time() - cast(float, self._now[-1][1]) >= EVERY):
            self._now.append(self._present(time.time(), self._reader.workers()))
            if len(self._now) > MOST_SAMPLES:
                self._now = [*self._now[:-1:2], self._now[-1]]
        found = TimelineRecord(cut=self._rows > len(self._first) + len(self._latest))
        found.samples.extend(self._past() + self._now)
        if spans:
            rows = [*self._first, *self._latest]
            kept = {place: self._spans.get(place) for place, _ in rows}
            self._spans = {place: known for place, known in kept.items() if known is not None}
            for place, record in rows:
                if place not in self._spans:
                    self._spans[place] = _spans(place, record, self._reader.past(place, record))
                found.spans.extend(self._spans[place])
        return found

    def _add(self, place: int, record: Record) -> None:
        usage = cast(JsonObject, record.get("usage") or {})
        timings = cast(JsonObject, record.get("timings") or {})
        at = _time(place)
        values = [
            1.0,
            float(not record.get("ok")),
            *(float(cast(int, usage.get(f"{kind}_tokens") or 0)) for kind in ("prompt", "cached", "completion")),
            float(cast(float, record.get("cost") or 0.0)),
        ]
        second = self._ended[int(at)]
        for number, value in enumerate(values):
            second[number] += value
            self._totals[number] += value
        self._began[int(at - cast(float, timings.get("total") or 0.0))] += 1
        self._rows += 1
        short: Record = {"index": record["index"], "timings": timings}
        if len(self._first) < SPANS_OF_ROWS:
            self._first.append((place, short))
        else:
            self._latest.append((place, short))

    def _past(self) -> list[Line]:
        """Return samples of the time before this object existed."""
        lines: list[Line] = []
        totals, running = [0.0] * 6, 0
        until = cast(float, self._now[0][1]) if self._now else float("inf")
        seconds = [second for second in sorted({*self._began, *self._ended}) if second < until]
        step = max(1, len(seconds) // 1000)
        for number, second in enumerate(seconds):
            ended = self._ended.get(second, [0.0] * 6)
            totals = [total + value for total, value in zip(totals, ended, strict=True)]
            running += self._began[second] - int(ended[0])
            if number % step == 0 or second == seconds[-1]:
                lines.append(_sample(float(second), totals, [running, 0, 0, 0], {}))
        return lines

    def _present(self, at: float, workers: Sequence[JsonObject]) -> Line:
        names, agents = ("running", "queued", "tools", "backing_off"), _agents(workers)
        endpoints: JsonObject = {
            str(each.get("name")): [each.get("inflight"), each.get("limit"), each.get("state")]
            for each in _endpoints(workers)
        }
        return _sample(at, self._totals, [agents[name] for name in names], endpoints)


def _place(entry: str) -> int:
    """Return the id of an entry of a stream as one number."""
    at, _, number = entry.partition("-")
    return (int(at) << SEQUENCE) + int(number)


def _time(place: int) -> float:
    return (place >> SEQUENCE) / 1000


def _sample(at: float, totals: Sequence[float], agents: Sequence[int], endpoints: JsonObject) -> Line:
    done, failed, prompt, cached, completion, cost = totals
    counts = (int(done), int(failed), *agents, int(prompt), int(cached), int(completion))
    return [SAMPLE, round(at, 3), *counts, cost or None, endpoints, None]


def _spans(place: int, record: Record, past: Past | None) -> list[Line]:
    """Return the turns and tool calls of a finished row. Their times are computed back from its end."""
    if past is None:
        return []
    spans: list[Line] = []
    timings = cast(JsonObject, record["timings"])
    before = Used()
    turns = past.turns
    began = _time(place) - cast(float, timings.get("total") or 0.0)
    index = cast(int, record["index"])
    waits = [*(turn.spent.tool_wait for turn in turns[1:]), cast(float, timings.get("tool_wait") or 0.0)]
    for number, (turn, wait) in enumerate(zip(turns, waits, strict=False), start=1):
        spent, usage = turn.spent, turn.reply.usage
        end = began + spent.total
        start = end - max(0.0, spent.inference - before.inference)
        waited = max(0.0, spent.queued - before.queued)
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        spans.append(["turn", start, end, index, number, "", round(waited, 3), 0.0, "", "", *tokens, None])
        for call in turn.reply.tool_calls:
            spans.append(["tool", end, end + max(0.0, wait - spent.tool_wait), index, number, call.name, True, ""])
        before = spent
    return spans


def _reports(workers: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """Return the reports whose numbers add up to those of the run: the feeder's, which counts all workers; without a
    feeder, those of the workers."""
    return [worker for worker in workers if worker.get("feeder")] or workers


def _agents(workers: Sequence[JsonObject]) -> Counter[str]:
    agents = Counter[str]()
    for worker in _reports(workers):
        agents.update(cast("dict[str, int]", worker.get("agents") or {}))
    return agents


def _endpoints(workers: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the endpoints of all workers: requests in flight are added, and the worst state counts."""
    found: dict[str, JsonObject] = {}
    inflight: Counter[str] = Counter()
    for worker in workers:
        for each in cast("list[JsonObject]", worker.get("endpoints") or []):
            name = str(each.get("name"))
            inflight[name] += cast(int, each.get("inflight") or 0)
            known = found.get(name)
            if known is None or (known.get("state") == "healthy" and each.get("state") != "healthy"):
                found[name] = each
    return [{**each, "inflight": inflight[name]} for name, each in found.items()]


def live_status(view: RunSnapshot, *, paused: bool) -> JsonObject:
    """Return the status of a run from what its workers report."""
    latest = view.progress
    rate = sum(cast(float, worker.get("rows_per_second") or 0.0) for worker in _reports(view.workers))
    done = latest.ok + latest.failed
    left = None if view.total is None else view.total - done
    rows: JsonObject = {"total": view.total, "done": done, "ok": latest.ok, "failed": latest.failed}
    return {
        "at": time.time(),
        "state": "paused" if paused else view.state,
        "rows": rows,
        "agents": {**_agents(view.workers)},
        "rows_per_second": rate,
        "seconds_left": left / rate if left is not None and rate else None,
        "cost": latest.cost,
        "max_inflight": None,
        "backend": view.facts.get("backend"),
        "endpoints": [*_endpoints(view.workers)],
        "workers": [{"host": worker.get("host"), "pid": worker.get("pid")} for worker in view.workers],
    }


def run_names(address: StoreAddress) -> list[str]:
    """Return the names of the runs on a server, sorted. Raises StoreError if it is unreachable."""
    connection = RedisConnection(address, patience=0.0)
    try:
        found = connection.call(lambda client: client.execute_command("SMEMBERS", RUNS))
        return sorted(cast(bytes, name).decode() for name in found)
    finally:
        connection.close()


def delete_run(address: StoreAddress) -> int:
    """Delete every key of a run and of its stages. Returns how many there were."""
    connection = RedisConnection(address, patience=0.0)
    pattern = address.at(address.name).prefix.replace("[", "\\[") + "*"

    def delete(client: Client) -> int:
        count = 0
        for key in cast(Any, client).scan_iter(match=pattern, count=1000):
            count += int(client.execute_command("UNLINK", key))
        return count

    try:
        removed = connection.call(delete)
        connection.call(lambda client: client.execute_command("SREM", RUNS, address.name))
        return removed
    finally:
        connection.close()

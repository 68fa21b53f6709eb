"""Copies a run from Redis into a directory, and keeps the copy up to date while the run continues.

``RunMirror.refresh`` copies what is new: results are appended to the result files and their steps to the journal, so
readers of a run directory see the copy grow. The timeline is made of the times at which rows finished and of what the
workers report. Methods block. Use an object in one thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from batch_agent.errors import SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.base import Entry, Identity, Progress
from batch_agent.record.codec import decode
from batch_agent.record.lock import Lock
from batch_agent.record.private import private
from batch_agent.record.run_history import History, spans_of
from batch_agent.record.rundir import FAILURES, JOURNAL, LOCK, RESULTS, RUN, SUMMARY, RunView, State, stage_names
from batch_agent.record.shared import KeptStep
from batch_agent.record.sqlite import Glance, SqliteJournal
from batch_agent.record.timeline import Line, TimelineFiles
from batch_agent.scheduler.lending import BUDGET_COST, BUDGET_TOKENS, DOLLAR, of_stage

if TYPE_CHECKING:
    from batch_agent.record.redis.reading import ReadRow, RedisReader

# Facts for workers only, or stored in other files of a directory.
INTERNAL = ("spec", "specs", "row_schema", "first", "pieces", "summary", "asked")
UNFINISHED = "unfinished.jsonl"  # the inputs of rows that are not done; only in copies of runs in Redis
ROWS_AT_ONCE = 512


@contextmanager
def reader_of(address: StoreAddress) -> Iterator[RedisReader]:
    """Yield a reader of the run at an address."""
    reader = open_reader(address)
    try:
        yield reader
    finally:
        reader.store.close()


def open_reader(address: StoreAddress) -> RedisReader:
    from batch_agent.record.redis.connection import RedisConnection
    from batch_agent.record.redis.reading import RedisReader
    from batch_agent.record.redis.store import RedisRunStore

    return RedisReader(RedisRunStore(RedisConnection(address, patience=0.0)))


def shared_view(reader: RedisReader, address: StoreAddress) -> RunView:
    """Return the state and progress of a run in Redis. Raises SpecError if there is none."""
    facts = reader.store.facts()
    if facts is None:
        raise SpecError(f"{address} holds no run")
    standing = reader.store.standing()
    state = cast(State, facts.get("state"))
    if state == "running" and not standing.feeder:
        state = "interrupted"
    rows, summary = facts.get("rows"), facts.get("summary")
    resumed = rows.get("resumed", 0) if isinstance(rows, dict) else 0
    table, _ = reader.store.lent().table()
    tokens, cost = (table.spent_of(of_stage(name, address.stage)) for name in (BUDGET_TOKENS, BUDGET_COST))
    counts = standing.counts
    latest = Progress(counts.ok, counts.failed, cast(int, resumed), tokens, cost / DOLLAR if cost else None)
    stages = {}
    for name in stage_names(facts):
        stage = address.at(address.name, name)
        with reader_of(stage) as inner:
            if inner.store.facts() is not None:
                stages[name] = shared_view(inner, stage)
    shown = {name: value for name, value in facts.items() if name not in INTERNAL}
    return RunView(
        Path(address.stage or address.name),
        shown,
        state,
        Glance(reader.sittings(), latest),
        stages,
        name=str(address),
        kept_summary=summary if isinstance(summary, dict) else None,
    )


class RunMirror:
    """A directory that follows a run in Redis. With ``steps`` it has the conversations of its rows."""

    def __init__(self, address: StoreAddress, directory: Path, *, steps: bool = True) -> None:
        self.address, self.directory, self._steps = address, directory, steps
        self.count = 0  # results that were copied
        self._reader = open_reader(address)
        self._journal: SqliteJournal | None = None
        self._lock: Lock | None = None  # held while a feeder works on the run, as in a run directory
        self._timeline: TimelineFiles | None = None
        self._history, self._is_past_told = History(), False
        self._stages: dict[str, RunMirror] = {}
        self._started: object = None
        self._after, self._agents = "", 0
        self._left_at = 0  # the sitting after which the steps of unfinished rows were copied

    def refresh(self) -> bool:
        """Copy what is new. Returns whether there is more. Raises SpecError if there is no run, StoreError if Redis is
        unreachable."""
        view = shared_view(self._reader, self.address)
        if self._journal is None or view.facts.get("started") != self._started:
            self._begin(view)
        rows = self._reader.results(self._after, ROWS_AT_ONCE)
        more = len(rows) == ROWS_AT_ONCE
        self._append(view, [row for row in rows if row.result is not None])
        if rows:
            self._after = rows[-1].place
        if not more:
            self._tell(view)
        self._describe(view)
        for stage in view.stages:
            if stage not in self._stages:
                at = self.address.at(self.address.name, stage)
                self._stages[stage] = RunMirror(at, self.directory / stage, steps=self._steps)
            more = self._stages[stage].refresh() or more
        return more

    def finish(self, *, inputs: bool) -> int:
        """Complete a copy that does not follow the run: no process works on it. Returns the number of results.

        With ``inputs`` it has the inputs of unfinished rows. A copy in which the run is continued must not have them.
        """
        view = shared_view(self._reader, self.address)
        if self._steps:
            self._leave_rows(view)
        self._release()
        self._write(RUN, {**self._facts(), "state": "interrupted" if view.state == "running" else view.state})
        if not inputs:
            (self.directory / UNFINISHED).unlink(missing_ok=True)
        return self.count + sum(stage.finish(inputs=inputs) for stage in self._stages.values())

    def close(self) -> None:
        for stage in self._stages.values():
            stage.close()
        self._release()
        if self._journal is not None:
            self._journal.close()
        self._reader.store.close()

    def _begin(self, view: RunView) -> None:
        """Start a copy. Another run under the same name replaces an earlier copy."""
        if self._journal is not None:
            self._journal.close()
            for file in [path for path in self.directory.iterdir() if path.is_file()]:
                file.unlink()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal = SqliteJournal.open(self.directory / JOURNAL, begun=False)
        self._journal.begin(bytes.fromhex(str(view.facts.get("fingerprint", ""))), str(view.facts.get("started")))
        self._started, self._after, self._agents, self.count = view.facts.get("started"), "", 0, 0
        self._history, self._is_past_told = History(), False
        asked = (self._reader.store.facts() or {}).get("asked")
        self._timeline = TimelineFiles(self.directory)
        self._timeline.begin(asked if isinstance(asked, dict) else {}, time.time())
        for name in (RESULTS, FAILURES):
            self._new(name).close()

    def _append(self, view: RunView, rows: Sequence[ReadRow]) -> None:
        lines: dict[bool, list[bytes]] = {True: [], False: []}
        entries: list[Entry] = []
        spans: list[Line] = []
        for row in rows:
            record: JsonObject | None = None
            if row.result is not None:
                record = {**cast(JsonObject, from_json(row.result)), "index": row.index}
                self._history.add(row.place, record)
                lines[bool(record["ok"])].append(_line(record))
                self.count += 1
            steps = self._reader.steps(row.row) if self._steps else ()
            self._agents, own = _entries(steps, self._agents)
            entries += own
            if record is not None:
                spans += spans_of(row.place, record, (each.step for each in own if each.agent == self._agents))
        assert self._journal is not None and self._timeline is not None
        self._journal.commit(entries, view.glance.latest)
        self._timeline.write((), spans, None)
        for name, ok in ((RESULTS, True), (FAILURES, False)):
            if lines[ok]:
                with open(self.directory / name, "ab", opener=private) as file:
                    file.write(b"".join(lines[ok]))

    def _describe(self, view: RunView) -> None:
        """Write what the run says about itself."""
        if view.state == "running" and self._lock is None:
            self._lock = Lock(self.directory / LOCK)
        elif view.state != "running":
            self._release()
        self._write(RUN, {**self._facts(), "state": view.state})
        if view.kept_summary is not None:
            self._write(SUMMARY, view.kept_summary)
        if view.state not in ("running", "complete") and self._left_at != view.glance.sessions:
            self._leave_rows(view)

    def _leave_rows(self, view: RunView) -> None:
        """Write the inputs and the steps of the rows that are not done."""
        left = list(self._reader.unfinished())
        self._left_at = view.glance.sessions
        self._append(view, [row for row in left if row.started])
        with self._new(UNFINISHED) as file:
            for row in left:
                steps = self._reader.steps(row.row) if self._steps else ()
                contents = [*dict.fromkeys(step.content.hex() for step in steps)]
                value = from_json(row.value or b"null")
                file.write(to_json({"index": row.index, "rows": contents, "input": value}) + b"\n")

    def _tell(self, view: RunView) -> None:
        """Add to the timeline: the past once, then a sample of the present while the run is alive."""
        assert self._timeline is not None
        if not self._is_past_told:
            self._is_past_told = True
            self._timeline.write(self._history.samples(), (), None)
        if view.state == "running":
            workers = workers_of(self._reader)
            self._timeline.write([self._history.sample(time.time(), workers)], (), None)

    def _facts(self) -> JsonObject:
        facts = self._reader.store.facts() or {}
        facts.pop("summary", None)
        return facts

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _new(self, name: str) -> BinaryIO:
        return open(self.directory / name, "wb", opener=private)

    def _write(self, name: str, content: JsonObject) -> None:
        """Replace a file at once: another thread may read it."""
        with self._new(f"{name}.draft") as file:
            file.write(to_json(content) + b"\n")
        (self.directory / f"{name}.draft").replace(self.directory / name)


def workers_of(reader: RedisReader) -> list[JsonObject]:
    """Return what each live worker last reported."""
    table, now = reader.store.lent().table()
    return [member.status for member in table.live(now).values()]


def _entries(steps: Sequence[KeptStep], number: int) -> tuple[int, list[Entry]]:
    """Return the last agent number used, and the steps of a row as journal entries. Agents get the numbers after
    ``number``."""
    numbers: dict[int, int] = {}
    for step in steps:
        numbers.setdefault(step.agent, number + len(numbers) + 1)
    found = [
        Entry(numbers[step.agent], Identity(step.key, step.content), decode(step.kind, step.body)) for step in steps
    ]
    return number + len(numbers), found


def _line(record: JsonObject) -> bytes:
    """Return a result as a line of its file. Failed results are flat objects."""
    kept = {name: value for name, value in record.items() if name not in ("worker", "messages")}
    if kept["ok"]:
        del kept["raw_text"]
        return to_json(kept) + b"\n"
    error = cast(JsonObject, kept.pop("error"))
    first = {name: kept.pop(name) for name in ("index", "job_id")}
    for name in ("ok", "output"):
        del kept[name]
    return to_json({**first, **error, **kept}) + b"\n"

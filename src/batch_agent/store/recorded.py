"""Reads a recorded run for commands, from a run directory or from the URL of a run in Redis.

``look`` reads a run in Redis in place. ``brought`` copies it into a directory and reads it there. So no command needs
to know where a run is stored.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

from batch_agent.errors import SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.files.tables import ResultFile
from batch_agent.messages import JsonObject
from batch_agent.scheduler.lending import BUDGET_COST, BUDGET_TOKENS, DOLLAR, of_stage
from batch_agent.store.address import StoreAddress, is_store_url
from batch_agent.store.base import Entry, Identity, Progress
from batch_agent.store.codec import decode
from batch_agent.store.control import NotAlive, Refused
from batch_agent.store.private import private
from batch_agent.store.rundir import FAILURES, JOURNAL, RESULTS, RUN, SUMMARY, RunView, State, stage_names
from batch_agent.store.sqlite import Glance, SqliteJournal

if TYPE_CHECKING:
    from batch_agent.store.redis.reading import ReadRow, RedisReader

RunPlace: TypeAlias = Path | StoreAddress
INTERNAL = (
    "spec",
    "specs",
    "first",
    "pieces",
    "summary",
)  # facts for workers only, or stored in other files of a directory
ROWS_AT_ONCE = 256


def place_of(run: str, *, named: bool = True) -> RunPlace:
    """Return the place that a command line names. With ``named``, a URL must name a run. Raises SpecError for an
    invalid URL."""
    return StoreAddress.parse(run, named=named) if is_store_url(run) else Path(run)


def look(place: RunPlace) -> RunView:
    """Return the state and progress of the run. Raises SpecError if there is none, StoreError if it cannot be read."""
    if isinstance(place, Path):
        return RunView.of(place)
    with _reader(place) as reader:
        return _view(reader, place)


@contextmanager
def brought(place: RunPlace, *, steps: bool = True) -> Iterator[Path]:
    """Yield a directory with the run: its own, or a temporary copy. With ``steps``, the copy has the record of its
    rows."""
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="batch-agent-") as folder:
        directory = Path(folder) / place.name
        copy_out(place, directory, steps=steps)
        yield directory


def failures(place: RunPlace) -> Counter[str]:
    """Return the number of failed rows by type of error."""
    with brought(place, steps=False) as directory:
        return Counter(str(failure.get("type")) for failure in ResultFile(directory / FAILURES))


def copy_out(address: StoreAddress, directory: Path, *, steps: bool = True) -> int:
    """Copy a run from Redis into a new directory, with its stages. Returns the number of its rows."""
    with _reader(address) as reader:
        view = _view(reader, address)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        count = _write_rows(reader, view, directory, steps=steps)
        # No process works on the copy, even if one works on the run.
        facts = {**(reader.store.facts() or {}), "state": "interrupted" if view.state == "running" else view.state}
        summary = facts.pop("summary", None)
        _write(directory / RUN, facts)
        if isinstance(summary, dict):
            _write(directory / SUMMARY, summary)
    for stage in view.stages:
        count += copy_out(address.at(address.name, stage), directory / stage, steps=steps)
    return count


def steer_shared(address: StoreAddress, request: JsonObject) -> JsonObject:
    """Send a request to all workers of a run in Redis, and return the status of the run. The workers act within a
    second or two. Raises NotAlive if there is no worker, Refused if the request is invalid."""
    with _reader(address) as reader:
        view, lent = _view(reader, address), reader.store.lent()
        table, now = lent.table()
        workers = [member.status for member in table.live(now).values()]
        if not workers:
            raise NotAlive(f"{address} has no worker: there is nothing to steer")
        steering = table.steering
        if request.get("do") != "status":
            try:
                steering = lent.steer(request)
            except SpecError as error:
                raise Refused(str(error)) from None
        return {"ok": True, "status": _shared_status(view, workers, paused=steering.paused)}


def _shared_status(view: RunView, workers: list[JsonObject], *, paused: bool) -> JsonObject:
    latest, agents = view.progress, Counter[str]()
    for worker in workers:
        agents.update(cast("dict[str, int]", worker.get("agents") or {}))
    rows: JsonObject = {
        "total": view.total, "done": latest.ok + latest.failed, "ok": latest.ok, "failed": latest.failed
    }  # fmt: skip
    return {
        "state": "paused" if paused else view.state,
        "rows": rows,
        "agents": {**agents},
        "rows_per_second": sum(cast(float, worker.get("rows_per_second") or 0.0) for worker in workers),
        "seconds_left": None,
        "cost": latest.cost,
        "backend": view.facts.get("backend"),
        "endpoints": [],
        "workers": [{"host": worker.get("host"), "pid": worker.get("pid")} for worker in workers],
    }


@contextmanager
def _reader(address: StoreAddress) -> Iterator[RedisReader]:
    from batch_agent.store.redis.connection import RedisConnection
    from batch_agent.store.redis.reading import RedisReader
    from batch_agent.store.redis.store import RedisRunStore

    connection = RedisConnection(address, patience=0.0)
    try:
        yield RedisReader(RedisRunStore(connection))
    finally:
        connection.close()


def _view(reader: RedisReader, address: StoreAddress) -> RunView:
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
    tokens, cost = (table.spent(of_stage(name, address.stage)) for name in (BUDGET_TOKENS, BUDGET_COST))
    counts = standing.counts
    latest = Progress(counts.ok, counts.failed, cast(int, resumed), tokens, cost / DOLLAR if cost else None)
    stages = {}
    for name in stage_names(facts):
        stage = address.at(address.name, name)
        with _reader(stage) as inner:
            if inner.store.facts() is not None:
                stages[name] = _view(inner, stage)
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


def _write_rows(reader: RedisReader, view: RunView, directory: Path, *, steps: bool) -> int:
    """Write the results and, with ``steps``, the journal. Returns the number of results."""
    count = 0
    journal = SqliteJournal.open(directory / JOURNAL, begun=False)
    try:
        journal.begin(bytes.fromhex(str(view.facts.get("fingerprint", ""))), str(view.facts.get("started")))
        number, entries = 0, list[Entry]()
        with _new(directory / RESULTS) as results, _new(directory / FAILURES) as failures:
            for row in reader.rows(steps=steps):
                if row.result is not None:
                    count += 1
                    record: JsonObject = {**cast(JsonObject, from_json(row.result)), "index": row.index}
                    (results if record["ok"] else failures).write(_line(record))
                number, own = _entries(row, number)
                entries += own
                if len(entries) >= ROWS_AT_ONCE:
                    journal.commit(entries, view.glance.latest)
                    entries = []
        journal.commit(entries, view.glance.latest)
    finally:
        journal.close()
    return count


def _entries(row: ReadRow, number: int) -> tuple[int, list[Entry]]:
    """Return the last agent number used, and the steps of a row as journal entries. Agents get the numbers after
    ``number``."""
    numbers: dict[int, int] = {}
    for step in row.steps:
        numbers.setdefault(step.agent, number + len(numbers) + 1)
    found = [
        Entry(numbers[step.agent], Identity(step.key, step.content), decode(step.kind, step.body)) for step in row.steps
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


def _new(path: Path) -> BinaryIO:
    return open(path, "wb", opener=private)


def _write(path: Path, content: JsonObject) -> None:
    with _new(path) as file:
        file.write(to_json(content) + b"\n")


def members_of(address: StoreAddress) -> int:
    """Return the number of processes that work on a run in Redis."""
    with _reader(address) as reader:
        table, now = reader.store.lent().table()
        return len(table.live(now))

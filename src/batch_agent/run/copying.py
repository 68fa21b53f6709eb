"""Copies a recorded run: a loop over its reader that writes a new run directory, or a new run in a ``RunStore``.

A store is written with the same calls that a feeder and a worker make.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

from batch_agent.agent.fingerprint import rows_under
from batch_agent.agent.prepare import Prepared
from batch_agent.errors import StoreError
from batch_agent.files.results import to_json
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.record.keys import Keys
from batch_agent.record.private import DIRECTORY, private
from batch_agent.record.promise import HEAD
from batch_agent.record.reader import RunReader, RunSnapshot, UnfinishedRow, past_of, result_line_of
from batch_agent.record.review import copy_log
from batch_agent.record.row_json import encode_record, encode_row
from batch_agent.record.rundir import FAILURES, GOLD, JOBS, JOURNAL, RESULTS, RUN, SUMMARY
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.record.store import (
    Commit,
    Identity,
    KeptStep,
    Lease,
    Resuming,
    Row,
    RowChange,
    RunStore,
)
from batch_agent.record.timeline import TimelineFiles
from batch_agent.run.spec_json import pieces, spec_json

logger = logging.getLogger("batch_agent")

ROWS_AT_ONCE = 100
BESIDE = (GOLD, HEAD)  # files that a run keeps beside its rows
LEFT_OUT = (
    "%s: what is recorded of %d rows that are not done is not copied, because their inputs are unknown. In the copy "
    "they begin again, and tools that write may write again"
)
Unfinished = Callable[[RunReader, str], Iterable[UnfinishedRow]]


def copy_to_directory(reader: RunReader, directory: Path) -> int:
    """Write the run with its stages into a new directory. Returns the number of its results."""
    view, facts = reader.view(), reader.facts()
    facts.pop("summary", None)
    directory.mkdir(DIRECTORY, parents=True, exist_ok=True)
    count = agents = 0
    rows = _rows(reader, reader.unfinished)
    with (
        closing(SqliteJournal.open(directory / JOURNAL, begun=False)) as journal,
        open(directory / RESULTS, "wb", opener=private) as results,
        open(directory / FAILURES, "wb", opener=private) as failures,
    ):
        journal.begin(bytes.fromhex(str(facts.get("fingerprint", ""))), str(facts.get("started")))
        while page := list(islice(rows, ROWS_AT_ONCE)):
            steps: list[KeptStep] = []
            for row in page:
                agents, own = _renumbered(row.steps, agents)
                steps += own
                if row.record is not None:
                    name, line = result_line_of(row.record)
                    (results if name == RESULTS else failures).write(line)
                    count += 1
            journal.commit(steps, view.latest)
    if not reader.stage_name and (lines := reader.job_lines()):
        with open(directory / JOBS, "wb", opener=private) as jobs:
            jobs.writelines(line + b"\n" for line in lines)
    for name in () if reader.stage_name else BESIDE:
        if lines := [*reader.kept_lines(name)]:
            with open(directory / name, "wb", opener=private) as file:
                file.writelines(line + b"\n" for line in lines)
    copy_log(reader, directory)
    _copy_timeline(reader, directory)
    state = "interrupted" if view.state in ("starting", "running") else view.state
    _write(directory / RUN, {**facts, "state": state})
    if view.summary is not None:
        _write(directory / SUMMARY, view.summary)
    for name in view.stages:
        with reader.stage(name) as stage:
            count += copy_to_directory(stage, directory / name)
    return count


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to copy. ``record`` is its result, None if it is not done. ``index`` is None if its input is unknown."""

    index: int | None
    value: object
    record: Record | None
    steps: Sequence[KeptStep]
    name: str | None


def _rows(reader: RunReader, unfinished: Callable[[], Iterable[UnfinishedRow]]) -> Iterator[_Row]:
    """Yield the finished rows in input order, then those that have steps and are not done."""
    for place, record in reader.rows.placed():
        name = None if record["job_id"] == str(record["index"]) else str(record["job_id"])
        steps: Sequence[KeptStep] = ()
        try:
            steps = reader.steps(place, record)
            if steps and past_of(steps) is None:
                raise StoreError("it is damaged")
        except StoreError as error:  # a damaged journal
            steps = ()
            logger.warning("the record of row %s is not copied; it is asked again: %s", record["job_id"], error)
        yield _Row(cast(int, record["index"]), record.get("input"), record, steps, name)
    try:
        for row in unfinished():
            if row.steps:
                yield _Row(row.index, row.value, None, row.steps, row.job_id)
    except StoreError as error:
        logger.warning("rows that are not done are not copied: %s", error)


def _renumbered(steps: Sequence[KeptStep], last: int) -> tuple[int, list[KeptStep]]:
    """Return the last agent number used, and the steps of a row. Agents get the numbers after ``last``."""
    numbers: dict[int, int] = {}
    for step in steps:
        numbers.setdefault(step.agent, last + len(numbers) + 1)
    return last + len(numbers), [replace(step, agent=numbers[step.agent]) for step in steps]


def _copy_timeline(reader: RunReader, directory: Path) -> None:
    found, files = reader.timeline(), TimelineFiles(directory)
    header = found.headers[-1] if found.headers else {}
    files.begin(header, cast(float, header.get("at") or time.time()))
    files.write([*found.samples, *found.changes], found.spans, reader.status())


def _write(path: Path, content: JsonObject) -> None:
    with open(path, "wb", opener=private) as file:
        file.write(to_json(content) + b"\n")


def copy_to_store(
    reader: RunReader, store: RunStore, prepared: Mapping[str, Prepared], unfinished: Unfinished, stage: str = ""
) -> int:
    """Write the run with its stages into a new run of a store. Returns the number of its results.

    ``prepared`` are its stages by name, a plain run as "", as they make the same requests as the run. ``unfinished``
    returns the rows of a stage that have begun and are not done, with their inputs. ``stage`` is the name of the run
    that ``reader`` reads, if it is a stage.
    """
    view = reader.view()
    facts = _facts(reader, view, None if view.stages else prepared[stage])
    session = store.open_feed(facts, Resuming(retry=False)).number
    count = 0
    for name in view.stages:
        with reader.stage(name) as inner, closing(store.stage(name)) as target:
            count += copy_to_store(inner, target, prepared, unfinished, name)
        store.keep_feed(session)
    if not view.stages:
        rows = _rows(reader, partial(unfinished, reader, stage))
        count = _copy_rows(reader, store, prepared[stage], session, rows)
    if not stage and (lines := reader.job_lines()):
        store.add_job_lines(lines)
    for name in () if stage else BESIDE:
        if lines := [*reader.kept_lines(name)]:
            store.put_file(name, b"\n".join(lines).decode())
    store.commit(store.join({"copies": reader.name}), 1, Commit(spent=view.latest.spent))
    store.close_feed(session, facts, "ended")
    return count


def _facts(reader: RunReader, view: RunSnapshot, prepared: Prepared | None) -> JsonObject:
    facts = {**reader.facts(), "state": "interrupted" if view.state == "starting" else view.state}
    if "spec" not in facts and prepared is not None:
        facts.update(spec=spec_json(prepared), first="null", pieces={**pieces(prepared)})
    if view.summary is not None:
        facts["summary"] = view.summary
    return facts


def _copy_rows(reader: RunReader, store: RunStore, prepared: Prepared, session: int, rows: Iterator[_Row]) -> int:
    """Feed the rows, and commit their steps and results. A row that is not done is copied if its input is known."""
    plan = prepared.plan
    keys = Keys(rows_under(prepared))
    worker = store.join({"copies": reader.name})
    unfinished: list[Lease] = []
    count = number = left_out = 0
    while page := list(islice(rows, ROWS_AT_ONCE)):
        known: dict[int, tuple[_Row, Identity]] = {}
        for row in page:
            if row.index is None:
                left_out += 1
                continue
            job = plan.job(row.index, row.value, row.name)
            known[job.index] = row, keys.identity(job, plan.question(job))
        fed = [Row(index, key.key, key.row, encode_row(row.value, row.name)) for index, (row, key) in known.items()]
        store.feed(session, fed)
        while known and (taken := store.take(worker, len(known), 0.0)):
            for lease in taken:
                number += 1
                change = _change(lease, worker, *known.pop(lease.row.index))
                if store.commit(worker, number, Commit([change])):
                    raise StoreError("the copy took longer than a lease; delete it and try again with a longer lease")
                if change.result is None:
                    unfinished.append(lease)
                count += change.result is not None
        store.keep_feed(session)
    store.hand_back(worker, unfinished)
    store.end_inputs(session)
    store.leave(worker)
    if left_out:
        logger.warning(LEFT_OUT, reader.name, left_out)
    return count


def _change(lease: Lease, worker: int, row: _Row, identity: Identity) -> RowChange:
    steps = tuple(replace(step, key=identity.key, content=identity.row) for step in row.steps)
    if row.record is None:
        return RowChange(lease, steps)
    error = row.record.get("error")
    kind = str(error["type"]) if isinstance(error, dict) else ""
    return RowChange(lease, steps, encode_record(row.record, worker), kind)

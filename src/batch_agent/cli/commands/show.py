"""``batch-agent show``: prints rows of a recorded run as text: messages, tool calls with their arguments, times and
costs. Failed and running rows are included.

The journal has the answers of models and tools. A row is found there by its input, which is stored with its result. If
the spec did not change, the prompts are shown as they were sent, else the input. The rows of a pipeline are those of
its stages.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from batch_agent.agent.prepare import Prepared
from batch_agent.cli.commands.export import RunRecords
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.row_text import Page, ShownRow, row_text
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.transcripts import open_journal, prepared_again, prompts_changed
from batch_agent.errors import JobError, SpecError
from batch_agent.files.columns import Record
from batch_agent.files.read import LazyRows
from batch_agent.files.results import from_json
from batch_agent.observe.text import rows, terminal_width
from batch_agent.record.base import Identity
from batch_agent.record.keys import row_of
from batch_agent.record.mirror import UNFINISHED
from batch_agent.record.recorded import brought, place_of
from batch_agent.record.rundir import JOURNAL, RunView
from batch_agent.record.sqlite import SqliteJournal

NO_KEY = b""  # rows are found by their content, not by their prompt
FIRST = 1  # rows that are shown by default


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help=RUN_HELP)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--row", metavar="ID", help="the row with this id, or at this position, from 0; in a pipeline STAGE/ID"
    )
    which.add_argument("--failed", action="store_true", help="failed rows")
    which.add_argument("--unfinished", action="store_true", help="rows that have started and are not done")
    which.add_argument("--slow", type=int, metavar="N", help="the N rows that took longest")
    parser.add_argument("--full", action="store_true", help="do not cut long texts")


class ShownPart:
    """A stage of a pipeline, or a plain run, whose name is ""."""

    def __init__(self, name: str, path: Path, journal: SqliteJournal, prepared: Prepared | None) -> None:
        self.name, self.records = name, RunRecords(path)
        self._journal, self._prepared = journal, prepared
        self._unfinished = path / UNFINISHED

    def finished(self, record: Record) -> ShownRow:
        """Return the row of a result line."""
        [past] = self._journal.claim([Identity(NO_KEY, row_of(record.get("input"), ""))])
        return ShownRow(self.name, record, past, _prompts(self._prepared, record.get("input")))

    def unfinished(self, wanted: str | None = None) -> Iterator[ShownRow]:
        """Yield running rows. Their inputs are not in the record: they are searched in the inputs of the run. A run in
        Redis has them, also those of rows in the queue."""
        if self._unfinished.exists():
            yield from self._queued(wanted)
            return
        waiting = [row for row, _ in self._journal.under_way()]
        known = _inputs_of(self._prepared, set(waiting))
        for row in waiting:
            index, own, value = known.get(row, (None, None, None))
            if wanted is not None and wanted not in (own, str(index)):
                continue
            [past] = self._journal.claim([Identity(NO_KEY, row)])
            record: Record = {} if index is None else {"index": index, "job_id": own or str(index)}
            prompts = _prompts(self._prepared, value) if index is not None else None
            yield ShownRow(self.name, record or None, past, prompts, value)

    def _queued(self, wanted: str | None) -> Iterator[ShownRow]:
        with self._unfinished.open("rb") as lines:
            for line in lines:
                row = cast("dict[str, Any]", from_json(line))
                if wanted is not None and wanted != str(row["index"]):
                    continue
                pasts = self._journal.claim([Identity(NO_KEY, bytes.fromhex(each)) for each in row["rows"]])
                record: Record = {"index": row["index"], "job_id": str(row["index"])}
                past = next(iter(pasts), None)
                yield ShownRow(self.name, record, past, _prompts(self._prepared, row["input"]), row["input"])

    def named(self, wanted: str) -> list[ShownRow]:
        """Return the rows with this id, else the row at this position in the inputs."""
        found = [record for record in self.records if wanted in (record.get("job_id"), str(record.get("index")))]
        found = [record for record in found if record.get("job_id") == wanted] or found
        return [self.finished(record) for record in found] or list(self.unfinished(wanted))


def show_command(options: argparse.Namespace) -> int:
    place = place_of(options.run_dir)
    with brought(place) as directory:
        return _show(options, replace(RunView.of(directory), name=str(place)))


def _show(options: argparse.Namespace, view: RunView) -> int:
    with redirect_stdout(sys.stderr):  # a user's module may print when it is imported
        prepared = _prepared(view)
    shown, page = 0, Page(options.full, terminal_width(sys.stdout))
    with ExitStack() as journals:
        parts = [_opened(name, part, prepared.get(name), journals) for name, part in view.parts.items()]
        for row in _chosen(parts, options):
            put(("\n" if shown else "") + row_text(row, page))
            shown += 1
    if not shown and options.row is not None:
        raise SpecError(f"there is no row {options.row!r} in {view.name}, or it has not started")
    if not shown:
        kind = "failed " if options.failed else "unfinished " if options.unfinished else ""
        say(f"batch-agent: there are no {kind}rows in {view.name}")
    elif not (options.row or options.failed or options.unfinished or options.slow):
        progress, each = view.progress, " of each stage," if view.stages else ""
        done = rows(progress.ok + progress.failed)
        say(f"the first{each} of {done}; show others with --row ID, --failed, --unfinished or --slow N")
    return ALL_OK


def _opened(name: str, part: RunView, prepared: Prepared | None, journals: ExitStack) -> ShownPart:
    if not (part.path / JOURNAL).exists():
        raise SpecError(f"the journal of {part.path} is missing: there is nothing to show")
    journal = journals.enter_context(closing(open_journal(part.path / JOURNAL)))
    journal.sort_by("row")
    return ShownPart(name, part.path, journal, prepared)


def _prepared(view: RunView) -> Mapping[str, Prepared]:
    """Return the parts of the run whose prompts are known."""
    known: Mapping[str, Prepared] = {}
    try:
        known = prepared_again(view.path, view.facts)
        for name, part in view.parts.items():
            if name not in known:
                raise prompts_changed(part.path)
    except SpecError as error:
        say(f"batch-agent: inputs are shown instead of prompts: {error}")
    return known


def _chosen(parts: Sequence[ShownPart], options: argparse.Namespace) -> Iterator[ShownRow]:
    if options.row is not None:
        yield from _named(parts, options.row)
    elif options.slow is not None:
        every = ((part, record) for part in parts for record in part.records)
        for part, record in heapq.nlargest(options.slow, every, key=lambda pair: _seconds(pair[1])):
            yield part.finished(record)
    else:
        for part in parts:
            if options.unfinished:
                yield from part.unfinished()
            elif options.failed:
                yield from (part.finished(record) for record in part.records if not record.get("ok"))
            else:
                yield from map(part.finished, islice(part.records, FIRST))


def _named(parts: Sequence[ShownPart], wanted: str) -> list[ShownRow]:
    """Return the row ``ID`` or ``STAGE/ID``. Raises SpecError if more than one stage has it."""
    stage, _, own = wanted.partition("/")
    within = [part for part in parts if part.name and part.name == stage and own]
    if within:
        return within[0].named(own)
    found = {part.name: part.named(wanted) for part in parts}
    having = [name for name, those in found.items() if those]
    if len(having) > 1:
        names = " or ".join(f"--row {name}/{wanted}" for name in having)
        raise SpecError(f"more than one stage has a row {wanted!r}: give {names}")
    return [row for those in found.values() for row in those]


def _seconds(record: Record) -> float:
    timings = record.get("timings")
    total = timings.get("total") if isinstance(timings, dict) else None
    return float(total) if isinstance(total, int | float) else 0.0


def _inputs_of(prepared: Prepared | None, wanted: set[bytes]) -> dict[bytes, tuple[int, str | None, object]]:
    inputs = prepared.spec.inputs if prepared is not None else None
    if prepared is None or not isinstance(inputs, list | LazyRows):
        return {}
    known: dict[bytes, tuple[int, str | None, object]] = {}
    for index, value in enumerate(inputs):
        try:
            prepared.plan.check_first(value)
            own, question = prepared.plan.asks(value)
        except JobError:
            continue
        row = row_of(value, question)
        if row in wanted:
            known[row] = (index, own, value)
    return known


def _prompts(prepared: Prepared | None, value: object) -> tuple[str, str] | None:
    if prepared is None:
        return None
    try:
        prepared.plan.check_first(value)
        return prepared.plan.system, prepared.plan.job(0, value).prompt
    except (JobError, SpecError):
        return None

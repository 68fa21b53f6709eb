"""``batch-agent show``: the rows of a recorded run as a person reads them: who said what, which tools were called with
what, how long it took and what it cost. Rows that failed, and rows that are under way, too.

The record has what models and tools said. Rows are found by their input, which is beside their result; where the spec
is still the one of the run, the prompts are shown as they were sent, otherwise the input stands for them.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from batch_agent.cli.commands.export import RunRecords
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.row_text import Page, row_text
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.transcripts import open_journal, prepared_again
from batch_agent.engine.run.prepare import Prepared
from batch_agent.errors import JobError, SpecError
from batch_agent.files.columns import Record
from batch_agent.files.read import LazyRows
from batch_agent.messages import JsonObject
from batch_agent.observe.text import rows, terminal_width
from batch_agent.store.base import Identity
from batch_agent.store.keys import row_of
from batch_agent.store.rundir import JOURNAL, RunView
from batch_agent.store.sqlite import SqliteJournal
from batch_agent.store.steps import Past

NO_KEY = b""  # rows are found by what they hold, whatever they were asked
FIRST = 1  # rows that are shown where nobody says which


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="DIR", help="the run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--row", metavar="ID", help="the row of this id, or of this place in the inputs, from 0")
    which.add_argument("--failed", action="store_true", help="the rows that failed")
    which.add_argument("--unfinished", action="store_true", help="the rows that have begun and are not done")
    which.add_argument("--slow", type=int, metavar="N", help="the N rows that took longest")
    parser.add_argument("--full", action="store_true", help="long texts in full")


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row to show. ``record`` is its result line; what is under way has none."""

    record: Record | None
    past: Past | None
    prompts: tuple[str, str] | None = None  # system and user
    value: object = field(default=None)


def show_command(options: argparse.Namespace) -> int:
    view = RunView.of(Path(options.run_dir))
    with redirect_stdout(sys.stderr):  # what a user's module prints when it is imported
        prepared = _prepared(view.path, view.facts)
    if not (view.path / JOURNAL).exists():
        raise SpecError(f"the journal of {view.path} is gone: there is nothing to show")
    shown, page = 0, Page(options.full, terminal_width(sys.stdout))
    with closing(open_journal(view.path / JOURNAL)) as journal:
        journal.sort_by("row")
        for row in _chosen(view, journal, prepared, options):
            put(
                ("\n" if shown else "") + row_text(row.record, row.past, row.prompts, row.value, page),
                sys.stdout,
            )
            shown += 1
    if not shown:
        say(f"batch-agent: {_nothing(options)} in {view.path}")
    elif not (options.row or options.failed or options.unfinished or options.slow):
        done = view.glance.latest.ok + view.glance.latest.failed
        say(f"the first of {rows(done)}; --row ID, --failed, --unfinished or --slow N show others")
    return ALL_OK


def _prepared(directory: Path, facts: JsonObject) -> Prepared | None:
    """None where the prompts cannot be told any more."""
    try:
        return prepared_again(directory, facts)
    except SpecError as error:
        say(f"batch-agent: prompts are not shown, inputs stand for them: {error}")
        return None


def _chosen(
    view: RunView, journal: SqliteJournal, prepared: Prepared | None, options: argparse.Namespace
) -> Iterator[ShownRow]:
    if options.unfinished:
        yield from _unfinished(view.facts, journal, prepared)
        return
    records: Iterable[Record] = RunRecords(view.path)
    if options.failed:
        records = (record for record in records if not record.get("ok"))
    elif options.slow is not None:
        records = heapq.nlargest(options.slow, records, key=_seconds)
    elif options.row is not None:
        records = [record for record in records if options.row in (record.get("job_id"), str(record.get("index")))]
        records = [record for record in records if record.get("job_id") == options.row] or records
    else:
        records = islice(records, FIRST)
    found = False
    for record in records:
        found = True
        [past] = journal.claim([Identity(NO_KEY, row_of(record.get("input"), ""))])
        yield ShownRow(record, past, _prompts(prepared, record.get("input")))
    if options.row is not None and not found:
        yield from _unfinished(view.facts, journal, prepared, wanted=options.row)


def _seconds(record: Record) -> float:
    timings = record.get("timings")
    total = timings.get("total") if isinstance(timings, dict) else None
    return float(total) if isinstance(total, int | float) else 0.0


def _unfinished(
    facts: JsonObject, journal: SqliteJournal, prepared: Prepared | None, wanted: str | None = None
) -> Iterator[ShownRow]:
    """Rows under way. Their inputs are not in the record: they are looked for among the run's own."""
    waiting = [row for row, _ in journal.under_way()]
    known = _inputs_of(prepared, set(waiting))
    for row in waiting:
        index, own, value = known.get(row, (None, None, None))
        if wanted is not None and wanted not in (own, str(index)):
            continue
        [past] = journal.claim([Identity(NO_KEY, row)])
        record: Record = {} if index is None else {"index": index, "job_id": own or str(index)}
        yield ShownRow(record or None, past, _prompts(prepared, value) if index is not None else None, value)


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


def _nothing(options: argparse.Namespace) -> str:
    if options.row is not None:
        return f"there is no row {options.row!r} that has begun"
    return f"there are no {'failed ' if options.failed else 'unfinished ' if options.unfinished else ''}rows"

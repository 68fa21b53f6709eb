"""``batch-agent export``: writes the results of a run to a file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batch_agent.cli.commands.review import add_who, name_of
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.results import (
    opened_output,
    refuse_in_run_directory,
    refuse_missing_directory,
    refuse_overwriting,
    written_file,
)
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.load import files_read_by
from batch_agent.cli.spec.numbers import positive
from batch_agent.cli.spec.rows import STDIN
from batch_agent.cli.spec.transcripts import prepared_again, prompts_changed, transcript_lines
from batch_agent.errors import SpecError
from batch_agent.files.compression import format_of
from batch_agent.files.excel import EXCEL
from batch_agent.files.results import to_json
from batch_agent.files.tables import (
    CSV,
    PARQUET,
    TSV,
    Record,
    check_table,
    columns_of,
    write_records,
)
from batch_agent.observe.text import counted, harmless
from batch_agent.record.people import PeopleReview
from batch_agent.record.reader import FinishedRows, RunReader, open_run
from batch_agent.record.review import log_of
from batch_agent.record.review_table import take_rows, write_table
from batch_agent.record.rundir import stage_names
from batch_agent.record.score_reader import gold_of_record, has_gold
from batch_agent.record.scoring import with_gold
from batch_agent.trust.review import QUEUES

TABLES = {"csv": CSV, "tsv": TSV, "parquet": PARQUET, "xlsx": EXCEL}
JSONL, MESSAGES = "jsonl", "messages"


def add_export_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument("directory", metavar="RUN", help=RUN_HELP)
    export.add_argument(
        "--format",
        choices=[JSONL, *TABLES, MESSAGES],
        help="all rows as JSON lines or as a table, or messages: the conversations of the rows that are ok "
        "(default: from the extension of the output, or jsonl)",
    )
    export.add_argument("--stage", metavar="NAME", help="rows of this stage of a pipeline (default: the last stage)")
    export.add_argument("--output", metavar="FILE", help="file to write; - is standard output (default)")
    export.add_argument(
        "--review",
        metavar="FILE.csv",
        help="write rows for a reviewer to fill in instead; they are this reviewer's until import-review",
    )
    add_who(export)
    export.add_argument("--queue", choices=QUEUES, help="with --review: only rows of this queue")
    export.add_argument("--limit", type=positive, metavar="N", help="with --review: at most N rows")


def export_command(options: argparse.Namespace) -> int:
    if options.review is not None:
        return _export_review(options)
    if given := [name for name in ("who", "queue", "limit") if getattr(options, name) is not None]:
        raise SpecError(f"--{given[0]} is for rows that a reviewer fills in: give --review FILE.csv too")
    with open_run(options.directory) as reader:
        stage = _stage(reader, options.stage)
        if not stage:
            return _export(options, reader, reader)
        with reader.stage(stage) as part:
            return _export(options, reader, part)


def _export(options: argparse.Namespace, run: RunReader, part: RunReader) -> int:
    """Write the results of ``part``, which is the run itself or a stage of it."""
    output = None if options.output in (None, STDIN) else Path(options.output)
    kind = options.format or _kind_of(output)
    if output is not None:
        refuse_missing_directory(output, str(output))
        if isinstance(run.place, Path):
            refuse_in_run_directory(output, run.place)
        for what, path in files_read_by(run.facts()):
            refuse_overwriting(output, path, what)
    records = part.rows
    rows: Iterable[Record] = records
    with ExitStack() as opened:
        review = opened.enter_context(PeopleReview(run, part.stage_name)) if _is_reviewed(part) else None
        if review is not None:
            review.catch_up()
            rows = _Mapped(records, review.delivered) if review.begun else records
        if has_gold(run.facts()):
            rows = _Mapped(rows, partial(with_gold, taken=gold_of_record(run)))
        _write(kind, rows, run, part, output)
    if records.torn:
        are = "is" if records.torn == 1 else "are"
        say(f"batch-agent: skipped {counted(records.torn, 'line')} that {are} not complete")
    failed = records.counts()[1]
    if kind == MESSAGES and failed:
        say(f"batch-agent: skipped {counted(failed, 'row')} that failed; --format jsonl includes them")
    return ALL_OK


def _write(kind: str, rows: Iterable[Record], run: RunReader, part: RunReader, output: Path | None) -> None:
    if kind == MESSAGES:
        _export_messages(run, part, part.rows, output)
    elif kind == JSONL:
        with opened_output(output) as stream:
            stream.writelines(to_json(record) + b"\n" for record in rows)
    else:
        table = TABLES[kind]
        if output is not None:
            check_table(output, table)
        elif table in (PARQUET, EXCEL):
            name = "a Parquet" if table == PARQUET else "an Excel"
            raise SpecError(f"{name} file cannot be written to standard output; give --output FILE")
        columns = columns_of(rows)
        with opened_output(output) as stream:
            write_records(rows, columns, stream, table)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """Rows that a function has changed. It can be iterated several times."""

    rows: Iterable[Record]
    change: Callable[[Record], Record]

    def __iter__(self) -> Iterator[Record]:
        return map(self.change, self.rows)


def _is_reviewed(part: RunReader) -> bool:
    """Return whether people work on this run, or on this stage."""
    with closing(log_of(part)) as log:
        return log.exists()


def _export_review(options: argparse.Namespace) -> int:
    """Write rows for a reviewer to fill in."""
    output, who = Path(options.review), name_of(options)
    for name, given in (("format", options.format), ("output", options.output)):
        if given is not None:
            raise SpecError(f"--{name} is not for --review, which writes its own table")
    refuse_missing_directory(output, str(output))
    with PeopleReview.open(options.directory, options.stage or "") as review:
        if isinstance(review.whole.place, Path):
            refuse_in_run_directory(output, review.whole.place)
        for what, path in files_read_by(review.whole.facts()):
            refuse_overwriting(output, path, what)
        rows = take_rows(review, who, options.limit, options.queue)
        with written_file(output) as stream:
            write_table(review, rows, stream)
        run = shlex.quote(options.directory) + (f" --stage {options.stage}" if options.stage else "")
    say(f"batch-agent: {counted(len(rows), 'row')} for {harmless(who)} in {output}")
    if rows:
        say(f"fill in the columns answer, then: batch-agent import-review {run} {shlex.quote(str(output))}", wrap=False)
    return ALL_OK


def _stage(run: RunReader, wanted: str | None) -> str:
    """Return the stage to export; "" for a plain run. Raises SpecError if it does not exist or has not started."""
    names = stage_names(run.facts())
    if not names and wanted is not None:
        raise SpecError(f"{run.name} is not a pipeline: it has no stages; omit --stage")
    if not names:
        return ""
    name = names[-1] if wanted is None else wanted
    if name not in names:
        raise SpecError(f"{run.name} has no stage {name!r}; its stages: {', '.join(names)}")
    if name not in run.begun_stages():
        raise SpecError(f"the stage {name!r} of {run.name} has not started; its stages: {', '.join(names)}")
    return name


def _kind_of(output: Path | None) -> str:
    """Return the format of a file's extension. Raises SpecError if there is none."""
    if output is None:
        return JSONL
    extension = format_of(output)[0].removeprefix(".")
    if extension not in (JSONL, *TABLES):
        raise SpecError(
            f"the format of {output} is unknown: use .jsonl, .csv, .tsv, .parquet or .xlsx, or give --format"
        )
    return extension


def _export_messages(run: RunReader, part: RunReader, records: FinishedRows, output: Path | None) -> None:
    with redirect_stdout(sys.stderr):  # a user's module may print when it is imported
        prepared = prepared_again(run).get(part.stage_name if part is not run else "")
    if prepared is None:
        raise prompts_changed(part.name)
    with opened_output(output) as stream:
        stream.writelines(transcript_lines(part, prepared, records))

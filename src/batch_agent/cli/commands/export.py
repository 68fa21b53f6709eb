"""``batch-agent export``: writes the results of a run to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.results import (
    opened_output,
    refuse_in_run_directory,
    refuse_missing_directory,
    refuse_overwriting,
)
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.load import files_read_by
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
from batch_agent.observe.text import counted
from batch_agent.record.reader import FinishedRows, RunReader, open_run
from batch_agent.record.rundir import stage_names
from batch_agent.record.score_reader import gold_of_record, has_gold
from batch_agent.record.scoring import with_gold

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


def export_command(options: argparse.Namespace) -> int:
    with open_run(options.directory) as reader:
        stage = _stage(reader, options.stage)
        if not stage:
            return _export(options, reader, reader)
        with reader.stage(stage) as part:
            return _export(options, reader, part)


def _export(options: argparse.Namespace, run: RunReader, part: RunReader) -> int:
    """``part`` is the run itself, or a stage of it."""
    output = None if options.output in (None, STDIN) else Path(options.output)
    kind = options.format or _kind_of(output)
    if output is not None:
        refuse_missing_directory(output, str(output))
        if isinstance(run.place, Path):
            refuse_in_run_directory(output, run.place)
        for what, path in files_read_by(run.facts()):
            refuse_overwriting(output, path, what)
    records = part.rows
    rows = _WithGold(run, records) if has_gold(run.facts()) else records
    if kind == MESSAGES:
        _export_messages(run, part, records, output)
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
    if records.torn:
        are = "is" if records.torn == 1 else "are"
        say(f"batch-agent: skipped {counted(records.torn, 'line')} that {are} not complete")
    failed = records.counts()[1]
    if kind == MESSAGES and failed:
        say(f"batch-agent: skipped {counted(failed, 'row')} that failed; --format jsonl includes them")
    return ALL_OK


class _WithGold:
    """Rows with their gold, and whether they are right. It can be iterated several times."""

    def __init__(self, run: RunReader, rows: FinishedRows) -> None:
        self._rows, self._taken = rows, gold_of_record(run)

    def __iter__(self) -> Iterator[Record]:
        return (with_gold(record, self._taken) for record in self._rows)


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

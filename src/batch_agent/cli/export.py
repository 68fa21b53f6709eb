"""``batch-agent export``: the results in a run directory, as another file."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import cast

from batch_agent.cli.overwriting import refuse_in_run_directory, refuse_overwriting
from batch_agent.cli.recorded import read_by
from batch_agent.cli.streams import say, writing
from batch_agent.cli.transcripts import prepared_again, transcript_lines
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.columns import Record
from batch_agent.files.order import InputOrder
from batch_agent.files.results import to_json
from batch_agent.files.tables import (
    CSV,
    PARQUET,
    TSV,
    ResultFile,
    check_table,
    columns_of,
    complete_file,
    record_of,
    write_records,
    write_table,
)
from batch_agent.messages import JsonObject
from batch_agent.store.rundir import FAILURES, RESULTS, read_run

TABLES = {"csv": CSV, "tsv": TSV, "parquet": PARQUET}
MESSAGES = "messages"


def add_export_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument("directory", metavar="DIR", help="the run directory")
    export.add_argument("--format", required=True, choices=[*TABLES, MESSAGES], help="a table, or the conversations")
    export.add_argument("--output", metavar="FILE", help="where it goes (default: standard output)")


def export_command(options: argparse.Namespace) -> int:
    directory, output = Path(options.directory), options.output and Path(options.output)
    facts = read_run(directory)
    if output is not None:
        refuse_in_run_directory(output, directory)
        for what, path in read_by(facts):
            refuse_overwriting(output, path, what)
    records = RunRecords(directory)
    if options.format == MESSAGES:
        _export_messages(directory, facts, records, output)
    else:
        _export_table(records, TABLES[options.format], output)
    if records.torn:
        say(f"batch-agent: left out {records.torn} lines that are not complete")
    return 0


class RunRecords:
    """All rows that a run has finished, those that failed among them, in input order."""

    def __init__(self, directory: Path) -> None:
        self._results = ResultFile(directory / RESULTS)
        self._failures = ResultFile(directory / FAILURES)

    @property
    def torn(self) -> int:
        return self._results.torn + self._failures.torn

    def __iter__(self) -> Iterator[Record]:
        with tempfile.TemporaryFile(buffering=0) as waiting, tempfile.TemporaryFile(buffering=0) as places:
            order = InputOrder(waiting, places)
            for record in self._unordered():
                yield from _records(order.put(cast(int, record["index"]), to_json(record)))
            yield from _records(order.rest())

    def _unordered(self) -> Iterator[Record]:
        yield from self._results
        for failure in self._failures:
            yield {**failure, "ok": False, "error": {name: failure.get(name) for name in ("type", "message")}}


def _records(lines: Iterator[bytes]) -> Iterator[Record]:
    return (record for line in lines if (record := record_of(line)) is not None)


def _export_table(records: RunRecords, kind: str, output: Path | None) -> None:
    if output is not None:
        check_table(output, kind)
        with _in_words(output):
            write_table(records, output, kind)
    elif kind == PARQUET:
        raise SpecError("a Parquet file is nothing for standard output; give --output FILE")
    else:
        with writing(sys.stdout):
            write_records(records, columns_of(records), sys.stdout.buffer, kind)


def _export_messages(directory: Path, facts: JsonObject, records: RunRecords, output: Path | None) -> None:
    with redirect_stdout(sys.stderr):  # what a user's module prints when it is imported
        prepared = prepared_again(directory, facts)
    lines = transcript_lines(directory, facts, prepared, records)
    if output is None:
        with writing(sys.stdout):
            sys.stdout.buffer.writelines(lines)
        return
    with _in_words(output), complete_file(output) as stream:
        stream.writelines(lines)


@contextmanager
def _in_words(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchAgentError(f"cannot write {output}: {error.strerror}") from None

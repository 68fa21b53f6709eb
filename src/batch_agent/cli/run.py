"""``batch-agent run``: a spec file and rows in, one line of JSON per result out."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TextIO

from batch_agent.api import BatchAgent
from batch_agent.cli.display import Display, with_expected
from batch_agent.cli.dryrun import DryRun
from batch_agent.cli.interrupts import Interrupts
from batch_agent.cli.results import FileWriter, ResultWriter, StdoutWriter, to_json
from batch_agent.cli.rows import STDIN, LargeFile, as_row, read_rows
from batch_agent.cli.specfile import SpecFile, read_specfile
from batch_agent.engine.run import Run
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.observe.metrics import Statistics
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.observe.terminal import LiveView, NoView, PlainView, View
from batch_agent.spec import BatchSpec
from batch_agent.tools.latency import ToolStatistics

STDOUT_DESCRIPTOR = 1
ALL_OK, RUN_FAILED, ROWS_FAILED = 0, 1, 2
SIGNALLED = 128  # plus the signal's number, as shells say it


def run_command(options: argparse.Namespace) -> int:
    stdout = sys.stdout
    # Standard output belongs to results: what a user's module or tool prints goes to standard error.
    with redirect_stdout(sys.stderr):
        spec = load_spec(options)
        if options.dry_run:
            dry = DryRun.of(BatchAgent.plan(spec))
            print(to_json(dry.to_json()).decode() if options.json else dry.to_text(), file=stdout, flush=True)
            return ALL_OK
        view = choose_view(options, sys.stderr, stdout)
        with _open_output(options) as writer:
            return asyncio.run(_run(spec, writer, view, _Reporter(options, stdout)))


def load_spec(options: argparse.Namespace) -> BatchSpec:
    """The file's spec, with what the command line says in its place."""
    file = read_specfile(Path(options.spec or options.spec_path))
    overrides: dict[str, object] = {"inputs": _inputs(file, options)}
    for name in ("model", "backend", "max_inflight"):
        if getattr(options, name) is not None:
            overrides[name] = getattr(options, name)
    if options.no_hoist:
        overrides["no_hoist"] = True
    return file.resolve(overrides)


def _inputs(file: SpecFile, options: argparse.Namespace) -> object:
    path = options.inputs or file.inputs_path()
    if path is not None:
        if options.output and path != STDIN:
            _refuse_overwriting(options.output, path, "inputs")
        return read_rows(path, options.limit)
    inline = file.options.get("inputs")
    if inline is None:
        raise SpecError(f"{file.path}: there are no inputs; give --inputs FILE, or inputs in the spec")
    if not isinstance(inline, list):
        raise file.error("inputs must be a list of rows or the path of a file")
    return [as_row(item, f"{file.path} input {number}") for number, item in enumerate(inline[: options.limit], 1)]


def _refuse_overwriting(output: str, other: str, what: str) -> None:
    try:
        same = Path(output).samefile(other)
    except OSError:  # one of them is not there yet
        return
    if same:
        raise SpecError(f"--output {output} is the file of the {what}; give another one")


def _open_output(options: argparse.Namespace) -> ResultWriter:
    if options.output is None:
        return StdoutWriter(STDOUT_DESCRIPTOR)
    _refuse_overwriting(options.output, options.spec or options.spec_path, "spec")
    return FileWriter(Path(options.output))


def choose_view(options: argparse.Namespace, stderr: TextIO, stdout: TextIO) -> View:
    # Result lines scrolling through a live view would destroy both.
    shared = options.output is None and stdout.isatty()
    able = stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if options.dashboard:
        if not able:
            raise SpecError("--dashboard needs a terminal on standard error; leave it out to get plain lines")
        if shared:
            raise SpecError("--dashboard needs the terminal for itself; give --output FILE or redirect the results")
        return LiveView(stderr)
    if options.json:
        return NoView()
    return LiveView(stderr) if able and not shared else PlainView(stderr)


async def _run(spec: BatchSpec, writer: ResultWriter, view: View, report: _Reporter) -> int:
    with closing(spec.inputs) if isinstance(spec.inputs, LargeFile) else nullcontext():
        async with BatchAgent.open(spec) as run:
            statistics = partial(_statistics, run, spec.inputs)
            try:
                with Interrupts(run) as interrupts:
                    async with Display(view, statistics):
                        async for result in run.results():
                            await writer.write(result)
            except BrokenPipeError:  # `| head` has seen enough
                return SIGNALLED + signal.SIGPIPE
            except BatchAgentError:
                report.written(statistics(), writer)
                raise
            report.summary(statistics(), run.tool_statistics(), writer)
            if interrupts.stopped_by is not None:
                return SIGNALLED + interrupts.stopped_by
            return exit_code(statistics())


def _statistics(run: Run[object], rows: object) -> Statistics:
    expected = rows.expected_rows() if isinstance(rows, LargeFile) else None
    return with_expected(run.statistics(), expected)


def exit_code(statistics: Statistics) -> int:
    undone = statistics.ended == "drained" and statistics.done != statistics.total
    return ROWS_FAILED if statistics.failed or undone else ALL_OK


class _Reporter:
    """Says how the run went: lines for people on standard error; with --json one object, on standard output unless the
    results are there."""

    def __init__(self, options: argparse.Namespace, stdout: TextIO) -> None:
        self._json: bool = options.json
        self._json_stream = stdout if options.output is not None else sys.stderr

    def summary(self, statistics: Statistics, tools: Mapping[str, ToolStatistics], writer: ResultWriter) -> None:
        advice = [tool.advice for tool in tools.values() if tool.advice]
        if self._json:
            record = summary_json(statistics, output=writer.destination, advice=advice)
            print(to_json(record).decode(), file=self._json_stream, flush=True)
        else:
            lines = summary_lines(statistics, output=writer.destination, advice=advice)
            print("\n".join(lines), file=sys.stderr, flush=True)

    def written(self, statistics: Statistics, writer: ResultWriter) -> None:
        """What a run that failed leaves behind."""
        if statistics.done and writer.destination and not self._json:
            print(f"{statistics.done:,} results are in {writer.destination}", file=sys.stderr, flush=True)

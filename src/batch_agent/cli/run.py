"""``batch-agent run``: a spec file and rows in, one line of JSON per result out."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from batch_agent.api import BatchAgent
from batch_agent.cli.display import Display, with_expected
from batch_agent.cli.dryrun import DryRun
from batch_agent.cli.exit_status import ALL_OK, OUT_OF_BUDGET, ROWS_FAILED, RUN_FAILED, SIGNALLED, UNREACHABLE
from batch_agent.cli.interrupts import Interrupts
from batch_agent.cli.models import fetch_missing
from batch_agent.cli.overwriting import refuse_in_run_directory, refuse_overwriting
from batch_agent.cli.recorded import command_of, recording_of
from batch_agent.cli.results import ResultWriter, open_results
from batch_agent.cli.rows import STDIN, read_rows
from batch_agent.cli.specfile import SpecFile, read_specfile
from batch_agent.cli.stages import STAGES, read_stages
from batch_agent.cli.streams import put, say
from batch_agent.engine.prepare import prepare
from batch_agent.engine.run import Run
from batch_agent.errors import BatchAgentError, Invalid, SpecError
from batch_agent.events import Ended
from batch_agent.files.read import LazyRows
from batch_agent.files.results import plainly, to_json
from batch_agent.files.rows import as_row
from batch_agent.observe.metrics import Statistics
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.observe.terminal import LiveView, NoView, PlainView, View
from batch_agent.spec import BatchSpec
from batch_agent.tools.latency import ToolStatistics
from batch_agent.topology.flow import Flow

# How a run ends that stopped before it was done, other than at a person's word.
ENDS: Mapping[Ended | None, int] = {"out of budget": OUT_OF_BUDGET, "unreachable": UNREACHABLE, "failed": RUN_FAILED}


def run_command(options: argparse.Namespace) -> int:
    stdout = sys.stdout
    # Standard output belongs to results: what a user's module or tool prints goes to standard error.
    with redirect_stdout(sys.stderr):
        if says_stages(options):
            return _run_stages(options, stdout)
        spec = load_spec(options)
        if options.dry_run:
            dry = DryRun.of(BatchAgent.plan(spec))
            put(to_json(dry.to_json()).decode() if options.json else dry.to_text(), stdout)
            return ALL_OK
        view = choose_view(options, sys.stderr, stdout)
        prepared = prepare(spec)
        fetch_missing(prepared.backend.name, sys.stderr)
        run: Run[object] = Run(prepared, command=command_of(options))
        with _open_output(options, spec) as writer:
            return asyncio.run(_run(run, spec, writer, view, _Reporter(options, stdout)))


def load_spec(options: argparse.Namespace) -> BatchSpec:
    """The file's spec, with what the command line says in its place."""
    file = read_specfile(Path(options.spec or options.spec_path))
    return file.resolve({"inputs": _inputs(file, options), **_overrides(file, options)})


def _overrides(file: SpecFile, options: argparse.Namespace) -> dict[str, object]:
    overrides: dict[str, object] = {}
    for name in ("model", "backend", "max_inflight", "max_cost", "max_total_tokens", "max_wall_time", "max_outage"):
        if getattr(options, name) is not None:
            overrides[name] = getattr(options, name)
    if options.cache is not None:
        overrides["cache"] = options.cache if options.cache is True else Path(options.cache).absolute()
    if options.no_hoist:
        overrides["no_hoist"] = True
    return overrides | recording_of(options, file)


def says_stages(options: argparse.Namespace) -> bool:
    """Whether the spec file says a pipeline."""
    return STAGES in read_specfile(Path(options.spec or options.spec_path)).options


def load_flow(options: argparse.Namespace, *, sends: bool = True) -> Flow:
    """The pipeline of the file, with what the command line says in its place."""
    file = read_specfile(Path(options.spec or options.spec_path))
    pipeline = read_stages(file, _inputs(file, options), lambda named: _rows(file, named, options))
    whole = {name: value for name, value in file.options.items() if name not in (STAGES, "inputs")}
    try:
        known = file.followed(whole) | _overrides(file, options)
        return Flow(pipeline.inputs, pipeline.stages, known, command=command_of(options), sends=sends)
    except SpecError as error:
        raise file.error(str(error)) from None


def _run_stages(options: argparse.Namespace, stdout: TextIO) -> int:
    flow = load_flow(options, sends=not options.dry_run)
    if options.dry_run:
        stages = {node.name: (node.prepared.model, node.prepared.backend.name) for node in flow.nodes}
        lines = [f"{name}: {model or 'the one model'} at {backend}" for name, (model, backend) in stages.items()]
        put(to_json({STAGES: stages}).decode() if options.json else "\n".join(lines), stdout)
        return ALL_OK
    for node in flow.nodes:
        fetch_missing(node.prepared.backend.name, sys.stderr)
    view = choose_view(options, sys.stderr, stdout)
    inputs = flow.inputs
    closed = closing(inputs) if isinstance(inputs, LazyRows) else nullcontext()
    with closed, _open_output(options, flow.spec) as writer:
        return asyncio.run(_finish(flow, writer, view, _Reporter(options, stdout)))


async def _finish(flow: Flow, writer: ResultWriter, view: View, report: _Reporter) -> int:
    """What comes out of the last stage is the output; the other stages are in the run directory."""
    async with flow:
        with Interrupts(flow) as interrupts:
            async with Display(view, flow.statistics):
                await flow.finish()
        for result in flow.results():
            await writer.write(plainly(result, flow.nodes[-1].prepared.schema))
    report.summary(flow.statistics(), {}, writer)
    report.resume(flow.statistics(), flow.spec)
    return exit_code(flow.statistics()) if interrupts.stopped_by is None else SIGNALLED + interrupts.stopped_by


def _inputs(file: SpecFile, options: argparse.Namespace) -> object:
    path = options.inputs or file.inputs_path()
    if path is not None:
        if options.output and path != STDIN:
            refuse_overwriting(Path(options.output), Path(path), "inputs")
        return read_rows(path, options.limit)
    if file.options.get("inputs") is None:
        raise SpecError(f"{file.path}: there are no inputs; give --inputs FILE, or inputs in the spec")
    return _rows(file, file.options["inputs"], options)


def _rows(file: SpecFile, named: object, options: argparse.Namespace) -> object:
    if isinstance(named, str):
        return read_rows(str(file.path.parent / named), options.limit)
    if not isinstance(named, list):
        raise file.error("inputs must be a list of rows or the path of a file")
    return [as_row(item, f"{file.path} input {number}") for number, item in enumerate(named[: options.limit], 1)]


def _open_output(options: argparse.Namespace, spec: BatchSpec) -> ResultWriter:
    if options.output is None:
        return open_results(None, ordered=options.ordered)
    output = Path(options.output)
    refuse_overwriting(output, Path(options.spec or options.spec_path), "spec")
    if spec.run_dir is not None:
        refuse_in_run_directory(output, Path(spec.run_dir))
    return open_results(output, ordered=options.ordered)


def choose_view(options: argparse.Namespace, stderr: TextIO, stdout: TextIO) -> View:
    # Result lines scrolling through a live view would destroy both.
    shared = options.output is None and stdout.isatty()
    able = stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if options.dashboard and able:
        if shared:
            raise SpecError("--dashboard needs the terminal for itself; give --output FILE or redirect the results")
        return LiveView(stderr)
    if options.json and not options.dashboard:
        return NoView()
    return LiveView(stderr) if able and not shared else PlainView(stderr)


async def _run(run: Run[object], spec: BatchSpec, writer: ResultWriter, view: View, report: _Reporter) -> int:
    with closing(spec.inputs) if isinstance(spec.inputs, LazyRows) else nullcontext():
        async with run:
            unwritten = 0

            def statistics() -> Statistics:
                return _statistics(run, spec.inputs, unwritten)

            try:
                with Interrupts(run) as interrupts:
                    async with Display(view, statistics):
                        async for result in run.results():
                            shown = plainly(result, run.schema)
                            faithful = await writer.write(shown)
                            unwritten += result.ok and not (shown.ok and faithful)
            except BrokenPipeError:  # `| head` has seen enough
                return SIGNALLED + signal.SIGPIPE
            except BatchAgentError:
                report.written(statistics(), writer)
                report.resume(statistics(), spec)
                raise
            report.summary(statistics(), run.tool_statistics(), writer)
            report.resume(statistics(), spec)
            if interrupts.stopped_by is not None:
                return SIGNALLED + interrupts.stopped_by
            return exit_code(statistics())


def _statistics(run: Run[object], rows: object, unwritten: int) -> Statistics:
    """``unwritten`` rows were ok for the run, and failed for those who read the results."""
    expected = rows.expected_rows() if isinstance(rows, LazyRows) else None
    statistics = with_expected(run.statistics(), expected)
    if not unwritten:
        return statistics
    failures = Counter(statistics.failures) + Counter({Invalid.type: unwritten})
    return replace(statistics, ok=statistics.ok - unwritten, failures=failures)


def exit_code(statistics: Statistics) -> int:
    if statistics.ended in ENDS:
        return ENDS[statistics.ended]
    undone = statistics.ended == "drained" and statistics.done != statistics.total
    return ROWS_FAILED if statistics.failed or undone else ALL_OK


class _Reporter:
    """Says how the run went: lines for people on standard error; with --json one object, on standard output unless the
    results are there."""

    def __init__(self, options: argparse.Namespace, stdout: TextIO) -> None:
        self._json: bool = options.json
        self._stdout = stdout if options.output is not None else None

    def summary(self, statistics: Statistics, tools: Mapping[str, ToolStatistics], writer: ResultWriter) -> None:
        advice = [tool.advice for tool in tools.values() if tool.advice]
        if self._json:
            record = summary_json(statistics, output=writer.destination, advice=advice)
            text = to_json(record).decode()
            say(text) if self._stdout is None else put(text, self._stdout)
        else:
            say("\n".join(summary_lines(statistics, output=writer.destination, advice=advice)))

    def resume(self, statistics: Statistics, spec: BatchSpec) -> None:
        """How to do what was left undone."""
        undone = statistics.ended != "complete" or statistics.failed
        if undone and statistics.done and spec.run_dir is not None and not self._json:
            say(f"  go on    batch-agent resume {spec.run_dir}")

    def written(self, statistics: Statistics, writer: ResultWriter) -> None:
        """What a run that failed leaves behind."""
        if statistics.done and writer.destination and not self._json:
            say(f"{statistics.done:,} results are in {writer.destination}")

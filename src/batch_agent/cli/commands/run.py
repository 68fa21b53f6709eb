"""``batch-agent run``: a task and rows in, one line of JSON per result out."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import TextIO

from batch_agent.agent.comparison import Comparison, measured_speed
from batch_agent.agent.dryrun import DryRun, marks_for
from batch_agent.agent.prepare import prepare
from batch_agent.api import BatchAgent
from batch_agent.cli.commands.models import fetch_missing
from batch_agent.cli.exit_status import (
    ALL_OK,
    CANCELLED,
    OUT_OF_BUDGET,
    ROWS_FAILED,
    RUN_FAILED,
    SIGNALLED,
    UNREACHABLE,
)
from batch_agent.cli.interrupts import Interrupts
from batch_agent.cli.output.report import Reporter
from batch_agent.cli.output.request_log import RequestLog
from batch_agent.cli.output.results import ResultWriter, open_results, refuse_in_run_directory, refuse_overwriting
from batch_agent.cli.output.streams import flush_words, put, put_json, say
from batch_agent.cli.spec.load import is_pipeline, load_flow, load_plan, load_spec, resolve_paths, take_settings
from batch_agent.cli.spec.recorded import command_of
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BatchAgentError, Invalid, SpecError
from batch_agent.events import Ended
from batch_agent.files.read import LazyRows
from batch_agent.files.results import plainly, to_json
from batch_agent.job import AgentResult
from batch_agent.observe.metrics import RecentResult, Statistics
from batch_agent.observe.progress import Display, can_redraw, is_pipe, with_expected
from batch_agent.observe.terminal import LiveDisplay, PlainDisplay, TerminalDisplay
from batch_agent.record.address import directory_of
from batch_agent.run.changes import retries
from batch_agent.run.recording import OnChange
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.topology.flow import Flow
from batch_agent.topology.plan import PipelinePlan

# Exit statuses of runs that ended early and were not stopped by a signal.
ENDS: Mapping[Ended | None, int] = {
    "out of budget": OUT_OF_BUDGET,
    "unreachable": UNREACHABLE,
    "failed": RUN_FAILED,
    "cancelled": CANCELLED,
}

RECENT_RESULTS = 40  # enough for a large terminal
SHOWN_CHARACTERS = 300

CHOICES: Mapping[str, OnChange] = {"k": "keep", "keep": "keep", "r": "resend", "resend": "resend"}


def run_command(options: argparse.Namespace) -> int:
    stdout = sys.stdout
    # Standard output is for results only: output of the user's modules and tools goes to standard error.
    with redirect_stdout(sys.stderr), ExitStack() as files:
        take_settings(options)
        resolve_paths(options)
        if options.dry_run:
            return _show_plan(options, stdout)
        wants_comparison(options)
        view = choose_view(options, sys.stderr, stdout)
        log = RequestLog(verbose=options.verbose, log_file=options.log_file, files=files)
        run, spec, inputs = _loaded(options, log)
        if (ended := go_on(options, run, spec.run_dir)) is not None:
            return ended
        for prepared in run.parts.values():
            fetch_missing(prepared.backend.name, sys.stderr)
        closed = closing(inputs) if isinstance(inputs, LazyRows) else nullcontext()
        with closed, page_beside(options, spec), open_output(options, spec) as writer:
            return asyncio.run(_run(run, inputs, writer, view, Reporter(options, spec, writer, stdout)))


def _loaded(options: argparse.Namespace, log: RequestLog) -> tuple[Run[object] | Flow, BatchSpec, object]:
    """Return the run or the pipeline, its spec, and its inputs."""
    if is_pipeline(options):
        flow = load_flow(options, command=command_of(options), wrap=log.wrap)
        return flow, flow.spec, flow.inputs
    spec = load_spec(options)
    prepared = prepare(spec)
    prepared = replace(prepared, backend=log.wrap(prepared.backend, spec.api_key))
    return Run[object](prepared, command=command_of(options)), spec, spec.inputs


def comparison_of(options: argparse.Namespace, plan: DryRun | PipelinePlan) -> Comparison | None:
    """Return the comparison that the command line asks for, or None."""
    if not wants_comparison(options):
        return None
    only, price, speed = options.compare_only or "", options.gpu_price, options.gpu_speed
    if speed is not None and price is None:
        raise SpecError("--gpu-speed needs --gpu-price, the price of the GPU in dollars per hour")
    return plan.compare(only=only, gpu_price=price, tokens_per_second=None if speed is None else _speed(speed))


def wants_comparison(options: argparse.Namespace) -> bool:
    """Return whether a comparison is wanted. Raises SpecError without --dry-run."""
    given = [name for name in ("compare", "compare_only", "gpu_price", "gpu_speed") if getattr(options, name)]
    if given and not options.dry_run:
        raise SpecError(f"--{given[0].replace('_', '-')} is for --dry-run, which sends nothing")
    return bool(given)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        return measured_speed(Path(text))
    if not 0 < speed < float("inf"):
        raise SpecError("--gpu-speed must be a number of tokens per second above 0")
    return speed


def _show_plan(options: argparse.Namespace, stdout: TextIO) -> int:
    """Print what would be sent, and its cost at other providers."""
    plan = load_plan(options) if is_pipeline(options) else DryRun.of(BatchAgent.plan(load_spec(options)))
    comparison = comparison_of(options, plan)
    if options.json:
        put_json(plan.to_json() | ({} if comparison is None else {"comparison": comparison.to_json()}), stdout)
    else:
        put("\n\n".join([plan.to_text(marks_for(stdout)), *([] if comparison is None else [str(comparison)])]), stdout)
    return ROWS_FAILED if isinstance(plan, DryRun) and plan.rows == 0 else ALL_OK


@contextmanager
def page_beside(options: argparse.Namespace, spec: BatchSpec) -> Iterator[None]:
    """With --view, serve the page of the run in another process."""
    if not options.view:
        yield
        return
    from batch_agent.view.beside import PageBeside

    with closing(PageBeside(spec.run_dir)) as page:
        if address := asyncio.run(page.open()):
            say(f"view the run: {address}", wrap=False)
        yield


def open_output(options: argparse.Namespace, spec: BatchSpec) -> ResultWriter:
    if options.output is None:
        return open_results(None, ordered=options.ordered)
    output = Path(options.output)
    if options.spec is not None:
        refuse_overwriting(output, Path(options.spec), "spec")
    if (directory := directory_of(spec.run_dir)) is not None:
        refuse_in_run_directory(output, directory)
    return open_results(output, ordered=options.ordered)


def settle_output(writer: ResultWriter, statistics: Statistics) -> None:
    """Decide whether a run without an answer leaves an empty output, or the older one unchanged."""
    writer.stopped = statistics.ended != "complete"
    if writer.keeps_old:
        say(f"batch-agent: no row has an answer, so {writer.destination} is unchanged")


def choose_view(options: argparse.Namespace, stderr: TextIO, stdout: TextIO) -> TerminalDisplay:
    # Result lines would break a live view on the same terminal; so would the output of `| jq`.
    shared = options.output is None and stdout.isatty()
    piped = options.output is None and is_pipe(stdout)
    able = can_redraw(stderr)
    if options.dashboard and able:
        if shared:
            raise SpecError("--dashboard needs a terminal without results; give --output FILE or redirect the results")
        return LiveDisplay(stderr)
    if options.json and not options.dashboard:
        return TerminalDisplay()
    return LiveDisplay(stderr) if able and not shared and not piped else PlainDisplay(stderr)


async def _run(
    run: Run[object] | Flow, inputs: object, writer: ResultWriter, view: TerminalDisplay, report: Reporter
) -> int:
    async with run:
        unwritten, all_ok = 0, True
        recent: deque[tuple[int, bool, object, float, str]] = deque(maxlen=RECENT_RESULTS)

        def statistics() -> Statistics:
            now = _statistics(run, inputs, unwritten)
            return replace(now, recent_results=tuple(starmap(_in_short, recent)))

        try:
            with Interrupts(run) as interrupts:
                async with Display(view, statistics):
                    async for result, schema in _results(run):
                        shown = plainly(result, schema)
                        faithful = await writer.write(shown)
                        unwritten += result.ok and not (shown.ok and faithful)
                        all_ok &= shown.ok
                        outcome = shown.output if shown.ok else shown.error
                        recent.append((shown.index, shown.ok, outcome, shown.timings.total, shown.job_id))
        except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
            report.broke_off(statistics())
            return SIGNALLED + signal.SIGPIPE
        except BatchAgentError:
            report.broke_off(statistics())
            raise
        settle_output(writer, statistics())
        report.finished(statistics(), run.tool_statistics())
        if interrupts.stopped_by is not None:
            return SIGNALLED + interrupts.stopped_by
        code = exit_code(statistics())
        return code if all_ok or code != ALL_OK else ROWS_FAILED


async def _results(run: Run[object] | Flow) -> AsyncIterator[tuple[AgentResult[object], OutputSchema[object] | None]]:
    """Yield each result with its schema. The results of a pipeline are those of its last stage, at the end."""
    if isinstance(run, Flow):
        await run.finish()
        for result in run.results():
            yield result, run.nodes[-1].prepared.schema
    else:
        async for result in run.results():
            yield result, run.schema


def _in_short(index: int, ok: bool, outcome: object, seconds: float, job_id: str) -> RecentResult:
    """Return a short form of a result for the live view. ``outcome`` is its output or its error."""
    if not ok:
        text = str(outcome)
    else:
        text = outcome[:SHOWN_CHARACTERS] if isinstance(outcome, str) else to_json(outcome).decode(errors="replace")
    return RecentResult(index, ok, text[:SHOWN_CHARACTERS], seconds, job_id)


def _statistics(run: Run[object] | Flow, rows: object, unwritten: int) -> Statistics:
    """Return the statistics of the run. ``unwritten`` rows count as failed: their outputs could not be written."""
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
    nothing = statistics.ended == "complete" and not statistics.done
    return ROWS_FAILED if statistics.failed or undone or nothing else ALL_OK


# Before anything is sent, ``resume``, ``retry-failed`` and ``run --resume`` say which options differ from the record,
# how many recorded answers they would drop, and what the rest costs.
def go_on(options: argparse.Namespace, run: Run[object] | Flow, run_dir: object) -> int | None:
    """Compare a resumed run with its record. Returns the exit status if the run does not begin: there is nothing to do,
    or recorded answers would be dropped and neither the arguments nor the user at the terminal allow that."""
    if not options.resume or run_dir is None:
        return None
    if options.command == "retry-failed":
        count, words = retries(str(run_dir), run.parts)
        say(f"batch-agent: {words}")
        if not count:
            return ALL_OK
    changes = run.changes()
    if changes.dropped and run.on_change is None:
        say(f"batch-agent: {changes.refusal(flags=True)}")
        if not options.json and sys.stdin.isatty() and sys.stderr.isatty():
            run.on_change = _ask()
        if run.on_change is None:
            return RUN_FAILED
    elif words := changes.forecast(keeps=run.on_change == "keep"):
        say(f"batch-agent: {words}")
    return None


def _ask() -> OnChange:
    while True:
        print("Keep the recorded answers (k), send the rows again (r), or stop (Enter)? ", end="", file=sys.stderr)
        flush_words()
        answer = sys.stdin.readline().strip().lower()
        if not answer or answer in CHOICES:
            return CHOICES.get(answer)

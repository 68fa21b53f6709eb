"""``batch-agent run``: a task and rows in, one line of JSON per result out. ``resume`` and ``retry-failed`` start a
recorded run again with the recorded command, which is in ``run.json``; this command line overrides it."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import TextIO

from pydantic import JsonValue

from batch_agent.agent.comparison import Comparison, measured_speed
from batch_agent.agent.dryrun import DryRun, marks_for
from batch_agent.agent.fingerprint import matched, rows_under
from batch_agent.agent.prepare import prepare
from batch_agent.api import BatchAgent
from batch_agent.blocking import in_thread
from batch_agent.cli.commands.models import fetch_missing
from batch_agent.cli.exit_status import (
    ALL_OK,
    CANCELLED,
    OUT_OF_BUDGET,
    PILOT,
    REQUIRED,
    ROWS_FAILED,
    RUN_FAILED,
    SIGNALLED,
    UNREACHABLE,
)
from batch_agent.cli.interrupts import interruption_of
from batch_agent.cli.output.request_log import RequestLog
from batch_agent.cli.output.results import ResultWriter, open_results, refuse_in_run_directory, refuse_overwriting
from batch_agent.cli.output.streams import flush_words, put, put_json, say
from batch_agent.cli.pilot import PilotStop, refuse_unrecorded
from batch_agent.cli.spec.load import (
    KEPT,
    command_again,
    command_of,
    is_pipeline,
    load_flow,
    load_plan,
    load_spec,
    recorded_command,
    refuse_left_out,
    resolve_paths,
    settings_beside,
    take_settings,
)
from batch_agent.cli.spec.rows import STDIN
from batch_agent.errors import BatchAgentError, Invalid, JobError, SpecError
from batch_agent.events import Ended
from batch_agent.files.gold import GOLD_FACT, IN_KEYS
from batch_agent.files.read import LazyRows
from batch_agent.files.results import plainly, to_json
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.observe.numbers import of_record
from batch_agent.observe.progress import Display, can_redraw, is_pipe, with_expected
from batch_agent.observe.statistics import RecentResult, Statistics
from batch_agent.observe.summary import promise_summary, score_summary, summary_json, summary_lines
from batch_agent.observe.terminal import LiveDisplay, PlainDisplay, TerminalDisplay
from batch_agent.observe.text import counted, harmless, harmless_lines, rows
from batch_agent.record.address import StoreAddress, directory_of, place_of
from batch_agent.record.keys import Keys
from batch_agent.record.people import waiting_words
from batch_agent.record.promise import PromiseStanding
from batch_agent.record.reader import RunSnapshot, look, open_run
from batch_agent.record.rundir import RESULTS, RUN
from batch_agent.record.score_reader import has_gold, score_of_run
from batch_agent.run.changes import Changes, OnChange, retries
from batch_agent.run.collecting import collect
from batch_agent.run.promise import priced as priced_promise
from batch_agent.run.promise import standing_of
from batch_agent.run.run import Run
from batch_agent.run.scoring import final_score
from batch_agent.run.shared_backends import SharedBackends
from batch_agent.spec import BatchSpec
from batch_agent.tools.execution import ToolStatistics
from batch_agent.topology.flow import Flow
from batch_agent.topology.plan import PipelinePlan
from batch_agent.trust.score import Score

# Exit statuses of runs that ended early and were not stopped by a signal.
ENDS: Mapping[Ended | None, int] = {
    "out of budget": OUT_OF_BUDGET,
    "unreachable": UNREACHABLE,
    "failed": RUN_FAILED,
    "cancelled": CANCELLED,
    "pilot": PILOT,
}

RECENT_RESULTS = 40  # enough for a large terminal
SHOWN_CHARACTERS = 300

CHOICES: Mapping[str, OnChange] = {"k": "keep", "keep": "keep", "r": "resend", "resend": "resend"}


def run_command(options: argparse.Namespace) -> int:
    stdout = sys.stdout
    # Standard output is for results only: output of the user's modules and tools goes to standard error.
    with redirect_stdout(sys.stderr), ExitStack() as files:
        if options.command == "plan" and options.promise is not None and _names_a_run(options.spec_path):
            return _show_price(options, stdout)
        take_settings(options)
        resolve_paths(options)
        if options.dry_run:
            return _show_plan(options, stdout)
        wants_comparison(options)
        view = choose_view(options, sys.stderr, stdout)
        log = RequestLog(verbose=options.verbose, log_file=options.log_file, files=files)
        run, spec, inputs = _loaded(options, log)
        refuse_unrecorded(options, spec)
        _refuse_unreviewable(run)
        if (ended := go_on(options, run, spec.run_dir)) is not None:
            return ended
        for prepared in run.parts.values():
            fetch_missing(prepared.backend.name, sys.stderr)
        closed = closing(inputs) if isinstance(inputs, LazyRows) else nullcontext()
        with closed, page_beside(options, spec), open_output(options, spec) as writer:
            pilot = None if run.pilot_rows is None else PilotStop(options, run, run.pilot_rows)
            return asyncio.run(_run(run, inputs, writer, view, Reporter(options, spec, writer, stdout, pilot)))


def _loaded(options: argparse.Namespace, log: RequestLog) -> tuple[Run[object] | Flow, BatchSpec, object]:
    """Return the run or the pipeline, its spec, and its inputs."""
    if is_pipeline(options):
        flow = load_flow(options, command=command_of(options), wrap=log.wrap)
        return flow, flow.spec, flow.inputs
    spec = load_spec(options)
    prepared = prepare(spec)
    prepared = SharedBackends(log.wrap).share(prepared)
    return Run[object](prepared, command=command_of(options)), spec, spec.inputs


def _refuse_unreviewable(run: Run[object] | Flow) -> None:
    """Raise SpecError if people review rows and nothing is recorded: their answers would have no place."""
    for prepared in run.parts.values():
        if prepared.cascade is not None and prepared.cascade.people and prepared.spec.run_dir is None:
            raise SpecError("people review the record of a run: leave out --no-run-dir")


def comparison_of(options: argparse.Namespace, plan: DryRun | PipelinePlan) -> Comparison | None:
    """Return the comparison that the command line asks for, or None."""
    if not wants_comparison(options):
        return None
    only = options.compare_only or ""
    price = options.gpu_price
    speed = options.gpu_speed
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


def _names_a_run(given: str | None) -> bool:
    return given is not None and (not isinstance(place := place_of(given), Path) or (place / RUN).exists())


def _show_price(options: argparse.Namespace, stdout: TextIO) -> int:
    """Print what another promise would cost, by the audit of a recorded run."""
    standing = priced_promise(options.spec_path, options.promise)
    if options.json:
        put_json({"priced": True, **standing.to_json()}, stdout)
    else:
        proves = "this prices the promise and proves nothing: the audited rows were drawn for another one"
        put("\n".join([*standing.lines(), proves]), stdout)
    return ALL_OK


def _show_plan(options: argparse.Namespace, stdout: TextIO) -> int:
    """Print what would be sent, and its cost at other providers."""
    plan: DryRun | PipelinePlan
    if is_pipeline(options):
        changes = _planned_changes(load_flow(options, sends=False)) if options.resume else None
        plan = load_plan(options)
    else:
        prepared = BatchAgent.plan(load_spec(options))
        changes = _planned_changes(Run[object](prepared)) if options.resume else None
        plan = DryRun.of(prepared)
    comparison = comparison_of(options, plan)
    if options.json:
        more: JsonObject = {} if comparison is None else {"comparison": comparison.to_json()}
        if changes is not None:
            more["resume"] = changes.to_json(keeps=options.on_change == "keep")
        put_json(plan.to_json() | more, stdout)
    else:
        parts = [plan.to_text(marks_for(stdout)), *([] if comparison is None else [str(comparison)])]
        if changes is not None and changes.dropped and options.on_change is None:
            parts.append(changes.refusal(flags=True))
        elif changes is not None:
            parts.append(changes.forecast(keeps=options.on_change == "keep") or f"{changes.run} has no record yet")
        put("\n\n".join(parts), stdout)
    return ROWS_FAILED if isinstance(plan, DryRun) and plan.rows == 0 else ALL_OK


def _planned_changes(run: Run[object] | Flow) -> Changes:
    """Compare a run that would be resumed with its record."""
    with closing(run.changes()) as changes:
        return changes


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
    if directory_of(spec.run_dir) is not None:
        refuse_in_run_directory(output, Path(str(spec.run_dir)))
    return open_results(output, ordered=options.ordered)


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
    unwritten, all_ok = 0, True
    recent: deque[tuple[int, bool, object, float, str]] = deque(maxlen=RECENT_RESULTS)
    schema = run.nodes[-1].prepared.schema if isinstance(run, Flow) else run.schema

    def statistics() -> Statistics:
        now = _statistics(run, inputs, unwritten)
        return replace(now, recent_results=tuple(starmap(_in_short, recent)))

    async def write(result: AgentResult[object]) -> None:
        nonlocal unwritten, all_ok
        shown = plainly(result, schema)
        faithful = await writer.write(shown)
        unwritten += result.ok and not (shown.ok and faithful)
        all_ok &= shown.ok
        outcome = shown.output if shown.ok else shown.error
        recent.append((shown.index, shown.ok, outcome, shown.timings.total, shown.job_id))

    @asynccontextmanager
    async def display() -> AsyncIterator[None]:
        if report.pilot is not None:
            async with Display(view, statistics):
                await report.pilot.wait()
            await report.pilot.decide()
        async with Display(view, statistics):
            yield

    interruption = interruption_of(run)
    try:
        await collect(run, write, interruption=interruption, display=display())
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        say("\n".join(report.broke_off(statistics())), wrap=False)
        return SIGNALLED + signal.SIGPIPE
    except BatchAgentError as error:
        for line in report.broke_off(statistics()):
            word, rest = line.split(None, 1)
            error.add_note(f"{word.capitalize()} {rest}")
        raise
    if writer.keeps_old:
        say(f"batch-agent: no row has an answer, so {writer.destination} is unchanged")
    taken = run.gold if isinstance(run, Flow) else None if run.scoring is None else run.scoring.taken
    score = None if taken is None else final_score(run)
    promise = None if isinstance(run, Flow) else await in_thread(lambda: run.promise)
    report.finished(statistics(), run.tool_statistics(), score, promise)
    if interruption.stopped_by is not None:
        return SIGNALLED + interruption.stopped_by
    code = exit_code(statistics())
    code = code if all_ok or code != ALL_OK else ROWS_FAILED
    unmet = taken is not None and taken.options.require and (score is None or score.unmet)
    unmet = unmet or (promise is not None and not promise.kept)
    waits = report.people_wait(statistics())
    return REQUIRED if (unmet or waits) and code in (ALL_OK, ROWS_FAILED) else code


def _in_short(index: int, ok: bool, outcome: object, seconds: float, job_id: str) -> RecentResult:
    """Return a short form of a result for the live view. ``outcome`` is its output or its error."""
    if not ok:
        text = str(outcome)
    else:
        text = outcome[:SHOWN_CHARACTERS] if isinstance(outcome, str) else to_json(outcome).decode(errors="replace")
    return RecentResult(index, ok, text[:SHOWN_CHARACTERS], seconds, job_id)


def _statistics(run: Run[object] | Flow, rows: object, unwritten: int) -> Statistics:
    """Return the statistics of the run. ``unwritten`` rows count as failed: their outputs could not be written."""
    statistics = run.statistics()
    if isinstance(rows, LazyRows) and isinstance(run, Run):  # a pipeline counts the rows of all its stages
        statistics = with_expected(statistics, rows.expected_rows())
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
    changes.told = True
    if changes.dropped and run.on_change is None:
        say(f"batch-agent: {changes.refusal(flags=True)}")
        if not options.json and sys.stdin.isatty() and sys.stderr.isatty():
            run.on_change = _ask()
        if run.on_change is None:
            changes.close()
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


# The summary at the end of a run: text on standard error, or with --json one object on standard output (on standard
# error if the results are on standard output). It names the record and the command that continues the run.
class Reporter:
    def __init__(
        self,
        options: argparse.Namespace,
        spec: BatchSpec,
        writer: ResultWriter,
        stdout: TextIO,
        pilot: PilotStop | None = None,
    ) -> None:
        self.pilot = pilot
        self._json: bool = options.json
        self._name = str(spec.run_dir)
        self._place = directory_of(spec.run_dir) or (None if spec.run_dir is None else place_of(str(spec.run_dir)))
        self._writer = writer
        self._stdout = stdout if options.output is not None else None

    def finished(
        self,
        statistics: Statistics,
        tools: Mapping[str, ToolStatistics],
        score: Score | None = None,
        promise: PromiseStanding | None = None,
    ) -> None:
        output = self._writer.destination
        if not self._json:
            say("\n".join(summary_lines(statistics, output=output, tools=tools, score=score)))
            if promise is not None:
                say("\n".join(promise_summary(promise, shlex.quote(self._name))))
            self._say_overall(statistics)
            for line in self._named_record(statistics):
                say(line, wrap=False)
            return
        run_dir = self._record(statistics)
        again = None if run_dir is None else f"batch-agent resume {shlex.quote(run_dir)} --yes"
        record = {
            **summary_json(statistics, output=output, tools=tools, score=score, promise=promise),
            **({} if self.pilot is None else self.pilot.to_json(again)),
            "run_dir": run_dir,
        }
        text = to_json(record).decode()
        say(text, wrap=False) if self._stdout is None else put(text, self._stdout)

    def broke_off(self, statistics: Statistics) -> Iterator[str]:
        """Yield lines about the results and the record of a run that failed, or whose standard output was closed."""
        if self._json:
            return
        if self._writer.written and self._writer.destination:
            yield f"{counted(self._writer.written, 'result')} in {self._writer.destination}"
        yield from self._named_record(statistics)

    def people_wait(self, statistics: Statistics) -> bool:
        """Print how many rows of a cascade wait for people, if the models have nothing left to do. Returns whether
        there are any."""
        escalated = statistics.cascade is not None and statistics.cascade.for_people > 0
        if not escalated or statistics.ended != "complete" or self._place is None:
            return False
        with open_run(self._place) as record:  # people may have judged some of them already
            words = waiting_words(record, self._record(statistics) or self._name)
        if words:
            say(harmless_lines(words), wrap=False)
        return bool(words)

    def _say_overall(self, statistics: Statistics) -> None:
        """Print the totals of a run with earlier sessions: the summary is only about the latest session."""
        if self._record(statistics) is None or self._place is None:
            return
        try:
            view = look(self._place)
        except BatchAgentError:  # the results are there; a record that cannot be read must not hide them
            return
        if view.sessions > 1:
            now = of_record(view)
            done = f"{rows(now.done)} done: {now.ok:,} ok, {now.failed:,} failed"
            say(f"  overall  {done}; {now.total_words}, in {view.sessions} sessions")

    def _named_record(self, statistics: Statistics) -> Iterator[str]:
        """Yield the command that continues the run, or that shows it if all rows are ok."""
        record = self._record(statistics)
        if record is None:
            return
        directory = shlex.quote(harmless(record))
        if statistics.ended != "complete" or statistics.failed:
            yes = " --yes" if statistics.ended == "pilot" else ""
            yield f"  continue batch-agent resume {directory}{yes}"
        else:
            yield f"  show     batch-agent show {directory}"

    def _record(self, statistics: Statistics) -> str | None:
        """Return the path or URL of the record, without a password; None if there is none."""
        if self._place is None or (isinstance(self._place, Path) and not (self._place / RUN).exists()):
            return None
        if isinstance(self._place, StoreAddress) and not statistics.started:
            try:
                look(self._place)
            except BatchAgentError:  # nothing was recorded: Redis is unreachable or refused the login
                return None
        return self._name if isinstance(self._place, Path) else str(self._place)


def resume_command(options: argparse.Namespace) -> int:
    view = look(options.run_dir)
    command = recorded_command(
        view.facts,
        f"{view.name} was not started by the command line, so its spec is unknown here; start it again from "
        "Python with resume=True",
    )
    asked_for = options.output is not None or options.command == "retry-failed" or options.on_change is not None
    merged = _merged(options, command)
    recorded = view.sessions > 0  # False if the journal is deleted
    if not asked_for and not options.dry_run and recorded and view.state == "complete" and _is_as_it_was(view, merged):
        return _say_complete(view, options.run_dir, as_json=options.json)
    return run_command(merged)


def _merged(options: argparse.Namespace, command: Mapping[str, JsonValue]) -> argparse.Namespace:
    take_settings(options)
    refuse_left_out(command, options)
    kept = command_again(command)
    merged = argparse.Namespace(**{**vars(options), **vars(kept)})
    for name in KEPT:
        if getattr(options, name) is not None:
            setattr(merged, name, getattr(options, name))
    merged.set = [*settings_beside(options, kept.set or ()), *(options.set or ())] or None  # the last one wins
    if merged.inputs == STDIN and options.inputs != STDIN:
        raise SpecError(
            f"{place_of(options.run_dir)} read its rows from standard input: pipe them in again, with --inputs -"
        )
    merged.resume = True
    return merged


def _is_as_it_was(view: RunSnapshot, options: argparse.Namespace) -> bool:
    """Return whether the spec and the rows of a complete run are unchanged. Then the run is not started, and results
    are not delivered again. Rows are compared by their hash."""
    recorded = view.facts.get("rows")
    if options.inputs == STDIN or is_pipeline(options) or not isinstance(recorded, dict) or recorded.get("failed"):
        return False
    prepared = BatchAgent.plan(load_spec(options))
    if prepared.cascade is not None:  # its answers are decided again
        return False
    inputs = prepared.spec.inputs
    with closing(inputs) if isinstance(inputs, LazyRows) else nullcontext():
        if not isinstance(inputs, Iterable):
            return False
        gold = view.facts.get(GOLD_FACT)
        known = {name: value for name, value in gold.items() if name != IN_KEYS} if isinstance(gold, dict) else None
        if (None if prepared.gold is None else prepared.gold.facts) != known:
            return False
        prepared, same = matched(prepared, view.facts)
        if not same or prepared.shapes.raised_from is not None:
            return False
        keys, plan = Keys(rows_under(prepared)), prepared.plan
        try:
            for index, value in enumerate(inputs):
                if not index:
                    plan.check_first(value)
                keys.identify(value, *plan.asks(value))
        except JobError:
            return False
    return keys.digest == recorded.get("digest")


def _say_complete(view: RunSnapshot, run: str, *, as_json: bool) -> int:
    """Report a run that is complete already, with its score. Returns the exit status."""
    ok, results = view.latest.ok, Path(view.name) / RESULTS
    output = str(results) if results.exists() else view.name
    score = None
    if has_gold(view.facts):
        with open_run(run) as record:
            score = score_of_run(record, {})
    promise = standing_of(run)
    if as_json:
        measured = {} if score is None else {"score": score.to_json()}
        measured |= {} if promise is None else {"promise": promise.to_json()}
        put_json({"state": view.state, "rows": ok, "output": output, **measured})
    else:
        text = f"{view.name} is complete: {ok:,} rows, all ok, and neither its spec nor its rows have changed."
        lines = [] if score is None else score_summary(score)
        lines += [] if promise is None else promise_summary(promise, shlex.quote(view.name))
        say("\n".join([f"{text} Kept {ok:,}, to send 0.", *lines, f"  results  {output}"]))
    unmet = (score is not None and score.unmet) or (promise is not None and not promise.kept)
    return REQUIRED if unmet else ALL_OK

"""The command line: arguments, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from batch_agent.cli.cache import add_cache_arguments, cache_command
from batch_agent.cli.doctor import add_doctor_arguments, doctor_command
from batch_agent.cli.export import add_export_arguments, export_command
from batch_agent.cli.models import add_models_arguments, models_command
from batch_agent.cli.recorded import add_recording_arguments, add_resume_arguments
from batch_agent.cli.resume import resume_command
from batch_agent.cli.run import RUN_FAILED, SIGNALLED, UNREACHABLE, run_command
from batch_agent.cli.simulate import add_simulate_arguments, simulate_command
from batch_agent.cli.status import add_status_arguments, status_command
from batch_agent.cli.streams import discard, ensure_streams, flush_words, say
from batch_agent.errors import BatchAgentError, InternalError, RunUnreachable
from batch_agent.observe.text import harmless

RUN_EPILOG = """\
A spec file holds the options of BatchAgent.run under the same names, in YAML, TOML or JSON:

  task: "Summarise in one sentence: {text}"
  model: Qwen/Qwen2.5-7B-Instruct
  backend: vllm://localhost:8000
  inputs: rows.jsonl             # a list of rows, or a file beside the spec
  tools: [read_file, mytools:look_up]
  output_schema: schemas:Answer  # or a JSON schema
  system_prompt: {file: system.txt}

Results are written as they finish, one JSON object a line, or to --output FILE.csv, .tsv or .parquet as a table when
the run is over; docs/files.md has the formats. Everything else goes to standard error. On a terminal that is a live
view, elsewhere a line now and then; --json leaves them out and ends with one JSON object, on standard output, or on
standard error when the results are on standard output.

Ctrl-C lets the agents under way finish and starts no new one; a second Ctrl-C stops at once.

exit status:
  0    every row is ok
  1    the run failed, or could not start: the message says why
  2    some rows failed, or were left undone after Ctrl-C
  3    out of budget: --max-cost, --max-total-tokens or --max-wall-time ended the run; a higher one resumes it
  4    unreachable: the server was down for longer than --max-outage, or never answered; resume goes on when it is back
  128+n  stopped by signal n: 130 second Ctrl-C, 143 SIGTERM, 141 the reader of standard output is gone
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would exit with 2, which here says that rows failed.
        self.print_usage(sys.stderr)
        self.exit(RUN_FAILED, f"batch-agent: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    ensure_streams()
    try:
        return _main(_parser().parse_args(arguments))
    finally:
        flush_words()


def _main(options: argparse.Namespace) -> int:
    try:
        if options.command == "simulate":
            return simulate_command(options)
        if options.command == "cache":
            return cache_command(options)
        if options.command == "export":
            return export_command(options)
        if options.command == "status":
            return status_command(options)
        if options.command == "models":
            return models_command(options)
        if options.command == "doctor":
            return doctor_command(options)
        if options.command in ("resume", "retry-failed"):
            return resume_command(options)
        return run_command(options)
    except InternalError:
        raise
    except BatchAgentError as error:
        say(f"batch-agent: {harmless(str(error))}")
        return UNREACHABLE if isinstance(error, RunUnreachable) else RUN_FAILED
    except BrokenPipeError:  # `| head` has seen enough of a plan
        discard(sys.stdout)
        return SIGNALLED + signal.SIGPIPE
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="batch-agent", description="Run one task over many inputs with tool-using LLM agents.")
    version = importlib.metadata.version("batch-agent")
    parser.add_argument("--version", action="version", version=f"batch-agent {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a spec file over its inputs",
        description="Run the task of a spec file over its inputs.",
        epilog=RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_arguments(run)
    simulate = commands.add_parser(
        "simulate",
        help="serve a simulated engine, to try and plan runs without a GPU",
        description="Serve a simulated inference engine over HTTP: its answers and its timings are made up.",
    )
    add_simulate_arguments(simulate)
    cache = commands.add_parser(
        "cache",
        help="look at or empty the response cache",
        description="The answers that runs with --cache keep on disk.",
    )
    add_cache_arguments(cache)
    export = commands.add_parser(
        "export",
        help="make a table of the results in a run directory",
        description="The results in a run directory, finished or not, as another file, in input order.",
    )
    add_export_arguments(export)
    resume = commands.add_parser(
        "resume",
        help="go on with a run that was interrupted",
        description="Go on with a recorded run. Rows that are done are not asked again; rows that failed are. What is "
        "given here takes the place of what the run was started with.",
    )
    retry = commands.add_parser(
        "retry-failed",
        help="try a run's failed rows again",
        description="Try the failed rows of a recorded run again, and finish what else is undone.",
    )
    retry.add_argument("--type", metavar="T", dest="retry_type", help="only those that failed with this type of error")
    for parser_again in (resume, retry):
        add_resume_arguments(parser_again)
        _add_run_options(parser_again)
    status = commands.add_parser(
        "status",
        help="how far a run is",
        description="How far a recorded run is, also while another process works on it.",
    )
    add_status_arguments(status)
    models = commands.add_parser(
        "models",
        help="the models of local://, and fetching them",
        description="The models that local:// can use on this machine: in the cache, or to be had by name.",
    )
    add_models_arguments(models)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed here and which backends would work",
        description="What is installed here, which backends would work, and which one a run that names none takes. "
        "Exit status 1 when that one cannot work.",
    )
    add_doctor_arguments(doctor)
    return parser


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    spec = run.add_mutually_exclusive_group(required=True)
    spec.add_argument("spec_path", nargs="?", metavar="SPEC", help="the spec file: .yaml, .toml or .json")
    spec.add_argument("--spec", metavar="FILE", help="the same")
    add_recording_arguments(run)
    run.add_argument("--dry-run", action="store_true", help="print the plan and the first prompt; send nothing")
    _add_run_options(run)


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--inputs",
        metavar="FILE",
        help="the rows: .jsonl, .json, .csv, .tsv (also .gz, .zst), .parquet or a directory; - reads JSONL from stdin",
    )
    run.add_argument(
        "--output",
        metavar="FILE",
        help="where the results go: JSONL, or .csv, .tsv, .parquet (default: standard output)",
    )
    run.add_argument("--ordered", action="store_true", help="write the results in the order of the rows")
    run.add_argument("--model", help="in place of the spec's model")
    run.add_argument("--backend", metavar="URL", help="in place of the spec's backend")
    run.add_argument("--limit", type=_positive, metavar="N", help="take only the first N rows")
    run.add_argument("--max-inflight", type=_positive, metavar="N", help="model calls in flight at once")
    run.add_argument("--max-cost", type=_amount, metavar="DOLLARS", help="end the run before it costs more")
    run.add_argument("--max-total-tokens", type=_positive, metavar="N", help="end it before it uses more tokens")
    run.add_argument("--max-wall-time", type=_amount, metavar="SECONDS", help="send nothing more after so long")
    run.add_argument(
        "--cache",
        nargs="?",
        const=True,
        metavar="DIR",
        help="answer what was asked before from disk; behind SPEC, or as --cache=DIR",
    )
    run.add_argument("--no-hoist", action="store_true", help="send every message as written")
    run.add_argument("--dashboard", action="store_true", help="insist on the live view, which a terminal gets anyway")
    run.add_argument("--json", action="store_true", help="print the summary, or the plan, as one JSON object")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return number


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number

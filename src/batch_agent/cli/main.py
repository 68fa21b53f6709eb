"""The command line: arguments, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from batch_agent.cli.run import RUN_FAILED, SIGNALLED, run_command
from batch_agent.cli.simulate import add_simulate_arguments, simulate_command
from batch_agent.errors import BatchAgentError, InternalError
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

Results are written as they finish, one JSON object a line; everything else goes to standard error. On a terminal that
is a live view, elsewhere a line now and then; --json leaves them out and ends with one JSON object, on standard output,
or on standard error when the results are on standard output.

Ctrl-C lets the agents under way finish and starts no new one; a second Ctrl-C stops at once.

exit status:
  0    every row is ok
  1    the run failed, or could not start: the message says why
  2    some rows failed, or were left undone after Ctrl-C
  128+n  stopped by signal n: 130 second Ctrl-C, 143 SIGTERM, 141 the reader of standard output is gone
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would exit with 2, which here says that rows failed.
        self.print_usage(sys.stderr)
        self.exit(RUN_FAILED, f"batch-agent: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a prompt may have what the locale's encoding lacks
    try:
        if options.command == "simulate":
            return simulate_command(options)
        return run_command(options)
    except InternalError:
        raise
    except BatchAgentError as error:
        print(f"batch-agent: {harmless(str(error))}", file=sys.stderr)
        return RUN_FAILED
    except BrokenPipeError:  # `| head` has seen enough of a plan
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
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
    return parser


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    spec = run.add_mutually_exclusive_group(required=True)
    spec.add_argument("spec_path", nargs="?", metavar="SPEC", help="the spec file: .yaml, .toml or .json")
    spec.add_argument("--spec", metavar="FILE", help="the same")
    run.add_argument("--inputs", metavar="FILE", help="the rows: .jsonl, .json, .csv or .tsv; - reads JSONL from stdin")
    run.add_argument("--output", metavar="FILE", help="where the results go, as JSONL (default: standard output)")
    run.add_argument("--model", help="in place of the spec's model")
    run.add_argument("--backend", metavar="URL", help="in place of the spec's backend")
    run.add_argument("--limit", type=_positive, metavar="N", help="take only the first N rows")
    run.add_argument("--max-inflight", type=_positive, metavar="N", help="model calls in flight at once")
    run.add_argument("--no-hoist", action="store_true", help="send every message as written")
    run.add_argument("--dashboard", action="store_true", help="insist on the live view, which a terminal gets anyway")
    run.add_argument("--dry-run", action="store_true", help="print the plan and the first prompt; send nothing")
    run.add_argument("--json", action="store_true", help="print the summary, or the plan, as one JSON object")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return number

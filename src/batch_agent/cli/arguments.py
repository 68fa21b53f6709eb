"""The arguments of ``run``, ``resume`` and ``retry-failed``. Nothing is imported for them: help is there at once."""

from __future__ import annotations

import argparse
import math

RUNS = "runs"

RUN_EPILOG = """\
A spec file holds the options of BatchAgent.run under the same names, in YAML,
TOML or JSON:

  task: "Summarise in one sentence: {text}"
  model: Qwen/Qwen2.5-7B-Instruct
  backend: vllm://localhost:8000
  inputs: rows.jsonl             # a list of rows, or a file beside the spec
  tools: [read_file, mytools:look_up]
  output_schema: schemas:Answer  # or a JSON schema
  system_prompt: {file: system.txt}

Results are written as they finish, one JSON object a line, or to --output
FILE.csv, .tsv or .parquet as a table when the run is over; docs/files.md has
the formats. Everything else goes to standard error. On a terminal that is a
live view, elsewhere a line now and then; --json leaves them out and ends with
one JSON object, on standard output, or on standard error when the results are
on standard output.

Ctrl-C lets the agents under way finish and starts no new one; a second Ctrl-C
stops at once.

exit status:
  0      every row is ok
  1      the run failed, or could not start: the message says why
  2      some rows failed, or were left undone after Ctrl-C
  3      out of budget: --max-cost, --max-total-tokens or --max-wall-time ended
         the run; a higher one resumes it
  4      unreachable: the server was down for longer than --max-outage, or never
         answered; resume goes on when it is back
  128+n  stopped by signal n: 130 second Ctrl-C, 143 SIGTERM, 141 the reader of
         standard output is gone
"""


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    run.epilog, run.formatter_class = RUN_EPILOG, argparse.RawDescriptionHelpFormatter
    spec = run.add_mutually_exclusive_group(required=True)
    spec.add_argument("spec_path", nargs="?", metavar="SPEC", help="the spec file: .yaml, .toml or .json")
    spec.add_argument("--spec", metavar="FILE", help="the same")
    _add_recording_arguments(run)
    run.add_argument("--dry-run", action="store_true", help="print the plan and the first prompt; send nothing")
    _add_run_options(run)


def add_resume_arguments(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("--no-retry-failed", action="store_true", help="rows that failed stay failed")
    resume.set_defaults(retry_type=None)
    _add_recorded_arguments(resume)


def add_retry_arguments(retry: argparse.ArgumentParser) -> None:
    retry.add_argument("--type", metavar="T", dest="retry_type", help="only those that failed with this type of error")
    retry.set_defaults(no_retry_failed=False)
    _add_recorded_arguments(retry)


def _add_recorded_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="DIR", help="the run directory")
    parser.add_argument(
        "--force-resume",
        action="store_true",
        help="rows keep their answers although the task, model, schema or tools have changed",
    )
    parser.set_defaults(no_run_dir=False, dry_run=False)
    _add_run_options(parser)


class _GoOnIn(argparse.Action):
    def __call__(self, parser: object, options: argparse.Namespace, value: object, name: object = None) -> None:
        options.run_dir, options.resume = value, True


def _add_recording_arguments(run: argparse.ArgumentParser) -> None:
    where = run.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir",
        metavar="DIR",
        help=f"the directory that records the run, so that it can be resumed (default: {RUNS}/SPEC-TIME)",
    )
    where.add_argument(
        "--checkpoint-dir", metavar="DIR", dest="run_dir", action=_GoOnIn, help="--run-dir and --resume in one"
    )
    where.add_argument("--no-run-dir", action="store_true", help="record nothing; what is interrupted is lost")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with what --run-dir holds, also where its run.json is lost; where it holds nothing, begin",
    )
    run.set_defaults(force_resume=False, no_retry_failed=False, retry_type=None)


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
    run.add_argument("--max-outage", type=_amount, metavar="SECONDS", help="how long a server may be unreachable")
    run.add_argument(
        "--cache",
        nargs="?",
        const=True,
        metavar="DIR",
        help="answer what was asked before from disk; behind SPEC, or as --cache=DIR",
    )
    run.add_argument("--no-hoist", action="store_true", help="send every message as written")
    run.add_argument(
        "--dashboard",
        action="store_true",
        help="the live view, which a terminal gets anyway, also with --json; without a terminal, plain lines",
    )
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

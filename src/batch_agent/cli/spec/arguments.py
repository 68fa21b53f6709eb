"""The arguments of ``run``, ``resume`` and ``retry-failed``, and what those of others have in common. Nothing is
imported for them: help is there at once."""

from __future__ import annotations

import argparse
import math

RUNS = "runs"
FORMATS = ("jsonl", "csv", "tsv", "text")

RUN_EPILOG = """\
Without a spec file, --task is the task and SPEC the file of rows:

  batch-agent run --task "Which mood? {text}" rows.csv --schema '{"mood": "good|bad"}'

A spec file holds the options of BatchAgent.run under the same names, in YAML,
TOML or JSON; batch-agent init writes one to start from:

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
live view, elsewhere, and before a pipe, a line now and then; --json leaves them
out and ends with one JSON object, on standard output, or on standard error when
the results are on standard output.

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
    run.add_argument(
        "spec_path",
        nargs="?",
        metavar="SPEC",
        help="the spec file: .yaml, .toml or .json; with --task or --spec the rows, as --inputs",
    )
    run.add_argument("--spec", metavar="FILE", help="the spec file")
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
    run.set_defaults(force_resume=False, no_retry_failed=False, retry_type=None, directory=None)


def _add_run_options(run: argparse.ArgumentParser) -> None:
    _add_question(run.add_argument_group("what is asked", "each in place of what the spec says"))
    _add_rows(run.add_argument_group("rows and results"))
    _add_limits(run.add_argument_group("where and how much"))
    _add_words(run.add_argument_group("what is said"))


def _add_question(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--task", metavar="TEXT", help="the message of each row; {field} is filled in")
    group.add_argument("--system", metavar="TEXT", help="the system prompt")
    group.add_argument(
        "--schema",
        metavar="SCHEMA",
        help="what each answer must be: module:Class, a JSON schema or its file, or its fields as "
        """'{"label": "a|b|c", "score": "number", "why": "text", "tags": ["text"]}'""",
    )
    group.add_argument("--tool", action="append", metavar="NAME", help="a tool: read_file, module:function; repeatable")
    group.add_argument("--temperature", type=_number, metavar="X", help="sampling temperature")
    group.add_argument(
        "--set",
        action="append",
        metavar="OPTION=VALUE",
        help="any other option of a spec, its value as JSON or text: --set max_turns=4; repeatable",
    )


def _add_rows(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--inputs",
        metavar="FILE",
        help="the rows: .jsonl, .json, .csv, .tsv (also .gz, .zst), .parquet or a directory; - is standard input",
    )
    group.add_argument(
        "--format",
        choices=FORMATS,
        help="what standard input or a pipe holds: jsonl, csv, tsv, or text with a row a line, {input} "
        "(default: jsonl); for a file in place of what its name says",
    )
    group.add_argument("--limit", type=positive, metavar="N", help="take only the first N rows")
    group.add_argument(
        "--output",
        metavar="FILE",
        help="where the results go: JSONL, or .csv, .tsv, .parquet; - is standard output (default)",
    )
    group.add_argument("--ordered", action="store_true", help="write the results in the order of the rows")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="the model's name")
    group.add_argument("--backend", metavar="URL", help="where inference happens")
    group.add_argument(
        "--env-file", metavar="FILE", help="lines of NAME=VALUE, such as keys; set variables stay as set"
    )
    group.add_argument("--max-inflight", type=positive, metavar="N", help="model calls in flight at once")
    group.add_argument("--max-cost", type=amount, metavar="DOLLARS", help="end the run before it costs more")
    group.add_argument("--max-total-tokens", type=positive, metavar="N", help="end it before it uses more tokens")
    group.add_argument("--max-wall-time", type=amount, metavar="SECONDS", help="send nothing more after so long")
    group.add_argument("--max-outage", type=amount, metavar="SECONDS", help="how long a server may be unreachable")
    group.add_argument(
        "--cache",
        nargs="?",
        const=True,
        metavar="DIR",
        help="answer what was asked before from disk; behind SPEC, or as --cache=DIR",
    )
    group.add_argument("--no-hoist", action="store_true", help="send every message as written")


def _add_words(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dashboard",
        action="store_true",
        help="the live view, which a terminal gets anyway, also with --json or a pipe; without a terminal, plain lines",
    )
    group.add_argument("--json", action="store_true", help="print the summary, or the plan, as one JSON object")
    group.add_argument("-v", "--verbose", action="store_true", help="say what is sent and received, in short")
    group.add_argument(
        "--log-file", metavar="FILE", help="append what is sent and received to a file, in full, secrets cut out"
    )


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return number


def amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def port_number(text: str) -> int:
    if not (text.isdecimal() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, not {text!r}")
    return int(text)

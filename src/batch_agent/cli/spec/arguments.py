"""The arguments of ``run``, ``resume`` and ``retry-failed``. BatchSpec defines the flags of its options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batch_agent.cli.spec.numbers import amount, byte_count, positive
from batch_agent.documented import first_sentence
from batch_agent.errors import SpecError
from batch_agent.option import Flag, FlagGroup, kinds, notes
from batch_agent.spec import MCP, BatchSpec

RUNS = "runs"
RUN_HELP = "the run directory, or the URL of a run in Redis"
# Options that have a flag, with the flag's name in the parsed arguments.
FLAGS = {name: flag.name or name for name, flag in notes(BatchSpec, Flag).items()}
CLUSTER = ("ray", "workers", "worker_cpus", "worker_memory")  # arguments about the processes of a run
SCORE_OPTIONS = ("gold", "gold_sample", "gold_sealed", "tolerance", "score", "by", "groups", "require")
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

Each result is written when its row finishes, as one line of JSON. With --output
FILE.csv, .tsv, .parquet or .xlsx, the results are a table, written at the end;
docs/files.md describes the formats. Progress goes to standard error: a live view
on a terminal, otherwise a line now and then. With --json there is no progress,
and the run ends with one JSON object on standard output; it goes to standard
error if the results are on standard output.

After Ctrl-C, running agents finish and no new agent starts. A second Ctrl-C
stops the run at once.

exit status:
  0      all rows are ok
  1      the run failed or could not start: the message gives the reason
  2      some rows failed, or were not finished after Ctrl-C; or there were no rows
  3      out of budget: --max-cost, --max-total-tokens or --max-wall-time ended
         the run; resume it with a higher limit
  4      unreachable: the server was down for longer than --max-outage, or never
         answered; resume the run when the server is back
  5      cancelled: batch-agent control or the page cancelled the run; resume it
  6      what --require asks of the score is not met, or rows of a cascade wait
         for people; the message says which. It replaces 0 and 2
  7      stopped after the pilot: the last line is the command that continues
  128+n  stopped by signal n: 130 second Ctrl-C, 143 SIGTERM, 129 the terminal was
         closed (SIGHUP), 141 standard output was closed
"""


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    run.epilog, run.formatter_class = RUN_EPILOG, argparse.RawDescriptionHelpFormatter
    run.add_argument(
        "spec_path",
        nargs="?",
        metavar="SPEC",
        help="the spec file: .yaml, .toml or .json; with --task, --worker or --spec, the file of rows, like --inputs",
    )
    run.add_argument("--spec", metavar="FILE", help="the spec file")
    _add_recording_arguments(run)
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the first prompt, and with --resume which rows are kept; send nothing",
    )
    _add_comparison(run.add_argument_group("cost at other providers, with --dry-run"))
    _add_run_options(run)


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``, so that replacing ``run`` by ``plan`` in a command works."""
    add_run_arguments(plan)
    plan.epilog = None
    plan.set_defaults(dry_run=True)


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare", action="store_true", help="estimate the cost at each provider and model whose price is known"
    )
    group.add_argument("--compare-only", metavar="TEXT", help="compare only models whose name contains TEXT")
    group.add_argument("--gpu-price", type=amount, metavar="DOLLARS", help="also compare a GPU at this price per hour")
    group.add_argument(
        "--gpu-speed",
        metavar="TOKENS",
        help="tokens per second of the GPU, uncached prompts and answers; or the directory of a run to take it from",
    )


def add_resume_arguments(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("--no-retry-failed", action="store_true", help="do not retry failed rows")
    resume.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan, and which rows are kept and sent; send nothing",
    )
    resume.set_defaults(retry_type=None)
    _add_recorded_arguments(resume)


def add_retry_arguments(retry: argparse.ArgumentParser) -> None:
    retry.add_argument("--type", metavar="T", dest="retry_type", help="only rows that failed with this type of error")
    retry.set_defaults(no_retry_failed=False, dry_run=False)
    _add_recorded_arguments(retry)


def _add_recorded_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="DIR", help="the run directory")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--from-start", dest="retry_from", action="store_const", const="start", help="retry in a new conversation"
    )
    start.add_argument(
        "--continue",
        dest="retry_from",
        action="store_const",
        const="failure",
        help="continue the conversations of failed rows (default: only if the cause was outside of the row)",
    )
    _add_change_arguments(parser)
    parser.set_defaults(no_run_dir=False, compare=False, compare_only=None)
    parser.set_defaults(gpu_price=None, gpu_speed=None)
    _add_run_options(parser)


def _add_change_arguments(parser: argparse.ArgumentParser) -> None:
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--keep-answers",
        dest="on_change",
        action="store_const",
        const="keep",
        help="keep the recorded answers although the task, model, schema, tools or rows changed",
    )
    change.add_argument(
        "--resend",
        dest="on_change",
        action="store_const",
        const="resend",
        help="send rows again whose recorded answers do not fit the changed task, model, schema, tools or rows",
    )
    change.add_argument(  # the older name
        "--force-resume", dest="on_change", action="store_const", const="keep", help=argparse.SUPPRESS
    )


class _GoOnIn(argparse.Action):
    def __call__(self, parser: object, options: argparse.Namespace, value: object, name: object = None) -> None:
        options.run_dir, options.resume = value, True


def _add_recording_arguments(run: argparse.ArgumentParser) -> None:
    where = run.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir",
        metavar="DIR",
        help=f"directory that records the run, so that it can be resumed (default: {RUNS}/SPEC-TIME)",
    )
    where.add_argument(
        "--checkpoint-dir", metavar="DIR", dest="run_dir", action=_GoOnIn, help="--run-dir and --resume in one"
    )
    where.add_argument("--no-run-dir", action="store_true", help="record nothing; an interrupted run cannot be resumed")
    run.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --run-dir, even if its run.json is lost; start a run if there is none",
    )
    _add_change_arguments(run)
    run.set_defaults(retry_from=None, no_retry_failed=False, retry_type=None, directory=None)


def _add_run_options(run: argparse.ArgumentParser) -> None:
    question = run.add_argument_group(FlagGroup.QUESTION.value, "each overrides the spec file")
    _add_options(question, FlagGroup.QUESTION)
    add_mcp_argument(question)
    question.add_argument(
        "--set",
        action="append",
        metavar="OPTION=VALUE",
        help="any other option of a spec, with its value as JSON or text, such as --set top_p=0.9; repeatable",
    )
    _add_rows(run.add_argument_group("rows and results"))
    where = run.add_argument_group(FlagGroup.WHERE.value)
    _add_options(where, FlagGroup.WHERE)
    where.add_argument(
        "--env-file", metavar="FILE", help="lines of NAME=VALUE, such as keys; variables that are set stay unchanged"
    )
    _add_cluster(where)
    _add_words(run.add_argument_group("messages and logs"))


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ray", metavar="ADDRESS", help="work on the rows with actors of a Ray cluster: auto, or ray://host:10001"
    )
    group.add_argument(
        "--workers",
        type=lambda text: text if text == "auto" else positive(text),
        metavar="N",
        help="with --ray: number of actors; auto is one on each node, also on nodes that join later (default: auto)",
    )
    group.add_argument("--worker-cpus", type=float, metavar="C", help="with --ray: CPUs of each actor (default: 1)")
    group.add_argument(
        "--worker-memory", type=byte_count, metavar="M", help="with --ray: memory of each actor, such as 4G"
    )


def add_score_options(
    group: argparse._ArgumentGroup | argparse.ArgumentParser, options: Sequence[str] = SCORE_OPTIONS
) -> None:
    """Add the flags of a run that say what is right and what is required."""
    for name in options:
        flag = notes(BatchSpec, Flag)[name]
        text = flag_help(name).replace("%", "%%")
        group.add_argument(flag_name(name), default=None, help=text, **_reading(name, flag))


def add_mcp_argument(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument(
        "--mcp",
        dest=FLAGS["tools"],
        action="append",
        type=lambda server: f"{MCP}{server}",
        metavar="SERVER",
        help="use the tools of an MCP server: 'stdio:COMMAND', a URL, or a file with mcpServers; repeatable",
    )


def _add_options(group: argparse._ArgumentGroup, kind: FlagGroup) -> None:
    for name, flag in notes(BatchSpec, Flag).items():
        if flag.group is kind:
            text = flag_help(name).replace("%", "%%")
            group.add_argument(flag_name(name), default=None, help=text, **_reading(name, flag))


def flag_name(option: str) -> str:
    return f"--{FLAGS[option].replace('_', '-')}"


def flag_help(option: str) -> str:
    own = notes(BatchSpec, Flag)[option].help
    return own or first_sentence(BatchSpec.model_fields[option].description or "")


def _reading(name: str, flag: Flag) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that make argparse read the option's flag."""
    types = kinds(BatchSpec, name)
    if types == {bool}:
        return {"action": "store_true"}
    if bool in types:  # True or a path
        return {"nargs": "?", "const": True, "metavar": flag.metavar}
    if Mapping in types:
        return {"action": Pairs, "metavar": flag.metavar}
    if Sequence in types and Path not in types:  # else it is a file
        return {"action": "append", "metavar": flag.metavar}
    return {"type": _number(name) if types & {int, float} else str, "metavar": flag.metavar}


# Options that may be a text or a mapping, and the form of a pair of it.
TEXT_OR_PAIRS = {"gold": "FIELD=COLUMN", "vote": "FIELD=HOW"}


class Pairs(argparse.Action):
    """Reads a mapping, given as ``NAME=VALUE`` once for each name, or as JSON. A text without ``=`` is kept as text if
    the option may be text."""

    def __call__(self, parser: object, options: argparse.Namespace, value: object, name: object = None) -> None:
        text, before = str(value), getattr(options, self.dest)
        known = dict(before) if isinstance(before, dict) else {}
        given = json_or_text(text)
        if isinstance(given, dict):
            known |= given
        elif "=" in text:
            field, _, rest = text.partition("=")
            known[field.strip()] = json_or_text(rest) if self.dest == "tolerance" else rest
        elif self.dest in TEXT_OR_PAIRS and before is None:
            setattr(options, self.dest, text)
            return
        else:
            again = f"; a second one must be {TEXT_OR_PAIRS[self.dest]}" if self.dest in TEXT_OR_PAIRS else ""
            raise argparse.ArgumentError(self, f"{text!r} is not {self.metavar}{again}")
        setattr(options, self.dest, known)


def _number(name: str) -> Callable[[str], object]:
    """Return a function that reads a number and checks it with BatchSpec. Whether it agrees with other options is
    checked with all of them."""

    def read(text: str) -> object:
        value = json_or_text(text)
        try:
            BatchSpec(task="-", inputs=(), **{name: value})
        except SpecError as error:
            if str(error).startswith(f"{name}: "):
                raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}: ")) from None
        return value

    return read


def json_or_text(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def _add_rows(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--inputs",
        metavar="FILE",
        help="the rows: .jsonl, .json, .csv, .tsv (or .gz, .zst), .parquet, .xlsx or a directory; - is standard input",
    )
    group.add_argument(
        "--format",
        choices=FORMATS,
        help="format of standard input or of a pipe: jsonl, csv, tsv, or text with one row per line, {input} "
        "(default: jsonl); for a file, overrides its extension",
    )
    group.add_argument("--limit", type=positive, metavar="N", help="use only the first N rows")
    group.add_argument(
        "--output",
        metavar="FILE",
        help="file for the results: JSONL, or .csv, .tsv, .parquet, .xlsx; - is standard output (default)",
    )
    group.add_argument(
        "--ordered", action="store_true", default=None, help="write JSONL in the order of the rows, like tables"
    )


def _add_words(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dashboard",
        action="store_true",
        help="show progress also with --json or a pipe: the live view on a terminal, otherwise plain lines",
    )
    group.add_argument("--view", action="store_true", help="serve a page about the run and print its address")
    group.add_argument(
        "--yes",
        action="store_true",
        help="continue after the pilot without a question; without a terminal it stops there",
    )
    group.add_argument("--json", action="store_true", help="print the summary, or the plan, as one JSON object")
    group.add_argument("-v", "--verbose", action="store_true", help="print requests and answers, shortened")
    group.add_argument(
        "--log-file", metavar="FILE", help="append requests and answers to a file, in full, with secrets removed"
    )

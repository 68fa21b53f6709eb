"""The arguments of ``run``, ``resume`` and ``retry-failed``. The flags of options are made from BatchSpec."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from batch_agent.cli.spec.numbers import amount, byte_count, positive
from batch_agent.documented import first_sentence
from batch_agent.errors import SpecError
from batch_agent.option import Flag, FlagGroup, kinds, notes
from batch_agent.spec import MCP, BatchSpec

RUNS = "runs"
RUN_HELP = "the run directory, or the URL of a run in Redis"
# Options that have a flag, and its name among the parsed arguments.
FLAGS = {name: flag.name or name for name, flag in notes(BatchSpec, Flag).items()}
CLUSTER = ("ray", "workers", "worker_cpus", "worker_memory")  # arguments that say where a run's processes are
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
  2      some rows failed, or were left undone after Ctrl-C; or there was no row
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
        help="the spec file: .yaml, .toml or .json; with --task, --worker or --spec the rows, as --inputs",
    )
    run.add_argument("--spec", metavar="FILE", help="the spec file")
    _add_recording_arguments(run)
    run.add_argument("--dry-run", action="store_true", help="print the plan and the first prompt; send nothing")
    _add_comparison(run.add_argument_group("what it would cost elsewhere, with --dry-run"))
    _add_run_options(run)


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """Those of ``run``, so that the word can be exchanged in a command that is there."""
    add_run_arguments(plan)
    plan.epilog = None
    plan.set_defaults(dry_run=True)


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare", action="store_true", help="the estimated cost at each provider and model whose price is known"
    )
    group.add_argument("--compare-only", metavar="TEXT", help="the same for models whose name has TEXT in it")
    group.add_argument("--gpu-price", type=amount, metavar="DOLLARS", help="of a GPU by the hour, beside them")
    group.add_argument(
        "--gpu-speed",
        metavar="TOKENS",
        help="that the GPU does in a second, uncached prompts and answers; or the directory of a run that was measured",
    )


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
    parser.set_defaults(no_run_dir=False, dry_run=False, compare=False, compare_only=None)
    parser.set_defaults(gpu_price=None, gpu_speed=None)
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
    question = run.add_argument_group(FlagGroup.QUESTION.value, "each in place of what the spec says")
    _add_options(question, FlagGroup.QUESTION)
    add_mcp_argument(question)
    question.add_argument(
        "--set",
        action="append",
        metavar="OPTION=VALUE",
        help="any other option of a spec, its value as JSON or text: --set top_p=0.9; repeatable",
    )
    _add_rows(run.add_argument_group("rows and results"))
    where = run.add_argument_group(FlagGroup.WHERE.value)
    _add_options(where, FlagGroup.WHERE)
    where.add_argument(
        "--env-file", metavar="FILE", help="lines of NAME=VALUE, such as keys; set variables stay as set"
    )
    _add_cluster(where)
    _add_words(run.add_argument_group("what is said"))


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ray", metavar="ADDRESS", help="let actors of a Ray cluster work on the rows: auto, or ray://host:10001"
    )
    group.add_argument(
        "--workers",
        type=lambda text: text if text == "auto" else positive(text),
        metavar="N",
        help="with --ray: how many actors; auto is one on each node, also on those that join (default: auto)",
    )
    group.add_argument("--worker-cpus", type=float, metavar="C", help="with --ray: CPUs that each has (default: 1)")
    group.add_argument(
        "--worker-memory", type=byte_count, metavar="M", help="with --ray: memory that each reserves, such as 4G"
    )


def add_mcp_argument(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument(
        "--mcp",
        dest=FLAGS["tools"],
        action="append",
        type=lambda server: f"{MCP}{server}",
        metavar="SERVER",
        help="the tools of an MCP server: 'stdio:COMMAND', a URL, or a file with mcpServers; repeatable",
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
    """How argparse reads an option's flag."""
    types = kinds(BatchSpec, name)
    if types == {bool}:
        return {"action": "store_true"}
    if bool in types:  # or a place
        return {"nargs": "?", "const": True, "metavar": flag.metavar}
    if Sequence in types:
        return {"action": "append", "metavar": flag.metavar}
    return {"type": _number(name) if types & {int, float} else str, "metavar": flag.metavar}


def _number(name: str) -> Callable[[str], object]:
    """A number that BatchSpec takes for this option."""

    def read(text: str) -> object:
        value = json_or_text(text)
        try:
            BatchSpec(task="-", inputs=(), **{name: value})
        except SpecError as error:
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
    group.add_argument(
        "--ordered", action="store_true", default=None, help="write JSONL in the order of the rows, as tables are"
    )


def _add_words(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dashboard",
        action="store_true",
        help="the live view, which a terminal gets anyway, also with --json or a pipe; without a terminal, plain lines",
    )
    group.add_argument("--view", action="store_true", help="serve the run's page beside it and say its address")
    group.add_argument("--json", action="store_true", help="print the summary, or the plan, as one JSON object")
    group.add_argument("-v", "--verbose", action="store_true", help="say what is sent and received, in short")
    group.add_argument(
        "--log-file", metavar="FILE", help="append what is sent and received to a file, in full, secrets cut out"
    )

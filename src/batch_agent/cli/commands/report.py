"""``batch-agent report``: writes a run as one HTML file, or two runs with their comparison."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.results import refuse_in_run_directory, written_file
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.errors import SpecError
from batch_agent.observe.text import counted
from batch_agent.record.reader import open_run
from batch_agent.view.report import Which, report_html


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"{RUN_HELP}; two to compare them")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the HTML file to write")
    parser.add_argument(
        "--rows",
        default="200",
        type=_which,
        metavar="failed|all|N",
        help="rows in the file with their conversations: failed rows, all rows, or N rows, failed rows first; in a "
        "pipeline, of each stage (default %(default)s)",
    )


def _which(text: str) -> Which:
    if text in ("failed", "all") or (text.isdecimal() and int(text) > 0):
        return text if text in ("failed", "all") else int(text)
    raise argparse.ArgumentTypeError(f"must be failed, all, or a whole number above 0, not {text!r}")


def report_command(options: argparse.Namespace) -> int:
    output = Path(options.output)
    if len(options.runs) > 2:
        raise SpecError("report takes one run, or two to compare them")
    with ExitStack() as stack:
        runs = [stack.enter_context(open_run(run)) for run in options.runs]
        for run in runs:
            run.facts()  # raises SpecError if there is no run
            if isinstance(run.place, Path):
                refuse_in_run_directory(output, run.place)
        html, rows = report_html(runs, options.rows)
    with written_file(output) as file:
        file.write(html)
    say(f"{counted(rows, 'row')} in {output}, {len(html) / 1e6:.1f} MB")
    return ALL_OK

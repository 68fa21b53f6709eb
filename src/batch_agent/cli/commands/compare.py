"""``batch-agent compare``: what differs between runs over the same rows, and with gold, what is better."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put, put_json
from batch_agent.cli.spec.arguments import FLAGS, RUN_HELP, add_score_options
from batch_agent.cli.spec.specfile import SpecFile
from batch_agent.errors import SpecError
from batch_agent.observe.text import harmless_lines, terminal_width, wrapped
from batch_agent.record.compare import compare

OPTIONS = ("gold", "tolerance", "score", "groups")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN|FILE", help=f"two or more: {RUN_HELP}, or a file of results")
    add_score_options(parser, OPTIONS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def compare_command(options: argparse.Namespace) -> int:
    if len(options.runs) < 2:
        raise SpecError("compare takes two runs or more")
    given = {name: value for name in OPTIONS if (value := getattr(options, FLAGS[name])) is not None}
    read: dict[str, Any] = SpecFile(Path.cwd() / "compare", "", given).followed()
    first, second, *others = options.runs
    found = compare(first, second, *others, **read)
    if options.json:
        put_json(found.to_json())
    else:
        put(wrapped(harmless_lines(str(found)), terminal_width(sys.stdout)))
    return ALL_OK

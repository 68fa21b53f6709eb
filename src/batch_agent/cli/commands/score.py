"""``batch-agent score``: how many answers of a run, or of a file of results, are right."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK, REQUIRED
from batch_agent.cli.output.streams import put, put_json
from batch_agent.cli.spec.arguments import FLAGS, RUN_HELP, SCORE_OPTIONS, add_score_options
from batch_agent.cli.spec.specfile import SpecFile
from batch_agent.errors import SpecError
from batch_agent.observe.text import harmless_lines, terminal_width, wrapped
from batch_agent.record.reader import open_run
from batch_agent.record.score_reader import score_of_file, score_of_run
from batch_agent.trust.score import Score


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|FILE", help=f"{RUN_HELP}, or a file of results")
    add_score_options(parser)
    parser.add_argument("--open-sealed", action="store_true", help="score the half that --gold-sealed keeps unseen")
    parser.add_argument("--wrong", action="store_true", help="list the wrong rows, the most certain answers first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def score_command(options: argparse.Namespace) -> int:
    score = _score(options)
    if options.json:
        put_json(score.to_json())
    else:
        put(wrapped(harmless_lines(str(score)), terminal_width(sys.stdout)))
    return REQUIRED if score.unmet else ALL_OK


def _score(options: argparse.Namespace) -> Score:
    given = {name: getattr(options, FLAGS[name]) for name in SCORE_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("gold_sample") not in (None, "random"):
        raise SpecError('--gold-sample must be "random": the rows with gold are a random sample of all rows')
    given = SpecFile(Path.cwd() / "score", "", given).followed()
    path = Path(options.run)
    how = {"open_sealed": options.open_sealed, "wrong": options.wrong}
    if path.is_file():
        return score_of_file(path, given, **how)
    with open_run(options.run) as run:
        return score_of_run(run, given, **how)

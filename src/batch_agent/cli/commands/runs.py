"""``batch-agent runs``: lists the runs that are recorded in a directory, the latest first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.cli.spec.arguments import RUNS
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, dollars, harmless, table, terminal_width
from batch_agent.record.address import RunPlace, place_of
from batch_agent.record.reader import RunSnapshot, look, runs_in

HEADINGS = ("RUN", "STATE", "ROWS", "FAILED", "STARTED", "TOKENS", "COST", "MODEL")
NEEDED = 3  # columns that are always shown


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        default=RUNS,
        metavar="PLACE",
        help="a directory, or the URL of a Redis server (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def runs_command(options: argparse.Namespace) -> int:
    place = place_of(options.directory, named=False)
    if isinstance(place, Path) and not place.is_dir():
        raise SpecError(f"there is no directory {place}: runs of the command line are recorded in ./{RUNS}")
    views, unreadable = _views(place)
    if options.json:
        put_json([_json(view) for view in views])
    elif views:
        put(_table([HEADINGS, *map(_cells, views)], terminal_width(sys.stdout)))
    else:
        say(f"there are no runs in {place}")
    for words in unreadable:
        say(f"batch-agent: {harmless(words)}")
    return ALL_OK


def _views(place: RunPlace) -> tuple[list[RunSnapshot], list[str]]:
    views, unreadable = [], []
    for each in runs_in(place):
        try:
            views.append(look(each))
        except BatchAgentError as error:  # a damaged run must not hide the others
            unreadable.append(str(error))
    return sorted(views, key=lambda view: str(view.facts.get("session_started")), reverse=True), unreadable


def _json(view: RunSnapshot) -> JsonObject:
    now = view.progress
    return {
        "run_dir": view.name,
        "state": view.state,
        "rows": {"total": view.total, "done": now.ok + now.failed, "ok": now.ok, "failed": now.failed},
        "tokens": now.tokens,
        "cost": now.cost,
        "started": view.facts.get("started"),
        "model": view.facts.get("model"),
        "backend": view.facts.get("backend"),
    }


def _cells(view: RunSnapshot) -> tuple[str, ...]:
    now, facts = view.progress, view.facts
    of = "" if view.total is None else f"/{view.total:,}"
    return (
        harmless(view.name),
        view.state,
        f"{now.ok + now.failed:,}{of}",
        f"{now.failed:,}",
        _local(str(facts.get("started"))),
        amount(now.tokens),
        "" if now.cost is None else dollars(now.cost),
        harmless(str(facts.get("model") or "")),
    )


def _local(time: str) -> str:
    try:
        return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return harmless(time)


def _table(lines: Sequence[tuple[str, ...]], width: int | None) -> str:
    """Return the table without empty columns, and without the last columns if the terminal is too narrow."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    while width is not None and len(columns) > NEEDED and sum(widths) + 2 * len(columns) - 2 > width:
        columns.pop()
        widths.pop()
    head, *rest = zip(*columns, strict=True)
    return table(head, rest)

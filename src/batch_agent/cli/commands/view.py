"""``batch-agent view``: shows runs in a browser."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from batch_agent.blocking import in_thread
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.arguments import RUN_HELP, RUNS
from batch_agent.cli.spec.numbers import add_address
from batch_agent.door import is_loopback
from batch_agent.errors import SpecError
from batch_agent.record.address import RunPlace, place_of
from batch_agent.record.reader import look, runs_in
from batch_agent.view.runs import ShownRuns
from batch_agent.view.server import ViewServer


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help=f"{RUN_HELP}; two to compare them; a directory of runs (default ./{RUNS}); or a Redis server",
    )
    add_address(parser, 0)
    parser.add_argument(
        "--beside", action="store_true", help="serve until standard input ends; for a process that starts the page"
    )


def view_command(options: argparse.Namespace) -> int:
    runs = _runs([place_of(run, named=False) for run in options.runs], waits=options.beside)
    return serve_page(
        ViewServer(runs, options.host, options.port),
        options.host,
        "anyone with the token can read all prompts and answers, and cancel runs",
        "Ctrl-C stops the page; runs continue without it",
        beside=options.beside,
    )


def serve_page(server: ViewServer, host: str, risk: str, said: str, *, beside: bool = False) -> int:
    """Print the address and what is ``said`` of it, and serve the page until Ctrl-C, or with ``beside`` until standard
    input ends. Returns the exit status. ``risk``: who can do what with the address if others reach this ``host``."""
    if not is_loopback(host):
        open_to_others = f"{host} is reachable from other machines, and the connection is not encrypted"
        say(f"batch-agent: WARNING: {open_to_others}; {risk}")

    async def ready(address: str) -> None:
        put(address)
        sys.stdout.flush()
        if beside:
            await in_thread(sys.stdin.read)
            return
        say(said)
        await asyncio.get_running_loop().create_future()

    return serve(server.serve(ready), last_word="" if beside else "stopped")  # the other process has the screen


def _runs(places: list[RunPlace], *, waits: bool) -> ShownRuns:
    """Return the runs to show. With ``waits``, a given run may not have started yet."""
    if not places:
        places = [Path(RUNS)]
        if not Path(RUNS).is_dir():
            raise SpecError(f"there is no directory {RUNS} here: give a run directory")
    if waits:
        return ShownRuns(places)
    if len(places) == 1 and _holds_runs(places[0]):
        return ShownRuns([], places[0])
    for place in places:
        look(place)  # raises SpecError if there is no run
    return ShownRuns(places)


def _holds_runs(place: RunPlace) -> bool:
    """Return whether a place is a directory of runs or a Redis server, where runs may begin later, and not a run."""
    if isinstance(place, Path):
        return place.is_dir() and place not in runs_in(place) and bool(runs_in(place))
    return not place.name

"""``batch-agent view``: shows runs in a browser."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import cast

from batch_agent.blocking import in_thread
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.arguments import RUN_HELP, RUNS
from batch_agent.cli.spec.numbers import add_address
from batch_agent.errors import SpecError
from batch_agent.record.address import StoreAddress
from batch_agent.record.recorded import RunPlace, place_of
from batch_agent.record.rundir import RUN
from batch_agent.view.followed import FollowedRun, follow
from batch_agent.view.runs import ShownRuns
from batch_agent.view.server import ViewServer

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help=f"{RUN_HELP}; two to compare them; or a directory of runs (default ./{RUNS})",
    )
    add_address(parser, 0)
    parser.add_argument(
        "--beside", action="store_true", help="serve until standard input ends; for a process that starts the page"
    )


def view_command(options: argparse.Namespace) -> int:
    places = [place_of(run, named=False) for run in options.runs]
    listed = len(places) == 1 and isinstance(places[0], StoreAddress) and not places[0].name
    if listed:
        places = _runs_at(cast(StoreAddress, places[0]))
    followed = {place: follow(place, waits=options.beside) for place in places if isinstance(place, StoreAddress)}
    paths = [place if isinstance(place, Path) else followed[place].path for place in places]
    if listed:
        runs = ShownRuns(paths, followed=list(followed.values()), listed=True)
    else:
        runs = _runs(paths, list(followed.values()), waits=options.beside)
    server = ViewServer(runs, options.host, options.port)
    if options.host not in LOOPBACK:
        say(
            f"batch-agent: WARNING: {options.host} is reachable from other machines, and the connection is not "
            "encrypted; anyone with the token can read all prompts and answers, and cancel runs"
        )

    async def ready(address: str) -> None:
        put(address)
        sys.stdout.flush()
        if options.beside:
            await in_thread(sys.stdin.read)
            return
        say("Ctrl-C stops the page; runs continue without it")
        await asyncio.get_running_loop().create_future()

    return serve(server.serve(ready))


def _runs_at(server: StoreAddress) -> list[RunPlace]:
    """Return the runs of a Redis database. Raises SpecError if there are none."""
    from batch_agent.record.redis.reading import run_names

    names = run_names(server)
    if not names:
        raise SpecError(f"there are no runs in {server}")
    return [server.at(name) for name in names]


def _runs(paths: list[Path], followed: list[FollowedRun], *, waits: bool) -> ShownRuns:
    """Return the runs to show. With ``waits``, a given run may not have started yet."""
    if not paths:
        paths = [Path(RUNS)]
        if not paths[0].is_dir():
            raise SpecError(f"there is no directory {RUNS} here: give a run directory")
    if len(paths) == 1 and paths[0].is_dir() and not (paths[0] / RUN).exists() and not waits:
        if not any(paths[0].glob(f"*/{RUN}")):
            raise SpecError(f"{paths[0]} holds no run: there is no {RUN} in it")
        return ShownRuns([], paths[0])
    for path in paths:
        if not (path / RUN).exists() and not waits:
            raise SpecError(f"{path} holds no run: there is no {RUN} in it")
    return ShownRuns(paths, followed=followed)

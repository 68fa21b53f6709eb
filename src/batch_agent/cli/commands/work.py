"""``batch-agent work``: joins a run that another process feeds."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.interrupts import interruption_of
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.specfile import read_specfile
from batch_agent.errors import SpecError
from batch_agent.observe.text import harmless, rows
from batch_agent.record.address import StoreAddress, place_of
from batch_agent.run.joined_worker import WAIT, JoinedWorkers, NoRunCame, WorkReport, work_at
from batch_agent.run.trust import Trust, things_of

REFUSED, NOTHING_CAME = 2, 3


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        help="the run: redis://host:6379/0/NAME, or the run directory of a run on this machine; "
        "redis://host:6379/0/PREFIX* for all runs whose name begins so, as they come",
    )
    parser.add_argument(
        "--import-from", metavar="DIR", help="directory of the run's tools, schemas and workers (default: here)"
    )
    parser.add_argument(
        "--trust",
        metavar="FINGERPRINT",
        default="",
        help="use what the run names: the fingerprint that its feeder printed",
    )
    parser.add_argument(
        "--allow",
        metavar="PATTERN",
        action="append",
        default=[],
        help="a command, address, module:name or directory that the run may name; * is any text without / ? # @",
    )
    parser.add_argument("--spec", metavar="FILE", help="allow what this spec file names, your own copy of the run's")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=WAIT,
        help=f"maximum time to wait for a run, or for a lost feeder (default: {WAIT:g})",
    )


def work_command(options: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):
        try:
            report = asyncio.run(_work(options))
        except NoRunCame as error:
            say(f"batch-agent: {harmless(str(error))}")
            return NOTHING_CAME
        except SpecError as error:
            say(f"batch-agent: {harmless(str(error))}")
            return REFUSED
    say(f"batch-agent: {report.why}; {rows(report.rows)} done by this worker")
    return ALL_OK


def named_things(path: Path) -> set[str]:
    """Return the commands, addresses, modules and directories that a spec file names, in itself and in its stages."""
    found: set[str] = set()
    waiting: list[object] = [read_specfile(path).options]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            things = things_of({"spec": part})
            found.update(things, (thing.replace(".py:", ":") for thing in things))
            found.add(f"image_root={(path.parent / str(part.get('image_root', ''))).resolve()}")
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return found


async def _work(options: argparse.Namespace) -> WorkReport:
    named = [] if options.spec is None else named_things(Path(options.spec))
    trust = Trust(options.allow, options.trust, named)
    directory = None if options.import_from is None else Path(options.import_from)
    server, _, prefix = options.url.removesuffix("*").rpartition("/")
    if options.url.endswith("*") and isinstance(address := place_of(server, named=False), StoreAddress):
        workers = JoinedWorkers(address, prefix, trust, import_from=directory, wait=options.wait)
        with interruption_of(workers):
            return await workers.work()
    return await work_at(options.url, trust, import_from=directory, wait=options.wait, around=interruption_of)

"""``batch-agent work``: joins a run that another process feeds."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import redirect_stdout
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.interrupts import Interrupts
from batch_agent.cli.output.streams import say
from batch_agent.errors import SpecError
from batch_agent.observe.text import harmless, rows
from batch_agent.run.joining import WAIT, JoinedWorker, NoRunCame, WorkReport, open_store

REFUSED, NOTHING_CAME = 2, 3


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", help="the run: redis://host:6379/0/NAME, or the run directory of a run on this machine"
    )
    parser.add_argument(
        "--import-from", metavar="DIR", help="directory of the run's tools, schemas and workers (default: here)"
    )
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


async def _work(options: argparse.Namespace) -> WorkReport:
    store = await open_store(options.url, options.wait)
    directory = None if options.import_from is None else Path(options.import_from)
    worker = JoinedWorker(store, import_from=directory, wait=options.wait)
    try:
        with Interrupts(worker):
            return await worker.work()
    finally:
        store.close()

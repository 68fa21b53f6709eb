"""``batch-agent delete``: deletes a run from Redis."""

from __future__ import annotations

import argparse

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import say
from batch_agent.errors import SpecError
from batch_agent.record.address import StoreAddress, place_of
from batch_agent.record.reader import look
from batch_agent.record.redis.reading import delete_run


def add_delete_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the run: redis://host:6379/0/NAME")
    parser.add_argument("--force", action="store_true", help="also delete a running run; its processes then fail")


def delete_command(options: argparse.Namespace) -> int:
    address = place_of(options.url)
    if not isinstance(address, StoreAddress):
        raise SpecError("delete needs the URL of a run in Redis; delete a run directory like any other directory")
    address.refuse_stage()
    view = look(address)
    workers = len(view.workers)
    if (view.state == "running" or workers) and not options.force:
        raise SpecError(
            f"{address} is running ({workers} workers): stop it first with batch-agent control URL drain, or give "
            "--force"
        )
    say(f"batch-agent: {address} is deleted, {delete_run(address):,} keys")
    return ALL_OK

"""``batch-agent copy`` copies a recorded run to a directory or to Redis; ``delete`` deletes a run from Redis."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.transcripts import prepared_again, prompts_changed, unfinished_rows
from batch_agent.errors import SpecError
from batch_agent.observe.text import rows
from batch_agent.record.address import StoreAddress, place_of
from batch_agent.record.reader import RunReader, RunSnapshot, UnfinishedRow, look, open_run
from batch_agent.record.redis.reading import delete_run
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.review import copy_log
from batch_agent.run.copying import copy_to_directory, copy_to_store


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help=RUN_HELP)
    parser.add_argument("target", metavar="TO", help="a new directory, or the URL of a run that does not exist yet")
    parser.add_argument(
        "--import-from",
        metavar="DIR",
        help="to Redis: directory of the run's tools, schemas and workers (default: here)",
    )


def copy_command(options: argparse.Namespace) -> int:
    target = place_of(options.target)
    with open_run(options.source) as reader:
        view = reader.view()
        if view.state in ("starting", "running"):
            raise SpecError(f"{view.name} is running: wait for its end or stop it, then copy it")
        if isinstance(target, StoreAddress):
            count = _to_redis(reader, view, target, None if options.import_from is None else Path(options.import_from))
        elif target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise SpecError(f"{target} is not empty: give a new directory")
        else:
            count = copy_to_directory(reader, target)
    say(f"batch-agent: {rows(count)} of {reader.name} are in {target}")
    return ALL_OK


def _to_redis(reader: RunReader, view: RunSnapshot, target: StoreAddress, import_from: Path | None) -> int:
    target.refuse_stage()
    with closing(RedisRunStore.at(target)) as store:
        if store.facts() is not None:
            raise SpecError(f"{target} already holds a run: give another name, or delete it with batch-agent delete")
        prepared = prepared_again(reader, import_from)
        if any(name not in prepared for name in view.parts):
            raise prompts_changed(reader.name)

        def unfinished(run: RunReader, stage: str) -> Iterator[UnfinishedRow]:
            with ExitStack() as extent:
                others = [extent.enter_context(reader.stage(name)) for name in view.stages if name != stage]
                yield from unfinished_rows(run, prepared[stage], others)

        count = copy_to_store(reader, store, prepared, unfinished)
    for name in view.parts:
        with reader.stage(name) if name else nullcontext(reader) as part:
            copy_log(part, target.at(target.name, name))
    return count


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

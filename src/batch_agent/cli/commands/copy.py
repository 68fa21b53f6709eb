"""``batch-agent copy``: copies a recorded run from Redis to a directory, or back."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from batch_agent.cli.commands.export import RunRecords
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.cli.spec.transcripts import prepared_again, prompts_changed
from batch_agent.errors import SpecError
from batch_agent.observe.text import rows
from batch_agent.record.address import StoreAddress
from batch_agent.record.recorded import RunPlace, copy_out, look, place_of
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.rundir import RunView
from batch_agent.run.copy_in import copy_in, copy_stages_in, directory_is_new


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help=RUN_HELP)
    parser.add_argument("target", metavar="TO", help="a new directory, or the URL of a run that does not exist yet")
    parser.add_argument(
        "--import-from",
        metavar="DIR",
        help="to Redis: directory of the run's tools, schemas and workers (default: here)",
    )


def copy_command(options: argparse.Namespace) -> int:
    source, target = place_of(options.source), place_of(options.target)
    view = look(source)
    if view.state == "running":
        raise SpecError(f"{view.name} is running: wait for its end or stop it, then copy it")
    count = _copy(source, target, view, None if options.import_from is None else Path(options.import_from))
    say(f"batch-agent: {rows(count)} of {source} are in {target}")
    return ALL_OK


def _copy(source: RunPlace, target: RunPlace, view: RunView, import_from: Path | None) -> int:
    if isinstance(source, StoreAddress) and isinstance(target, Path):
        if not directory_is_new(target):
            raise SpecError(f"{target} is not empty: give a new directory")
        return copy_out(source, target)
    if isinstance(source, Path) and isinstance(target, StoreAddress):
        target.refuse_stage()
        with closing(RedisRunStore.at(target)) as store:
            if store.facts() is not None:
                raise SpecError(
                    f"{target} already holds a run: give another name, or delete it with batch-agent delete"
                )
            prepared = prepared_again(source, view.facts, import_from)
            if any(name not in prepared for name in view.parts):
                raise prompts_changed(source)
            if view.stages:
                return copy_stages_in(store, view, prepared, RunRecords)
            return copy_in(store, view, prepared[""], RunRecords(source))
    raise SpecError("copy needs one URL of a run in Redis and one directory")

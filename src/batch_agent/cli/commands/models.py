"""``batch-agent models``: the models of ``local://`` that are on this machine or can be had by name, and fetching them.

A command that needs weights which are not there fetches them first, here too, so that nobody looks at a frozen screen.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from batch_agent.backends.local import weights
from batch_agent.backends.local.weights import AnyWeights, Model, Progress, Stage
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.errors import SpecError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, harmless


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    fetch = actions.add_parser("fetch", help="fetch a model's weights now instead of at first use")
    named = f"one of: {', '.join(known.name for known in weights.KNOWN)}; or {weights.HUB_FORM}"
    fetch.add_argument("name", nargs="?", metavar="NAME", default=weights.SMOLLM2.name, help=named)


def models_command(options: argparse.Namespace) -> int:
    if options.action == "fetch":
        known = weights.find(options.name)
        if known is None:
            names = ", ".join(known.name for known in weights.KNOWN)
            raise SpecError(f"there is no model {options.name!r} to fetch. Known: {names}; or {weights.HUB_FORM}")
        with _shown(known, sys.stderr) as progress:
            path = weights.fetch_again(known, progress=progress)
        print(path)
        return ALL_OK
    models = weights.available()
    print(to_json(_record(models)).decode() if options.json else _text(models))
    return ALL_OK


def fetch_missing(backend_name: str, stream: TextIO) -> None:
    """Fetches the weights that the backend of this name needs, unless they are there or it needs none."""
    scheme, _, model = backend_name.partition("://")
    known = weights.find(model) if scheme == "local" else None
    if known is not None and not weights.is_present(known):
        with _shown(known, stream) as progress:
            weights.fetch(known, progress=progress)


@contextmanager
def _shown(known: AnyWeights, stream: TextIO) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere one line, which says what the wait is for."""
    title = f"weights of {known.name}"
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        if not weights.is_present(known):
            size = f", {amount(known.size_bytes)}B" if known.size_bytes else ""
            print(f"fetching the {title}{size}, once", file=stream, flush=True)
        yield _unseen
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with ProgressBar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(stage: Stage, done: int, total: int | None) -> None:
            bar.update(task, description=f"{stage} the {title}", completed=done, total=total)

        yield show


def _unseen(stage: Stage, done: int, total: int | None) -> None:
    pass


def _record(models: list[Model]) -> JsonObject:
    return {
        "folder": str(weights.cache_dir() / "models"),
        "models": [
            {
                "name": model.name,
                "backend": model.backend,
                "description": model.description,
                "state": model.state,
                "bytes": model.size_bytes,
                "path": str(model.path),
            }
            for model in models
        ],
    }


def _text(models: list[Model]) -> str:
    blocks = []
    for model in models:
        block = [f"{model.name}: {model.state}, {amount(model.size_bytes)}B", model.description]
        if model.state == "ready":
            block += [str(model.path), f"use it: --backend {model.backend}"]
        elif weights.find(model.name) is not None:
            block.append(f"fetch it: batch-agent models fetch {model.name} (a run that needs it does so too)")
        blocks.append("\n  ".join(map(harmless, block)))
    return "\n".join(blocks)

"""``batch-agent models``: lists the models of ``local://``, on this machine or to download, and downloads them.

Other commands download missing weights with ``fetch_missing``, which shows the progress.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from batch_agent.backends.cache_store import cache_dir
from batch_agent.backends.local import weights
from batch_agent.backends.local.weights import AnyWeights, ListedModel, Progress, Stage
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.errors import SpecError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.progress import can_redraw
from batch_agent.observe.text import amount, harmless


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    fetch = actions.add_parser("fetch", help="download a model's weights now instead of at first use")
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
    """Download the weights that the backend of this name needs, unless they exist or it needs none."""
    scheme, _, model = backend_name.partition("://")
    known = weights.find(model) if scheme == "local" else None
    if known is not None and not weights.is_present(known):
        with _shown(known, stream) as progress:
            weights.fetch(known, progress=progress)


@contextmanager
def _shown(known: AnyWeights, stream: TextIO) -> Iterator[Progress]:
    """Show the download: a progress bar on a terminal, otherwise one line."""
    title = f"weights of {known.name}"
    if not can_redraw(stream):
        if not weights.is_present(known):
            size = f", {amount(known.size_bytes)}B" if known.size_bytes else ""
            print(f"fetching the {title}{size}, once", file=stream, flush=True)
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with ProgressBar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(stage: Stage, done: int, total: int | None) -> None:
            bar.update(task, description=f"{stage} the {title}", completed=done, total=total)

        yield show


def _record(models: list[ListedModel]) -> JsonObject:
    return {
        "folder": str(cache_dir() / "models"),
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


def _text(models: list[ListedModel]) -> str:
    blocks = []
    for model in models:
        block = [f"{model.name}: {model.state}, {amount(model.size_bytes)}B", model.description]
        if model.state == "ready":
            block += [str(model.path), f"use it: --backend {model.backend}"]
        elif weights.find(model.name) is not None:
            block.append(f"fetch it: batch-agent models fetch {model.name} (a run that needs it also fetches it)")
        blocks.append("\n  ".join(map(harmless, block)))
    return "\n".join(blocks)

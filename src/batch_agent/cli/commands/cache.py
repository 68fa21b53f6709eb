"""``batch-agent cache``: what the response cache holds, and how to make it smaller."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from batch_agent.backends.cache_store import CachedModel, ResponseStore, cache_file
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put
from batch_agent.cli.spec.numbers import number
from batch_agent.observe.text import amount, harmless

DAY = 86_400.0


def add_cache_arguments(cache: argparse.ArgumentParser) -> None:
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="how many answers of which model, and when they were last used")
    listed.add_argument("--json", action="store_true", help="as one JSON object")
    from_zero = number(float, lambda value: 0 <= value < math.inf, "a number from 0 up")
    prune = actions.add_parser("prune", help="drop what was not used for 30 days, or as said")
    prune.add_argument("--unused-days", type=from_zero, metavar="N", help="answers not used for N days")
    prune.add_argument("--max-megabytes", type=from_zero, metavar="N", help="the least recently used above N MB")
    clear = actions.add_parser("clear", help="drop everything")
    for action in (listed, prune, clear):
        action.add_argument("--cache", metavar="DIR", help="the directory (default: BATCH_AGENT_CACHE, or your cache)")


def cache_command(options: argparse.Namespace) -> int:
    path = cache_file(True if options.cache is None else options.cache)
    # To look must not make one.
    with ResponseStore(path) if path.exists() else nullcontext() as store:
        if options.action == "list":
            models = store.models() if store else []
            put(json.dumps(_record(path, models)) if options.json else _text(path, models), sys.stdout)
        else:
            dropped = _drop(store, options) if store else 0
            put(f"{path}: dropped {dropped:,} answers", sys.stdout)
    return ALL_OK


def _drop(store: ResponseStore, options: argparse.Namespace) -> int:
    if options.action == "clear":
        return store.clear()
    days, megabytes = options.unused_days, options.max_megabytes
    if days is None and megabytes is None:
        days = 30.0
    return store.prune(
        max_bytes=None if megabytes is None else int(megabytes * 1e6),
        unused_seconds=None if days is None else days * DAY,
    )


def _record(path: Path, models: list[CachedModel]) -> dict[str, object]:
    return {
        "path": str(path),
        "answers": sum(model.answers for model in models),
        "bytes": sum(model.size_bytes for model in models),
        "models": [dataclasses.asdict(model) for model in models],
    }


def _text(path: Path, models: list[CachedModel]) -> str:
    answers = sum(model.answers for model in models)
    lines = [f"{path}: {answers:,} answers, {amount(sum(model.size_bytes for model in models))}B"]
    for model in models:
        days = max(0.0, time.time() - model.used) / DAY
        used = "today" if days < 1 else f"{days:.0f} days ago"
        what = f"{model.answers:,} answers, {amount(model.size_bytes)}B, last used {used}"
        lines.append(f"  {harmless(model.model)} at {harmless(model.backend)}: {what}")
    return "\n".join(lines)

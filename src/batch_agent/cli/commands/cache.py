"""``batch-agent cache``: lists the answers in the response cache, and deletes them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
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
    listed = actions.add_parser("list", help="show the number of answers per model, and their last use")
    listed.add_argument("--json", action="store_true", help="print one JSON object")
    from_zero = number(float, lambda value: 0 <= value < math.inf, "a number, 0 or more")
    prune = actions.add_parser("prune", help="delete old answers; by default, those not used for 30 days")
    prune.add_argument("--unused-days", type=from_zero, metavar="N", help="delete answers not used for N days")
    prune.add_argument("--max-megabytes", type=from_zero, metavar="N", help="keep only the last used N MB of answers")
    clear = actions.add_parser("clear", help="delete all answers")
    for action in (listed, prune, clear):
        action.add_argument("--cache", metavar="DIR", help="its directory (default: BATCH_AGENT_CACHE, or the user's)")


def cache_command(options: argparse.Namespace) -> int:
    path = cache_file(True if options.cache is None else options.cache)
    # Listing must not create a cache.
    with ResponseStore(path) if path.exists() else nullcontext() as store:
        if options.action == "list":
            models = store.models() if store else []
            put(json.dumps(_record(path, models)) if options.json else _text(path, models))
        else:
            dropped = _drop(store, options) if store else 0
            put(f"{path}: deleted {dropped:,} answers")
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

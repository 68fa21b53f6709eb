"""What every peer shares: the command line of one run, its measurement, and the loop that its documentation suggests.

A peer is a module with one coroutine that takes a ``Work``, a folder to keep state in, and a function that it calls
when a row is done. It is run as a process of its own and prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.workload import WARM_UP_AGENTS, Review, Work, allow_open_files, row

Finished = Callable[[], None]
Peer = Callable[[Work, Path, Finished], Awaitable[Sequence[Review | None]]]


def compete(run: Peer) -> None:
    """Measure ``run`` on the work of the command line. ``--keep`` is the folder for state that survives a kill."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--cold", action="store_true", help="no small batch first")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    allow_open_files()
    print(json.dumps(asyncio.run(_measure(run, Work.from_arguments(), own.keep, own.cold))))


async def _measure(run: Peer, work: Work, keep: Path, cold: bool) -> dict[str, float]:
    if not cold:
        await run(replace(work, agents=WARM_UP_AGENTS), keep / "warm-up", lambda: None)
    first = 0.0
    began, cpu = time.perf_counter(), time.process_time()

    def finished() -> None:
        nonlocal first
        first = first or time.perf_counter() - began

    reviews = await run(work, keep / "run", finished)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    right = sum(review is not None and review.record == place for place, review in enumerate(reviews))
    return {"wall_s": wall, "cpu_s": cpu, "first_s": first or wall, "right": right}


async def gathered(
    work: Work, agent: Callable[[dict[str, object]], Awaitable[Review]], finished: Finished
) -> list[Review | None]:
    """One task for each row, ``inflight`` agents at a time; a row that raises is lost, the others go on."""
    slots = asyncio.Semaphore(work.inflight)

    async def one(record: int) -> Review | None:
        async with slots:
            try:
                review = await agent(row(record))
            except Exception:  # noqa: BLE001
                return None
        finished()
        return review

    return list(await asyncio.gather(*map(one, range(work.agents))))


async def tool_loop(
    ask: Callable[[list[dict[str, object]]], Awaitable[dict[str, object]]], given: dict[str, object]
) -> Review:
    """The tool loop that one writes around a client which has none."""
    from benchmarks.workload import SYSTEM_PROMPT_WITH_SCHEMA, TASK, lookup

    messages: list[dict[str, object]] = [
        {"role": "system", "content": SYSTEM_PROMPT_WITH_SCHEMA},
        {"role": "user", "content": TASK.format(**given)},
    ]
    while True:
        message = await ask(messages)
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return Review.model_validate_json(str(message["content"]))
        messages.append(message)
        for call in calls:
            text = await lookup(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

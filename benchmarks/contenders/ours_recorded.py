"""``BatchAgent.run`` with a run directory: what ``ours`` does, every turn and tool result on disk before it is used."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.contenders import ours
from benchmarks.workload import Review, Work, contend

TICK = 0.001


async def run(work: Work, *, recorded: bool = True) -> list[Review]:
    with tempfile.TemporaryDirectory() as directory:
        return await ours.run(work, Path(directory) if recorded else None)


async def largest_gap(work: Work, *, recorded: bool) -> float:
    """The longest that a timer of the same event loop was late while the work went on, in seconds."""
    worst, over = 0.0, False

    async def tick() -> None:
        nonlocal worst
        while not over:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            worst = max(worst, time.perf_counter() - due)

    await run(work, recorded=recorded)  # imports and compilations happen here
    gc.collect()
    gc.freeze()  # or the collector's walks over everything imported, tens of milliseconds, would be all that is seen
    ticking = asyncio.create_task(tick())
    await run(work, recorded=recorded)
    over = True
    await ticking
    return worst


if __name__ == "__main__":
    if "--gap" in sys.argv:
        sys.argv.remove("--gap")
        given = Work.from_arguments()
        gaps = {name: asyncio.run(largest_gap(given, recorded=on)) for name, on in (("off", False), ("on", True))}
        print(json.dumps(gaps))
    else:
        contend(run)

"""What the page costs: its first paint over 100,000 rows, and the CPU of the viewer while 64 agents work.

``python -m benchmarks.view``. Needs Chromium. The first paint is the time from the navigation to the tiles of the
overview, of a viewer that has just begun and has no index; the viewer's CPU is that of its process over 15 seconds with
the overview open.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.view.browser import Page, chromium
from tests.view.world import recorded, triage

from benchmarks import report

ROWS, PAINT_MS_BAR, SECONDS, CPU_BAR = 100_000, 300.0, 15.0, 0.05
PAINTED = """new Promise((done) => {
  const look = () => document.querySelector('.tiles') ? done(performance.now()) : requestAnimationFrame(look);
  look();
})"""


@asynccontextmanager
async def viewer(run_dir: Path) -> AsyncIterator[tuple[str, int]]:
    """The page's address, and the viewer's process."""
    command = (sys.executable, "-m", "batch_agent", "view", str(run_dir), "--beside")
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip(), process.pid
    finally:
        process.kill()
        await process.wait()


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def first_paint(page: Page, run_dir: Path) -> float:
    """Milliseconds."""
    async with viewer(run_dir) as (address, _):
        await page.goto("about:blank")
        await page.goto(address)
        return float(await page.ask(PAINTED))


async def viewer_share(page: Page, run_dir: Path) -> float:
    """The part of a core that the viewer takes."""
    async with triage(run_dir, 20_000, pace=1.0, max_inflight=64) as run:

        async def drop() -> None:
            async for _ in run.results():
                pass

        taking = asyncio.create_task(drop())
        async with viewer(run_dir) as (address, process):
            await page.goto(address)
            await page.until("document.querySelector('.does')")
            await asyncio.sleep(3)
            before = cpu_seconds(process)
            await asyncio.sleep(SECONDS)
            share = (cpu_seconds(process) - before) / SECONDS
        run.cancel()
        await taking
        return share


async def measure(place: Path) -> tuple[list[float], float]:
    many = await recorded(place / "many", 20)
    record = json.loads((many / "results.jsonl").read_bytes().splitlines()[0])
    with (many / "results.jsonl").open("wb") as file:
        for index in range(ROWS):
            file.write(json.dumps(record | {"index": index, "job_id": f"row-{index}"}).encode() + b"\n")
    async with chromium() as page:
        paints = [await first_paint(page, many) for _ in range(5)]
        return paints, await viewer_share(page, place / "live")


def main() -> int:
    env = report.environment()
    with tempfile.TemporaryDirectory() as place:
        paints, share = asyncio.run(measure(Path(place)))
    best = sorted(paints)[len(paints) // 2]
    print(f"first paint over {ROWS:,} rows: {best:.0f} ms; the viewer takes {share:.1%} of a core")
    bars = [
        report.Bar(f"first paint, {ROWS:,} rows, ms", best, "<=", PAINT_MS_BAR),
        report.Bar("CPU of the viewer, 64 agents at work, cores", share, "<=", CPU_BAR),
    ]
    return report.finish("view", env, bars, {"paints_ms": paints, "viewer_share": share})


if __name__ == "__main__":
    sys.exit(main())

"""A batch that is run again, with the tool calls of last time begun before the models ask. The clock is virtual.

``python -m benchmarks.prewarm``. 200 agents of three answers that each call a slow tool, and a last one; a turn takes
1 s, the tool 0.5, 2 or 5 s. Of the rows a share makes the same calls as in the first run, the others make new ones.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from batch_agent import BatchAgent, Tool
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse
from batch_agent.testing.clock import run_virtual
from benchmarks import report

AGENTS, CALLS, TURN_S, INFLIGHT = 200, 3, 1.0, 64
TOOLS_S = (0.5, 2.0, 5.0)
SHARES = (1.0, 0.5, 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    wall_s: float
    mean_s: float  # of an agent, from its start to its end
    begun: int = 0
    hits: int = 0
    misses: int = 0
    wasted: int = 0


async def run(tool_s: float, share: float, run_dir: Path | None, earlier: Path | None) -> Outcome:
    @Tool.define(cacheable=True)
    async def look(page: str) -> str:
        await asyncio.sleep(tool_s)
        return page

    def script(request: Request) -> Say:
        agent = int(str(request.messages[-1 - 2 * request.turn]["content"]))
        if request.turn == CALLS:
            return Say("done", latency=TURN_S)
        kind = "same" if agent % 10 < share * 10 else "new"
        return CallTools(ToolUse("look", {"page": f"{kind} {agent} {request.turn}"}), latency=TURN_S)

    began, seconds = asyncio.get_running_loop().time(), []
    async with BatchAgent.open(
        task="{input}",
        inputs=[str(number) for number in range(AGENTS)],
        tools=[look],
        backend=ScriptedBackend(script),
        max_inflight=INFLIGHT,
        streaming_tool_dispatch=False,
        run_dir=run_dir,
        predictive_prewarm=earlier or False,
    ) as opened:
        async for result in opened.results():
            assert result.ok, result.error
            seconds.append(result.timings.total)
        wall = asyncio.get_running_loop().time() - began
        prewarm = opened.statistics().prewarm
    counts = (prewarm.begun, prewarm.hits, prewarm.misses, prewarm.wasted) if prewarm is not None else ()
    return Outcome(wall, sum(seconds) / len(seconds), *counts)


def main() -> int:
    env = report.environment()
    rows, bars, measurements = [], [], []
    for tool_s in TOOLS_S:
        with tempfile.TemporaryDirectory() as folder:
            run_virtual(run(tool_s, 1.0, Path(folder), None))
            cold = run_virtual(run(tool_s, 1.0, None, None))
            for share in SHARES:
                warm = run_virtual(run(tool_s, share, None, Path(folder)))
                name = f"tool {tool_s:g} s, {share:.0%} as last time"
                counts = f"{warm.begun} / {warm.hits} / {warm.misses} / {warm.wasted}"
                walls = [f"{one.wall_s:.1f} / {one.mean_s:.1f}" for one in (cold, warm)]
                rows.append((name, *walls, counts))
                measurements.append({"case": name, "cold": asdict(cold), "prewarmed": asdict(warm)})
                bars.append(report.Bar(f"{name}: wall, over a run without", warm.wall_s / cold.wall_s, "<=", 1.02))
                if share == 1.0:
                    bars.append(report.Bar(f"{name}: mean agent, over without", warm.mean_s / cold.mean_s, "<=", 0.95))
    print(report.table(("seconds: wall / mean agent", "without", "prewarmed", "begun / hits / misses / wasted"), rows))
    print()
    return report.finish("prewarm", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())

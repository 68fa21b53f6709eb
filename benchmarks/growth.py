"""Whether a turn costs more as a run grows: with many live agents, and late in a long batch.

``python -m benchmarks.growth``. A backend in the same process answers after a loop's turn, and reports a KV cache in
which every context fits, so that nothing but the package is measured. Live agents: batches of two turns, 64 and 10,000
in flight in turn, each in a process of its own (``--work``). Rows: one batch of single-turn rows from a generator; its
CPU time is taken every 10,000 rows, and the last ten parts are compared with the first ten. The garbage collector
looks at nothing that was imported, as in the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Backend, Capabilities, Load, ModelRequest, OnToolCall
from batch_agent.messages import Reply, ToolCall, Usage
from benchmarks import environments, report

FEW, MANY = 64, 10_000  # live agents
AGENTS = 20_000  # of a batch
ROWS, PART, PARTS = 1_000_000, 10_000, 10
LIVE_BAR, ROWS_BAR = 1.15, 1.05
WARM_UP = 500  # rows


class Instant(Backend):
    """Calls a tool in the first turn of a conversation with tools, and answers in the next."""

    name = "instant://"
    capabilities = Capabilities(native_schema=True, streaming=False, reports_load=True)

    async def models(self) -> list[str]:
        return ["instant"]

    async def load(self, endpoint: str = "") -> Load:
        return Load(running=1, waiting=0, kv_usage=0.1, kv_tokens=1 << 30)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        await asyncio.sleep(0)
        if request.shape.tools and request.conversation.messages[-1].role != "tool":
            return Reply("", (ToolCall("call_1", "lookup", '{"topic":"logs"}'),), Usage(600, 500, 20))
        return Reply("The record is clean.", usage=Usage(700, 600, 6))


@Tool.define(cacheable=True)
async def lookup(topic: str) -> str:
    """Look up what is known about a topic."""
    return f"nothing bad is known about {topic}"


def rows(count: int) -> Iterator[dict[str, object]]:
    return ({"id": number, "text": f"entry {number} of a long log"} for number in range(count))


async def live(agents: int, in_flight: int) -> float:
    """Return the CPU seconds of a turn with this many agents in flight."""
    cpu = time.process_time()
    await BatchAgent.run(
        task="Judge this record: {text}",
        inputs=rows(agents),
        tools=[lookup],
        backend=Instant(),
        model="instant",
        max_inflight=in_flight,
        max_agents=in_flight,
    )
    return (time.process_time() - cpu) / (2 * agents)


async def long(count: int) -> list[float]:
    """Return the CPU seconds of a row, for each part of a batch of ``count`` rows."""
    parts, done, cpu = [], 0, time.process_time()
    stream = BatchAgent.stream(
        task="Judge this record: {text}", inputs=rows(count), backend=Instant(), model="instant", max_inflight=FEW
    )
    async for _ in stream:
        done += 1
        if done % PART == 0:
            now = time.process_time()
            parts.append((now - cpu) / PART)
            cpu = now
    return parts


async def work(what: str, number: int) -> object:
    await live(WARM_UP, FEW if what == "rows" else number)
    gc.collect()
    gc.freeze()
    return await (long(number) if what == "rows" else live(AGENTS, number))


def run_once(what: str, number: int) -> object:
    command = [sys.executable, "-m", "benchmarks.growth", "--work", what, str(number)]
    done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="batches with few and with many agents")
    parser.add_argument("--rows", type=int, default=ROWS, help="of the long batch")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(asyncio.run(work(options.work[0], int(options.work[1])))))
        return 0
    env = report.environment()
    pairs = [(float(run_once("live", FEW)), float(run_once("live", MANY))) for _ in range(options.repetitions)]  # type: ignore[arg-type]
    for few, many in pairs:
        print(f"{FEW} agents: {few * 1e6:.0f} µs per turn; {MANY:,}: {many * 1e6:.0f} µs, {many / few:.2f} of that")
    parts: list[float] = run_once("rows", options.rows)  # type: ignore[assignment]
    early, late = statistics.median(parts[:PARTS]), statistics.median(parts[-PARTS:])
    print(f"rows: {early * 1e6:.0f} µs each at first, {late * 1e6:.0f} µs at the end of {options.rows:,}")
    bars = [
        report.Bar(
            f"CPU per turn, {MANY:,} live agents over {FEW}", statistics.median(b / a for a, b in pairs), "<=", LIVE_BAR
        ),
        report.Bar(f"CPU per row, the end of {options.rows:,} rows over their start", late / early, "<=", ROWS_BAR),
    ]
    measured = {"few_and_many_s": pairs, "row_s_by_part": parts}
    return report.finish("growth", env, bars, measured)


if __name__ == "__main__":
    sys.exit(main())

"""Many servers as one: how near a fleet comes to the best that its servers could do.

``python -m benchmarks.fleet``. Each number stands beside its alternative, measured in the same run:

- ``uneven``: four servers on loopback, one 8 x slower, against the ideal split and against round robin
- ``killed``: one of four servers is killed at a third of the run, against what three would have needed from then on
- ``cpu``: 64 endpoints x 16 in flight, 10,000 rows, against one endpoint with as many in flight
- ``scale``: 1,000 endpoints from one process: seconds until all have said which model they serve; memory after a run
- ``keys``: how many keys move when one of 100 endpoints is removed
- ``prefix``: 200 agents of several turns on eight simulated engines, against one with an endless cache, and round robin

``uneven``, ``killed`` and ``prefix`` run on a virtual clock, the first two over real sockets: what is measured there is
what was decided, not how busy this machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batch_agent import BatchAgent, Fleet, Tool
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.messages import Reply
from batch_agent.scheduler.routing import Router
from batch_agent.scheduler.server import Endpoint
from batch_agent.testing import Request, Say, ScriptedServer
from batch_agent.testing.clock import run_virtual
from benchmarks import report
from benchmarks.server import compiled

WORKERS, FAST, SLOW = 8, 0.2, 1.6  # requests that a server works on at once, and the seconds it takes
ROWS = [str(number) for number in range(2_000)]
MODEL = "bench"
ENDPOINTS, PER_ENDPOINT, CPU_ROWS = 64, 16, 10_000
MANY = 1_000


def working(seconds: float) -> Callable[[Request], Any]:
    """A server that works on ``WORKERS`` requests at once; others wait their turn."""
    gate = asyncio.Semaphore(WORKERS)

    async def answer(request: Request) -> Say:
        async with gate:
            await asyncio.sleep(seconds)
        return Say("ok")

    return answer


async def timed(backend: object, rows: Sequence[str], **options: Any) -> float:
    began = asyncio.get_running_loop().time()
    results = await BatchAgent.run(task="{input}", inputs=list(rows), backend=backend, model="m", **options)
    assert all(results)
    return asyncio.get_running_loop().time() - began


async def uneven() -> dict[str, float]:
    speeds = [FAST, FAST, FAST, SLOW]
    ideal = len(ROWS) / sum(WORKERS / seconds for seconds in speeds)
    async with AsyncExitStack() as stack:
        known = [await stack.enter_async_context(ScriptedServer(working(seconds))) for seconds in speeds]
        urls = [server.backend_url for server in known]
        ours = await timed(urls, ROWS, max_inflight=4 * WORKERS)
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for place, url in enumerate(urls):
                group.create_task(timed(url, ROWS[place::4], max_inflight=WORKERS))
        robin = asyncio.get_running_loop().time() - began
    return {"ideal_s": ideal, "ours_s": ours, "round_robin_s": robin}


async def killed() -> dict[str, float]:
    rate = WORKERS / FAST
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        known = [await stack.enter_async_context(ScriptedServer(working(FAST))) for _ in range(3)]
        victim = AsyncExitStack()
        doomed = await victim.enter_async_context(ScriptedServer(working(FAST)))
        ok, began, killed_at = 0, loop.time(), 0.0
        async with BatchAgent.open(
            task="{input}",
            inputs=ROWS,
            backend=[server.backend_url for server in [*known, doomed]],
            model="m",
            max_inflight=4 * WORKERS,
        ) as run:
            async for result in run.results():
                ok += result.ok
                if ok == len(ROWS) // 3:
                    killed_at = loop.time() - began
                    await victim.aclose()
        wall = loop.time() - began
    left = len(ROWS) - len(ROWS) // 3
    return {"lost": len(ROWS) - ok, "after_s": wall - killed_at, "three_s": left / (3 * rate), "killed_at_s": killed_at}


# Child processes, whose CPU time and memory are theirs alone


@contextmanager
def c_servers(count: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        program = stack.enter_context(compiled("server"))
        urls = []
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen([program, "20000", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert process.stdin is not None and process.stdout is not None
            stack.callback(process.stdin.close)
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}/v1")
        yield urls


def child(mode: str, urls: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.fleet", "--child", mode]
    done = subprocess.run(command, input=json.dumps(urls), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


async def cpu_child(urls: list[str]) -> dict[str, float]:
    async def turns(rows: int) -> None:
        backend = [{"url": url, "model": MODEL} for url in urls] if len(urls) > 1 else urls[0]
        results = await BatchAgent.run(
            task="Say {input}",
            inputs=[str(number) for number in range(rows)],
            backend=backend,
            model=MODEL,
            max_inflight=ENDPOINTS * PER_ENDPOINT,
            progress=False,
        )
        assert all(results), next(result.error for result in results if not result)

    await turns(2_000)  # what happens once for each process, connections included
    began = time.process_time()
    await turns(CPU_ROWS)
    return {"cpu_per_turn_s": (time.process_time() - began) / CPU_ROWS}


async def scale_child(urls: list[str]) -> dict[str, float]:
    before, began = _peak_mib(), time.perf_counter()
    fleet = Fleet(urls)
    answered: set[str] = set()
    ready = 0.0
    async with fleet:
        await fleet.locate(MODEL)
        ready = time.perf_counter() - began
        results = await BatchAgent.run(
            task="{input}", inputs=list(map(str, range(2 * len(urls)))), backend=fleet, model=MODEL, progress=False
        )
        answered = {str(result.output) for result in results}
    wall = time.perf_counter() - began
    return {
        "ready_s": ready,
        "all_answered_s": wall,
        "servers": len(answered),
        "peak_mib": _peak_mib(),
        "base_mib": before,
    }


def _peak_mib() -> float:
    """Of this process since it began; getrusage would count what its parent had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


SERVERS = """
import asyncio, sys
from batch_agent.testing import Say, ScriptedServer

async def main():
    servers = [ScriptedServer((lambda number: lambda request: Say(str(number)))(number), models=["bench"])
               for number in range(int(sys.argv[1]))]
    for server in servers:
        await server.__aenter__()
    print(" ".join(server.backend_url for server in servers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    import os
    os._exit(0)

asyncio.run(main())
"""


def scale() -> dict[str, float]:
    command = [sys.executable, "-c", SERVERS, str(MANY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        urls = process.stdout.readline().split()
        try:
            return child("scale", urls)
        finally:
            process.stdin.close()


def keys() -> float:
    endpoints = [Endpoint(name=f"vllm://gpu-{number}:8000") for number in range(100)]
    before, after = Router(endpoints), Router(endpoints[:40] + endpoints[41:])
    homes = [(before.home(key), after.home(key)) for key in map(str, range(20_000))]
    return sum(a.name != b.name for a, b in homes if a is not None and b is not None) / len(homes)


# Prefixes

AGENTS, TURNS, ENGINES = 200, 6, 8
TEXT = "What this agent has to read is its own, and it has to read it again at every turn. " * 60


class RoundRobin(Backend):
    """Every request to the next engine, as a load balancer does that knows nothing of prefixes."""

    def __init__(self, engines: Sequence[SimulatedBackend]) -> None:
        self.engines, self.asked = engines, 0

    name = "round robin"

    @property
    def capabilities(self) -> Capabilities:
        return self.engines[0].capabilities

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await engine.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines:
            await engine.__aexit__(kind, error, trace)

    async def models(self) -> list[str]:
        return await self.engines[0].models()

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        self.asked += 1
        return await self.engines[self.asked % len(self.engines)].infer(request, on_tool_call)


def engine(kv_tokens: int = 65_536) -> SimulatedBackend:
    return SimulatedBackend(EngineModel(tool_calls_per_agent=TURNS - 1, kv_tokens=kv_tokens))


async def hits(backend: object) -> float:
    """The share of all prompt tokens that was found in a cache."""

    @Tool.define(cacheable=False)
    async def look(place: str) -> str:
        """Look somewhere."""
        await asyncio.sleep(1.0)
        return f"What is at {place}: " + "nothing that was not there before. " * 8

    results = await BatchAgent.run(
        system_prompt="Be brief.",
        task="{number}: {text}",
        inputs=[
            {"number": number, "text": f"{number} " + TEXT.replace("agent", f"agent {number}")}
            for number in range(AGENTS)
        ],
        tools=[look],
        backend=backend,
        max_turns=TURNS + 1,
        max_inflight=64,
    )
    assert all(results), next(result.error for result in results if not result)
    return sum(r.usage.cached_tokens for r in results) / sum(r.usage.prompt_tokens for r in results)


async def prefix() -> dict[str, float]:
    return {
        "endless": await hits(engine(kv_tokens=100_000_000)),
        "fleet": await hits(Fleet([engine() for _ in range(ENGINES)])),
        "round_robin": await hits(RoundRobin([engine() for _ in range(ENGINES)])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description="Many servers as one.")
    parser.add_argument("--repetitions", type=int, default=5, help="of the comparison of CPU times")
    parser.add_argument("--child", choices=("cpu", "scale"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        urls = json.load(sys.stdin)
        print(json.dumps(asyncio.run((cpu_child if options.child == "cpu" else scale_child)(urls))))
        return 0
    env = report.environment()
    split, kill, caches = run_virtual(uneven()), run_virtual(killed()), run_virtual(prefix())
    with c_servers(ENDPOINTS) as urls:
        pairs = [(child("cpu", urls[:1]), child("cpu", urls)) for _ in range(options.repetitions)]
    ratios = [many["cpu_per_turn_s"] / one["cpu_per_turn_s"] for one, many in pairs]
    large, moved = scale(), keys()
    bars = [
        report.Bar("one of four 8 x slower: wall over the ideal split", split["ours_s"] / split["ideal_s"], "<=", 1.15),
        report.Bar("one of four killed: rows lost", kill["lost"], "<=", 0),
        report.Bar("one of four killed: wall over what three need", kill["after_s"] / kill["three_s"], "<=", 1.15),
        report.Bar("64 endpoints: CPU per turn over that of one", statistics.median(ratios), "<=", 1.2),
        report.Bar("1,000 endpoints: seconds until ready", large["ready_s"], "<=", 2.0),
        report.Bar("1,000 endpoints: MiB", large["peak_mib"], "<=", 100),
        report.Bar("1 of 100 endpoints removed: share of keys moved", moved, "<=", 0.02),
        report.Bar("prefix hits over an endless cache's: fleet", caches["fleet"] / caches["endless"], ">=", 0.95),
        report.Bar("... round robin", caches["round_robin"] / caches["endless"], "<=", 0.3),
    ]
    print(f"round robin over the ideal split: {split['round_robin_s'] / split['ideal_s']:.2f}")
    measured = {"uneven": split, "killed": kill, "cpu": pairs, "scale": large, "keys_moved": moved, "prefix": caches}
    return report.finish(Path(__file__).stem, env, bars, measured)


if __name__ == "__main__":
    raise SystemExit(main())

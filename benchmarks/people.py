"""People beside a batch on a real engine: ``batch-agent serve`` in front of a vLLM server on a GPU.

``python -m benchmarks.people --url vllm://127.0.0.1:8000``. The server speaks the scripts that the prompts carry
(``benchmarks/gpu.py`` says how), and every answer of a person is checked. Five interactive requests per second come
beside one long batch. Scenes, one after another:

- *idle*: people alone; *alone*: the batch alone
- *people*: both, with the target of 2.5 times the idle latency; *bursts*: people come for 12 s of each minute
- *loop 256*, *loop 64*: the same people beside a plain loop that keeps so many lines in flight, without ``serve``

Latencies are given over the median of *idle*, lines per second over those of *alone*.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from batch_agent.serve.models import open_models
from benchmarks import gpu, report
from benchmarks.serve import CHAT, MODEL, Client, serving

PEOPLE = 5.0  # requests per second
BURST, MINUTE = 12.0, 60.0
SYSTEM = (
    "You are one of many clerks who work from the same brief. " + "Read the case, and say what is to be done. " * 50
)
ANSWER = "case {number}: " + "the papers are in order and nothing more is to be done about it today; " * 3
LINES = 45_000
INFLIGHT = 256  # of the engine's own --max-num-seqs

Ask = Callable[[dict[str, object]], Awaitable[str]]


def body_of(number: int) -> dict[str, object]:
    """Return a request whose script is an answer of about 50 tokens."""
    script = json.dumps([ANSWER.format(number=number)])
    question = f"What about case {number}? {gpu.OPEN}{script}{gpu.CLOSE}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 200}


class People:
    """Interactive requests at random times, and the seconds that each took."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._chance = random.Random(1)
        self.latencies: list[float] = []

    async def come(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < until:
                await asyncio.sleep(self._chance.expovariate(PEOPLE))
                tasks.create_task(self._one())

    async def _one(self) -> None:
        number = self._chance.randrange(10**6, 10**7)
        began = time.perf_counter()
        said = await self._ask(body_of(number))
        self.latencies.append(time.perf_counter() - began)
        if said.strip() != ANSWER.format(number=number).strip():
            raise SystemExit(f"the answer is not that of the case: {said!r}")


def asker(session: aiohttp.ClientSession, url: str, model: str, key: str = "") -> Ask:
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(body: dict[str, object]) -> str:
        async with session.post(url, json={**body, "model": model}, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"{response.status}: {answer}")
            return str(answer["choices"][0]["message"]["content"])

    return ask


async def measured(
    name: str, people: People, done: Callable[[], Awaitable[int]], scene: Awaitable[object]
) -> tuple[float, list[float]]:
    """Play a scene. Return the lines per second in it, and the latencies of the people."""
    first, began = await done(), time.perf_counter()
    people.latencies = []
    await scene
    rate = (await done() - first) / (time.perf_counter() - began)
    median = statistics.median(people.latencies) if people.latencies else 0.0
    print(f"{name}: {rate:.1f} lines per second, median {median:.3f} s", flush=True)
    return rate, [*people.latencies]


async def bursts(people: People, minutes: int) -> None:
    for _ in range(minutes):
        began = time.perf_counter()
        await people.come(BURST)
        await asyncio.sleep(MINUTE - (time.perf_counter() - began))


async def through_serve(url: str, folder: Path, minutes: int) -> dict[str, tuple[float, list[float]]]:
    path = folder / "lines.jsonl"
    with path.open("w") as file:
        for number in range(LINES):
            line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body_of(number)}
            file.write(json.dumps(line) + "\n")
    options = {"interactive_latency": 2.5, "max_inflight": INFLIGHT}
    models = open_models(None, {MODEL: {"url": url, "model": "m"}})
    async with serving(models, folder / "data", **options) as (server, address, session):
        client = Client(session, address, server.key)
        people = People(asker(session, f"{address}{CHAT}", MODEL, server.key))

        async def nothing() -> int:
            return 0

        await people.come(2.0)  # not counted
        found = {"idle": await measured("idle", people, nothing, people.come(10.0))}
        id = await client.batch(path)
        await client.until(id, INFLIGHT)

        async def done() -> int:
            counts = (await client.show(id))["request_counts"]
            assert isinstance(counts, dict)
            return int(counts["completed"])

        await asyncio.sleep(5.0)
        found["alone"] = await measured("alone", people, done, asyncio.sleep(40.0))
        await people.come(12.0)  # settles
        found["people"] = await measured("people", people, done, people.come(30.0))
        await asyncio.sleep(8.0)
        found["bursts"] = await measured("bursts", people, done, bursts(people, minutes))
        if LINES - await done() < INFLIGHT:
            raise SystemExit("the batch ended before the people left: give it more LINES")
    return found


@asynccontextmanager
async def plain_loop(ask: Ask, inflight: int, counted: list[int]) -> AsyncIterator[None]:
    """Keep so many lines in flight; ``counted[0]`` is the number that were answered."""

    async def worker(first: int) -> None:
        for number in range(first, LINES, inflight):
            await ask(body_of(number))
            counted[0] += 1

    tasks = [asyncio.create_task(worker(number)) for number in range(inflight)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def beside_loops(url: str) -> dict[str, tuple[float, list[float]]]:
    base, found = f"{gpu.base_url(url)}{CHAT}", {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        ask = asker(session, base, "m")
        for inflight in (256, 64):
            counted, people = [0], People(ask)

            async def done(counted: list[int] = counted) -> int:
                return counted[0]

            async with plain_loop(ask, inflight, counted):
                await asyncio.sleep(5.0)
                name = f"loop {inflight}"
                found[name] = await measured(name, people, done, people.come(10.0))
    return found


async def play(url: str, minutes: int) -> dict[str, dict[str, float]]:
    """All scenes: of each its lines per second and the latencies of the people."""
    with tempfile.TemporaryDirectory() as name:
        scenes = await through_serve(url, Path(name), minutes)
    scenes |= await beside_loops(url)
    idle, alone = statistics.median(scenes["idle"][1]), scenes["alone"][0]
    found: dict[str, dict[str, float]] = {}
    for scene, (rate, latencies) in scenes.items():
        found[scene] = {"lines_per_second": round(rate, 2), "over_alone": round(rate / alone, 3)}
        if latencies:
            found[scene] |= {
                "median_s": round(statistics.median(latencies), 3),
                "p95_s": round(statistics.quantiles(latencies, n=20)[18], 3),
                "median_over_idle": round(statistics.median(latencies) / idle, 3),
                "p95_over_idle": round(statistics.quantiles(latencies, n=20)[18] / idle, 3),
            }
        print(scene, json.dumps(found[scene]), flush=True)
    return found


def bars_of(found: dict[str, dict[str, float]]) -> list[report.Bar]:
    people = found["people"]
    return [
        report.Bar("latency beside a batch over idle, median", people["median_over_idle"], "<=", 2.5),
        report.Bar("the same, 95th percentile", people["p95_over_idle"], "<=", 4),
        report.Bar("lines per second beside people over alone", people["over_alone"], ">=", 0.7),
        report.Bar("the same with people for a fifth of the time", found["bursts"]["over_alone"], ">=", 0.9),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.people", description="People beside a batch.")
    parser.add_argument("--url", default="vllm://127.0.0.1:8000")
    parser.add_argument("--minutes", type=int, default=2, help="of the scene bursts")
    parser.add_argument("--hardware", default="", help="what the server runs on, for the record")
    options = parser.parse_args()
    env = report.environment() | {"accelerator": options.hardware}
    env["server"] = asyncio.run(gpu.server_version(options.url))
    found = asyncio.run(play(options.url, options.minutes))
    return report.finish("people", env, bars_of(found), found)


if __name__ == "__main__":
    sys.exit(main())

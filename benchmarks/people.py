"""People beside a batch on a real engine: ``batch-agent serve`` in front of a server on a GPU.

``python -m benchmarks.people --url vllm://127.0.0.1:8000 --mix long``. The server speaks the scripts that the prompts
carry (``benchmarks/gpu.py`` says how), and every answer of a person is checked. Five interactive requests per second
come beside one long batch. A mix is a kind of prompts, of lines and people alike: *short* has 500 shared words, *long*
2,000 shared words and 300 of its own. Of each mix:

- *idle*: people alone; *alone*: the batch alone
- a target, such as *p95 3*: people come for 50 s and again for 20 s, after a pause; the first 20 s of both are counted
  as *first*
- *loop 256* to *loop 24*: the same people beside a plain loop that keeps so many lines in flight, without ``serve``

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import aiohttp

from batch_agent.serve import LatencyTarget
from batch_agent.serve.models import open_models
from benchmarks import gpu, report
from benchmarks.serve import CHAT, MODEL, Client, serving

PEOPLE = 5.0  # requests per second
FIRST, STEADY, PAUSE = 20.0, 30.0, 8.0
SENTENCE = "Read the case, and say what is to be done. "  # 10 words
SYSTEM = "You are one of many clerks who work from the same brief. "
WORDS = (
    *("the", "of", "case", "file", "and", "to", "in", "is", "was", "on", "for", "with", "as", "by", "at", "from"),
    *("page", "note", "date", "form", "desk", "clerk", "paper", "letter", "reply", "brief", "order", "city", "road"),
    *("house", "water", "light", "north", "south", "early", "late", "small", "large", "first", "last", "open"),
)
PHRASE = "the papers are in order and nothing more is to be done about it today; "
PHRASES = 3  # in the answer to a person; those to lines have one less to one more, so that they do not end together
INFLIGHT = 256  # of the engine's own --max-num-seqs
FRESH = 1_000_000  # between the numbers of two scenes, so that no prompt is in the engine's cache

Ask = Callable[[dict[str, object]], Awaitable[str]]
Scene = dict[str, float]


@dataclass(frozen=True, slots=True)
class Mix:
    """``shared``: sentences that all prompts begin with; ``own``: words that only one has."""

    shared: int
    own: int
    targets: tuple[LatencyTarget, ...]
    lines: int
    loops: tuple[int, ...] = ()

    def body(self, number: int, phrases: int = PHRASES) -> dict[str, object]:
        """Return a request whose script is an answer of about 17 tokens for each phrase."""
        script = json.dumps([answer(number, phrases)])
        case = " ".join(random.Random(number).choices(WORDS, k=self.own))
        question = f"{case} What about case {number}? {gpu.OPEN}{script}{gpu.CLOSE}"
        messages = [
            {"role": "system", "content": SYSTEM + SENTENCE * self.shared},
            {"role": "user", "content": question},
        ]
        return {"model": MODEL, "messages": messages, "max_tokens": 200}

    def line(self, number: int) -> dict[str, object]:
        return self.body(number, PHRASES - 1 + number % 3)


MIXES = {
    "short": Mix(50, 0, (LatencyTarget(3.0, 95),), 22_000),
    "long": Mix(200, 300, (LatencyTarget(3.0, 95), LatencyTarget(2.0, 95)), 12_000, loops=(256, 96, 48, 24)),
}


def answer(number: int, phrases: int) -> str:
    return f"case {number}: " + PHRASE * phrases


class People:
    """Interactive requests at random times, and the seconds that each took."""

    def __init__(self, ask: Ask, mix: Mix) -> None:
        self._ask, self._mix = ask, mix
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
        said = await self._ask(self._mix.body(number))
        self.latencies.append(time.perf_counter() - began)
        if said.strip() != answer(number, PHRASES).strip():
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


async def nothing() -> int:
    return 0


async def measured(people: People, done: Callable[[], Awaitable[int]], scene: Awaitable[object]) -> Scene:
    """Play a scene. Return the lines per second in it, and the latencies of the people who came."""
    first, began = await done(), time.perf_counter()
    people.latencies = []
    await scene
    found = {"lines_per_second": (await done() - first) / (time.perf_counter() - began)}
    return found | latencies(people.latencies)


def latencies(seconds: list[float]) -> Scene:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=20)
    return {"median_s": statistics.median(seconds), "p95_s": cuts[18], "worst_s": max(seconds), "count": len(seconds)}


async def through_serve(url: str, mix: Mix, target: LatencyTarget, folder: Path, *, whole: bool) -> dict[str, Scene]:
    """Play the scenes of a target. ``whole``: with people alone and the batch alone."""
    path = folder / "lines.jsonl"
    with path.open("w") as file:
        for number in range(mix.lines):
            line = {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": CHAT,
                "body": mix.body(number, PHRASES - 1 + number % 3),
            }
            file.write(json.dumps(line) + "\n")
    models = open_models(None, {MODEL: {"url": url, "model": "m"}})
    found: dict[str, Scene] = {}
    async with serving(models, folder / "data", interactive_latency=target, max_inflight=INFLIGHT) as (
        server,
        address,
        session,
    ):
        client = Client(session, address, server.key)
        people = People(asker(session, f"{address}{CHAT}", MODEL, server.key), mix)
        await people.come(3.0)  # not counted
        if whole:
            found["idle"] = await measured(people, nothing, people.come(12.0))
        id = await client.batch(path)
        await client.until(id, INFLIGHT)

        async def done() -> int:
            counts = (await client.show(id))["request_counts"]
            assert isinstance(counts, dict)
            return int(counts["completed"])

        if whole:
            await asyncio.sleep(5.0)
            found["alone"] = await measured(people, done, asyncio.sleep(30.0))
        name, first = str(target), list[float]()
        for seconds in (STEADY, 0.0):
            await asyncio.sleep(PAUSE)
            people.latencies = []
            await people.come(FIRST)
            first += people.latencies
            if seconds:
                found[name] = await measured(people, done, people.come(seconds))
        found[f"{name}, first"] = latencies(first)
        if mix.lines - await done() < INFLIGHT:
            raise SystemExit("the batch ended before the people left: give its mix more lines")
    return found


@asynccontextmanager
async def plain_loop(ask: Ask, mix: Mix, inflight: int, counted: list[int]) -> AsyncIterator[None]:
    """Keep so many lines in flight; ``counted[0]`` is the number that were answered."""

    async def worker(first: int) -> None:
        for number in count(FRESH * inflight + first, inflight):
            await ask(mix.line(number))
            counted[0] += 1

    tasks = [asyncio.create_task(worker(number)) for number in range(inflight)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def beside_loops(url: str, mix: Mix) -> dict[str, Scene]:
    base, found = f"{gpu.base_url(url)}{CHAT}", {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        ask = asker(session, base, "m")
        for inflight in mix.loops:
            counted, people = [0], People(ask, mix)

            async def done(counted: list[int] = counted) -> int:
                return counted[0]

            async with plain_loop(ask, mix, inflight, counted):
                await asyncio.sleep(4.0)
                found[f"loop {inflight}"] = await measured(people, done, people.come(10.0))
    return found


async def play(url: str, name: str, *, whole: bool = True) -> dict[str, Scene]:
    """All scenes of a mix, or those of its first target: of each its lines per second and the latencies of people."""
    mix, scenes = MIXES[name], dict[str, Scene]()
    for target in mix.targets if whole else mix.targets[:1]:
        with tempfile.TemporaryDirectory() as folder:
            scenes |= await through_serve(url, mix, target, Path(folder), whole=not scenes)
        print(json.dumps(scenes), file=sys.stderr, flush=True)
    if whole:
        scenes |= await beside_loops(url, mix)
    idle, alone = scenes["idle"]["median_s"], scenes["alone"]["lines_per_second"]
    for scene in scenes.values():
        if "lines_per_second" in scene:
            scene["over_alone"] = scene["lines_per_second"] / alone
        for part in ("median", "p95"):
            if f"{part}_s" in scene:
                scene[f"{part}_over_idle"] = scene[f"{part}_s"] / idle
    return {name: {part: round(value, 3) for part, value in scene.items()} for name, scene in scenes.items()}


def bars_of(mix: str, found: Mapping[str, Scene]) -> Iterator[report.Bar]:
    """The bars of one mix."""
    for name, most, least in (("p95 3", 3.0, 0.75), ("p95 2", 2.0, 0.5)):
        if name in found:
            first = found[f"{name}, first"]["p95_over_idle"]
            yield report.Bar(f"{mix}, {name}: 95th percentile over idle", found[name]["p95_over_idle"], "<=", most)
            yield report.Bar(f"{mix}, {name}: the same, 20 s after people come", first, "<=", most)
            yield report.Bar(f"{mix}, {name}: batch over alone", found[name]["over_alone"], ">=", least)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.people", description="People beside a batch.")
    parser.add_argument("--url", default="vllm://127.0.0.1:8000")
    parser.add_argument("--mix", action="append", choices=MIXES, help="default: all")
    parser.add_argument("--hardware", default="", help="what the server runs on, for the record")
    options = parser.parse_args()
    env = report.environment() | {"accelerator": options.hardware}
    env["server"] = asyncio.run(gpu.server_version(options.url))
    found = {mix: asyncio.run(play(options.url, mix)) for mix in options.mix or MIXES}
    bars = [bar for mix, scenes in found.items() for bar in bars_of(mix, scenes)]
    return report.finish("people", env, bars, found)


if __name__ == "__main__":
    sys.exit(main())

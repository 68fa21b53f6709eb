"""Agents on a real engine, side by side with a bare loop: wall time against a server on a GPU.

``python -m benchmarks.gpu --url vllm://127.0.0.1:8000``. The server has a tool-call parser and speaks the scripts
that the prompts carry (a logits processor forces the tokens between two marks): tokens, KV blocks, batching and timing
are real, and every answer can be checked. Contenders take turns, each time with a new system prompt, so that none finds
the prefix of another in the cache:

- *bare loop*: all agents at once, a semaphore around the model call alone, so that a slot is free while a tool runs; no
  retries, no validation, each tool call run for itself
- *ours*: ``BatchAgent.run`` with the same number in flight, the tool declared cacheable
- *ours, no number given*: the same with as many in flight as it finds by itself

``--sweep`` then gives the bare loop other numbers of requests in flight: the least time of them is what the engine
allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp
from pydantic import BaseModel

from batch_agent import BatchAgent, Tool
from benchmarks import report

OPEN, CLOSE = "<jupyter_start>", "<jupyter_text>"  # the marks of a script
SYSTEM = "You are one of many researchers who work from the same brief. " + (
    "Read what you are given, look up what you do not know, and answer in one line of JSON. " * 125
)


class Finding(BaseModel):
    topic: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Work:
    agents: int
    inflight: int
    tool_seconds: float  # 0: one turn, no tool
    topics: int = 10
    bar: float = 1.0  # over the bare loop, if we are given no number

    def __str__(self) -> str:
        tool = (
            f"{self.topics} distinct searches of {self.tool_seconds * 1000:.0f} ms" if self.tool_seconds else "1 turn"
        )
        return f"{self.agents:,} agents, {tool}, {self.inflight} in flight"

    def prompt(self, agent: int) -> str:
        topic = agent % self.topics
        search = json.dumps({"name": "web_search", "arguments": {"query": f"topic {topic}"}})
        answer = json.dumps({"topic": topic, "verdict": "seen before, and harmless then; nothing more to be done"})
        turns = [f"<tool_call>\n{search}\n</tool_call>", answer] if self.tool_seconds else [answer]
        return f"Research topic {topic} for report {agent}. {OPEN}{json.dumps(turns)}{CLOSE}"


WORKS = (Work(20, 8, 0.4, topics=9), Work(100, 32, 0.8, bar=0.8), Work(1_000, 256, 0.0))


def result_of(query: str) -> str:
    return f"What is known about {query}: " + "it was seen before, and it was harmless then. " * 8


def base_url(backend: str) -> str:
    """``vllm://host:port?option`` as ``http://host:port``."""
    return f"http://{backend.partition('://')[2].partition('?')[0]}"


async def ours(work: Work, backend: str, system: str, *, number_given: bool = True) -> tuple[list[Finding | None], int]:
    runs = 0

    @Tool.define(cacheable=True)
    async def web_search(query: str) -> str:
        """Search the web."""
        nonlocal runs
        runs += 1
        await asyncio.sleep(work.tool_seconds)
        return result_of(query)

    results = await BatchAgent.run(
        system_prompt=system,
        task="{prompt}",
        inputs=[{"prompt": work.prompt(agent)} for agent in range(work.agents)],
        tools=[web_search] if work.tool_seconds else [],
        output_schema=Finding,
        backend=f"{backend}?native_schema=false",
        model="m",
        **({"max_inflight": work.inflight} if number_given else {}),
    )
    return [result.output for result in results], runs


SEARCH = {
    "type": "function",
    "function": {
        "name": "web_search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


async def unnumbered(work: Work, backend: str, system: str) -> tuple[list[Finding | None], int]:
    return await ours(work, backend, system, number_given=False)


async def bare_loop(work: Work, backend: str, system: str) -> tuple[list[Finding | None], int]:
    gate = asyncio.Semaphore(work.inflight)
    runs = 0
    schema = f"{system}\n\nAnswer with JSON of this schema:\n{json.dumps(Finding.model_json_schema())}"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(messages: list[dict[str, object]]) -> dict[str, object]:
            body: dict[str, object] = {"model": "m", "messages": messages}
            if work.tool_seconds:
                body["tools"] = [SEARCH]
            async with gate, session.post(f"{base_url(backend)}/v1/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]  # type: ignore[no-any-return]

        async def agent(number: int) -> Finding:
            nonlocal runs
            messages: list[dict[str, object]] = [
                {"role": "system", "content": schema},
                {"role": "user", "content": work.prompt(number)},
            ]
            while True:
                message = await ask(messages)
                calls = message.get("tool_calls")
                if not isinstance(calls, list) or not calls:
                    return Finding.model_validate_json(str(message["content"]))
                messages.append({"role": "assistant", "content": message.get("content") or "", "tool_calls": calls})
                for call in calls:
                    runs += 1
                    await asyncio.sleep(work.tool_seconds)
                    query = json.loads(call["function"]["arguments"])["query"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_of(query)})

        return list(await asyncio.gather(*map(agent, range(work.agents)))), runs


Contender = Callable[[Work, str, str], Awaitable[tuple[list[Finding | None], int]]]
LOOP, OURS, UNNUMBERED = "bare loop", "ours", "ours, no number given"
SWEPT = (16, 24, 32, 48, 64, 80, 100)
CONTENDERS: dict[str, Contender] = {LOOP: bare_loop, OURS: ours, UNNUMBERED: unnumbered}


async def round_of(work: Work, backend: str) -> dict[str, tuple[float, int]]:
    """Each contender once, its answers checked: its wall seconds, and how often the tool ran."""
    found = {}
    for name, run in CONTENDERS.items():
        system = f"Brief {random.random()}. {SYSTEM}"
        began = time.perf_counter()
        findings, runs = await run(work, backend, system)
        found[name] = (round(time.perf_counter() - began, 3), runs)
        if [finding and finding.topic for finding in findings] != [a % work.topics for a in range(work.agents)]:
            raise SystemExit(f"{name}: the answers are not those of the rows")
    return found


def measured(work: Work, rounds: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, object]:
    """The measurement that some rounds are, with the ratios of neighbouring runs."""
    walls = {name: [each[name][0] for each in rounds] for name in CONTENDERS}
    ratios = {
        name: report.spread([mine / theirs for mine, theirs in zip(walls[name], walls[LOOP], strict=True)])
        for name in (OURS, UNNUMBERED)
    }
    return {
        "work": str(work),
        "wall_s": {name: report.spread(values) for name, values in walls.items()},
        "tool_runs": {name: rounds[-1][name][1] for name in CONTENDERS},
        "ratio": ratios,
    }


async def measure(work: Work, backend: str, repetitions: int, warm_up: bool) -> dict[str, object]:
    rounds = [await round_of(work, backend) for _ in range(repetitions + warm_up)]
    return measured(work, rounds[warm_up:])


def bars_of(work: Work, measurement: Mapping[str, object]) -> list[report.Bar]:
    ratios = measurement["ratio"]
    assert isinstance(ratios, dict)
    given, found = ratios[OURS]["median"], ratios[UNNUMBERED]["median"]
    return [
        report.Bar(f"{work}: wall, ours over the bare loop", given, "<=", 1.0),
        report.Bar(f"{work}: wall, no number given, over the bare loop", found, "<=", work.bar),
    ]


async def sweep(work: Work, backend: str, repetitions: int) -> dict[int, list[float]]:
    """Return the seconds of the bare loop by the number of its requests in flight."""
    walls: dict[int, list[float]] = {number: [] for number in SWEPT if number <= work.agents}
    for _ in range(repetitions):
        for number, seconds in walls.items():
            began = time.perf_counter()
            await bare_loop(replace(work, inflight=number), backend, f"Brief {random.random()}. {SYSTEM}")
            seconds.append(time.perf_counter() - began)
    return walls


async def server_version(backend: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{base_url(backend)}/version") as response:
        return f"vLLM {(await response.json())['version']}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Agents on a real engine.")
    parser.add_argument("--url", default="vllm://127.0.0.1:8000")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--hardware", default="", help="what the server runs on, for the record")
    parser.add_argument("--sweep", action="store_true", help="also the bare loop with other numbers in flight")
    options = parser.parse_args()
    env = report.environment() | {"server": asyncio.run(server_version(options.url)), "accelerator": options.hardware}
    measurements = [asyncio.run(measure(work, options.url, options.repetitions, work is WORKS[0])) for work in WORKS]
    rows = []
    bars: list[report.Bar] = []
    for work, item in zip(WORKS, measurements, strict=True):
        walls, runs, ratios = item["wall_s"], item["tool_runs"], item["ratio"]
        assert isinstance(walls, dict) and isinstance(runs, dict) and isinstance(ratios, dict)
        cells = [f"{walls[name]['median']:.2f} s, {runs[name]} tool runs" for name in CONTENDERS]
        rows.append((str(work), *cells, *(f"{ratio['median']:.2f}" for ratio in ratios.values())))
        bars += bars_of(work, item)
    print(report.table(("work", *CONTENDERS, "ratio", "no number"), rows), "\n")
    for work, item in zip(WORKS, measurements, strict=True) if options.sweep else ():
        if work.tool_seconds:
            walls = asyncio.run(sweep(work, options.url, options.repetitions))
            item["sweep_wall_s"] = {str(number): report.spread(seconds) for number, seconds in walls.items()}
            medians = {number: statistics.median(seconds) for number, seconds in walls.items()}
            print(f"{work}: the bare loop by its number:", {number: round(wall, 2) for number, wall in medians.items()})
    return report.finish("gpu", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())

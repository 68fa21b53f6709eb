"""Agents whose contexts do not all fit the KV cache: wall time against a plain loop and static numbers of agents.

``python -m benchmarks.kv --simulated`` plays the work on the simulated engine in virtual time. ``--url
http://127.0.0.1:8000/v1 --work growing`` measures a real vLLM server, which speaks the scripts that the prompts carry
(see ``benchmarks/gpu.py``) and must have a KV cache of the size that the work names. Contenders:

- *loop*: all agents at once, each a coroutine that asks and calls its tool
- *loop, N agents*: the same with N agents at a time, for several N; the best of them is the best static number
- *ours, off*: ``BatchAgent.run`` with ``kvflow=False``
- *ours*: ``BatchAgent.run``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.messages import Conversation, Message, ToolSpec
from batch_agent.testing import run_virtual
from benchmarks import report

OPEN, CLOSE = "<jupyter_start>", "<jupyter_text>"  # the marks of a script
SYSTEM = "You are one of many researchers who work from the same brief. " + "Read, look up, and answer briefly. " * 146


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    turns: int
    result_words: int  # of each tool result
    kv_tokens: int
    agents: int = 24
    tool_seconds: float = 2.0
    sweep: tuple[int, ...] = ()
    bars: bool = True  # the contexts do not fit; otherwise we only must not be slower

    def script(self, agent: int) -> list[str]:
        calls = [
            {"name": "read", "arguments": {"document": f"document {agent}-{turn}"}} for turn in range(1, self.turns)
        ]
        return [
            *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls),
            f"Agent {agent} has read everything, and found nothing to add to what was known before it began.",
        ]

    def prompt(self, agent: int, seed: int) -> str:
        own = " ".join(random.Random(seed * 1_000 + agent).choices(WORDS, k=60))
        return f"Work {seed}-{agent}: {own}. {OPEN}{json.dumps(self.script(agent))}{CLOSE}"

    def document(self, name: str, seed: int) -> str:
        return " ".join(random.Random(f"{seed} {name}").choices(WORDS, k=self.result_words))


WORDS = ("tree", "rock", "lamp", "snow", "page", "leaf", "door", "gold", "dawn", "port", "iron", "hay", "wax", "wood")
WORKS = {
    work.name: work
    for work in (
        Work("growing", 5, 2_500, 98_304, sweep=(6, 8, 10, 12)),
        Work("many turns", 10, 800, 65_536, sweep=(7, 11, 15)),
        Work("ample", 5, 2_500, 983_040, bars=False),
        Work("long tools", 5, 2_500, 98_304, tool_seconds=20.0, bars=False),
    )
}
Ask = Callable[[list[dict[str, object]]], Awaitable[dict[str, object]]]


async def loop_of(work: Work, seed: int, ask: Ask, at_once: int) -> list[str]:
    """The loop that people write, with at most ``at_once`` agents at a time."""
    gate = asyncio.Semaphore(at_once)

    async def agent(number: int) -> str:
        messages: list[dict[str, object]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": work.prompt(number, seed)},
        ]
        async with gate:
            while True:
                message = await ask(messages)
                calls = message.get("tool_calls")
                if not isinstance(calls, list) or not calls:
                    return str(message["content"])
                messages.append({"role": "assistant", "content": message.get("content") or "", "tool_calls": calls})
                for call in calls:
                    await asyncio.sleep(work.tool_seconds)
                    name = json.loads(call["function"]["arguments"])["document"]
                    text = work.document(name, seed)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    return list(await asyncio.gather(*map(agent, range(work.agents))))


async def ours(work: Work, seed: int, backend: object, kvflow: bool) -> list[str]:
    @Tool.define()
    async def read(document: str) -> str:
        """Read a document."""
        await asyncio.sleep(work.tool_seconds)
        return work.document(document, seed)

    results = await BatchAgent.run(
        system_prompt=SYSTEM,
        task="{prompt}",
        inputs=[{"prompt": work.prompt(agent, seed)} for agent in range(work.agents)],
        tools=[read],
        backend=backend,  # type: ignore[arg-type]
        model="m",
        max_turns=work.turns + 2,
        kvflow="auto" if kvflow else False,
    )
    return [str(result.output) for result in results]


READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a document.",
        "parameters": {"type": "object", "properties": {"document": {"type": "string"}}, "required": ["document"]},
    },
}


async def on_server(work: Work, url: str, seed: int, contender: str) -> float:
    """Seconds of one contender against a real server, all answers checked."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
    ) as session:

        async def ask(messages: list[dict[str, object]]) -> dict[str, object]:
            body = {"model": "m", "messages": messages, "tools": [READ]}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]  # type: ignore[no-any-return]

        await ask([{"role": "system", "content": SYSTEM}, {"role": "user", "content": f'Hi {OPEN}["hi"]{CLOSE}'}])
        began = time.perf_counter()
        if contender.startswith("loop"):
            answers = await loop_of(work, seed, ask, int(contender.split()[1]))
        else:
            address = f"vllm://{url.partition('://')[2].removesuffix('/v1')}"
            answers = await ours(work, seed, address, contender == "ours")
        seconds = time.perf_counter() - began
    if answers != [work.script(agent)[-1] for agent in range(work.agents)]:
        raise SystemExit(f"{contender}: the answers are not those of the rows: {answers[:2]}")
    return seconds


def simulated(work: Work, contender: str) -> float:
    """Seconds of one contender on the simulated engine."""
    model = EngineModel(
        prefill_tokens_per_second=9_000,
        step_seconds=0.03,
        sequence_seconds=0.0002,
        kv_tokens=work.kv_tokens,
        context_tokens=16_384,
        answer_tokens=40,
        tool_calls_per_agent=work.turns - 1,
        name="m",
    )

    async def play() -> float:
        backend = SimulatedBackend(model)
        loop = asyncio.get_running_loop()
        if not contender.startswith("loop"):
            began = loop.time()
            await ours(work, 0, backend, contender == "ours")
            return loop.time() - began
        tool = ToolSpec("read", "Read a document.", {"type": "object", "properties": {"document": {"type": "string"}}})
        shape = RequestShape(model.name, tools=(tool,))
        gate = asyncio.Semaphore(int(contender.split()[1]))

        async def agent(number: int) -> None:
            talk = Conversation((Message("system", SYSTEM), Message("user", work.prompt(number, 0))))
            async with gate:
                while True:
                    reply = await backend.infer(ModelRequest(shape, talk, str(number)))
                    talk.append(reply.message())
                    if not reply.tool_calls:
                        return
                    for call in reply.tool_calls:
                        await asyncio.sleep(work.tool_seconds)
                        talk.append(Message("tool", work.document(call.arguments, 0), tool_call_id=call.id))

        began = loop.time()
        await asyncio.gather(*map(agent, range(work.agents)))
        return loop.time() - began

    return run_virtual(play())


def contenders(work: Work) -> list[str]:
    return [f"loop {work.agents}", *(f"loop {number}" for number in work.sweep), "ours, off", "ours"]


def bars_of(work: Work, seconds: dict[str, float], mark: str) -> list[report.Bar]:
    plain, mine = seconds[f"loop {work.agents}"], seconds["ours"]
    if not work.bars:
        return [report.Bar(f"{work.name}{mark}: wall, ours over the loop", mine / plain, "<=", 1.02)]
    best = min(seconds[f"loop {number}"] for number in work.sweep)
    return [
        report.Bar(f"{work.name}{mark}: wall, the loop over ours", plain / mine, ">=", 1.2),
        report.Bar(f"{work.name}{mark}: wall, the best static number over ours", best / mine, ">=", 1.05),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv", description="Agents inside a KV cache.")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--work", action="append", choices=[*WORKS])
    parser.add_argument("--only", action="append", help="a contender, such as 'loop 8' or ours")
    parser.add_argument("--hardware", default="", help="what the server runs on, for the record")
    options = parser.parse_args()
    env = report.environment() | {"accelerator": options.hardware or ("simulated" if options.simulated else "")}
    mark = " (simulated)" if options.simulated else ""
    bars: list[report.Bar] = []
    measurements: list[dict[str, object]] = []
    rows: list[tuple[str, ...]] = []
    for work in (WORKS[name] for name in options.work or WORKS):
        seconds: dict[str, float] = {}
        for contender in options.only or contenders(work):
            seed = int(time.time() * 1_000) % 1_000_000
            if options.simulated:
                seconds[contender] = simulated(work, contender)
            else:
                seconds[contender] = asyncio.run(on_server(work, options.url, seed, contender))
            print(f"{work.name}{mark}: {contender}: {seconds[contender]:.1f} s", flush=True)
        rows.append((work.name, ", ".join(f"{name}: {value:.1f}" for name, value in seconds.items())))
        measurements.append({"work": work.name, "seconds": seconds, "simulated": options.simulated})
        if not options.only:
            bars += bars_of(work, seconds, mark)
    print(report.table(("work", "wall seconds"), rows), "\n")
    return report.finish("kv-simulated" if options.simulated else "kv", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())

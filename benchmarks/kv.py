"""Agents whose contexts do not all fit the KV cache: wall time against a plain loop and static numbers of agents.

``python -m benchmarks.kv --simulated`` plays the work on the simulated engine in virtual time. ``--url
vllm://127.0.0.1:8000 --work growing`` (or ``sglang://``) measures a real server, which speaks the scripts that the
prompts carry (see ``benchmarks/gpu.py``) and must have a KV cache of the size that the work names, and for ``offload``
a slower memory behind it. The work ``fleet`` takes one ``--url`` per server; ``untold`` is simulated only. Each
measurement is printed as one line of JSON; ``seconds_per_job`` is the mean time from the begin of the batch to the end
of a row. ``python -m benchmarks.numbers_gpu`` repeats the two main works on a real server in pieces, and keeps them.
Variants:

- *loop*: all agents at once, each a coroutine that asks and calls its tool; *loop N*: N agents at a time
- *ttl*: the loop on an engine that pins the contexts of waiting agents for a limited time and serves the requests of
  earlier agents first, as CacheTTL does (arXiv 2511.02230); simulated only
- *sweep*: ``loop N`` for several N; the best of them is the best static number
- *off*: ``BatchAgent.run`` with ``kvflow=False``; *ours*: with its default; *all*: with ``kvflow=True``
- *ours-order*, *ours+touch*: one part off or on (admission, order, touch, keep_alive, pin); *parts*: each part alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import aiohttp

from batch_agent import BatchAgent, Fleet, Tool
from batch_agent.backends.base import Backend, Load, ModelRequest, RequestShape
from batch_agent.backends.engines.engine import Exposition
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.events import Event, TurnFinished
from batch_agent.messages import Conversation, Message, ToolCall, ToolSpec, Usage
from batch_agent.scheduler.ordering import KvParts
from batch_agent.testing import run_virtual
from benchmarks import report
from benchmarks.gpu import CLOSE, OPEN, base_url

SYSTEM = "You are one of many researchers who work from the same brief. " + "Read, look up, and answer briefly. " * 146


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    turns: int
    result_words: int  # of each tool result
    kv_tokens: int  # of each server
    agents: int = 24
    tool_seconds: float = 2.0
    sweep: tuple[int, ...] = ()
    bars: bool = True  # the contexts do not fit; otherwise we only must not be slower
    servers: int = 1
    inflight: int | None = None  # requests at once, if the user gives a number
    offload_tokens: int = 0  # of a slower memory behind the cache
    told: bool = True  # the engine reports the size of its cache

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
CROWD = Work("crowd", 8, 800, 65_536, agents=96, tool_seconds=1.0, sweep=(8, 12, 16), inflight=12)
WORKS = {
    work.name: work
    for work in (
        Work("growing", 5, 2_500, 98_304, sweep=(6, 8, 10, 12)),
        Work("many turns", 10, 800, 65_536, sweep=(7, 11, 15)),
        Work("ample", 5, 2_500, 983_040, bars=False),
        Work("long tools", 5, 2_500, 98_304, tool_seconds=20.0, sweep=(8, 16), bars=False),
        Work("two turns", 2, 2_500, 98_304, agents=64, bars=False),
        CROWD,
        replace(CROWD, name="untold", told=False, sweep=()),
        Work("offload", 5, 2_500, 98_304, offload_tokens=400_000, bars=False),
        replace(CROWD, name="small offload", offload_tokens=131_072, sweep=(), bars=False),
        Work("fleet", 5, 2_500, 98_304, agents=48, sweep=(16, 20), servers=2),
    )
}
PARTS = tuple(field.name for field in fields(KvParts))
READ = ToolSpec(
    "read",
    "Read a document.",
    {"type": "object", "properties": {"document": {"type": "string"}}, "required": ["document"]},
)
Ask = Callable[[int, list[dict[str, object]]], Awaitable[tuple[dict[str, object], Usage]]]


class Counts:
    """A sink that counts prompt tokens, and those that were computed again because they had been evicted."""

    def __init__(self) -> None:
        self.usage, self.turns, self.recomputed = Usage(), 0, 0
        self.ends: list[float] = []  # seconds from the begin of the batch to the end of each row
        self._contexts: dict[int, int] = {}

    def add(self, agent: int, usage: Usage) -> None:
        self.turns += 1
        self.usage += usage
        if before := self._contexts.get(agent, 0):
            self.recomputed += max(0, min(before, usage.prompt_tokens) - usage.cached_tokens)
        self._contexts[agent] = usage.prompt_tokens + usage.completion_tokens

    def __call__(self, event: Event) -> None:
        if isinstance(event, TurnFinished):
            self.add(event.index, event.usage)

    def to_dict(self) -> dict[str, object]:
        usage = self.usage
        return {
            "turns": self.turns,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "recomputed_tokens": self.recomputed,
            "seconds_per_job": round(sum(self.ends) / max(1, len(self.ends)), 2),
        }


async def loop_of(work: Work, seed: int, ask: Ask, at_once: int, counts: Counts) -> list[str]:
    """The loop that people write, with at most ``at_once`` agents at a time."""
    clock = asyncio.get_running_loop().time
    began = clock()
    gate = asyncio.Semaphore(at_once)
    slots = asyncio.Semaphore(work.inflight or work.agents)

    async def agent(number: int) -> str:
        messages: list[dict[str, object]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": work.prompt(number, seed)},
        ]
        async with gate:
            while True:
                async with slots:
                    message, usage = await ask(number, messages)
                counts.add(number, usage)
                calls = message.get("tool_calls")
                if not isinstance(calls, list) or not calls:
                    counts.ends.append(clock() - began)
                    return str(message["content"])
                messages.append({"role": "assistant", "content": message.get("content") or "", "tool_calls": calls})
                for call in calls:
                    await asyncio.sleep(work.tool_seconds)
                    text = work.document(json.loads(call["function"]["arguments"])["document"], seed)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    return list(await asyncio.gather(*map(agent, range(work.agents))))


async def ours(
    work: Work, seed: int, backend: str | Backend, parts: KvParts, counts: Counts
) -> tuple[list[str], dict[str, object]]:
    """The answers of a run, and what is known of the cache."""

    @Tool.define()
    async def read(document: str) -> str:
        """Read a document."""
        await asyncio.sleep(work.tool_seconds)
        return work.document(document, seed)

    run = BatchAgent.open(
        system_prompt=SYSTEM,
        task="{prompt}",
        inputs=[{"prompt": work.prompt(agent, seed)} for agent in range(work.agents)],
        tools=[read],
        backend=backend,
        model="m",
        max_turns=work.turns + 2,
        sinks=[counts],
        **({} if work.inflight is None else {"max_inflight": work.inflight}),
    )
    run.shared.dispatcher.scheduler.use(parts)
    clock = asyncio.get_running_loop().time
    began, results = clock(), []
    async with run:
        async for result in run.results():
            results.append(result)
            counts.ends.append(clock() - began)
    results.sort(key=lambda result: result.index)
    return [str(result.output) for result in results], {"kv": asdict(run.shared.dispatcher.scheduler.admission.counts)}


def parts_of(variant: str) -> KvParts:
    """The parts that are on in a variant such as ``ours-order+touch``."""
    name, *changes = re.split(r"(?=[-+])", variant)
    if name not in ("off", "ours", "all") or any(change[1:] not in PARTS for change in changes):
        known = f"loop, loop N, sweep, ttl, parts; off, ours or all, then -PART or +PART of {', '.join(PARTS)}"
        raise SystemExit(f"no variant {variant!r}. There are: {known}")
    parts = KvParts.of({"off": False, "ours": "auto", "all": True}[name])  # type: ignore[arg-type]
    return replace(parts, **{change[1:]: change[0] == "+" for change in changes})


COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:request_success_total",
)


async def counters(session: aiohttp.ClientSession, urls: Sequence[str]) -> dict[str, float]:
    """vLLM's own counters, summed over the servers."""
    found: dict[str, float] = {}
    for url in urls:
        async with session.get(f"{base_url(url)}/metrics") as response:
            told = Exposition(await response.text(), COUNTERS)
        for name in COUNTERS:
            if (value := told.total(name)) is not None:
                found[name.removeprefix("vllm:")] = found.get(name.removeprefix("vllm:"), 0.0) + value
    return found


async def on_server(work: Work, urls: Sequence[str], seed: int, variant: str) -> dict[str, object]:
    """One variant against real servers, all answers checked."""
    described = {"name": READ.name, "description": READ.description, "parameters": READ.parameters}
    tools = [{"type": "function", "function": described}]
    counts = Counts()
    more: dict[str, object] = {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
    ) as session:

        async def ask(agent: int, messages: list[dict[str, object]]) -> tuple[dict[str, object], Usage]:
            body = {"model": "m", "messages": messages, "tools": tools}
            async with session.post(f"{base_url(urls[agent % len(urls)])}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            told = answer["usage"]
            cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            usage = Usage(told["prompt_tokens"], cached, told["completion_tokens"])
            return answer["choices"][0]["message"], usage

        for server in range(len(urls)):
            hello: list[dict[str, object]] = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f'Hi {OPEN}["hi"]{CLOSE}'},
            ]
            await ask(server, hello)
        before = await counters(session, urls)
        began = time.perf_counter()
        if variant.startswith("loop"):
            answers = await loop_of(work, seed, ask, int(variant.split()[1]), counts)
        else:
            backend = urls[0] if len(urls) == 1 else Fleet(list(urls))
            answers, more = await ours(work, seed, backend, parts_of(variant), counts)
        seconds = time.perf_counter() - began
        after = await counters(session, urls)
    if answers != [work.script(agent)[-1] for agent in range(work.agents)]:
        raise SystemExit(f"{variant}: the answers are not those of the rows: {answers[:2]}")
    engine = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {"seconds": round(seconds, 2), **counts.to_dict(), **more, "engine": engine}


class Untold(SimulatedBackend):
    """An engine that does not report the size of its cache."""

    async def load(self, endpoint: str = "") -> Load:
        return replace(await super().load(endpoint), kv_tokens=None)


def simulated(work: Work, variant: str, seed: int = 0) -> dict[str, object]:
    """One variant on simulated engines; the same seed gives the same seconds."""
    random.seed(seed)  # waits between attempts are random
    model = EngineModel(
        prefill_tokens_per_second=9_000,
        step_seconds=0.03,
        sequence_seconds=0.0002,
        kv_tokens=work.kv_tokens,
        offload_tokens=work.offload_tokens,
        context_tokens=16_384,
        policy="priority",
        answer_tokens=40,
        tool_calls_per_agent=work.turns - 1,
        name="m",
    )

    async def play() -> dict[str, object]:
        kind = SimulatedBackend if work.told else Untold
        backends = [kind(model) for _ in range(work.servers)]
        shape = RequestShape(model.name, tools=(READ,))
        counts = Counts()
        more: dict[str, object] = {}

        async def ask(agent: int, messages: list[dict[str, object]]) -> tuple[dict[str, object], Usage]:
            talk = Conversation(tuple(map(_message, messages)))
            request = ModelRequest(shape, talk, str(agent), agent=agent, run="loop")
            if variant == "ttl":
                request = replace(request, priority=agent, pin_seconds=2 * work.tool_seconds)
            reply = await backends[agent % len(backends)].infer(request)
            calls = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
            return {"content": reply.text, "tool_calls": calls}, reply.usage

        loop = asyncio.get_running_loop()
        began = loop.time()
        if variant.startswith("loop") or variant == "ttl":
            at_once = work.agents if variant == "ttl" else int(variant.split()[1])
            await loop_of(work, seed, ask, at_once, counts)
        else:
            backend = backends[0] if len(backends) == 1 else Fleet(backends)
            _, more = await ours(work, seed, backend, parts_of(variant), counts)
        seconds = loop.time() - began
        engine = {
            "preemptions": sum(backend.runner.engine.counters.preemptions for backend in backends),
            "computed": sum(backend.runner.engine.counters.prompt_tokens_computed for backend in backends),
            "requests": sum(backend.runner.engine.counters.finished for backend in backends),
        }
        return {"seconds": round(seconds, 2), **counts.to_dict(), **more, "engine": engine}

    return run_virtual(play())


def _message(message: dict[str, object]) -> Message:
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, list | tuple)
    return Message(
        message["role"],  # type: ignore[arg-type]
        str(message["content"]),
        tool_calls=tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls
        ),
        tool_call_id=str(message.get("tool_call_id") or ""),
    )


def variants_of(work: Work, asked: Sequence[str]) -> list[str]:
    """The variants by their full names, each once."""
    found: dict[str, None] = {}
    for variant in asked:
        if variant == "loop":
            found[f"loop {work.agents}"] = None
        elif variant == "sweep":
            found.update({f"loop {number}": None for number in work.sweep})
        elif variant == "parts":
            parts = parts_of("ours")
            found.update({f"ours{'-' if getattr(parts, name) else '+'}{name}": None for name in PARTS})
        else:
            if variant != "ttl" and not re.fullmatch(r"loop \d+", variant):
                parts_of(variant)
            found[variant] = None
    return list(found)


SIMULATED_VARIANTS = ["loop", "sweep", "ttl", "off", "ours", "ours+pin"]
# What must hold on each engine: the loop's seconds over ours.
REAL_BARS = {
    ("vllm", "many turns"): 1.40,
    ("vllm", "growing"): 1.30,
    ("sglang", "many turns"): 1.55,
    ("sglang", "growing"): 1.33,
}


def bars_of(work: Work, seconds: dict[str, float], engine: str) -> list[report.Bar]:
    """``engine``: ``simulated``, ``vllm`` or ``sglang``."""
    plain, mine = seconds.get(f"loop {work.agents}"), seconds.get("ours")
    if plain is None or mine is None:
        return []
    name = f"{work.name} ({engine})"
    if not work.bars:
        return [report.Bar(f"{name}: wall, ours over the loop", mine / plain, "<=", 1.02)]
    least = REAL_BARS.get((engine, work.name), 1.2)
    bars = [report.Bar(f"{name}: wall, the loop over ours", plain / mine, ">=", least)]
    if swept := [seconds[variant] for number in work.sweep if (variant := f"loop {number}") in seconds]:
        bars.append(report.Bar(f"{name}: wall, the best static number over ours", min(swept) / mine, ">=", 1.05))
    return bars


def medians(lines: Sequence[dict[str, object]]) -> dict[tuple[str, str], dict[str, float]]:
    """The median seconds of each variant, by engine and work."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for line in lines:
        variants = found.setdefault((str(line["engine_name"]), str(line["work"])), {})
        variants.setdefault(str(line["variant"]), []).append(float(str(line["seconds"])))
    return {key: {name: statistics.median(each) for name, each in variants.items()} for key, variants in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv", description="Agents inside a KV cache.")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--url", action="append", help="vllm://host:port or sglang://host:port; once per server")
    parser.add_argument("--work", action="append", choices=[*WORKS])
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="default: loop sweep off ours; simulated more")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions of each variant, one after the other")
    parser.add_argument("--kv-tokens", type=int, help="of the server, for the record, or of the simulated engine")
    parser.add_argument("--hardware", default="", help="what the server runs on, for the record")
    parser.add_argument("--results", default="", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    urls = options.url or ["vllm://127.0.0.1:8000"]
    env = report.environment() | {"accelerator": options.hardware or ("simulated" if options.simulated else "")}
    engine = "simulated" if options.simulated else urls[0].partition("://")[0]
    bars: list[report.Bar] = []
    measurements: list[dict[str, object]] = []
    usual = SIMULATED_VARIANTS if options.simulated else ["loop", "sweep", "off", "ours"]
    for work in (WORKS[name] for name in options.work or WORKS):
        if options.kv_tokens:
            work = replace(work, kv_tokens=options.kv_tokens)
        for variant in variants_of(work, options.variants or usual) * options.repeat:
            seed = int(time.time() * 1_000) % 1_000_000
            if options.simulated:
                measured = simulated(work, variant)
            else:
                measured = asyncio.run(on_server(work, urls[: work.servers], seed, variant))
            line = {"work": work.name, "variant": variant, "engine_name": engine, **measured}
            print(json.dumps(line), flush=True)
            measurements.append(line)
        bars += bars_of(work, medians(measurements)[engine, work.name], engine)
    name = options.results or ("kv-simulated" if options.simulated and not options.work else "")
    return report.finish(name, env, bars, measurements) if name else int(not all(bar.met for bar in bars))


if __name__ == "__main__":
    sys.exit(main())

"""Contexts that do not fit, on a simulated engine with a prefix cache. The clock is virtual: any machine does.

``python -m benchmarks.contexts``.

- A text of 200 pages in parts (``oversized="chunk"``) beside the same requests sent by hand: all at once, and the merge
  when the last is there. With a batch of short rows behind it, too: nobody waits for the long one.
- Agents of 50 turns with and without compaction: the prompt tokens that were sent, and those that the engine computed,
  because its cache did not have them. One agent alone has the cache to itself; eight share one that holds the
  conversations of four.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from batch_agent import BatchAgent, BatchSpec, Tool
from batch_agent.agent.dialogue import Dialogue
from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import ModelRequest
from batch_agent.backends.simulated.backend import SimulatedBackend
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.events import ContextCompacted, Event
from batch_agent.job import Job
from batch_agent.messages import Conversation, Message, Usage
from batch_agent.run.run import Run
from batch_agent.testing.clock import run_virtual
from benchmarks import report

PAGES, WORDS = 200, 500
CONTEXT = 16_384
SHORT_ROWS = 64
WALL_BAR = 1.05
TURNS = 50
RESULT_WORDS = 480  # of what a tool returns, about 600 tokens
LONG_CONTEXT, KV_TOKENS = 49_152, 131_072


@dataclass(frozen=True, slots=True)
class Wall:
    seconds: float
    short: float  # when the last short row was there


def book() -> str:
    page = " ".join(f"word{number % 97}" for number in range(WORDS))
    return "\n\n".join(f"# Page {number}\n\n{page}" for number in range(PAGES))


def rows(short: int) -> list[dict[str, str]]:
    return [{"text": book()}, *({"text": f"A short note, number {number}."} for number in range(short))]


def chunk_spec(backend: SimulatedBackend, short: int) -> BatchSpec:
    return BatchSpec(
        task="Summarise:\n{text}",
        inputs=rows(short),
        system_prompt="You are a careful reader. " * 40,
        backend=backend,
        model_max_context=CONTEXT,
        oversized="chunk",
        max_inflight=32,
    )


def engine() -> SimulatedBackend:
    return SimulatedBackend(EngineModel(context_tokens=CONTEXT, answer_tokens=256, kv_tokens=1_048_576))


async def by_chunks(short: int) -> Wall:
    now = asyncio.get_running_loop().time
    began, last, last_short = now(), 0.0, 0.0
    async for result in BatchAgent.stream(chunk_spec(engine(), short)):
        assert result.ok, result.error
        last = now() - began
        if result.index:
            last_short = last
        else:
            assert result.chunks > 5
    return Wall(last, last_short)


async def by_hand(short: int) -> Wall:
    """The same requests from a loop that somebody wrote for this one text."""
    backend, now = engine(), asyncio.get_running_loop().time
    prepared = prepare(chunk_spec(backend, short))
    plan, shape = prepared.plan, prepared.shapes.first
    long, *others = [plan.job(index, row) for index, row in enumerate(rows(short))]
    slots = asyncio.Semaphore(32)
    ends: list[float] = []
    began = now()

    async def ask(job: Job) -> str:
        async with slots:
            conversation = Conversation((Message("user", job.prompt),), parent=plan.shared)
            return (await backend.infer(ModelRequest(shape, conversation, job.job_id))).text

    async def ask_short(job: Job) -> None:
        await ask(job)
        ends.append(now() - began)

    async def ask_long(parts: Sequence[Awaitable[str]]) -> float:
        answers = await asyncio.gather(*parts)
        [merge] = plan.merging(long, answers)
        await ask(merge)
        return now() - began

    async with backend:
        parts = [asyncio.create_task(ask(part)) for part in long.parts]  # the rows in their order
        seconds, *_ = await asyncio.gather(ask_long(parts), *map(ask_short, others))
    return Wall(max(seconds, *ends, 0.0), max(ends, default=0.0))


@dataclass(frozen=True, slots=True)
class Talk:
    usage: Usage
    computed: int  # prompt tokens, by the engine's own count
    seconds: float
    cuts: int
    longest: int  # prompt, tokens


@Tool.define(effect="write")
async def look(topic: str) -> str:
    """Look something up."""
    return " ".join(f"found{number % 89}" for number in range(RESULT_WORDS))


async def talk(agents: int, **options: Any) -> Talk:
    """Agents that use a tool fifty times, whatever they were told."""
    model = EngineModel(context_tokens=LONG_CONTEXT, kv_tokens=KV_TOKENS, tool_calls_per_agent=10**6)
    backend, now = SimulatedBackend(model), asyncio.get_running_loop().time
    events: list[Event] = []
    longest = 0

    async def worker(row: object, ctx: Dialogue) -> object:
        nonlocal longest
        for _ in range(TURNS):
            reply = await ctx.ask()
            longest = max(longest, reply.usage.prompt_tokens)
            await ctx.call(reply.tool_calls)
        return "done"

    spec = BatchSpec(
        task="Find out all about {input}.",
        inputs=[f"subject {number}" for number in range(agents)],
        system_prompt="You find things out. " * 50,
        tools=[look],
        backend=backend,
        **options,
    )
    began = now()
    async with Run[str](prepare(spec), [events.append], worker=worker) as run:
        results = [result async for result in run.results()]
        assert all(result.ok for result in results), results[0].error
        usage = run.statistics().usage
    cuts = sum(isinstance(event, ContextCompacted) for event in events)
    return Talk(usage, backend.runner.engine.counters.prompt_tokens_computed, now() - began, cuts, longest)


WAYS: dict[str, dict[str, Any]] = {
    "without": {"compaction": "off"},
    "heuristic": {"model_max_context": CONTEXT},
    "by a model": {"model_max_context": CONTEXT, "compaction_model": "simulated"},
}


def main() -> int:
    env = report.environment()
    bars: list[report.Bar] = []
    measurements: list[dict[str, object]] = []
    walls = []
    for short in (0, SHORT_ROWS):
        ours, hand = run_virtual(by_chunks(short)), run_virtual(by_hand(short))
        name = f"{PAGES} pages, {short} short rows"
        walls.append((name, f"{ours.seconds:.2f} / {ours.short:.2f}", f"{hand.seconds:.2f} / {hand.short:.2f}"))
        bars.append(report.Bar(f"{name}: wall by chunks, over by hand", ours.seconds / hand.seconds, "<=", WALL_BAR))
        measurements.append({"case": name, "ours_s": ours.seconds, "by_hand_s": hand.seconds})
    print(report.table(("seconds: last / last short row", "by chunks", "by hand"), walls), "\n")
    talks = []
    for agents in (1, 8):
        measured = {way: run_virtual(talk(agents, **options)) for way, options in WAYS.items()}
        for way, told in measured.items():
            sent, cached = told.usage.prompt_tokens, told.usage.cached_tokens
            name = f"{agents} agents of {TURNS} turns, {way}"
            cells = (told.longest, sent, told.computed, told.cuts)
            talks.append((name, *(f"{number:,}" for number in cells), f"{told.seconds:.1f}"))
            numbers = {"sent": sent, "cached": cached, "computed": told.computed, "longest": told.longest}
            measurements.append({"case": name, **numbers, "cuts": told.cuts, "seconds": told.seconds})
        sent = measured["heuristic"].usage.prompt_tokens / measured["without"].usage.prompt_tokens
        bars.append(report.Bar(f"{agents} agents: prompt tokens sent, with over without", sent, "<=", 0.5))
        if agents > 1:
            computed = measured["heuristic"].computed / measured["without"].computed
            bars.append(report.Bar(f"{agents} agents: prompt tokens computed, with over without", computed, "<=", 0.5))
    print(report.table(("tokens", "longest prompt", "sent", "computed", "cuts", "seconds"), talks), "\n")
    return report.finish("contexts", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())

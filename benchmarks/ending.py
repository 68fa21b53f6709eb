"""How a batch ends: when the last result comes, and what that costs the others. The clock is virtual: any machine does.

``python -m benchmarks.ending``. The same agents, with the same turns and the same times, are run in three ways:

- ``ours``: the engine, which knows how many rows there are
- ``unknown``: the engine without that knowledge (the rows come from a generator), so nearest first to the very end
- ``plain loop``: all agents at once and a semaphore around the model call, first come first served

In ``fixed`` batches all agents take equally many turns, and all times are within 2 % of the mean. In ``drawn`` ones an
agent's turns are geometric and all times log-normal, with the same means; a number is then the mean over several
batches, because one long agent decides when a batch ends.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Capabilities
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse
from batch_agent.testing.clock import run_virtual
from benchmarks import report

BAR = 1.05
SPREAD = 0.8  # of the logarithm of a drawn time: one in ten is more than twice the mean
DRAWN = 8  # batches
JITTER = 0.02  # of a fixed time, either way

Kind = Literal["fixed", "drawn"]


@dataclass(frozen=True, slots=True)
class Batch:
    agents: int
    turns: int
    slots: int
    turn: float  # seconds
    tool: float

    def __str__(self) -> str:
        return f"{self.agents:,} x {self.turns}, {self.slots} slots, {self.turn:g} s, {self.tool:g} s"

    @property
    def bound(self) -> float:
        """No schedule is faster."""
        return self.agents * self.turns * self.turn / self.slots


BATCHES = (
    Batch(100, 2, 32, 0.6, 0.8),
    Batch(128, 7, 32, 0.5, 1.0),
    Batch(300, 5, 32, 0.6, 0.8),
    Batch(1_000, 5, 64, 0.6, 0.8),
    Batch(1_000, 5, 64, 0.6, 5.0),
)


@dataclass(frozen=True, slots=True)
class Agent:
    """The seconds of each turn, and of the tool after each turn but the last."""

    turns: tuple[float, ...]
    tools: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    last: float
    mean: float
    first: float
    alive: float  # the most agents at once that have begun and are not done


def agents_of(batch: Batch, kind: Kind, seed: int) -> list[Agent]:
    chance = random.Random(seed)

    def seconds(mean: float, count: int) -> tuple[float, ...]:
        if kind == "fixed":
            return tuple(mean * chance.uniform(1 - JITTER, 1 + JITTER) for _ in range(count))
        return tuple(mean * math.exp(chance.gauss(-SPREAD * SPREAD / 2, SPREAD)) for _ in range(count))

    def agent() -> Agent:
        turns = batch.turns if kind == "fixed" else 1
        while kind == "drawn" and chance.random() > 1 / batch.turns:
            turns += 1
        return Agent(seconds(batch.turn, turns), seconds(batch.tool, turns - 1))

    return [agent() for _ in range(batch.agents)]


async def ours(agents: list[Agent], slots: int) -> Outcome:
    return await _engine(agents, slots, [str(number) for number in range(len(agents))])


async def unknown(agents: list[Agent], slots: int) -> Outcome:
    return await _engine(agents, slots, (str(number) for number in range(len(agents))))


async def _engine(agents: list[Agent], slots: int, inputs: Iterable[str]) -> Outcome:
    now = asyncio.get_running_loop().time
    alive = peak = 0

    @Tool.define(effect="write")
    async def look(agent: int, turn: int) -> str:
        await asyncio.sleep(agents[agent].tools[turn])
        return "seen"

    def answer(request: Request) -> Say:
        nonlocal alive, peak
        number, turn = int(str(request.messages[-1 - 2 * request.turn]["content"])), request.turn
        if turn == 0:
            alive += 1
            peak = max(peak, alive)
        latency = agents[number].turns[turn]
        if turn < len(agents[number].tools):
            return CallTools(ToolUse("look", {"agent": number, "turn": turn}), latency=latency)
        return Say("done", latency=latency)

    backend = ScriptedBackend(answer, capabilities=Capabilities(streaming=False))
    options = {"max_inflight": slots, "max_turns": None, "backend": backend}
    began, ends = now(), []
    async for result in BatchAgent.stream(task="{input}", inputs=inputs, tools=[look], **options):
        assert result.ok, result.error
        ends.append(now() - began)
        alive -= 1
    return Outcome(ends[-1], statistics.mean(ends), ends[0], peak)


async def plain_loop(agents: list[Agent], slots: int) -> Outcome:
    now = asyncio.get_running_loop().time
    semaphore = asyncio.Semaphore(slots)
    began, ends = now(), []

    async def work(agent: Agent) -> None:
        for turn, seconds in enumerate(agent.turns):
            async with semaphore:
                await asyncio.sleep(seconds)
            if turn < len(agent.tools):
                await asyncio.sleep(agent.tools[turn])
        ends.append(now() - began)

    await asyncio.gather(*map(work, agents))
    return Outcome(ends[-1], statistics.mean(ends), ends[0], len(agents))


WAYS: dict[str, Callable[[list[Agent], int], Awaitable[Outcome]]] = {
    "ours": ours,
    "unknown": unknown,
    "plain loop": plain_loop,
}


async def _outcome(way: str, agents: list[Agent], slots: int) -> Outcome:
    return await WAYS[way](agents, slots)


def measure(batch: Batch, kind: Kind, batches: int) -> dict[str, Outcome]:
    """Each way's mean over the same batches."""
    seeds = range(batches if kind == "drawn" else 1)
    draws = [agents_of(batch, kind, seed) for seed in seeds]
    outcomes = {way: [run_virtual(_outcome(way, agents, batch.slots)) for agents in draws] for way in WAYS}
    return {
        way: Outcome(
            last=statistics.mean(outcome.last for outcome in measured),
            mean=statistics.mean(outcome.mean for outcome in measured),
            first=statistics.mean(outcome.first for outcome in measured),
            alive=statistics.mean(outcome.alive for outcome in measured),
        )
        for way, measured in outcomes.items()
    }


def bars_of(name: str, outcomes: dict[str, Outcome]) -> list[report.Bar]:
    mine, nearest, plain = outcomes["ours"], outcomes["unknown"], outcomes["plain loop"]
    return [
        report.Bar(
            f"{name}: last, over the better of the others", mine.last / min(nearest.last, plain.last), "<=", BAR
        ),
        report.Bar(f"{name}: mean, over nearest first", mine.mean / nearest.mean, "<=", BAR),
        report.Bar(f"{name}: first, over nearest first", mine.first / nearest.first, "<=", BAR),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ending", description="How a batch ends.")
    parser.add_argument("--batches", type=int, default=DRAWN, help="how many are drawn for each row that draws")
    batches = parser.parse_args().batches
    env = report.environment()
    rows, bars, measurements = [], [], []
    kinds: tuple[Kind, ...] = ("fixed", "drawn")
    for kind in kinds:
        for batch in BATCHES:
            outcomes = measure(batch, kind, batches)
            rows.append((f"{kind}: {batch}", *map(_cell, outcomes.values()), f"{batch.bound:.1f}"))
            bars += bars_of(f"{kind}: {batch}", outcomes)
            for way, outcome in outcomes.items():
                numbers = {"last_s": outcome.last, "mean_s": outcome.mean, "first_s": outcome.first}
                measurements.append({"batch": f"{kind}: {batch}", "way": way, "alive": outcome.alive, **numbers})
    header = ("seconds: last / mean / first (most alive)", *WAYS, "slots' bound")
    print(report.table(header, rows), "\n")
    return report.finish("ending", env, bars, measurements)


def _cell(outcome: Outcome) -> str:
    return f"{outcome.last:.1f} / {outcome.mean:.1f} / {outcome.first:.1f} ({outcome.alive:.0f})"


if __name__ == "__main__":
    sys.exit(main())

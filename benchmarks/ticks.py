"""A tick of many agents against a tick of one, and a deadline that the model cannot meet.

    python -m benchmarks.ticks [--simulated]

together        one tick of AgentRuntime for all agents
one by one      the same agents, each asked when the one before has answered
four threads    the same agents on a pool of four threads that wait for their answers, as AgentArena has it

On the embedded engine (4 and 16 agents, real weights, real time) and on the simulated one (4, 100 and 1,000, whose
clock is virtual: there a pool of four is four requests at a time). What is asked of the model is the same in each case.
Loading the model is not counted. Each number is the median of several ticks; the contenders take turns. One agent's
tick is the mean of those that are taken one by one: answers differ in length, and a tick takes as long as its longest.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Literal

from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.testing.clock import run_virtual
from batch_agent.ticks import Action, Agent, AgentRuntime, TextBackend, WindowMemory
from benchmarks import report

CLAIM = 1.5  # times one agent's tick, for four agents
EMBEDDED, SIMULATED = (4, 16), (4, 100, 1_000)
ROUNDS, DEADLINE_TICKS = 3, 30
SLACK = 1.1  # of a deadline: what the operating system may take to wake a process
SYSTEM = "You look for berries on a grid. " + "A berry in the north is picked by walking north. " * 12


def walk(direction: Literal["north", "south", "east", "west"]) -> None:
    """Go one step."""


class Alone(Agent):
    """Asks by itself, and waits for the answer, as agents of a pool of threads do."""

    def ask(self, backend: TextBackend) -> Action | None:
        said = backend.generate_with_tools(f"{SYSTEM}\n\n{self._build_context()}", [walk], temperature=0.0)
        return self._parse_action(said.text)


def names(count: int) -> list[str]:
    return [f"agent-{number}" for number in range(count)]


def seen(count: int, tick: int) -> dict[str, object]:
    ways = ("north", "south", "east", "west")
    return {name: {"tick": tick, "berry": ways[(tick + number) % 4]} for number, name in enumerate(names(count))}


def agent(name: str) -> Alone:
    return Alone(name, tools=[walk], memory=WindowMemory(observations=1, actions=0), system_prompt=SYSTEM)


def runtime_of(backend: object, count: int, deadline: float | None = None) -> AgentRuntime:
    runtime = AgentRuntime(backend=backend, deadline=deadline, max_tokens=48, temperature=0.0)
    for name in names(count):
        runtime.register_agent(agent(name))
    return runtime


async def timed(work: Awaitable[object]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work
    return loop.time() - began


async def together(runtime: AgentRuntime, count: int, tick: int) -> None:
    actions = await runtime.process_tick(tick, seen(count, tick))
    assert all(action.source == "answer" for action in actions.values()), actions


async def few_at_a_time(runtime: AgentRuntime, count: int, tick: int, most: int) -> None:
    """Ticks of one agent each, ``most`` of them under way at once."""
    gate = asyncio.Semaphore(most)

    async def one(name: str, observation: object) -> None:
        async with gate:
            actions = await runtime.process_tick(tick, {name: observation})
            assert actions[name].source == "answer"

    await asyncio.gather(*(one(name, observation) for name, observation in seen(count, tick).items()))


async def on_threads(runtime: AgentRuntime, count: int, tick: int, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    asked = []
    for name, observation in seen(count, tick).items():
        one = runtime.get_agent(name)
        assert isinstance(one, Alone) and isinstance(one.lent_backend, TextBackend)
        one.perceive(observation)
        asked.append(loop.run_in_executor(pool, one.ask, one.lent_backend))
    assert all(action is not None and action.source == "answer" for action in await asyncio.gather(*asked))


async def measure(backend: Callable[[], object], count: int, *, threads: bool) -> dict[str, float]:
    """Seconds of each kind of tick, the median of some."""
    seconds: dict[str, list[float]] = {"together": [], "one by one": [], "four threads": []}
    cpu: list[float] = []
    with ThreadPoolExecutor(4) as pool:
        async with runtime_of(backend(), count) as runtime:
            await together(runtime, count, 0)
            for tick in range(1, 4 * ROUNDS, 4):
                began = time.process_time()
                seconds["together"].append(await timed(together(runtime, count, tick + 1)))
                cpu.append(time.process_time() - began)
                seconds["one by one"].append(await timed(few_at_a_time(runtime, count, tick + 2, 1)))
                pooled = (
                    on_threads(runtime, count, tick + 3, pool)
                    if threads
                    else few_at_a_time(runtime, count, tick + 3, 4)
                )
                seconds["four threads"].append(await timed(pooled))
    medians = {name: median(values) for name, values in seconds.items()}
    one = medians["one by one"] / count
    return {"agents": count, "one agent": one, **medians, "cpu_ms_per_agent": median(cpu) / count * 1000}


async def with_deadline(backend: object, count: int, latency: float) -> dict[str, float]:
    """Ticks whose deadline is half of what one agent's answer takes."""
    deadline = latency / 2
    on_time = complete = 0
    sources = dict.fromkeys(("answer", "late", "last", "fallback"), 0)
    async with runtime_of(backend, count, deadline) as runtime:
        for tick in range(1, DEADLINE_TICKS + 1):
            began = asyncio.get_running_loop().time()
            actions = await runtime.process_tick(tick, seen(count, tick))
            on_time += asyncio.get_running_loop().time() - began <= deadline * SLACK
            complete += len(actions) == count
            for action in actions.values():
                sources[action.source] += 1
    shares = {"on_time": on_time / DEADLINE_TICKS, "complete": complete / DEADLINE_TICKS}
    return {"agents": count, "deadline_s": deadline, **shares, **sources}


def simulated() -> SimulatedBackend:
    return SimulatedBackend(EngineModel(max_num_seqs=1_024))


def main() -> int:
    env = report.environment()
    rows, bars = [], []
    measurements: dict[str, list[dict[str, object]]] = {"ticks": [], "deadlines": []}

    def take(engine: str, one: dict[str, float], late: dict[str, float]) -> None:
        count, base = int(one["agents"]), one["one agent"]
        ratios = [one[name] / base for name in ("together", "one by one", "four threads")]
        rows.append(
            (
                f"{engine}, {count:,} agents",
                f"{base:.3f}",
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{one['cpu_ms_per_agent']:.2f}",
            )
        )
        if count == 4:
            bars.append(report.Bar(f"{engine}: a tick of 4 agents over one of 1", ratios[0], "<=", CLAIM))
        kept = min(late["on_time"], late["complete"])
        bars.append(report.Bar(f"{engine}, {count:,} agents: ticks on time and complete", kept, ">=", 1.0))
        measurements["ticks"].append({"engine": engine, **one})
        measurements["deadlines"].append({"engine": engine, **late})

    for count in SIMULATED:
        one = run_virtual(measure(simulated, count, threads=False))
        take("simulated", one, run_virtual(with_deadline(simulated(), count, one["one agent"])))
    if "--simulated" not in sys.argv[1:]:
        for count in EMBEDDED:
            one = asyncio.run(measure(lambda: "local://", count, threads=True))
            take("embedded", one, asyncio.run(with_deadline("local://", count, one["one agent"])))
    head = ("a tick", "one agent, s", "together", "one by one", "four threads", "CPU ms per agent")
    print(report.table(head, rows), "\n(multiples of one agent's tick)\n")
    return report.finish("ticks", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())

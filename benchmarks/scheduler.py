"""What a turn costs in the scheduler alone: no HTTP, no conversation, no tools.

``python -m benchmarks.scheduler``. Each agent takes two turns, and between them waits for a tool that takes as long as
a few hundred grants. Two ways to drive it:

- ``decisions``: as the engine drives it: an agent starts when there is room
- ``crowd``: every agent is ready from the start, the longest queue that a run can have

Then a turn with the bookkeeping of an engine's KV cache, by the number of live agents, all of which wait for tools
except 64 in flight: ``ample``, where all contexts fit by far, and ``tight``, where they do not fit. No agent is held
back, so that as many stay live.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

from batch_agent.messages import Usage
from batch_agent.scheduler.core import Scheduler, Slot
from batch_agent.scheduler.engine_load import Load
from batch_agent.scheduler.ordering import AgentForecast, KvParts
from batch_agent.scheduler.server_events import Reading
from benchmarks import report

INFLIGHT = 64
TURNS = 2
TOOL_GRANTS = 256  # how many other turns begin while an agent waits for its tool
AGENTS = (1_000, 10_000, 100_000)
TURN_BAR, FLAT_BAR = 40e-6, 1.2


def decisions(agents: int) -> None:
    scheduler = Scheduler(INFLIGHT)
    running: deque[Slot] = deque()  # requests on their way
    in_tool: deque[AgentForecast] = deque()
    to_start, ended, now = agents, 0, 0.0
    while ended < agents:
        while len(in_tool) > TOOL_GRANTS or (in_tool and not to_start):
            progress = in_tool.popleft()
            scheduler.request(progress, progress.turns + 1, now)
        while to_start and scheduler.has_room():
            to_start -= 1
            scheduler.forecast.rows = to_start
            scheduler.start_agent()
            scheduler.request(AgentForecast(), 0, now)
            _grant_all(scheduler, running)
        _grant_all(scheduler, running)
        now += 1 / INFLIGHT
        ended += _finish_turn(scheduler, running.popleft(), now, in_tool)


def crowd(agents: int) -> None:
    scheduler = Scheduler(INFLIGHT)
    scheduler.forecast.rows = 0
    running: deque[Slot] = deque()
    in_tool: deque[AgentForecast] = deque()
    now = 0.0
    for _ in range(agents):
        scheduler.start_agent()
        scheduler.request(AgentForecast(), 0, now)
    _grant_all(scheduler, running)
    while running:
        now += 1 / INFLIGHT
        if not _finish_turn(scheduler, running.popleft(), now, in_tool):
            scheduler.request(in_tool.pop(), 1, now)
        _grant_all(scheduler, running)


def _finish_turn(scheduler: Scheduler, slot: Slot, now: float, in_tool: deque[AgentForecast]) -> bool:
    """Whether its agent is done."""
    progress = slot.ticket.progress
    scheduler.give_back(slot)
    scheduler.forecast.answered(progress, 1.0, now)
    if progress.turns + 1 < TURNS:
        in_tool.append(progress)
        return False
    scheduler.end_agent(progress, TURNS)
    return True


def _grant_all(scheduler: Scheduler, running: deque[Slot]) -> None:
    while (slot := scheduler.grant()) is not None:
        running.append(slot)


def live(agents: int, *, tight: bool) -> float:
    """Return the seconds of CPU per turn with this many live agents."""
    scheduler = Scheduler(INFLIGHT)
    scheduler.use(KvParts())
    scheduler.admission.has_room = scheduler.admission._takes = lambda *_: True  # type: ignore[method-assign]
    endpoint = scheduler.endpoints[0]
    scheduler.admission.enabled = True
    endpoint.server.on(Reading(Load(kv_tokens=agents * (500 if tight else 100_000))), 0.0)
    scheduler.admission.read(endpoint)
    waiting: deque[tuple[AgentForecast, int]] = deque()
    running: deque[Slot] = deque()
    turns, now, spent, counted = max(2 * agents, 4_000), 0.0, 0.0, 0
    for _ in range(agents):
        scheduler.start_agent()
        progress = AgentForecast()
        progress.live = True
        waiting.append((progress, 0))
    for turn in range(agents + turns):
        if turn == agents:
            gc.collect()
            spent, counted = time.process_time(), turns
        now += 0.01
        progress, taken = waiting.popleft()
        progress.expected = 1_000 + 50 * taken
        scheduler.request(progress, taken, now)
        _grant_all_at(scheduler, running, now)
        if len(running) >= INFLIGHT:
            slot = running.popleft()
            progress = slot.ticket.progress
            before = 1_000 + 50 * (progress.turns - 1) if progress.turns else 0
            usage = Usage(1_000 + 50 * progress.turns, before, 50)
            scheduler.answered(slot, 0.6, usage, now)
            scheduler.give_back(slot)
            waiting.append((progress, progress.turns + 1))
    return (time.process_time() - spent) / counted


def _grant_all_at(scheduler: Scheduler, running: deque[Slot], now: float) -> None:
    while (slot := scheduler.grant(now)) is not None:
        running.append(slot)


LIVE, TIGHT = (128, 10_000), (100, 400, 1_600)
LIVE_BAR = 1.15
WAYS: dict[str, Callable[[int], None]] = {"decisions": decisions, "crowd": crowd}


def seconds_per_turn(way: Callable[[int], None], agents: int) -> float:
    """Of CPU time. Small batches are repeated, so that each measurement covers about as many turns."""
    rounds = max(1, 20_000 // agents)
    gc.collect()
    start = time.process_time()
    for _ in range(rounds):
        way(agents)
    return (time.process_time() - start) / (rounds * agents * TURNS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description="The scheduler alone.")
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    env = report.environment()
    costs: dict[tuple[str, int], list[float]] = {(way, agents): [] for way in WAYS for agents in AGENTS}
    for _ in range(repetitions):
        for way, agents in costs:
            costs[way, agents].append(seconds_per_turn(WAYS[way], agents))
    cost = {key: statistics.median(values) for key, values in costs.items()}

    rows = [
        (
            way,
            *(f"{cost[way, agents] * 1e6:.1f}" for agents in AGENTS),
            f"{cost[way, AGENTS[-1]] / cost[way, AGENTS[0]]:.2f}",
        )
        for way in WAYS
    ]
    print(report.table(("µs CPU per turn", *(f"{agents:,} agents" for agents in AGENTS), "last/first"), rows), "\n")

    bars = [
        report.Bar(f"{way}: the dearest µs per turn", max(cost[way, a] for a in AGENTS) * 1e6, "<=", TURN_BAR * 1e6)
        for way in WAYS
    ]
    flat = cost["decisions", AGENTS[-1]] / cost["decisions", AGENTS[0]]
    bars.append(report.Bar("decisions: 100,000 agents over 1,000", flat, "<=", FLAT_BAR))
    held = {("ample", n): [live(n, tight=False) for _ in range(repetitions)] for n in LIVE}
    held |= {("tight", n): [live(n, tight=True) for _ in range(repetitions)] for n in TIGHT}
    named = {key: statistics.median(values) for key, values in held.items()}
    rows = [(f"{way}, {n:,} live agents", f"{seconds * 1e6:.1f}") for (way, n), seconds in named.items()]
    print(report.table(("µs CPU per turn, with the KV cache", ""), rows), "\n")
    few, many = LIVE
    bars.append(
        report.Bar(
            f"ample: {many:,} live agents over {few}", named["ample", many] / named["ample", few], "<=", LIVE_BAR
        )
    )
    measurements = [
        {"way": way, "live agents": n, "cpu_per_turn_s": report.spread(values)} for (way, n), values in held.items()
    ] + [
        {"way": way, "agents": agents, "cpu_per_turn_s": report.spread(values)}
        for (way, agents), values in costs.items()
    ]
    return report.finish("scheduler", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())

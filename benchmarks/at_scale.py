"""A thousand endpoints and a million agents, simulated: what the scheduler and the dispatcher make of them.

``python -m benchmarks.at_scale``. Nothing here is a measurement of a cluster. The servers are simulated in this process
and time is virtual; the scheduler and the dispatcher are the real ones. Each agent takes three turns with a tool of one
second between them. Every server fails now and then: it refuses connections, hangs, or answers 500.

- ``throughput``: the time that the work would take with every slot of every healthy server busy, over the time it took
- ``decisions``: slots granted per second of CPU, by the scheduler alone, at 1,000 endpoints, ten and one
- ``memory``: bytes per live agent in the scheduler and the dispatcher; its conversation is not part of it
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Literal

from batch_agent.backends.base import Probe
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy, Question
from batch_agent.errors import BackendError, Unavailable
from batch_agent.messages import Reply, Usage
from batch_agent.scheduler.core import Scheduler, Slot, Ticket
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms
from batch_agent.testing.clock import run_virtual
from benchmarks import report

TURNS, TURN_SECONDS, TOOL_SECONDS = 3, 4.0, 1.0
UP_SECONDS, DOWN_SECONDS = 900.0, 60.0  # of a server, on average
REQUEST_TIMEOUT = 30.0
THROUGHPUT_BAR, RATIO_BAR, MEMORY_BAR = 0.9, 1.5, 16_384
FEW = 10  # endpoints that the thousand are compared with

Fault = Literal["refuses", "hangs", "fails"]
FAULTS: tuple[Fault, ...] = ("refuses", "hangs", "fails")


@dataclass(frozen=True, slots=True)
class Outage:
    begins: float
    ends: float
    fault: Fault


def outages(seed: str) -> Iterator[Outage]:
    """The outages of one server, for ever."""
    chance = random.Random(seed)
    now = 0.0
    while True:
        begins = now + chance.expovariate(1 / UP_SECONDS)
        now = begins + chance.expovariate(1 / DOWN_SECONDS)
        yield Outage(begins, now, chance.choice(FAULTS))


class SimulatedServer:
    """Answers at once what it has slots for, unless it is down."""

    __slots__ = ("_coming", "_outage")

    def __init__(self, name: str) -> None:
        self._coming = outages(name)
        self._outage = next(self._coming)

    def outage(self, now: float) -> Outage:
        """The outage of now, or the next one."""
        while self._outage.ends <= now:
            self._outage = next(self._coming)
        return self._outage

    async def work(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        outage = self.outage(loop.time())
        left = outage.begins - loop.time()
        if seconds <= left:
            await asyncio.sleep(seconds)
            return
        if left > 0:
            await asyncio.sleep(left)
        if outage.fault == "hangs":
            await loop.create_future()
        await asyncio.sleep(0.01)
        if outage.fault == "refuses":
            raise Unavailable("connection refused", unreached=left <= 0)
        raise Unavailable("the server failed", status=500)


class World:
    """All servers, and what is counted."""

    name = "simulated"

    def __init__(self, endpoints: int) -> None:
        self.servers = {f"simulated-{number}": SimulatedServer(f"simulated-{number}") for number in range(endpoints)}
        self.answers = self.failures = self.agents_failed = self.most_live = 0
        self.work_seconds = 0.0

    async def probe(self, endpoint: str = "") -> Probe:
        outage = self.servers[endpoint].outage(now := asyncio.get_running_loop().time())
        if outage.begins > now or outage.fault == "fails":
            return Probe("up")
        if outage.fault == "hangs":
            await asyncio.get_running_loop().create_future()
        return Probe("down", "connection refused")


class Turn(Question):
    __slots__ = ("_seconds", "_world")

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds = world, seconds

    async def send(self, endpoint: str) -> Reply:
        try:
            await self._world.servers[endpoint].work(self._seconds)
        except BackendError:
            self._world.failures += 1
            raise
        self._world.answers += 1
        return Reply("done", usage=Usage(100, 0, 10))


async def live(world: World, dispatcher: Dispatcher, number: int, ticket: Ticket, policy: Policy) -> None:
    """One agent from its first turn to its end."""
    chance = random.Random(number)
    progress = ticket.progress
    claim: Ticket | None = ticket
    turns = 0
    try:
        while True:
            seconds = TURN_SECONDS * chance.uniform(0.5, 1.5)
            world.work_seconds += seconds
            claim = claim or dispatcher.slots.claim(progress, turns)
            await dispatcher.ask(Turn(world, seconds), policy, ticket=claim)
            claim, turns = None, turns + 1
            if turns == TURNS:
                break
            await asyncio.sleep(TOOL_SECONDS)
    except BackendError:
        world.agents_failed += 1
    finally:
        dispatcher.end_agent(progress, turns)


@dataclass(frozen=True, slots=True)
class Played:
    endpoints: int
    slots: int
    agents: int
    virtual_s: float
    ideal_s: float
    throughput_over_ideal: float
    answers: int
    failed_attempts: int
    agents_failed: int
    most_live: int
    bytes_per_live_agent: float
    turns_per_cpu_s: float


async def play(endpoints: int, agents: int, slots: int) -> Played:
    """Play all agents; ``slots`` are those of each endpoint."""
    world = World(endpoints)
    servers = {name: ServerState(name, default_inflight=slots) for name in world.servers}
    dispatcher = Dispatcher(world, servers=servers, terms=Terms(), max_outage=inf)
    policy = Policy(timeout=REQUEST_TIMEOUT)
    gc.collect()
    before, most, cpu = resident_bytes(), 0, time.process_time()
    feed = dispatcher.feed(lambda: None)
    async with asyncio.TaskGroup() as group:
        for number in range(agents):
            feed.expect(agents - number)
            await feed.wait_room()
            ticket = dispatcher.start_agent(AgentForecast())
            group.create_task(live(world, dispatcher, number, ticket, policy))
            world.most_live = max(world.most_live, dispatcher.scheduler.agents)
            if number % 1000 == 0:
                most = max(most, resident_bytes())
        feed.end()
    cpu, took = time.process_time() - cpu, asyncio.get_running_loop().time()
    feed.close()
    dispatcher.close()
    ideal = ideal_seconds(world, slots)
    return Played(
        endpoints=endpoints,
        slots=slots,
        agents=agents,
        virtual_s=took,
        ideal_s=ideal,
        throughput_over_ideal=ideal / took,
        answers=world.answers,
        failed_attempts=world.failures,
        agents_failed=world.agents_failed,
        most_live=world.most_live,
        bytes_per_live_agent=max(0, most - before) / max(1, world.most_live),
        turns_per_cpu_s=world.answers / cpu,
    )


def ideal_seconds(world: World, slots: int) -> float:
    """When the work would be done if every slot of every healthy server was busy all the time."""
    changes: list[tuple[float, int, Iterator[Outage], Outage]] = []
    for number, name in enumerate(world.servers):
        coming = outages(name)
        outage = next(coming)
        heappush(changes, (outage.begins, number, coming, outage))
    healthy, now, left = len(world.servers), 0.0, world.work_seconds
    while True:
        at, number, coming, outage = heappop(changes)
        done = (at - now) * healthy * slots
        if done >= left:
            return now + left / (healthy * slots)
        left, now = left - done, at
        if at == outage.begins:
            healthy -= 1
            heappush(changes, (outage.ends, number, coming, outage))
        else:
            healthy += 1
            outage = next(coming)
            heappush(changes, (outage.begins, number, coming, outage))


def decisions_per_cpu_second(endpoints: int, slots: int, turns: int) -> float:
    """Slots that the scheduler alone grants in a second of CPU: no event loop, no dispatcher."""
    scheduler = Scheduler(endpoints=[Endpoint(ServerState(str(n)), Terms(slots)) for n in range(endpoints)])
    running: deque[Slot] = deque()
    resting: deque[AgentForecast] = deque()
    usage = Usage(100, 0, 10)
    granted, now = 0, 0.0
    gc.collect()
    began = time.process_time()
    while granted < turns:
        while scheduler.has_room(now):
            scheduler.start_agent()
            scheduler.request(AgentForecast(), 0, now)
            while (slot := scheduler.grant(now)) is not None:
                running.append(slot)
                granted += 1
        now += TURN_SECONDS / (endpoints * slots)
        done = running.popleft()
        progress = done.ticket.progress
        scheduler.answered(done, now - done.sent_at, usage, now)
        done.endpoint.server.learn(now - done.sent_at, now)
        scheduler.give_back(done)
        if progress.turns + 1 == TURNS:
            scheduler.end_agent(progress, TURNS)
        else:
            resting.append(progress)
        if len(resting) > endpoints * slots // 4:
            progress = resting.popleft()
            scheduler.request(progress, progress.turns + 1, now)
        while (slot := scheduler.grant(now)) is not None:
            running.append(slot)
            granted += 1
    return granted / (time.process_time() - began)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.at_scale", description="A large fleet, simulated.")
    parser.add_argument("--endpoints", type=int, default=1_000)
    parser.add_argument("--agents", type=int, default=1_000_000)
    parser.add_argument("--slots", type=int, default=16, help="of each endpoint")
    options = parser.parse_args()
    env = report.environment()
    turns = min(200_000, options.agents)
    total = options.slots * options.endpoints
    decisions = {
        number: decisions_per_cpu_second(number, total // number, turns) for number in (1, FEW, options.endpoints)
    }
    played = run_virtual(play(options.endpoints, options.agents, options.slots))
    print("SIMULATED: servers and time; the scheduler and the dispatcher are real")
    print(report.table(("", "simulated"), [(name, f"{value:,.2f}") for name, value in asdict(played).items()]))
    for number, rate in decisions.items():
        print(f"scheduler alone, {number:,} endpoints: {rate:,.0f} decisions per second of CPU")
    ratio = decisions[FEW] / decisions[options.endpoints]
    bars = [
        report.Bar("simulated: throughput over the ideal", played.throughput_over_ideal, ">=", THROUGHPUT_BAR),
        report.Bar("simulated: agents failed", played.agents_failed, "<=", 0),
        report.Bar(f"CPU per decision, {options.endpoints:,} endpoints over {FEW}", ratio, "<=", RATIO_BAR),
        report.Bar("bytes per live agent, conversation aside", played.bytes_per_live_agent, "<=", MEMORY_BAR),
    ]
    measured = {
        "simulated": asdict(played),
        "scheduler_decisions_per_cpu_s": {f"{number} endpoints": rate for number, rate in decisions.items()},
    }
    return report.finish(Path(__file__).stem, env, bars, measured)


if __name__ == "__main__":
    sys.exit(main())

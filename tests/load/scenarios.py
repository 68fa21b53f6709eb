"""One whole run per scenario and seed, and what it cost: wall time over the ideal, requests over needed, shares."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.load.servers import (
    ENGINE,
    TRAVEL,
    Balancer,
    Client,
    Engine,
    Limits,
    PerMinute,
    PlainServer,
)

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Backend
from batch_agent.backends.simulated import SimulatedBackend
from batch_agent.testing import run_virtual

ALLOWED_WALL, ALLOWED_REQUESTS = 1.3, 1.1
RETRY = 0.25  # seconds until a refused row is sent again, on average


@dataclass(frozen=True)
class Outcome:
    """``wall``: over the ideal. ``requests``: over needed. The other numbers have bars of their own."""

    scenario: str
    wall: float
    requests: float
    most_wall: float = ALLOWED_WALL
    most_requests: float = ALLOWED_REQUESTS
    notes: dict[str, object] = field(default_factory=dict)
    broken: tuple[str, ...] = ()  # promises that did not hold

    @property
    def problems(self) -> list[str]:
        found = list(self.broken)
        if self.wall > self.most_wall:
            found.append(f"wall time {self.wall:.2f} of the ideal, {self.most_wall} allowed")
        if self.requests > self.most_requests:
            found.append(f"requests {self.requests:.2f} of those needed, {self.most_requests} allowed")
        return found

    def __str__(self) -> str:
        notes = "".join(f", {name} {value}" for name, value in self.notes.items())
        return f"{self.scenario}: wall {self.wall:.2f}, requests {self.requests:.2f}{notes}"


async def finish(backend: Backend, rows: int, **options: Any) -> float:
    """Run the rows and return the seconds."""
    began = asyncio.get_running_loop().time()
    failed = []
    async for result in BatchAgent.stream(
        task="{input}", inputs=list(map(str, range(rows))), backend=backend, **options
    ):
        if not result.ok:
            failed.append(result)
    assert not failed, f"{len(failed)} rows failed: {failed[0].error}"
    return asyncio.get_running_loop().time() - began


def random_refusals(seed: int) -> Outcome:
    """A provider that refuses some requests by chance, at any load."""
    chance = random.Random(seed)
    share = chance.choice([0.01, 0.02, 0.05])
    seconds = chance.uniform(0.3, 3.0)
    retry_after = chance.choice([None, None, 1.0])
    rows = 2_000

    def run(refused: float) -> tuple[PlainServer, float]:
        server = PlainServer(Limits(lambda now: 10_000, seconds, refused=refused, retry_after=retry_after), seed)
        return server, run_virtual(finish(server, rows, max_retries=10))

    server, took = run(share)
    _, ideal = run(0.0)
    # The last row may be one that is refused several times, and waits each time.
    ideal += max(server.refused_rows.values()) * ((retry_after or 0.0) + RETRY) + seconds
    notes = {"refused": share, "answer seconds": round(seconds, 2), "retry_after": retry_after}
    return Outcome("random refusals", took / ideal, server.sent / (rows / (1 - share)), notes=notes)


def full_server(seed: int) -> Outcome:
    """A server that refuses what is beyond its slots."""
    chance = random.Random(seed)
    slots, seconds = chance.choice([8, 16, 50, 128]), chance.uniform(0.3, 3.0)
    rows = max(1_500, 40 * slots)
    spread = chance.choice([0.0, 0.3])  # if all answers take the same time, refused rows come back together
    server = PlainServer(Limits(lambda now: slots, seconds, spread=spread), seed)
    took = run_virtual(finish(server, rows))
    notes = {"slots": slots, "answer seconds": round(seconds, 2), "spread": spread}
    return Outcome("full server", took / (server.work / slots), server.sent / rows, notes=notes)


def growing_server(seed: int) -> Outcome:
    """A server whose slots grow from 16 to 128."""
    chance = random.Random(seed)
    seconds, at = chance.uniform(0.5, 4.0), 60.0
    retry_after = chance.choice([None, 1.0, 5.0, 10.0])
    server = PlainServer(Limits(lambda now: 16 if now < at else 128, seconds, retry_after=retry_after), seed)
    rows = int((at * 16 + 150 * 128) / seconds)
    took = run_virtual(finish(server, rows))
    window = max(3.0, 2 * seconds)
    enough = 0.9 * 128 / seconds * window
    found = next(
        (
            second
            for second in range(400)
            if sum(at + second <= each < at + second + window for each in server.answers) >= enough
        ),
        400,
    )
    ideal = at + (server.work - at * 16) / 128
    broken = () if found <= 60 else (f"128 slots were used {found} s after they were there",)
    return Outcome(
        "growing server", took / ideal, server.sent / rows, broken=broken,
        notes={"answer seconds": round(seconds, 2), "retry_after": retry_after, "found after": found},
    )  # fmt: skip


def minute_limit(seed: int, *, counts_refused: bool = False) -> Outcome:
    """A provider that takes a number of requests per minute, and says nothing, or little, about it.
    ``counts_refused``: requests that it refuses count too."""
    chance = random.Random(seed)
    limit = PerMinute(
        chance.choice([60, 120, 300, 600]),
        chance.choice(["minutes", "any minute", "bucket"]),
        chance.choice(["nothing", "nothing", "nothing", "Retry-After", "remaining", "limit"]),
        chance.uniform(5.0, 60.0),
        counts_refused,
    )
    seconds, rows = chance.uniform(0.3, 5.0), int(limit.number * chance.uniform(3.0, 8.0))
    notes = {"per minute": limit.number, "kind": limit.kind, "tells": limit.tells, "answer seconds": round(seconds, 2),
             "rows": rows}  # fmt: skip
    began, last = limit.ideal(rows)
    server = PlainServer(Limits(lambda now: 10_000, seconds, per_minute=limit), seed)
    took = run_virtual(finish(server, rows))
    ideal = began + seconds * (2 + last / 128)
    # What is left: the requests that find out, some 40 in a run. A bucket takes one again after a moment, so no number
    # per minute shows.
    most = 1.05 if limit.tells == "remaining" else 1.3 if limit.kind == "bucket" else 1.1 + 12 / limit.number
    name = "all count per minute" if counts_refused else "minute limit"
    return Outcome(name, took / ideal, server.sent / rows, most_requests=most, notes=notes)


def all_count_per_minute(seed: int) -> Outcome:
    """A number of requests per minute that refused ones count towards: sending too early makes it last longer."""
    return minute_limit(seed, counts_refused=True)


def two_clients(seed: int) -> Outcome:
    """Two processes that share nothing, at a server that refuses what is beyond its slots."""
    chance = random.Random(seed)
    slots, seconds = chance.choice([8, 16, 50, 128]), chance.uniform(0.3, 2.0)
    retry_after = chance.choice([None, 1.0])
    late = chance.choice([0.0, 10.0, 30.0])
    server = PlainServer(Limits(lambda now: slots, seconds, retry_after=retry_after), seed)
    clients = [Client(server), Client(server)]
    until = late + 180.0
    rows = int(2 * until * slots / seconds)

    async def one(client: Client, delay: float) -> None:
        await asyncio.sleep(delay)
        async for _ in BatchAgent.stream(task="{input}", inputs=map(str, range(rows)), backend=client):
            if asyncio.get_running_loop().time() > until:
                break

    async def both() -> None:
        await asyncio.gather(one(clients[0], 0.0), one(clients[1], late))

    run_virtual(both())
    began = late + 60.0
    counts = [sum(began <= at < until for at in client.answers) for client in clients]
    used = sum(counts) * seconds / slots / (until - began)
    share = min(counts) / max(counts)
    # Refusals hit clients by chance, and few of them are seen in two minutes: N of them fix a share to 1/sqrt(N).
    broken = () if share >= 0.4 else (f"after a minute the clients share {counts[0]} : {counts[1]}",)
    notes = {"slots": slots, "seconds": round(seconds, 2), "retry_after": retry_after, "late": late,
             "smaller over larger": round(share, 2)}  # fmt: skip
    return Outcome(
        "two clients", 1 / used, server.sent / len(server.answers), most_requests=1.2, notes=notes, broken=broken
    )


def long_answers(seed: int) -> Outcome:
    """Answers of two minutes and more, at a server that queues and has no metrics."""
    chance = random.Random(seed)
    slots, seconds = chance.choice([16, 32, 64]), chance.uniform(120.0, 200.0)
    server = PlainServer(Limits(lambda now: slots, seconds, queues=True, spread=chance.choice([0.0, 0.1, 0.3])), seed)
    rows = 640
    took = run_virtual(finish(server, rows))
    notes = {"slots": slots, "answer seconds": round(seconds), "spread": server.limits.spread,
             "given up": server.given_up}  # fmt: skip
    # 128 are sent before the first answer. Those that the server cannot answer in 600 s are sent again.
    late = max(0.0, 128 - slots * int(600 / seconds))
    most = 1.05 + (late + slots) / rows
    return Outcome(
        "long answers", took / (server.work / slots + seconds), server.sent / rows, most_requests=most, notes=notes
    )


def one_long_agent(seed: int) -> Outcome:
    """One agent of 200 turns beside 2,000 of one or two."""
    chance = random.Random(seed)
    slots, seconds, rows = 64, 1.0, 2_000
    long = chance.randrange(rows)
    short = chance.choice([1, 2])
    server = PlainServer(Limits(lambda now: 10_000, seconds, spread=0.1), seed)
    server.turns = lambda row: 200 if row == long else short

    @Tool.define(cacheable=False)
    async def look() -> str:
        """Look."""
        return "seen"

    took = run_virtual(finish(server, rows, max_inflight=slots, tools=[look], max_turns=300))
    turns = short * (rows - 1) + 200
    started = long * short * seconds / slots  # rows start in their order
    ideal = max(started + 200 * seconds, turns * seconds / slots) + 2 * 200 * TRAVEL
    notes = {"row": long, "turns of the others": short}
    return Outcome("one long agent", took / ideal, server.sent / turns, most_wall=1.1, notes=notes)


def _agents(
    make: Callable[[], Backend], agents: int, seed: int, kvflow: bool | Literal["auto"], inflight: int | None = None
) -> float:
    """Return the seconds of a batch of agents that read long documents with a tool."""

    @Tool.define()
    async def read(document: str) -> str:
        """Read a document."""
        await asyncio.sleep(1.0)
        return f"{seed} {document} ".ljust(6_000, ".")

    backend = make()
    options = {} if inflight is None else {"max_inflight": inflight}
    return run_virtual(finish(backend, agents, tools=[read], model="m", kvflow=kvflow, max_turns=20, **options))


FIND_OUT = 20.0  # seconds until the counters of a cold engine show that it is one of several: 18 of them stand still


def metrics_of_a_part(seed: int) -> Outcome:
    """Metrics of one of eight replicas behind one address, with and without affinity, and metrics that vanish. Once
    this is found out, scheduling by the cache must not make the run slower."""
    chance = random.Random(seed)
    agents, inflight = chance.choice([96, 192]), chance.choice([None, 16])
    vanishes = chance.uniform(2.0, 6.0)
    kinds: dict[str, Callable[[], Backend]] = {
        "one of eight replicas": lambda: Balancer(ENGINE, 8),
        "replicas without affinity": lambda: Balancer(ENGINE, 8, sticky=False),
        "vanishing": lambda: Engine(ENGINE, lambda load, now: None if now > vanishes else load),
    }
    kind = list(kinds)[seed % len(kinds)]
    off = _agents(kinds[kind], agents, seed, False, inflight)
    took = _agents(kinds[kind], agents, seed, "auto", inflight)
    notes = {"kind": kind, "agents": agents, "in flight": inflight, "seconds": round(took)}
    return Outcome("metrics of a part", took / off, 1.0, most_wall=1.05 + FIND_OUT / off, notes=notes)


def small_cache(seed: int) -> Outcome:
    """An engine that reports its cache as it is, and cannot hold all contexts. Scheduling by the cache pays."""
    agents = random.Random(seed).choice([24, 48])
    off = _agents(lambda: SimulatedBackend(ENGINE), agents, seed, False)
    took = _agents(lambda: SimulatedBackend(ENGINE), agents, seed, "auto")
    return Outcome("small cache", took / off, 1.0, most_wall=0.9, notes={"agents": agents, "seconds": round(took)})


def play(name: str, seed: int) -> Outcome:
    """Play one seed of a scenario. The engine draws the waits between attempts from the module ``random``."""
    random.seed(seed)
    return SCENARIOS[name](seed)


SCENARIOS: dict[str, Callable[[int], Outcome]] = {
    "random refusals": random_refusals,
    "full server": full_server,
    "growing server": growing_server,
    "minute limit": minute_limit,
    "all count per minute": all_count_per_minute,
    "two clients": two_clients,
    "long answers": long_answers,
    "one long agent": one_long_agent,
    "metrics of a part": metrics_of_a_part,
    "small cache": small_cache,
}

"""Batches whose rows or servers are bad: who is blamed, how long it takes, and how many requests it costs.

Each seed makes a small world: servers that compute a number of requests at once, and one kind of trouble. Good rows
must be answered, bad rows must fail, and nothing else may happen. ``Played`` also says how much longer the run took
than the work itself, and how many requests it sent beyond those that it needed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from batch_agent import BatchAgent, Fleet
from batch_agent.backends.base import ModelRequest, OnToolCall, Probe
from batch_agent.errors import Unavailable
from batch_agent.messages import Reply
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend, run_virtual
from batch_agent.testing.replies import ScriptedReply

Trouble = Literal["poison", "poison at the end", "crash loop", "lost requests", "rolling refusals"]
TROUBLES: tuple[Trouble, ...] = ("poison", "poison at the end", "crash loop", "lost requests", "rolling refusals")

MOST_OVER_IDEAL = 1.3  # wall time
MOST_OVER_NEEDED = 1.1  # requests
RETRIES = 3
BACK_OFF = 4.0  # seconds at most that the retries of one row wait, together
RECALL = 30.0  # seconds at least until a request counts as lost


@dataclass(frozen=True, slots=True)
class Trial:
    """What a seed plays. ``bad`` are the rows that are the trouble, ``seconds`` how long each part of it lasts."""

    trouble: Trouble
    servers: int
    slots: int  # of each server
    rows: int
    latency: float
    bad: frozenset[str]
    seconds: float
    status: int

    @classmethod
    def of(cls, seed: int) -> Trial:
        chance = Random(f"evidence {seed}")
        trouble = TROUBLES[seed % len(TROUBLES)]
        servers, slots, rows = chance.choice((1, 1, 2, 4)), chance.choice((4, 8, 16)), chance.randint(60, 400)
        share = {"poison": 0.3, "poison at the end": 0.3}.get(trouble, 0.0)
        number = max(1, round(rows * chance.uniform(0.01, share))) if share else 1
        if trouble == "lost requests":
            number = chance.randint(1, 3)
        names = [str(n) for n in range(rows)]
        bad = names[-number:] if trouble == "poison at the end" else chance.sample(names, number)
        if trouble == "rolling refusals":
            bad = []
        return cls(
            trouble,
            servers,
            slots,
            rows,
            chance.uniform(0.3, 3.0),
            frozenset(bad),
            chance.choice((0.1, 1.5, 5.0)),
            chance.choice((401, 403, 404)),
        )

    @property
    def fails(self) -> frozenset[str]:
        """The rows that must fail."""
        return frozenset() if self.trouble in ("lost requests", "rolling refusals") else self.bad

    @property
    def ideal(self) -> float:
        """The seconds that the work takes at least, with what no program can avoid."""
        work = self.rows * self.latency / (self.servers * self.slots) + self.latency
        match self.trouble:
            case "poison" | "poison at the end":  # with few slots, a control request for every three bad rows
                return work + BACK_OFF + len(self.bad) / 3 * 0.2 * self.latency
            case "crash loop":  # each crash stops what is in flight, and the server until it is back
                crashes = (2 * RETRIES + 2) * (self.seconds + self.latency + BACK_OFF / RETRIES)
                # The row moves on to the next server: what was in flight at two of them is sent one at a time.
                suspects = 0.0 if self.servers == 1 else 3 * self.slots * self.latency
                return work + crashes + suspects
            case "lost requests":  # they hold slots until they count as lost
                wait = max(RECALL, 20 * self.latency)
                held = min(1.0, len(self.bad) / self.slots) * wait
                return work + max(wait, held) + 2 * self.latency + 5.0
            case "rolling refusals":
                return work + self.servers * (self.seconds + 1.0)

    @property
    def needed(self) -> int:
        """The requests that are needed at least, with what no program can avoid."""
        match self.trouble:
            case "poison" | "poison at the end":  # with few slots, a control request for every three bad rows
                return self.rows + RETRIES * len(self.bad) + len(self.bad) // 3
            case "crash loop":  # what is in flight at each crash, a trial, a control request and the row again
                return self.rows + (2 * RETRIES + 2) * (self.slots + 3)
            case "lost requests":
                return self.rows + len(self.bad) + 2
            case "rolling refusals":  # what is in flight is denied, and trials
                return self.rows + self.servers * (3 * self.slots + 10)


@dataclass(slots=True)
class Played:
    over_ideal: float
    over_needed: float
    problems: list[str] = field(default_factory=list)


class Server(ScriptedBackend):
    """Has ``slots``; further requests wait."""

    def __init__(self, number: int, trial: Trial, lost: set[str]) -> None:
        super().__init__(self._answer)
        self._number, self._trial, self._lost = number, trial, lost
        self._slots = asyncio.Semaphore(trial.slots)
        self._open: dict[asyncio.Task[Reply], None] = {}  # in the order in which they began
        self._back_at = 0.0

    @property
    def name(self) -> str:
        return f"scripted://{self._number}"

    @property
    def is_gone(self) -> bool:
        return asyncio.get_running_loop().time() < self._back_at

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("down", "connection refused") if self.is_gone else Probe("up")

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if self.is_gone:
            raise Unavailable("connection refused", unreached=True)
        task = asyncio.get_running_loop().create_task(super().infer(request, on_tool_call))
        self._open[task] = None
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_gone and task.cancelled():
                raise Unavailable("the server closed the connection before it answered") from None
            raise
        finally:
            task.cancel()
            self._open.pop(task, None)

    async def _answer(self, request: Request) -> ScriptedReply:
        trial, now = self._trial, asyncio.get_running_loop().time()
        begin = 2.0 * trial.latency + trial.seconds * self._number
        if trial.trouble == "rolling refusals" and begin <= now < begin + trial.seconds:
            return Fail(trial.status, latency=0.01)
        is_bad = not request.is_control and request.text in trial.bad
        if is_bad and trial.trouble == "lost requests" and request.text not in self._lost:
            self._lost.add(request.text)
            return Hang()
        if is_bad and trial.trouble == "crash loop":
            self._back_at = now + trial.seconds
            for task in tuple(self._open):
                task.cancel()
        if is_bad and trial.trouble.startswith("poison"):
            return Fail(500, latency=0.02)
        async with self._slots:
            await asyncio.sleep(0.2 * trial.latency if request.is_control else trial.latency)
        return Say("ok")


def play_evidence(seed: int) -> tuple[Trial, Played]:
    trial = Trial.of(seed)
    random.seed(seed)
    return trial, run_virtual(_play(trial))


async def _play(trial: Trial) -> Played:
    lost: set[str] = set()
    servers = [Server(number, trial, lost) for number in range(trial.servers)]
    backend = servers[0] if len(servers) == 1 else Fleet(servers)
    inputs = [str(n) for n in range(trial.rows)]
    async with BatchAgent.open(
        task="{input}", inputs=inputs, backend=backend, max_inflight=trial.slots * trial.servers, max_retries=RETRIES
    ) as run:
        results = [result async for result in run.results()]
    requests = sum(len(server.requests) for server in servers)
    played = Played(asyncio.get_running_loop().time() / trial.ideal, requests / trial.needed)
    delivered = Counter(result.input for result in results)
    failed = {result.input for result in results if not result.ok}
    if run.statistics().ended != "complete":
        played.problems.append(f"it ended {run.statistics().ended}: {run.statistics().reason}")
    if twice := [row for row, count in delivered.items() if count > 1]:
        played.problems.append(f"delivered twice: {twice}")
    if failed != trial.fails:
        played.problems.append(f"wrongly failed: {failed - trial.fails}; not failed: {trial.fails - failed}")
    if played.over_ideal > MOST_OVER_IDEAL:
        played.problems.append(f"{played.over_ideal:.2f} times the ideal {trial.ideal:.1f} s")
    if played.over_needed > MOST_OVER_NEEDED:
        played.problems.append(f"{requests} requests, {played.over_needed:.2f} times those needed")
    return played

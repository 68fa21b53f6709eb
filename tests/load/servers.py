"""Servers for whole runs on a virtual clock: one that refuses when it is full or by chance, one that queues, and
engines whose metrics are wrong or vanish."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from batch_agent.backends.base import Backend, Capabilities, Load, ModelRequest, OnToolCall, Probe
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.errors import RateLimited, Unavailable
from batch_agent.messages import Allowance, Quota, Reply, ToolCall, Usage

TRAVEL = 0.02  # seconds that a request or an answer takes
SPREAD = 0.3  # of the logarithm of an answer's seconds


@dataclass
class Limits:
    """What a server does with a request."""

    slots: Callable[[float], int]  # requests that it works on at once, by the time
    seconds: float = 1.0  # of an answer, on average
    queues: bool = False  # a request beyond the slots waits; otherwise it is refused
    refused: float = 0.0  # share of the requests that it refuses by chance
    retry_after: float | None = None
    spread: float = SPREAD
    per_minute: PerMinute | None = None


Tells = Literal["nothing", "Retry-After", "remaining", "limit"]  # what a refusal, or an answer, says of a rate limit


@dataclass
class PerMinute:
    """A number of requests per minute. ``kind``: counted from minute to minute, the first of which ends after
    ``ends`` seconds; in any minute; or a bucket of that many requests that fills up steadily."""

    number: int
    kind: Literal["minutes", "any minute", "bucket"]
    tells: Tells = "nothing"
    ends: float = 60.0
    counts_refused: bool = False  # a refused request counts too

    def __post_init__(self) -> None:
        self._left, self._at, self._taken = float(self.number), 0.0, [-math.inf]

    def ideal(self, rows: int) -> tuple[float, int]:
        """Return when the last window begins, and how many of the rows are sent in it."""
        before = (rows - 1) // self.number
        if self.kind == "bucket":
            return max(0, rows - self.number) * 60 / self.number, 1
        first = self.ends if self.kind == "minutes" else 60.0
        return (first + 60 * (before - 1) if before else 0.0), rows - before * self.number

    def takes(self, now: float) -> bool:
        if self.kind == "any minute":
            self._taken = [at for at in self._taken if at > now - 60]
            taken = len(self._taken) < self.number
            if taken or self.counts_refused:
                self._taken.append(now)
            return taken
        if self.kind == "bucket":
            self._left = min(self.number, self._left + (now - self._at) * self.number / 60)
            self._at = now
        elif now >= self.ends:
            self._left, self.ends = float(self.number), self.ends + 60 * (1 + (now - self.ends) // 60)
        taken = self._left >= 1
        self._left -= taken or (self.counts_refused and self._left >= 1)
        return taken

    def resets_in(self, now: float) -> float:
        match self.kind:
            case "minutes":
                return self.ends - now
            case "any minute":
                return max(0.0, self._taken[0] + 60 - now) if len(self._taken) >= self.number else 0.0
            case "bucket":
                return max(0.0, (1 - self._left) * 60 / self.number)

    def refusal(self, now: float) -> RateLimited:
        wait = self.resets_in(now) if self.tells == "Retry-After" else None
        return RateLimited("too many requests per minute", status=429, retry_after=wait, quota=self.quota(0))

    def quota(self, remaining: int | None = None) -> Quota | None:
        """Headers without the time of the reset: what remains, or the limit alone."""
        match self.tells:
            case "remaining":
                left = int(self._left) if self.kind != "any minute" else self.number - len(self._taken)
                return Quota(requests=Allowance(self.number, max(0, left) if remaining is None else remaining, None))
            case "limit":
                return Quota(requests=Allowance(self.number, None, None))
        return None


class PlainServer(Backend):
    """A server without metrics. ``answers`` are the times of its answers; ``sent`` counts requests."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self.limits = limits
        self.chance = random.Random(seed)
        self.sent = self.refused = self.running = self.given_up = 0
        self.work = 0.0  # slot-seconds of all answers
        self.answers: list[float] = []
        self.refused_rows: Counter[str] = Counter()  # by chance or because it was full
        self.turns: Callable[[int], int] = lambda row: 1  # of the agent of a row
        self._line: list[asyncio.Future[None]] = []

    @property
    def name(self) -> str:
        return "plain://"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(native_schema=True)

    async def models(self) -> list[str]:
        return ["m"]

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("up", models=("m",))

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        limits, loop = self.limits, asyncio.get_running_loop()
        self.sent += 1
        await asyncio.sleep(TRAVEL)
        if limits.per_minute is not None and not limits.per_minute.takes(loop.time()):
            self.refused += 1
            await asyncio.sleep(TRAVEL)
            raise limits.per_minute.refusal(loop.time())
        quota = None if limits.per_minute is None else limits.per_minute.quota()
        full = self.running >= limits.slots(loop.time())
        if self.chance.random() < limits.refused or (full and not limits.queues):
            self.refused += 1
            self.refused_rows[request.job_id] += 1
            await asyncio.sleep(TRAVEL)
            raise RateLimited("too many requests", status=429, retry_after=limits.retry_after)
        if full:
            await self._wait_in_line()
        else:
            self.running += 1
        seconds = limits.seconds * math.exp(self.chance.gauss(-(limits.spread**2) / 2, limits.spread))
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self._leave()
        self.work += seconds
        await asyncio.sleep(TRAVEL)
        self.answers.append(loop.time())
        return replace(self._answer(request), quota=quota)

    def _answer(self, request: ModelRequest) -> Reply:
        usage, messages = Usage(prompt_tokens=50, completion_tokens=20), request.conversation.messages
        row = next(str(message.content) for message in messages if message.role == "user")
        taken = sum(message.role == "assistant" for message in messages)
        is_control = not row.isdigit()
        if not is_control and taken + 1 < self.turns(int(row)):
            return Reply(text="", tool_calls=(ToolCall(f"call_{taken}", "look", "{}"),), usage=usage)
        return Reply(text="ok", usage=usage)

    async def _wait_in_line(self) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            self.given_up += 1
            if place in self._line:
                self._line.remove(place)
            elif place.done() and not place.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        self.running -= 1
        slots = self.limits.slots(asyncio.get_running_loop().time())
        while self._line and self.running < slots:
            place = self._line.pop(0)
            if not place.done():
                self.running += 1
                place.set_result(None)


class Client(PlainServer):
    """A second address of a server, with which nothing is shared but its slots."""

    def __init__(self, server: PlainServer) -> None:
        super().__init__(server.limits, 0)
        self._behind = server

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        reply = await self._behind.infer(request, on_tool_call)
        self.answers.append(asyncio.get_running_loop().time())
        return reply


ENGINE = EngineModel(
    prefill_tokens_per_second=9_000,
    step_seconds=0.03,
    sequence_seconds=0.0002,
    kv_tokens=65_536,
    context_tokens=16_384,
    answer_tokens=40,
    tool_calls_per_agent=5,
    name="m",
)


class Engine(SimulatedBackend):
    """A simulated engine whose reading goes through ``tell``, which may change it, or return None for a failure."""

    def __init__(self, model: EngineModel, tell: Callable[[Load, float], Load | None]) -> None:
        super().__init__(model)
        self._tell = tell

    async def load(self, endpoint: str = "") -> Load:
        told = self._tell(await super().load(endpoint), asyncio.get_running_loop().time())
        if told is None:
            raise Unavailable("404 for /metrics", status=404)
        return told


class Balancer(SimulatedBackend):
    """Several replicas behind one address; metrics come from the first alone. With ``sticky``, all requests of an agent
    go to the same replica; otherwise they take turns."""

    def __init__(self, model: EngineModel, replicas: int, *, sticky: bool = True) -> None:
        super().__init__(model)
        self._sticky, self._requests = sticky, 0
        self.replicas = [SimulatedBackend(model) for _ in range(replicas)]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        self._requests += 1
        place = (request.agent if self._sticky else self._requests) % len(self.replicas)
        return await self.replicas[place].infer(request, on_tool_call)

    async def load(self, endpoint: str = "") -> Load:
        return await self.replicas[0].load(endpoint)

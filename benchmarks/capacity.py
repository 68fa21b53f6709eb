"""How much at once: what is found where no number is given, and what becomes of limits and budgets.

``python -m benchmarks.capacity``. On a virtual clock:

- a server that takes 50 requests at once and answers 429 beyond, with and without ``Retry-After``, against the same
  rows with ``max_inflight=50``; one whose limit halves in the middle, and one whose limit grows from 8 to 128
- two runs at once at a server that takes 50, and at one that takes 8
- a provider that counts requests or tokens by the minute, in a window that slides or as a bucket that fills; told of by
  the user (``rpm``, ``tpm``) or by its headers
- 1,000 rows on the simulated engine with no number given, against 16, 32, 64, 128, 256 and 512 in flight; where the
  engine tells how long its queue is, and where it does not

and once on real sockets (``--real 0`` leaves it out): the server that takes 50 at once, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from batch_agent import BatchAgent
from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.messages import Reply, Usage
from batch_agent.testing import Fail, Request, Say, ScriptedBackend
from batch_agent.testing.clock import run_virtual
from benchmarks import report

AT_ONCE, LATENCY, ROWS = 50, 1.0, 6_000
TRAVEL = 0.02  # seconds that a request or an answer is on its way
SPREAD = 0.4  # of the logarithm of an answer's seconds
CHANGES_AT = 40.0
GROWS = (8, 128)
LATER = 15.0  # seconds by which the second of two runs begins after the first
SETTLED = 10.0  # seconds after which refusals count
FOUND_ROWS, TRIED = 1_000, (16, 32, 64, 128, 256, 512)
A_MINUTE = {"requests": 600, "tokens": 60_000}
MINUTES, FILLED = 4, 0.95  # budgets that the rows would take up, and how much of each
TOKENS = Usage(prompt_tokens=60, completion_tokens=40)

Kind = Literal["requests", "tokens"]
Way = Literal["window", "bucket"]


class Crowded(ScriptedBackend):
    """Takes ``at_once`` requests and refuses the rest; ``later`` from ``CHANGES_AT`` on."""

    def __init__(self, at_once: int = AT_ONCE, retry_after: float | None = None, later: int | None = None) -> None:
        super().__init__(self._answer)
        self.at_once, self.later = at_once, later or at_once
        self._headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
        self._running = 0
        self._chance = random.Random(8)
        self.refused: list[float] = []
        self.answered: list[float] = []

    def _answer(self, request: Request) -> Say | Fail:
        now = asyncio.get_running_loop().time()
        if self._running >= (self.at_once if now < CHANGES_AT else self.later):
            self.refused.append(now)
            return Fail(429, headers=self._headers, latency=TRAVEL)
        self._running += 1
        seconds = LATENCY * math.exp(self._chance.gauss(-SPREAD * SPREAD / 2, SPREAD))
        return Say("ok", latency=seconds)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        await asyncio.sleep(TRAVEL)
        reply = await super().infer(request, on_tool_call)
        self._running -= 1
        await asyncio.sleep(TRAVEL)
        self.answered.append(asyncio.get_running_loop().time())
        return reply


async def finish(backend: Any, rows: int = ROWS, **options: Any) -> float:
    """Seconds."""
    began = asyncio.get_running_loop().time()
    results = await BatchAgent.run(task="{input}", inputs=list(map(str, range(rows))), backend=backend, **options)
    assert all(results), next(result for result in results if not result.ok)
    return asyncio.get_running_loop().time() - began


@dataclass(frozen=True, slots=True)
class Limited:
    throughput: float  # over that of the limit set by hand
    refused: float  # share of the requests after the first seconds


def limited(retry_after: float | None) -> Limited:
    server = Crowded(retry_after=retry_after)
    ours, by_hand = run_virtual(finish(server)), run_virtual(finish(Crowded(), max_inflight=AT_ONCE))
    return Limited(by_hand / ours, _refused_share(server, SETTLED))


def _refused_share(server: Crowded, since: float) -> float:
    refused = sum(1 for at in server.refused if at >= since)
    return refused / max(1, refused + sum(1 for at in server.answered if at >= since))


def halved() -> tuple[float, float]:
    """Seconds after the limit fell until less than 2 % of the requests are refused and nine tenths of what is left is
    used, and the share that is refused from then on."""
    server = Crowded(later=AT_ONCE // 2)
    run_virtual(finish(server))
    second = CHANGES_AT
    while second < CHANGES_AT + 60:
        answers = sum(1 for at in server.answered if second <= at < second + 3)
        refused = sum(1 for at in server.refused if second <= at < second + 3)
        if refused <= 0.02 * answers and answers >= 0.9 * 3 * AT_ONCE / 2 / LATENCY:
            break
        second += 0.25
    return second - CHANGES_AT, _refused_share(server, second)


def grown() -> float:
    """Rounds of answers after the limit grew, of as many as there are slots then, until nine tenths of it are used."""
    small, large = GROWS
    server = Crowded(small, later=large)
    run_virtual(finish(server))
    answers = [at for at in server.answered if at >= CHANGES_AT]
    used = (sum(1 for at in answers if second <= at < second + 1) / (large / LATENCY) for second in answers[::large])
    return next(float(rounds) for rounds, share in enumerate(used) if share >= 0.9)


def side_by_side(seed: int, at_once: int = AT_ONCE, retry_after: float | None = None) -> float:
    """The smaller share of the answers over the larger, while both runs are at work; the second begins later."""
    random.seed(seed)  # of the waits between tries
    server = Crowded(at_once, retry_after)
    done: dict[str, list[float]] = {"first": [], "second": []}

    async def one(name: str, delay: float) -> None:
        await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        rows = list(map(str, range(120 * at_once)))
        async for result in BatchAgent.stream(task="{input}", inputs=rows, backend=server):
            assert result.ok
            done[name].append(loop.time())

    async def both() -> None:
        await asyncio.gather(one("first", 0.0), one("second", LATER))

    run_virtual(both())
    until = min(max(times) for times in done.values())
    shares = [sum(1 for at in times if 2 * LATER <= at < until) for times in done.values()]
    return min(shares) / max(shares)


# Budgets


class Metered(ScriptedBackend):
    """Allows so many requests or tokens a minute: in a ``window`` that slides, or from a ``bucket`` that fills all the
    time. ``passed`` counts what was asked beyond that."""

    def __init__(self, kind: Kind, way: Way, *, tells: bool) -> None:
        super().__init__(self._answer)
        self.kind, self.way, self.tells = kind, way, tells
        self.limit = A_MINUTE[kind]
        self.passed = 0
        self.used = 0
        self._window: deque[tuple[float, int]] = deque()
        self._level, self._at = float(self.limit), 0.0

    def _left(self, now: float) -> float:
        if self.way == "bucket":
            self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60)
            self._at = now
            return self._level
        while self._window and self._window[0][0] <= now - 60:
            self._window.popleft()
        return self.limit - sum(amount for _, amount in self._window)

    def _answer(self, request: Request) -> Say | Fail:
        now = asyncio.get_running_loop().time()
        amount = 1 if self.kind == "requests" else TOKENS.prompt_tokens + TOKENS.completion_tokens
        left = self._left(now)
        if left < amount:
            self.passed += 1
            return Fail(429, headers=self._headers(0, now), latency=0.02)
        self.used += amount
        self._window.append((now, amount))
        self._level -= amount
        return Say("ok", latency=LATENCY, usage=TOKENS, headers=self._headers(int(left - amount), now))

    def _headers(self, left: int, now: float) -> dict[str, str]:
        if not self.tells:
            return {}
        full = (self.limit - left) * 60 / self.limit
        if self.way == "window":
            full = self._window[-1][0] + 60 - now if self._window else 0.0
        return {
            f"x-ratelimit-limit-{self.kind}": str(self.limit),
            f"x-ratelimit-remaining-{self.kind}": str(left),
            f"x-ratelimit-reset-{self.kind}": f"{full:.3f}s",
        }


@dataclass(frozen=True, slots=True)
class Metering:
    used: float  # of what the provider allowed in that time
    passed: int  # requests beyond the budget, after the first answer told of it


def metered(kind: Kind, way: Way, *, given: bool) -> Metering:
    server = Metered(kind, way, tells=not given)
    amount = 1 if kind == "requests" else TOKENS.prompt_tokens + TOKENS.completion_tokens
    options: dict[str, int] = {("rpm" if kind == "requests" else "tpm"): A_MINUTE[kind]} if given else {}
    seconds = run_virtual(finish(server, rows=int(MINUTES * FILLED * A_MINUTE[kind]) // amount, **options))
    # The first budget is there at the start; a bucket fills all the time, a window all at once.
    allowed = A_MINUTE[kind] * (1 + (seconds / 60 if way == "bucket" else seconds // 60))
    return Metering(server.used / allowed, server.passed)


# The number that nobody gave


class Silent(SimulatedBackend):
    """Does not tell how busy it is."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, reports_load=False)


ENGINES = {
    "default": EngineModel(),
    "64 sequences": EngineModel(max_num_seqs=64),
    "1,024 sequences": EngineModel(max_num_seqs=1024),
    "long prompts, little memory": EngineModel(kv_tokens=65_536),
}


def found(name: str, make: Callable[[EngineModel], SimulatedBackend]) -> dict[str, float]:
    """Seconds by number in flight; ``found`` is ours."""
    engine = ENGINES[name]
    text = "word " * (400 if "long" in name else 20)
    options: dict[str, Any] = {"system_prompt": "be brief", "rows": FOUND_ROWS}

    def seconds(**more: Any) -> float:
        return run_virtual(_on_engine(make(engine), text, **options, **more))

    return {str(tried): seconds(max_inflight=tried) for tried in TRIED} | {"found": seconds()}


async def _on_engine(backend: SimulatedBackend, text: str, rows: int, **options: Any) -> float:
    began = asyncio.get_running_loop().time()
    inputs = [f"{number} {text}" for number in range(rows)]
    results = await BatchAgent.run(task="{input}", inputs=inputs, backend=backend, **options)
    assert all(results)
    return asyncio.get_running_loop().time() - began


# On real sockets

SERVER = """
import asyncio, sys
from batch_agent.testing import Fail, Say, ScriptedServer

async def main():
    running = 0
    def end():
        nonlocal running
        running -= 1
    def answer(request):
        nonlocal running
        if running >= 50:
            return Fail(429)
        running += 1
        asyncio.get_running_loop().call_later(0.25, end)
        return Say("ok", latency=0.25)
    async with ScriptedServer(answer, port=int(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(main())
"""
REAL_ROWS = 3_000


def real() -> tuple[float, float]:
    """Throughput over that of the limit set by hand, and the share of refusals after the first seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        by_hand, _ = asyncio.run(_real_run(port, max_inflight=AT_ONCE))
        ours, refused = asyncio.run(_real_run(port))
        return by_hand / ours, refused
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def _real_run(port: int, **options: Any) -> tuple[float, float]:
    began = time.monotonic()
    late = {"TurnFailed": 0, "TurnFinished": 0}

    def watch(event: object) -> None:
        kind = type(event).__name__
        if kind in late and time.monotonic() - began > SETTLED:
            late[kind] += 1

    rows, where = list(map(str, range(REAL_ROWS))), f"http://127.0.0.1:{port}/v1"
    async with BatchAgent.open(task="{input}", inputs=rows, backend=where, model="m", sinks=[watch], **options) as run:
        ok = sum([result.ok async for result in run.results()])
    assert ok == REAL_ROWS
    return time.monotonic() - began, late["TurnFailed"] / max(1, sum(late.values()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description="How much at once.")
    parser.add_argument("--real", type=int, default=1, metavar="0|1", help="0 leaves the real sockets out")
    with_real = parser.parse_args().real
    env = report.environment()
    bars, measurements = [], []
    for retry_after in (None, 1.0):
        name = "50 at once" + (f", Retry-After {retry_after:g} s" if retry_after else "")
        outcome = limited(retry_after)
        measurements.append({"case": name, **asdict(outcome)})
        bars += [
            report.Bar(f"{name}: throughput over max_inflight=50", outcome.throughput, ">=", 0.9),
            report.Bar(f"{name}: refused after 10 s", outcome.refused, "<=", 0.02),
        ]
    followed, refused = halved()
    measurements.append({"case": "the limit halves", "seconds": followed, "refused_after": refused})
    bars.append(report.Bar("the limit halves: followed after seconds", followed, "<=", 5))
    bars.append(report.Bar("the limit halves: refused from then on", refused, "<=", 0.02))
    rounds = grown()
    measurements.append({"case": "the limit grows from 8 to 128", "rounds": rounds})
    bars.append(report.Bar("the limit grows from 8 to 128: filled after rounds", rounds, "<=", 30))
    for at_once in (AT_ONCE, 8):
        for retry_after in (None, 1.0):
            name = f"two runs, {at_once} at once" + (f", Retry-After {retry_after:g} s" if retry_after else "")
            shares = [side_by_side(seed, at_once, retry_after) for seed in range(4)]
            measurements.append({"case": name, "smaller_over_larger": shares})
            bars.append(report.Bar(f"{name}: smaller share over larger", statistics.mean(shares), ">=", 0.5))
    bars += _budget_bars(measurements)
    bars += _found_bars(measurements)
    if with_real:
        ratio, refused = real()
        measurements.append({"case": "50 at once, real sockets", "throughput": ratio, "refused": refused})
        bars.append(report.Bar("50 at once, real sockets: throughput over max_inflight=50", ratio, ">=", 0.9))
        bars.append(report.Bar("50 at once, real sockets: refused after 10 s", refused, "<=", 0.02))
    return report.finish("capacity", env, bars, measurements)


def _budget_bars(measurements: list[dict[str, object]]) -> list[report.Bar]:
    bars = []
    kinds: tuple[Kind, ...] = ("requests", "tokens")
    ways: tuple[Way, ...] = ("window", "bucket")
    for kind in kinds:
        for way in ways:
            for given in (True, False):
                name = f"{kind} a minute, {way}, {'given' if given else 'from headers'}"
                outcome = metered(kind, way, given=given)
                measurements.append({"case": name, **asdict(outcome)})
                bars.append(report.Bar(f"{name}: used", outcome.used, ">=", 0.9))
                bars.append(report.Bar(f"{name}: requests beyond it", outcome.passed, "<=", 0))
    return bars


def _found_bars(measurements: list[dict[str, object]]) -> list[report.Bar]:
    bars, rows = [], []
    ways: dict[str, Callable[[EngineModel], SimulatedBackend]] = {"tells": SimulatedBackend, "silent": Silent}
    for engine in ENGINES:
        for way, make in ways.items():
            seconds = found(engine, make)
            name = f"{engine}, {way}"
            measurements.append({"case": name, "seconds": seconds})
            rows.append((name, *(f"{seconds[str(tried)]:.1f} s" for tried in TRIED), f"{seconds['found']:.1f} s"))
            best = min(seconds[str(tried)] for tried in TRIED)
            bars.append(report.Bar(f"{name}: no number over the best", seconds["found"] / best, "<=", 1.05))
    print(report.table(("1,000 rows on", *map(str, TRIED), "none given"), rows), "\n")
    return bars


if __name__ == "__main__":
    sys.exit(main())

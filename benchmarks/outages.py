"""A server that goes away in the middle of a run and comes back: what it costs, and what is lost.

``python -m benchmarks.outages``. 3,000 rows, 64 in flight, answers in a tenth of a second:

- on a virtual clock, with the server gone for 5 s, 60 s and 10 min: connections refused, requests that hang, 500, 503;
  beside it what people write by hand, a loop that tries each request four times and backs off between
- the same with one 429 among 512 in flight
- on real sockets (``--real SECONDS``, 20 by default, 0 leaves it out): a server process that is killed with SIGKILL and
  started again
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from batch_agent import BatchAgent
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.errors import BackendError, Unavailable
from batch_agent.events import Event, HealthChanged, TurnFinished
from batch_agent.messages import Conversation, Message
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend
from batch_agent.testing.clock import run_virtual
from benchmarks import report

ROWS, INFLIGHT, LATENCY, BEGINS = 3_000, 64, 0.1, 2.0
FULL_SPEED = 0.9 * INFLIGHT / LATENCY  # answers a second
TRIES = 4  # of the loop


def refuse() -> Any:
    raise Unavailable("connection refused", unreached=True)


MODES: dict[str, Callable[[], Any]] = {
    "refused": refuse,
    "hangs": Hang,
    "500": lambda: Fail(500),
    "503": lambda: Fail(503),
}


class Gone(ScriptedBackend):
    """Gone for ``seconds``; notes when requests came and were answered."""

    def __init__(self, mode: str, seconds: float) -> None:
        super().__init__(self._answer)
        self.mode, self.ends = mode, BEGINS + seconds
        self.came: list[float] = []
        self.answered: list[float] = []

    def _answer(self, request: Request) -> Any:
        now = asyncio.get_running_loop().time()
        self.came.append(now)
        if BEGINS <= now < self.ends:
            return MODES[self.mode]()
        self.answered.append(now + LATENCY)
        return Say("ok", latency=LATENCY)


@dataclass(frozen=True, slots=True)
class Outcome:
    ok: int
    wall_s: float
    trials: int = 0
    closest_trials_s: float = 0.0
    full_speed_after_s: float = 0.0


async def ours(server: Gone) -> Outcome:
    began = asyncio.get_running_loop().time()
    trials: list[float] = []

    def watch(event: Event) -> None:
        if isinstance(event, HealthChanged) and event.state == "on trial":
            trials.append(event.at)

    async with BatchAgent.open(
        task="{input}", inputs=list(map(str, range(ROWS))), backend=server, max_inflight=INFLIGHT, sinks=[watch]
    ) as run:
        ok = sum([result.ok async for result in run.results()])
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    wall = asyncio.get_running_loop().time() - began
    return Outcome(ok, wall, len(trials), min(gaps, default=0.0), _regained(server.answered, server.ends))


def _regained(answers: list[float], since: float) -> float:
    """Seconds after the server's return from which on it answers at full speed, or has nothing left to answer."""
    after = sorted(at for at in answers if at >= since)
    for place, at in enumerate(after):
        if sum(1 for other in after[place:] if other < at + 1) >= FULL_SPEED:
            return at - since
    return (after[-1] if after else since) - since


async def loop(server: Gone) -> Outcome:
    """A semaphore, and each request tried again: what people write by hand."""
    gate = asyncio.Semaphore(INFLIGHT)
    shape = RequestShape("m")
    began = asyncio.get_running_loop().time()

    async def row(number: int) -> bool:
        request = ModelRequest(shape, Conversation((Message("user", str(number)),)), str(number))
        async with gate:
            for failures in range(TRIES):
                try:
                    async with asyncio.timeout(600):
                        await server.infer(request)
                    return True
                except (BackendError, TimeoutError):
                    await asyncio.sleep(2**failures * random.random())
        return False

    ok = sum(await asyncio.gather(*map(row, range(ROWS))))
    return Outcome(ok, asyncio.get_running_loop().time() - began)


async def refusal_for_load(refused: int | None) -> float:
    def answer(request: Request) -> Any:
        return Fail(429) if request.number == refused else Say("ok", latency=1)

    began = asyncio.get_running_loop().time()
    rows = list(map(str, range(20_000)))
    results = await BatchAgent.run(task="{input}", inputs=rows, backend=ScriptedBackend(answer), max_inflight=512)
    assert all(results)
    return asyncio.get_running_loop().time() - began


# On real sockets

SERVER = """
import asyncio, sys
from batch_agent.testing import Say, ScriptedServer

async def main():
    async with ScriptedServer(lambda request: Say("ok", latency=0.1), port=int(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def _serve(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    raise SystemExit("the server does not start")


async def killed(seconds: float) -> Outcome:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = _serve(port)
    answers: list[float] = []
    trials: list[float] = []

    def watch(event: Event) -> None:
        if isinstance(event, TurnFinished):
            answers.append(time.monotonic())
        if isinstance(event, HealthChanged) and event.state == "on trial":
            trials.append(time.monotonic())

    async def outage() -> float:
        nonlocal process
        await asyncio.sleep(2)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(seconds)
        process = await asyncio.to_thread(_serve, port)
        return time.monotonic()

    began = time.monotonic()
    rows = list(map(str, range(ROWS)))
    try:
        async with BatchAgent.open(
            task="{input}",
            inputs=rows,
            backend=f"http://127.0.0.1:{port}/v1",
            model="m",
            max_inflight=32,
            sinks=[watch],
        ) as run:
            trouble = asyncio.create_task(outage())
            ok = sum([result.ok async for result in run.results()])
        back = await trouble
    finally:
        process.kill()
        process.wait()
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    first = min((at for at in answers if at >= back), default=back) - back
    return Outcome(ok, time.monotonic() - began, len(trials), min(gaps, default=0.0), first)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outages", description="A server that goes away.")
    parser.add_argument("--real", type=float, default=20.0, metavar="SECONDS", help="how long a real server is gone")
    real = parser.parse_args().real
    env = report.environment()
    measurements: list[dict[str, object]] = []
    rows: list[tuple[str, ...]] = []
    bars: list[report.Bar] = []
    for seconds in (5.0, 60.0, 600.0):
        for mode in MODES:
            name = f"{mode}, {seconds:g} s"
            mine, theirs = run_virtual(ours(Gone(mode, seconds))), run_virtual(loop(Gone(mode, seconds)))
            measurements.append({"outage": name, "ours": asdict(mine), "loop": asdict(theirs)})
            rows.append(_row(name, mine, theirs))
            bars += _bars(name, mine)
    ratio = run_virtual(refusal_for_load(5_000)) / run_virtual(refusal_for_load(None))
    measurements.append({"outage": "one 429 at 512 in flight", "wall_over_undisturbed": ratio})
    bars.append(report.Bar("one 429 at 512 in flight: wall over undisturbed", ratio, "<=", 1.1))
    if real:
        name, mine = f"killed, {real:g} s (real sockets)", asyncio.run(killed(real))
        measurements.append({"outage": name, "ours": asdict(mine)})
        rows.append(_row(name, mine, None))
        bars += _bars(name, mine)
    print(report.table(("outage", "ok", "ok, loop", "trials", "closest trials", "full speed after"), rows), "\n")
    return report.finish("outages", env, bars, measurements)


def _row(name: str, mine: Outcome, theirs: Outcome | None) -> tuple[str, ...]:
    loop_ok = f"{theirs.ok:,}" if theirs is not None else ""
    closest, regained = f"{mine.closest_trials_s:.2f} s", f"{mine.full_speed_after_s:.2f} s"
    return name, f"{mine.ok:,}", loop_ok, str(mine.trials), closest, regained


def _bars(name: str, mine: Outcome) -> list[report.Bar]:
    return [
        report.Bar(f"{name}: rows ok", mine.ok, ">=", ROWS),
        report.Bar(f"{name}: seconds from its return to full speed", mine.full_speed_after_s, "<=", 5),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""A jump of the wall clock ends no deadline."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from tests.serve.served import Client, chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.serve import clock as clock_module
from batch_agent.serve import server
from batch_agent.serve.clock import RATE, ServedClock
from batch_agent.testing import Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply

DAY = 86400.0
# A process whose wall clock is ahead by as many seconds as a file says.
JUMPING = """
import sys, time
from pathlib import Path
real, ahead = time.time, Path(sys.argv.pop(1))
time.time = lambda: real() + float(ahead.read_text())
from batch_agent.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Times:
    """The wall clock and real time of a test."""

    def __init__(self) -> None:
        self.wall, self.elapsed = 1_000_000.0, 5.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds

    def clock(self) -> ServedClock:
        return ServedClock(lambda: self.wall, lambda: self.elapsed)


def test_the_clock_is_the_wall_clock_and_follows_its_drift_at_once() -> None:
    times = Times()
    clock = times.clock()
    for _ in range(100):
        times.pass_by(10.0)
        times.wall += 0.1
        assert clock.now() == pytest.approx(times.wall)


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_jump_is_noticed_once_and_followed_slowly(jump: float, caplog: pytest.LogCaptureFixture) -> None:
    times = Times()
    clock = times.clock()
    times.wall += jump
    for _ in range(10):
        before = clock.now()
        times.pass_by(100.0)
        clock.look()
        assert clock.now() - before == pytest.approx(100.0 + (100.0 * RATE if jump > 0 else -100.0 * RATE))
    assert caplog.text.count("the wall clock has jumped") == 1
    times.pass_by(100 * DAY)
    assert clock.now() == pytest.approx(times.wall)


def test_a_jump_between_two_starts_is_noticed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times, boot = Times(), tmp_path / "boot"
    boot.write_text("this boot")
    monkeypatch.setattr(clock_module, "BOOT_ID", boot)
    before = ServedClock(lambda: times.wall, lambda: times.elapsed, tmp_path)
    before.save()
    times.pass_by(3600.0)
    times.wall += 30 * DAY
    after = ServedClock(lambda: times.wall, lambda: times.elapsed, tmp_path)
    assert after.now() == pytest.approx(before.now(), abs=3600 * RATE * 2) and "has jumped" in caplog.text
    boot.write_text("the next boot")  # real time before it is unknown
    assert ServedClock(lambda: times.wall, lambda: times.elapsed, tmp_path).now() == times.wall


async def test_a_jump_expires_no_batch_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.01)
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.01)
    times, gate = Times(), False

    def script(request: Request) -> ScriptedReply:
        return Say("done") if gate or "late" not in request.text else Hang()

    options: dict[str, Any] = {"now": lambda: times.wall, "elapsed": lambda: times.elapsed, "keep": DAY}
    async with backend(script) as model:
        async with serving(tmp_path, model, **options) as client:
            done = await client.wait((await client.create([chat("a")]))["id"])
            batch = await client.create([chat("b"), chat("late")])
            await model.wait_requests(3)
            times.wall += 40 * DAY
            while "the wall clock has jumped" not in caplog.text:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # several looks and sweeps
            assert (await client.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
            assert len((await client.outcomes(done))[0]) == 1
        gate = True
        times.wall -= 40 * DAY
        async with serving(tmp_path, model, **options) as client:
            assert (await client.wait(batch["id"]))["status"] == "completed"


async def test_a_server_whose_clock_jumps_keeps_its_batches_also_after_a_kill(tmp_path: Path) -> None:
    """A process of its own, whose wall clock is set two days ahead while it works, and again while it is away."""
    data, ahead, gate = tmp_path / "data", tmp_path / "ahead", asyncio.Event()
    ahead.write_text("0")

    async def script(request: Request) -> ScriptedReply:
        if "late" in request.text:
            await gate.wait()
        return Say("done")

    async with backend(script) as model, aiohttp.ClientSession() as session:
        command = ("serve", "--data", str(data), "--backend", model.backend_url, "--port", "0", "--reserve", "1K")
        batch: Any = None
        for jump in ("172800", "345600"):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", JUMPING, str(ahead), *command),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None and process.stderr is not None
            url = (await process.stdout.readline()).decode().strip()
            key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
            client = Client(url, key, session, cast("Any", None))
            if batch is None:
                batch = await client.create([chat("a"), chat("late")])
                await model.wait_requests(2)
            else:
                assert (await client.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
                gate.set()
                assert (await client.wait(batch["id"]))["status"] == "completed"
            if jump == "172800":
                while "clock.json" not in {path.name for path in data.iterdir()}:
                    await asyncio.sleep(0.02)
                ahead.write_text(jump)
                async with asyncio.timeout(20):
                    while b"the wall clock has jumped" not in await process.stderr.readline():
                        pass
                assert (await client.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
                ahead.write_text("345600")
            process.send_signal(signal.SIGKILL)
            await process.communicate()

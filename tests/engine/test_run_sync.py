"""``run_sync`` where a loop is already running, as in a notebook: a real process, interrupted by a real signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

import pytest

CELL = """
import asyncio, signal
from batch_agent import BatchAgent
from batch_agent.testing import Hang, ScriptedBackend

def script(request):
    print("asked", flush=True)
    return Hang()

async def cell():
    handler = signal.getsignal(signal.SIGINT)
    backend = ScriptedBackend(script)
    try:
        BatchAgent.run_sync(task="{input}", inputs=["a"], backend=backend, on_result=print)
    except KeyboardInterrupt:
        print("interrupted, in flight:", backend.inflight, flush=True)
    assert signal.getsignal(signal.SIGINT) == handler
    await asyncio.sleep(0)  # nothing of the interrupt is left for the next cell
    print("the next cell runs")

"""


@pytest.mark.parametrize("start", ["asyncio.run(cell())", "asyncio.new_event_loop().run_until_complete(cell())"])
async def test_the_first_interrupt_stops_the_run_and_gives_control_back(start: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", CELL + start, stdout=PIPE, stderr=PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):  # it would wait for ever
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert out.decode().splitlines() == ["interrupted, in flight: 0", "the next cell runs"], err.decode()
    assert process.returncode == 0

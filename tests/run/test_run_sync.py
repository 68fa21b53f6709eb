"""Ctrl-C in a program and in an interactive session: a real process, interrupted by a real signal."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE

import pytest
from tests.warm import start

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


SCRIPT = """
import asyncio, sys
from batch_agent import BatchAgent, Pipeline
from batch_agent.testing import Hang, Say, ScriptedBackend

def script(request):
    if "b" in request.text:
        print("asked", flush=True)
        return Hang()
    return Say("done")

options = dict(task="{input}", inputs=["a", "b"], backend=ScriptedBackend(script), max_inflight=1)

"""
ONE_LINE = "batch-agent: interrupted: 1 of 2 rows done. Nothing is recorded; with run_dir='DIR', resume=True the next"


async def interrupted(code: str) -> tuple[str, str, int | None]:
    """What a program says that is interrupted when it has said "asked"."""
    process = await start("-c", code, stdout=PIPE, stderr=PIPE)
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
    return out.decode(), err.decode(), process.returncode


@pytest.mark.parametrize("start", ["asyncio.run(cell())", "asyncio.new_event_loop().run_until_complete(cell())"])
async def test_the_first_interrupt_stops_the_run_and_gives_control_back(start: str) -> None:
    out, err, status = await interrupted(CELL + start)
    assert out.splitlines() == ["interrupted, in flight: 0", "the next cell runs"], err
    assert status == 0


@pytest.mark.parametrize(
    "code",
    [
        "BatchAgent.run_sync(**options)",
        "asyncio.run(BatchAgent.run(**options))",
        "asyncio.run(BatchAgent.run_with_reduce(reduce='all', **options))",
        "async def main():\n    async for _ in BatchAgent.stream(**options): pass\nasyncio.run(main())",
    ],
)
async def test_a_script_that_is_interrupted_ends_with_one_line_and_by_the_signal(code: str) -> None:
    out, err, status = await interrupted(SCRIPT + code)
    assert err.startswith(ONE_LINE.replace("1 of 2 rows", "1 row") if "reduce" in code else ONE_LINE)
    assert err.count("\n") == 1 and not out
    assert status == -signal.SIGINT


async def test_what_catches_the_interrupt_has_the_results() -> None:
    code = "try:\n    BatchAgent.run_sync(**options)\nexcept KeyboardInterrupt as error:\n    print(error.results)"
    out, err, status = await interrupted(SCRIPT + code)
    assert (out.strip(), err, status) == ("<Results: 2 rows, 1 ok, 1 failed (1 Interrupted)>", "", 0)


@pytest.mark.parametrize(
    "code",
    [
        "print(BatchAgent.run_sync(**options))",
        "async def cell(): print(BatchAgent.run_sync(**options))\nasyncio.run(cell())",
        "async def cell(): print(await BatchAgent.run(**options))\nasyncio.run(cell())",
    ],
)
async def test_an_interactive_session_keeps_the_rows_that_are_done(code: str) -> None:
    out, err, status = await interrupted(f"{SCRIPT}sys.ps1 = '>>> '\n{code}")
    assert (out.strip(), status) == ("<Results: 2 rows, 1 ok, 1 failed (1 Interrupted)>", 0), err
    assert err.startswith(ONE_LINE)

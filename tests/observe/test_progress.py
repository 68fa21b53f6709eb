"""When a run of a program is shown, and where: real processes on real pipes and terminals."""

import asyncio
import os
import pty
import threading
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from tests.warm import start

from batch_agent import BatchAgent
from batch_agent.testing import ScriptedBackend

PROGRAM = """
import asyncio, sys
from batch_agent import BatchAgent
from batch_agent.testing import Fail, Say, ScriptedBackend, run_virtual

def script(request):
    return Fail(400) if request.number == 1 else Say("done", latency=LATENCY)

def run(**more):
    backend = ScriptedBackend(script)
    return BatchAgent.run(task="{input}", inputs=["a", "b", "c"], backend=backend, max_inflight=1, **more)

"""
SHOWN = "3 rows in"


async def program(code: str, latency: float, **streams: Any) -> tuple[bytes, bytes]:
    """What a program writes to those of its streams that are pipes."""
    process = await start("-c", PROGRAM.replace("LATENCY", str(latency)) + code, **streams)
    async with asyncio.timeout(60):
        said = await process.communicate()
    assert not process.returncode
    return said


@contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal's end to write to; all that was written is there when it is closed."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:  # all the time: a terminal that nobody reads is soon full
        with suppress(OSError):  # nobody has the other end open any more
            while part := os.read(ours, 65536):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, written
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


async def on_terminal(code: str, latency: float = 1.0, *, piped: bool = False) -> tuple[str, str]:
    """What the terminal shows, and what comes out of standard output where that is a pipe."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with terminal() as (theirs, written):
        out = PIPE if piped else theirs
        said, _ = await program(code, latency, stdout=out, stderr=theirs, env={**environment, "TERM": "xterm"})
    return b"".join(written).decode(), said.decode()


async def test_a_terminal_shows_a_run_that_takes_longer_than_a_moment_and_its_summary() -> None:
    shown, _ = await on_terminal("run_virtual(run()); print('mine')")
    assert SHOWN in shown
    assert "failed   1 Rejected" in shown
    assert "mine" in shown


async def test_a_quick_run_is_not_shown_unless_somebody_asks() -> None:
    assert (await on_terminal("run_virtual(run())", 0))[0] == ""
    assert SHOWN in (await on_terminal("run_virtual(run(progress=True))", 0))[0]


async def test_false_shows_nothing_however_long_it_takes() -> None:
    assert (await on_terminal("run_virtual(run(progress=False))"))[0] == ""


async def test_run_sync_shows_it_too_also_in_a_thread_beside_a_loop() -> None:
    code = "async def cell(): BatchAgent.run_sync(task='x', inputs=['a'], backend=ScriptedBackend(), progress=True)\n"
    assert "1 row in" in (await on_terminal(code + "asyncio.run(cell())", 0))[0]


async def test_of_two_runs_at_once_one_has_the_terminal() -> None:
    shown, _ = await on_terminal("async def both(): await asyncio.gather(run(), run())\nrun_virtual(both())")
    assert shown.count(SHOWN) == 1


async def test_a_pipe_keeps_the_terminal_for_whoever_reads_it() -> None:
    shown, out = await on_terminal("run_virtual(run()); print('mine')", piped=True)
    assert (shown, out) == ("", "mine\n")


async def test_what_goes_to_a_pipe_goes_there_while_progress_is_asked_for() -> None:
    shown, out = await on_terminal("asyncio.run(run(progress=True, on_result=lambda _: print('mine')))", 0, piped=True)
    assert out == "mine\n" * 3
    assert SHOWN in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(("asked", "lines"), [("", 0), ("progress=True", 1)])
async def test_where_there_is_no_terminal_only_those_who_ask_get_lines(asked: str, lines: int) -> None:
    out, err = await program(f"run_virtual(run({asked})); print('mine')", 1.0, stdout=PIPE, stderr=PIPE)
    assert out == b"mine\n"
    assert err.decode().count(SHOWN) == lines


async def test_a_run_that_fails_before_any_result_ends_without_a_summary() -> None:
    code = "try: asyncio.run(run(max_cost=1))\nexcept ValueError as error: print(type(error).__name__)"
    shown, _ = await on_terminal(code, 0)
    assert shown.strip() == "SpecError"


async def test_a_test_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    await BatchAgent.run(task="x", inputs=["a"], backend=ScriptedBackend())
    assert capfd.readouterr() == ("", "")

"""When a run of a program is shown, and where: real processes on real pipes and terminals."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

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


def program(code: str, latency: float) -> list[str]:
    return [sys.executable, "-c", PROGRAM.replace("LATENCY", str(latency)) + code]


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


def on_terminal(code: str, latency: float = 1.0, *, piped: bool = False) -> tuple[str, str]:
    """What the terminal shows, and what comes out of standard output where that is a pipe."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with terminal() as (theirs, written):
        done = subprocess.run(
            program(code, latency),
            stdout=subprocess.PIPE if piped else theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm"},
            check=True,
            timeout=60,
        )
    return b"".join(written).decode(), (done.stdout or b"").decode()


def test_a_terminal_shows_a_run_that_takes_longer_than_a_moment_and_its_summary() -> None:
    shown, _ = on_terminal("run_virtual(run()); print('mine')")
    assert SHOWN in shown
    assert "failed   1 Rejected" in shown
    assert "mine" in shown


def test_a_quick_run_is_not_shown_unless_somebody_asks() -> None:
    assert on_terminal("run_virtual(run())", 0)[0] == ""
    assert SHOWN in on_terminal("run_virtual(run(progress=True))", 0)[0]


def test_false_shows_nothing_however_long_it_takes() -> None:
    assert on_terminal("run_virtual(run(progress=False))")[0] == ""


def test_run_sync_shows_it_too_also_in_a_thread_beside_a_loop() -> None:
    code = "async def cell(): BatchAgent.run_sync(task='x', inputs=['a'], backend=ScriptedBackend(), progress=True)\n"
    assert "1 row in" in on_terminal(code + "asyncio.run(cell())", 0)[0]


def test_of_two_runs_at_once_one_has_the_terminal() -> None:
    shown, _ = on_terminal("async def both(): await asyncio.gather(run(), run())\nrun_virtual(both())")
    assert shown.count(SHOWN) == 1


def test_a_pipe_keeps_the_terminal_for_whoever_reads_it() -> None:
    shown, out = on_terminal("run_virtual(run()); print('mine')", piped=True)
    assert (shown, out) == ("", "mine\n")


def test_what_goes_to_a_pipe_goes_there_while_progress_is_asked_for() -> None:
    shown, out = on_terminal("asyncio.run(run(progress=True, on_result=lambda _: print('mine')))", 0, piped=True)
    assert out == "mine\n" * 3
    assert SHOWN in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(("asked", "lines"), [("", 0), ("progress=True", 1)])
def test_where_there_is_no_terminal_only_those_who_ask_get_lines(asked: str, lines: int) -> None:
    command = program(f"run_virtual(run({asked})); print('mine')", 1.0)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "mine\n"
    assert done.stderr.count(SHOWN) == lines


def test_a_run_that_fails_before_any_result_ends_without_a_summary() -> None:
    code = "try: asyncio.run(run(max_cost=1))\nexcept ValueError as error: print(type(error).__name__)"
    shown, _ = on_terminal(code, 0)
    assert shown.strip() == "SpecError"


async def test_a_test_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    await BatchAgent.run(task="x", inputs=["a"], backend=ScriptedBackend())
    assert capfd.readouterr() == ("", "")

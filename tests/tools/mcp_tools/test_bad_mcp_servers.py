"""MCP servers that lie, die, hang and flood: each costs its own call, or is refused in words."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.tools.conftest import OpenPool
from tests.tools.tool_calls import call

from batch_agent.errors import SpecError, ToolFailed
from batch_agent.tools import Tool, resolve_tools

BAD_SERVER = str(Path(__file__).parent / "bad_server.py")


def bad(lie: str, **options: object) -> list[Tool]:
    return Tool.mcp([sys.executable, "-I", BAD_SERVER, lie], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("silent", "did not answer within 0.5 s"),
        ("bad schema", "'look' that cannot be offered: its schema cannot be used.*only="),
        ("remote schema", "may only refer to itself"),
        ("long name", "must have 1 to 64 characters"),
        ("no list", "does not list its tools"),
        ("endless list", "more than 100 pages"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_before_the_run(lie: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        bad(lie, connect_timeout=0.5 if lie == "silent" else 60)


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(SpecError, match="two tools are called 'a_b'"):
        resolve_tools([bad("same name")])


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("no result", "Error: look failed: the server's answer is not valid"),
        ("other output", "Error: look failed: the server's answer is not valid"),
        ("endless line", "Error: look failed: the server's answer is longer than 8,388,608 bytes"),
        ("silent call", "Error: look timed out: it ran longer than 0.5 s"),
        ("nothing", r"\(no output\)"),
        ("dies at the second start", "Error: the MCP server .*no second time"),
    ],
)
async def test_a_lie_costs_its_own_call(lie: str, words: str, notes: Path, open_pool: OpenPool, tmp_path: Path) -> None:
    async with open_pool(bad(lie, env={"NOTES": str(notes)}), timeout=0.5 if lie == "silent call" else 30) as pool:
        outcome = await pool.start(call("look", a=1)).wait()
        assert re.match(words, outcome.text, re.DOTALL), outcome.text


def test_a_server_that_keeps_failing_is_started_ever_less_often() -> None:
    from batch_agent.tools.mcp.connection import LONGEST_PAUSE, Restarts

    restarts = Restarts()
    assert restarts.pause(0.0) == 0.0
    restarts.answered()
    pauses = [restarts.pause(100.0 * number) for number in range(1, 4)]
    assert pauses == [0.0, 0.0, 0.0], "nobody waits for a server that failed long ago"
    now, waits = 1000.0, []
    restarts.answered()
    with pytest.raises(ToolFailed, match="failed 5 times in a row, and is not started again for"):
        while True:
            waits.append(restarts.pause(now))
            now += waits[-1]
    assert waits[0] == 0.0 and waits[1:] == sorted(waits[1:]) and len(waits) > 3
    assert restarts.pause(now + LONGEST_PAUSE) == 0.0

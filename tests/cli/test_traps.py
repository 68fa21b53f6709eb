"""Mistakes and odd tools that once changed a run without a word."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commandline import batch_agent

from batch_agent.testing import CallTools, Say, ScriptedServer, ToolUse
from batch_agent.testing.replies import ScriptedReply
from batch_agent.testing.wire import Request

MOVES = """
import os

async def move(place: str) -> str:
    os.chdir(place)
    return "moved"
"""


def moves_once(elsewhere: Path) -> object:
    def reply(request: Request) -> ScriptedReply:
        used = any(message["role"] == "tool" for message in request.messages)
        return Say("done") if used else CallTools(ToolUse("move", {"place": str(elsewhere)}))

    return reply


async def test_a_tool_that_changes_the_working_directory_changes_no_file_of_the_run(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for directory in (home, elsewhere, home / "texts"):
        directory.mkdir()
    (home / "moves.py").write_text(MOVES)
    for name in "abc":
        (home / "texts" / f"{name}.txt").write_text(f"the text {name}")
    async with ScriptedServer(moves_once(elsewhere)) as server:  # type: ignore[arg-type]
        where = ["--backend", server.backend_url, "--model", "m", "--set", "max_agents=1"]
        given = ["--task", "Read {text}", "texts", "--tool", "moves:move", "--run-dir", "runs/r", "--output", "out.csv"]
        outcome = await batch_agent(home, "run", *given, *where, "--events", "events.jsonl")
    assert outcome.code == 0, outcome.stderr
    assert "batch-agent show runs/r" in outcome.stderr and "results  out.csv" in outcome.stderr
    sent = [request.messages[-1]["content"] for request in server.requests if request.messages[-1]["role"] == "user"]
    assert sorted(sent) == [f"Read the text {name}" for name in "abc"]
    assert (home / "out.csv").read_text().count("\n") == 4
    assert list(elsewhere.iterdir()) == []
    facts = json.loads((home / "runs" / "r" / "run.json").read_text())
    assert facts["state"] == "complete"

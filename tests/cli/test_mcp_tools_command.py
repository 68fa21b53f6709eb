"""MCP servers in spec files and on the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.commandline import batch_agent, rows, serving, started
from tests.tools.mcp_tools.conftest import SERVERS, needs_mcp
from tests.tools.mcp_tools.test_bad_mcp_servers import BAD_SERVER

from batch_agent.cli.spec.arguments import add_run_arguments
from batch_agent.cli.spec.load import command_of
from batch_agent.testing import CallTools, Request, Say, ToolUse
from batch_agent.testing.replies import Scripted

pytestmark = needs_mcp
SERVER = f"stdio:{sys.executable} -I {BAD_SERVER} fine"


async def test_the_tools_of_a_spec_are_listed_with_their_schemas(tmp_path: Path) -> None:
    spec = {
        "task": "{a}",
        "tools": ["read_file", f"mcp:{SERVER}", {"mcp": SERVER, "prefix": "other_", "env": {"X": "${HOME}"}}],
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    outcome = await batch_agent(tmp_path, "tools", "spec.json", "--json")
    assert outcome.code == 0, outcome.stderr
    listed = {tool["name"]: tool for tool in json.loads(outcome.stdout)}
    assert list(listed) == ["read_file", "look", "other_look"]
    assert listed["look"]["parameters"] == {"type": "object", "properties": {"a": {"type": "integer"}}}

    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"bad": {"command": "no-such-command"}}}))
    missing = await batch_agent(tmp_path, "tools", "--mcp", "mcp.json")
    assert missing.code == 1 and "no command 'no-such-command'" in missing.stderr
    (tmp_path / "spec.json").write_text(json.dumps({"tools": [{"mcp": SERVER, "onlyy": ["look"]}]}))
    wrong = await batch_agent(tmp_path, "tools", "spec.json")
    assert wrong.code == 1 and "there is no option 'onlyy'" in wrong.stderr


async def test_agents_of_a_run_call_the_tools_of_a_server(tmp_path: Path) -> None:
    def script(request: Request) -> Scripted:
        if not request.turn:
            return CallTools(ToolUse("look", {"a": 1}))
        return Say(str(request.messages[-1]["content"]))

    rows(tmp_path, {"input": "one"}, {"input": "two"})
    async with serving(tmp_path, script):
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--mcp", SERVER)
        assert outcome.code == 0, outcome.stderr
        assert [result["output"] for result in outcome.results] == ["fine", "fine"]
        # The server's address is part of the recorded command, so that the run can be resumed.
        [run_dir] = (tmp_path / "runs").iterdir()
        again = await batch_agent(tmp_path, "resume", str(run_dir))
    assert again.code == 0 and "is complete" in again.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server ends when its input does")
async def test_a_server_dies_with_a_run_that_is_killed(tmp_path: Path) -> None:
    seen: list[str] = []

    def script(request: Request) -> Scripted:
        if not request.turn:
            return CallTools(ToolUse("process_ids"))
        seen.append(str(request.messages[-1]["content"]))
        return CallTools(ToolUse("sleep_long", {"label": "a"}))

    server = [sys.executable, SERVERS, "stdio"]
    tools = {"mcp": server, "only": ["process_ids", "sleep_long"], "env": {"NOTES": str(tmp_path / "notes")}}
    (tmp_path / "notes").touch()
    rows(tmp_path, {"input": "one"})
    async with serving(tmp_path, script, f"tools: {json.dumps([tools])}\n"):
        async with started(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--no-run-dir") as process:
            await until(lambda: "began a" in (tmp_path / "notes").read_text())
            process.send_signal(signal.SIGKILL)
            await process.wait()
        for server in map(int, seen[0].split()):
            await until(lambda server=server: not is_alive(server))


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what other processes do."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def test_the_url_of_a_server_that_may_hold_a_key_is_not_recorded() -> None:
    def kept(*arguments: str) -> dict[str, object]:
        parser = argparse.ArgumentParser()
        add_run_arguments(parser)
        return dict(command_of(parser.parse_args(["spec.yaml", *arguments])))

    harmless = kept("--tool", "read_file", "--mcp", "stdio:npx -y @scope/server")
    assert harmless["tool"] == ["read_file", "mcp:stdio:npx -y @scope/server"]
    assert kept("--mcp", "https://host/mcp?key=hush")["tool"] is None
    assert kept("--mcp", "https://host/mcp?key=hush")["left_out"] == ["tool"]

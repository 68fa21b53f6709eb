"""Each recipe of examples/agents with the real framework or command line: run, killed in the middle, resumed.

``python -m tests.real agents`` installs them and runs this. The model is a scripted server.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

PROGRAMS = os.environ.get("BATCH_AGENT_TEST_AGENTS", "")
PYTHON = os.environ.get("BATCH_AGENT_TEST_AGENTS_PYTHON", "")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not PROGRAMS, reason="python -m tests.real agents installs them")]
RECIPES = Path(__file__).parents[2] / "examples" / "agents"
BEING_WRITTEN = 4  # answers that the server has sent, and that are not on disk when the program is killed
FRAMEWORKS = ("pydantic_ai", "openai_agents", "langgraph")
OWN = ("a_function", "agents_of_agents")
COMMAND_LINES = ("claude-code", "codex", "opencode")


def packer(request: Request) -> Say:
    """Looks the weather up, then answers; slowly enough to be killed in between."""
    said = request.conversation()
    city = next(word for word in str(said).split() if word.rstrip("'\",)") in CITIES).rstrip("'\",)")
    results = [str(message.content) for message in said if message.role == "tool"]
    if not results:
        return CallTools(ToolUse("weather", {"city": city}, id=f"call_{city}"), latency=0.05)
    return Say(f"Something for {results[-1]}.", latency=0.05)


CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Cork", "Bern", "Nice", "Graz", "Baku", "Doha"]


def reviewer(request: Request) -> Say:
    task = next(line for line in str(request.body).split("Read ") if line.startswith("file_"))
    return Say(f"The fault of {task.split()[0]} is its name.", latency=0.3)


def asked(request: Request) -> str:
    """What was asked, without what a program says of its directory and itself."""
    said = [(message.role, message.content, message.tool_calls) for message in request.conversation()]
    task = re.search(r"Read file_\d+", str(said))
    return task.group() if task else str(said)


async def run(
    folder: Path, command: list[str], server: ScriptedServer, kill_after: int | None = None
) -> tuple[str, int]:
    """What the program prints, and the requests in flight when it was killed: once the server has had so many."""
    folder.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ending = asyncio.ensure_future(process.communicate())
    while kill_after is not None and server.received < kill_after and not ending.done():
        await asyncio.sleep(0.01)
    in_flight = server.inflight
    if kill_after is not None:
        process.send_signal(signal.SIGKILL)
    out, err = await ending
    assert kill_after is not None or process.returncode == 0, err.decode()[-3000:]
    return "\n".join(sorted(out.decode().splitlines())), in_flight


async def undisturbed_and_killed(tmp_path: Path, command: list[str], server: ScriptedServer) -> None:
    whole, _ = await run(tmp_path / "whole", command, server)
    asked_for = len(server.requests)
    _, in_flight = await run(tmp_path / "killed", command, server, kill_after=asked_for + asked_for // 2)
    await server.wait_idle()
    again, _ = await run(tmp_path / "killed", command, server)
    assert again == whole
    assert "None" not in whole and "Error" not in whole
    assert len(whole.splitlines()) == 20
    more = Counter(map(asked, server.requests[asked_for:])) - Counter(map(asked, server.requests[:asked_for]))
    assert sum(more.values()) <= in_flight + BEING_WRITTEN, more


@pytest.mark.parametrize("form", ["whole", "streamed"])
@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_a_framework(name: str, form: str, tmp_path: Path) -> None:
    async with ScriptedServer(packer, models=["m"]) as server:
        command = [PYTHON, str(RECIPES / f"with_{name}.py"), server.backend_url]
        await undisturbed_and_killed(tmp_path, [*command, *(["--stream"] if form == "streamed" else [])], server)


@pytest.mark.parametrize("name", OWN)
async def test_a_program_without_a_framework(name: str, tmp_path: Path) -> None:
    async with ScriptedServer(packer, models=["m"]) as server:
        await undisturbed_and_killed(tmp_path, [PYTHON, str(RECIPES / f"with_{name}.py"), server.backend_url], server)


@pytest.mark.parametrize("name", COMMAND_LINES)
async def test_a_command_line(name: str, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for number in range(20):
        (repository / f"file_{number}.txt").write_text(f"{number}\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=repository, check=True)
    async with ScriptedServer(reviewer, models=["m"]) as server:
        recipe = str(RECIPES / "with_command_line_agents.py")
        program = str(Path(PROGRAMS, name.split("-")[0]))
        command = [PYTHON, recipe, name, str(repository), server.backend_url, program]
        await undisturbed_and_killed(tmp_path, command, server)
    listed = subprocess.run(["git", "worktree", "prune", "-v"], cwd=repository, capture_output=True, text=True)
    assert subprocess.run(["git", "status", "--short"], cwd=repository, capture_output=True).stdout == b"", listed

"""The examples run, against a server that says the least a well-behaved model could say."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from batch_agent.testing import ScriptedServer

ROOT = Path(__file__).parent.parent


async def run(command: list[str], server: ScriptedServer) -> tuple[int | None, str, str]:
    environment = os.environ | {"BATCH_AGENT_BACKEND": server.backend_url}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("name", ["review_files.py", "stream_results.py", "test_your_agents.py"])
async def test_an_example_runs(name: str) -> None:
    async with ScriptedServer(models=["tiny"]) as server:
        status, out, err = await run([sys.executable, f"examples/{name}"], server)
    assert (status, err) == (0, "")
    assert out


async def test_the_triage_example_gives_thirty_rows(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "batch_agent", "run", "examples/triage/triage.yaml", "--output", str(output)]
    command += ["--run-dir", str(tmp_path / "run")]
    async with ScriptedServer(models=["tiny"]) as server:
        status, out, err = await run(command, server)
    assert (status, out) == (0, ""), err
    assert len(output.read_text().splitlines()) == 30
    assert "30" in err

"""The examples run, against a server that says the least a well-behaved model could say."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from batch_agent.testing import ScriptedServer

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

MODEL = "gpt-4.1-mini"  # the one that an example names; the others take what there is


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with the examples, in which they may leave what they make."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


async def run(command: list[str], server: ScriptedServer, place: Path) -> tuple[int | None, str, str]:
    environment = os.environ | {
        "BATCH_AGENT_BACKEND": server.backend_url,
        "BATCH_AGENT_CACHE": str(place / "cache"),
    }
    process = await asyncio.create_subprocess_exec(
        *command, cwd=place, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_runs(name: str, workplace: Path) -> None:
    async with ScriptedServer(models=[MODEL]) as server:
        status, out, err = await run([sys.executable, f"examples/{name}"], server, workplace)
    assert (status, err) == (0, "")
    assert out


async def test_an_example_that_is_recorded_asks_nothing_twice(workplace: Path) -> None:
    async with ScriptedServer(models=[MODEL]) as server:
        await run([sys.executable, "examples/overnight.py"], server, workplace)
        asked = len(server.requests)
        _, out, _ = await run([sys.executable, "examples/overnight.py"], server, workplace)
    assert asked == len(server.requests) == 12
    assert out.splitlines()[-1] == "12 rows, 0 failed, $0.0000 spent in this session"


async def test_the_triage_example_gives_thirty_rows(workplace: Path) -> None:
    command = [sys.executable, "-m", "batch_agent", "run", "examples/triage/triage.yaml", "--output", "out.jsonl"]
    async with ScriptedServer(models=[MODEL]) as server:
        status, out, err = await run([*command, "--run-dir", "run"], server, workplace)
    assert (status, out) == (0, ""), err
    assert len((workplace / "out.jsonl").read_text().splitlines()) == 30
    assert "30" in err

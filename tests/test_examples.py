"""The examples run, against a server that says the least a well-behaved model could say."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from pydantic import JsonValue

from batch_agent.testing import Request, Say, ScriptedServer

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


def plays_along(request: Request) -> Say:
    """A model that has something to say to the examples of pipelines."""
    answers: dict[str, JsonValue] = {
        "Review": {"bugs": [{"line": 1, "severity": "high", "what": "it is wrong"}]},
        "Here are the bug reports": {"worst_file": "login.py", "advice": "Bind parameters."},
        "Write a short survey": {"survey": "Instruments drift. " * 5},
        "Write 2 questions": {"items": ["What is it?", "What is it for?"]},
        "Research this question": {"answer": "A thing.", "sources": ["https://example.org"]},
        "Write a survey of": {"title": "Things", "markdown": "They are things."},
    }
    said = next((answer for start, answer in answers.items() if request.text.startswith(start)), None)
    return Say(json.dumps(said if said is not None else {"summary": "It drifts. " * 14}))


async def test_the_code_review_example_sums_up_its_reports(workplace: Path) -> None:
    async with ScriptedServer(plays_along, models=["tiny"]) as server:
        status, out, err = await run([sys.executable, "examples/code_review/code_review.py"], server, workplace)
    assert (status, err) == (0, "")
    assert "login.py: 1 bugs" in out and "Bind parameters." in out and "(3 of 3 reports were summed up)" in out
    assert len(server.requests) == 4


async def test_the_papers_example_makes_one_survey_by_a_tree(workplace: Path, tmp_path: Path) -> None:
    output = tmp_path / "survey.jsonl"
    command = [sys.executable, "-m", "batch_agent", "run", "examples/papers/papers.yaml", "--output", str(output)]
    command += ["--run-dir", str(tmp_path / "run")]
    async with ScriptedServer(plays_along, models=["tiny"]) as server:
        status, _, err = await run(command, server, workplace)
    assert status == 0, err
    [line] = output.read_text().splitlines()
    assert json.loads(line)["output"] == {"survey": "Instruments drift. " * 5}
    assert len((tmp_path / "run" / "read" / "results.jsonl").read_text().splitlines()) == 12
    assert len(server.requests) > 12 + 2


async def test_the_research_example_writes_a_survey(workplace: Path, tmp_path: Path) -> None:
    output = tmp_path / "survey.md"
    command = [sys.executable, "examples/auto_research.py", "--topic", "things", "--n-questions", "2"]
    async with ScriptedServer(plays_along, models=["tiny"]) as server:
        command += ["--backend", server.backend_url, "--output", str(output)]
        status, _, err = await run(command, server, workplace)
    assert (status, err) == (0, "")
    assert output.read_text() == "# Things\n\nThey are things.\n\n## Sources\n\n- https://example.org\n"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100

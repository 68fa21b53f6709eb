"""The examples run, against a server that says the least a well-behaved model could say."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import JsonValue
from tests.cli.commandline import batch_agent, program

from batch_agent.testing import Request, Say, ScriptedServer
from batch_agent.testing.wire import Script

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

MODEL = "gpt-4.1-mini"  # the one that an example names; the others take what there is


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with the examples, in which they may leave what they make."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "cache"))


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, script: Script | None = None) -> AsyncIterator[ScriptedServer]:
    """A server that runs use which name none."""
    async with ScriptedServer(script, models=[MODEL]) as server:
        monkeypatch.setenv("BATCH_AGENT_BACKEND", server.backend_url)
        yield server


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_runs(name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch):
        status, out, err = await program(workplace, f"examples/{name}")
    err = "".join(line for line in err.splitlines() if "reports no log-probabilities" not in line)
    assert (status, err) == (0, "")
    assert out


async def test_an_example_that_is_recorded_asks_nothing_twice(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        await program(workplace, "examples/overnight.py")
        asked = len(server.requests)
        _, out, _ = await program(workplace, "examples/overnight.py")
    assert asked == len(server.requests) == 12
    assert out.splitlines()[-1] == "12 rows, 0 failed, $0.0000 spent in this session"


async def test_the_triage_example_gives_thirty_rows(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch):
        command = ("run", "examples/triage/triage.yaml", "--output", "out.jsonl", "--run-dir", "run")
        status, out, err = await batch_agent(workplace, *command)
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


async def test_the_code_review_example_sums_up_its_reports(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, plays_along) as server:
        status, out, err = await program(workplace, "examples/code_review/code_review.py")
    assert (status, err) == (0, "")
    assert "login.py: 1 bugs" in out and "Bind parameters." in out and "(3 of 3 reports were summed up)" in out
    assert len(server.requests) == 4


async def test_the_papers_example_makes_one_survey_by_a_tree(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("run", "examples/papers/papers.yaml", "--output", "survey.jsonl", "--run-dir", "run")
    async with serving(monkeypatch, plays_along) as server:
        status, _, err = await batch_agent(workplace, *command)
    assert status == 0, err
    [line] = (workplace / "survey.jsonl").read_text().splitlines()
    assert json.loads(line)["output"] == {"survey": "Instruments drift. " * 5}
    assert len((workplace / "run" / "read" / "results.jsonl").read_text().splitlines()) == 12
    assert len(server.requests) > 12 + 2


async def test_the_research_example_writes_a_survey(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--topic", "things", "--n-questions", "2", "--output", "survey.md")
    async with serving(monkeypatch, plays_along) as server:
        example = "examples/auto_research.py"
        status, _, err = await program(workplace, example, *arguments, "--backend", server.backend_url)
    assert (status, err) == (0, "")
    survey = (workplace / "survey.md").read_text()
    assert survey == "# Things\n\nThey are things.\n\n## Sources\n\n- https://example.org\n"


def test_an_example_is_short() -> None:
    sizes = {path.name: path.read_text().count("\n") for path in (ROOT / "examples").rglob("*.py")}
    assert {name: lines for name, lines in sizes.items() if lines >= 100} == {}

"""A pipeline's run directory, as the commands that read one see it: the rows of its stages, not its own row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from batch_agent import Pipeline
from batch_agent.cli.main import main
from batch_agent.testing import Fail, Request, Say, ScriptedBackend

ROWS = [{"id": "a", "text": "one"}, {"id": "b", "text": "broken"}, {"id": "c", "text": "three"}]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def answer(request: Request) -> Say | Fail:
    if request.text in ("Read broken", "Judge said Read three"):
        return Fail(400)
    return Say(f"said {request.text}")


@pytest.fixture
async def recorded() -> Path:
    """Three rows are read and one fails; two are judged and one fails; one reduction."""
    pipeline = Pipeline(ROWS).map(name="read", task="Read {text}").map(name="judge", task="Judge {input}")
    backend = ScriptedBackend(answer)
    await pipeline.reduce("Sum up {n}").run(backend=backend, model="m", run_dir="runs/p", max_retries=0)
    return Path("runs/p")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_status_sums_the_stages_and_has_a_line_for_each(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "status", str(recorded))
    assert "rows     6 of 6 done: 4 ok, 2 failed" in text
    assert "stages   read    3 of 3 done: 2 ok, 1 failed" in text and "judge   2 of 2 done: 1 ok, 1 failed" in text
    status = json.loads(shown(capsys, "status", str(recorded), "--json"))
    assert (status["rows"]["done"], status["rows"]["total"]) == (6, 6)
    assert [(each["name"], each["rows"]["failed"]) for each in status["stages"]] == [
        ("read", 1),
        ("judge", 1),
        ("reduce", 0),
    ]
    assert sum(each["tokens"] for each in status["stages"]) == status["tokens"]


def test_a_stage_that_has_not_begun_is_named_and_the_total_is_unknown(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "reduce" / "run.json").unlink()
    text = shown(capsys, "status", str(recorded))
    assert "rows     5 done: 3 ok, 2 failed" in text and "reduce  not begun" in text


def test_runs_lists_a_pipeline_with_the_rows_of_its_stages(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "runs/p  complete  6/6   2" in shown(capsys, "runs")

"""The score on the page: its numbers, the rows behind a cell of the matrix, and the gold of a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.view.test_view_server import page_of

from batch_agent import BatchAgent, Pipeline
from batch_agent.record.reader import open_run
from batch_agent.testing import Request, Say, ScriptedBackend
from batch_agent.view.report import report_html

MOODS = {"mood": "angry|calm"}


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def mood(request: Request) -> Say:
    return Say("short" if "Sum up" in str(request.messages) else '{"mood": "calm"}')


def rows() -> list[dict[str, Any]]:
    return [{"id": f"r{row}", "text": f"text {row}", "label": "calm" if row % 4 else "angry"} for row in range(20)]


async def test_the_page_has_the_score_and_the_rows_of_each_cell_of_the_matrix(tmp_path: Path) -> None:
    await BatchAgent.run(
        task="Mood of {text}",
        inputs=rows(),
        output_schema=MOODS,
        gold="label",
        backend=ScriptedBackend(mood),
        run_dir=tmp_path / "run",
    )
    async with page_of(tmp_path / "run") as page:
        await page.rows(run="run")
        score = (await page.get("run", run="run"))["score"]
        assert score["fields"]["mood"]["confusion"] == {"angry": {"calm": 5}, "calm": {"calm": 15}}
        cell = json.dumps(["mood", "angry", "calm"])
        found = await page.rows(run="run", cell=cell)
        assert [row["index"] for row in found["rows"]] == [0, 4, 8, 12, 16]
        assert found["rows"][0]["gold"] == {"mood": "angry"}
        assert found["rows"][0]["right"] == {"mood": False}
        assert (await page.rows(run="run", state="wrong"))["total"] == 5
        assert (await page.rows(run="run", cell=json.dumps(["mood", "calm", "angry"])))["total"] == 0
        assert (await page.rows(run="run", cell="no JSON"))["total"] == 0
        row = await page.get("row", run="run", row="4")
        assert row["gold"] == {"mood": "angry"}
        assert "label" not in row["record"]["input"]
    with open_run(str(tmp_path / "run")) as run:
        html, _ = report_html([run], "all")
    assert b'"confusion":{"angry":{"calm":5}' in html
    assert b'"gold":{"mood":"angry"}' in html


async def test_the_page_of_a_pipeline_has_the_score_of_its_last_stage(tmp_path: Path) -> None:
    first = Pipeline(rows()).map(name="sum", task="Sum up {text}")
    pipeline = first.map(name="mood", task="Mood of {input}", output_schema=MOODS)
    await pipeline.run(backend=ScriptedBackend(mood), gold="label", run_dir=tmp_path / "run")
    async with page_of(tmp_path / "run") as page:
        whole = await page.get("run", run="run")
        assert whole["score"]["fields"]["mood"]["right"] == 15
        assert whole["answers"] == "mood"
        found = await page.rows(run="run/mood", state="wrong")
        assert found["total"] == 5
        assert (await page.rows(run="run/sum", state="wrong"))["total"] == 0


async def test_a_run_without_gold_has_no_score(tmp_path: Path) -> None:
    await BatchAgent.run(task="{text}", inputs=rows(), backend=ScriptedBackend(mood), run_dir=tmp_path / "run")
    async with page_of(tmp_path / "run") as page:
        assert (await page.get("run", run="run"))["score"] is None
        assert "gold" not in (await page.rows(run="run"))["rows"][0]

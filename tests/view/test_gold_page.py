"""The score on the page: its numbers, the rows behind a cell of the matrix, and the gold of a row."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
from tests.view.browser import MISSING, PROGRAM, chromium
from tests.view.test_view_server import page_of

from batch_agent import BatchAgent, Pipeline
from batch_agent.messages import TokenChance
from batch_agent.record.reader import open_run
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, ScriptedServer
from batch_agent.view.report import report_html

MOODS = {"mood": "angry|calm"}


pytestmark = pytest.mark.usefixtures("state")


def mood(request: Request) -> Say:
    return Say("short" if "Sum up" in str(request.messages) else '{"mood": "calm"}')


def rows() -> list[dict[str, Any]]:
    return [
        {"id": f"r{row}", "text": f"text {row}", "label": "calm" if row % 4 else "angry", "half": row // 10}
        for row in range(20)
    ]


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


async def test_the_rows_of_a_cell_are_those_that_the_matrix_counts(tmp_path: Path) -> None:
    """Answers that are no class, failed rows, and examples in the prompt."""

    def said(request: Request) -> Say | Fail:
        number = int(request.text.split()[-1])
        return Fail(400) if number == 5 else Say(f'{{"mood": "{"tired" if number in (4, 6) else "calm"}"}}')

    await BatchAgent.run(
        task="{text}",
        inputs=rows(),
        output_schema={"mood": "text"},
        gold="label",
        examples=[({"text": "text 8"}, {"mood": "angry"})],
        max_retries=0,
        backend=ScriptedBackend(said),
        run_dir=tmp_path / "run",
    )
    async with page_of(tmp_path / "run") as page:
        await page.rows(run="run")
        score = (await page.get("run", run="run"))["score"]
        confusion = score["fields"]["mood"]["confusion"]
        assert confusion == {"angry": {"calm": 3, "(other)": 1}, "calm": {"calm": 13, "(other)": 1, "(failed)": 1}}
        assert score["excluded"] == 1
        for gold, counts in confusion.items():
            for answer, count in counts.items():
                assert (await page.rows(run="run", cell=json.dumps(["mood", gold, answer])))["total"] == count
        assert (await page.rows(run="run", state="wrong"))["total"] == 6
        assert "gold" not in await page.get("row", run="run", row="8")


@pytest.mark.real
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
@pytest.mark.parametrize("place", ["page", "report"])
async def test_people_see_the_score_click_on_the_matrix_and_sort_by_doubt(tmp_path: Path, place: str) -> None:
    def said(request: Request) -> Say:
        chance = 0.5 + int(request.text.split()[-1]) / 50
        parts = ['{"mood": "', "calm", '"}']
        return Say("".join(parts), tokens=[TokenChance(part.encode(), log(chance)) for part in parts])

    async with ScriptedServer(said, models=["m"]) as server:
        await BatchAgent.run(
            task="{text}",
            inputs=rows(),
            output_schema=MOODS,
            gold="label",
            by="half",
            doubt=True,
            backend=server.backend_url,
            model="m",
            run_dir=tmp_path / "run",
        )
    async with page_of(tmp_path / "run") as viewer, chromium() as page:
        await page.size(1360, 1200)
        base = f"{viewer.base}/?token={viewer.token}"
        if place == "report":
            with open_run(str(tmp_path / "run")) as run:
                (tmp_path / "run.html").write_bytes(report_html([run], "all")[0])
            base = (tmp_path / "run.html").as_uri()
        await page.goto(f"{base}#/run/run")
        await page.until("document.querySelector('.matrix')")
        line = "mood 0.75 15 of 20 0.54 0.50\u20130.92 0.75 1.00"  # bounds are rounded away from what was measured
        await page.until(f"document.body.innerText.replace(/\\s+/g, ' ').includes({json.dumps(line)})")
        await page.ask("document.querySelector('.matrix td.bad a').click()")
        await page.until("document.querySelectorAll('tbody tr').length === 5")
        assert "mood: gold angry, answer calm" in await page.text()
        await page.ask("location.hash = '/run/run/rows?q=doubt:>0.4'")
        found = "[...document.querySelectorAll('tbody tr td:nth-child(2)')].map((each) => each.innerText).join(' ')"
        await page.until(f"{found} === 'r0 r1 r2 r3 r4'")
        await page.ask("location.hash = '/run/run/rows'")
        await page.until("document.querySelectorAll('tbody tr').length === 20")
        heading = "[...document.querySelectorAll('th')].find((each) => each.innerText.startsWith('doubt'))"
        await page.ask(f"{heading}.click()")
        await page.until(f"{heading}.innerText.includes('↓')")
        first = "document.querySelector('tbody tr').innerText"
        await page.until(f"{first}.includes('r0') && {first}.includes('0.50')")
        await page.ask("location.hash = '/run/run/row/4'")
        await page.until("document.body.innerText.includes('Votes and doubt')")
        assert page.problems == []


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

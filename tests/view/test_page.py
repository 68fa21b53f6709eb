"""The page in a real browser: what people see of a run, live and afterwards."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.view.browser import MISSING, PROGRAM, Page, chromium
from tests.view.test_view_server import page_of
from tests.view.world import recorded, triage

from batch_agent import BatchAgent, Pipeline, Tool
from batch_agent.cli.main import main
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ScriptedServer, ToolUse

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason=MISSING), pytest.mark.real]
thorough = pytest.mark.skipif("BATCH_AGENT_TEST_VIEW" not in os.environ, reason="it takes long: make test-view runs it")


@asynccontextmanager
async def opened(*paths: Path, place: str = "") -> AsyncIterator[Page]:
    async with page_of(*paths) as server, chromium() as page:
        await page.size(1360, 900)
        await page.goto(f"{server.base}/?token={server.token}#{place}")
        yield page
        assert page.problems == []
        assert [address for address in page.requests if not address.startswith((server.base, "data:", "about:"))] == []


@thorough
async def test_a_live_run_of_200_rows_is_followed_filtered_and_steered(tmp_path: Path) -> None:
    async with triage(tmp_path / "live", 200, pace=0.2, max_inflight=8) as run:

        async def take() -> int:
            return len([result async for result in run.results()])

        taking = asyncio.create_task(take())
        async with opened(tmp_path / "live", place="/run/live") as page:
            await page.until("document.querySelector('.state.live')")
            await page.until("document.body.innerText.includes('Running rows')")
            await page.ask("location.hash = '/run/live/control'")
            await page.until("[...document.querySelectorAll('button')].find((b) => b.innerText === 'Pause')")
            await page.ask("[...document.querySelectorAll('button')].find((b) => b.innerText === 'Pause').click()")
            await page.until("document.getElementById('state').innerText === 'paused'")
            done = run.statistics().done
            assert done < 200
            await page.ask("[...document.querySelectorAll('button')].find((b) => b.innerText === 'Resume').click()")
            await page.ask("document.querySelector('input.count').value = 48")
            await page.ask("[...document.querySelectorAll('button')].find((b) => b.innerText === 'Resize').click()")
            await page.ask("location.hash = '/run/live/rows'")
            assert await taking == 200
            await page.until("document.getElementById('state').innerText === 'complete'")
            await page.until("document.body.innerText.includes('100 of 200')")
            await page.ask(
                "[...document.querySelectorAll('.choice button')].find((b) => b.innerText === 'failed').click()"
            )
            await page.until("document.body.innerText.includes('1 of 1')")


async def test_the_keyboard_finds_and_opens_a_row_and_comes_back(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run")
    async with opened(run, place="/run/run/rows") as page:
        await page.until("document.querySelectorAll('tbody tr').length === 60")
        await page.press("/")
        await page.until("document.activeElement.type === 'search'")
        for letter in "kettle":
            await page.press(letter)
        await page.until("document.querySelectorAll('tbody tr').length === 10")
        await page.press("Escape")
        await page.press("j")
        await page.press("j")
        await page.press("Enter")
        await page.until("location.hash.endsWith('/row/10')")
        await page.until("document.querySelector('.call')")
        await page.press("j")
        await page.until("location.hash.endsWith('/row/11')")
        await page.press("Escape")
        await page.until("location.hash.endsWith('/row/10')")


async def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", 12)
    async with opened(run, place="/run/run/row/5") as page:
        await page.until("document.querySelectorAll('.m-turn').length >= 2")
        shown = await page.text()
        assert "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>" in shown
        assert "[click](javascript:alert(1))" in shown and "\\e[31m" in shown and "\\u202e" in shown
        for place in ("rows", "timeline", "overview"):
            await page.ask(f"location.hash = '/run/run/{place}'")
            await page.until(f"document.querySelector('.tabs a.on').innerText.toLowerCase() === '{place}'")
        assert await page.ask("window.hacked") is None
        assert await page.ask("document.querySelectorAll('a[href^=javascript], #page script').length") == 0


HOLD = """(() => {
  const fetched = window.fetch, held = new Promise((free) => { window.free = free; });
  window.fetch = async (address) => { if (address.startsWith("/api/run?")) await held; return fetched(address); };
})()"""


async def test_a_part_that_is_left_before_its_data_arrive_does_not_come_back(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", 12)
    async with opened(run, place="/run/run") as page:
        await page.until("document.querySelector('.tiles')")
        await page.ask(HOLD)
        await page.ask("location.hash = '/run/run/rows'")
        await page.until("document.querySelector('.tabs a.on').innerText.toLowerCase() === 'rows'")
        await page.ask("location.hash = '/run/run/timeline'")
        await page.until("document.querySelector('canvas')")
        await page.ask("window.free(); fetch('/api/run?run=run').then((answer) => answer.json())")
        assert await page.ask("location.hash") == "#/run/run/timeline"
        assert await page.ask("document.querySelector('canvas') && !document.querySelector('.filters')")


async def test_a_transcript_grows_while_the_agent_talks(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(200))

    @Tool.define(effect="read")
    async def look(at: str) -> str:
        """Looks."""
        return f"seen {at}"

    def answer(request: Request) -> Say:
        if not request.turn:
            return CallTools(ToolUse("look", {"at": "it"}))
        return Say(words, chunk_delay=0.02)

    async with ScriptedServer(answer, models=["m"]) as server:
        spec: dict[str, Any] = {"task": "Tell {x}", "inputs": [{"x": "a"}, {"x": "b"}], "model": "m", "tools": [look]}
        async with BatchAgent.open(**spec, backend=server.backend_url, run_dir=tmp_path / "talk") as run:

            async def take() -> list[bool]:
                return [result.ok async for result in run.results()]

            taking = asyncio.create_task(take())
            await server.wait_requests(3)
            async with opened(tmp_path / "talk", place="/run/talk/row/0") as page:
                streaming = "document.querySelector('.streaming pre').innerText.length"
                first = await page.until(f"{streaming} > 10 && {streaming}")
                later = await page.until(f"{streaming} > {first} && {streaming}")
                assert later > first
                assert await taking == [True, True]
                await page.until("document.querySelector('.state.ok')")
                assert "word199" in await page.text() and "seen it" in await page.text()


@thorough
async def test_a_timeline_is_zoomed_by_dragging(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", 40, pace=0.02)
    async with opened(run, place="/run/run/timeline") as page:
        await page.until("document.querySelector('canvas').height > 50")
        before = await page.ask("document.querySelector('.chart').innerHTML")
        box = await page.ask(
            "(({ left, top, width }) => [left, top, width])(document.querySelector('canvas').getBoundingClientRect())"
        )
        for kind, at in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.6)):
            place = {"x": box[0] + box[2] * at, "y": box[1] + 30}
            await page.send("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)
        await page.until(f"document.querySelector('.chart').innerHTML !== {json.dumps(before)}")
        await page.press("Escape")
        await page.until(f"document.querySelector('.chart').innerHTML === {json.dumps(before)}")


async def test_two_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    one = await recorded(tmp_path / "one", 30)
    other = await recorded(tmp_path / "other", 30, seed="other")
    async with opened(one, other, place="/compare/one/other") as page:
        await page.until("document.querySelectorAll('.difference').length > 5")
        await page.ask("document.querySelector('.difference .choice button').click()")
        await page.until("document.body.innerText.includes('judged A: 1')")


async def test_a_report_is_one_file_that_needs_no_server_and_no_network(tmp_path: Path) -> None:
    run, file = await recorded(tmp_path / "run", 30), tmp_path / "report.html"
    assert await asyncio.to_thread(main, ["report", str(run), "-o", str(file), "--rows", "all"]) == 0
    async with chromium() as page:
        await page.size(1360, 900)
        await page.goto(file.as_uri())
        await page.until("document.querySelector('.tiles')")
        await page.ask("location.hash = '/run/run/rows'")
        await page.until("document.querySelectorAll('tbody tr').length === 30")
        await page.ask("location.hash = '/run/run/row/5'")
        await page.until("document.querySelectorAll('.m-turn').length >= 2")
        await page.ask("location.hash = '/run/run/timeline'")
        await page.until("document.querySelector('canvas')")
        assert await page.ask("window.hacked") is None and page.problems == []
        assert [address for address in page.requests if not address.startswith(("file:", "data:", "about:"))] == []


async def test_a_report_of_a_pipeline_has_its_stages_and_their_rows(tmp_path: Path) -> None:
    pipeline = Pipeline(["a", "b", "c"]).map(name="read", task="Read {input}").map(name="check", task="Check {input}")
    await pipeline.run(backend=ScriptedBackend(lambda request: Say(f"said {request.text}")), run_dir=tmp_path / "run")
    file = tmp_path / "report.html"
    assert await asyncio.to_thread(main, ["report", str(tmp_path / "run"), "-o", str(file), "--rows", "all"]) == 0
    async with chromium() as page:
        await page.size(1360, 900)
        await page.goto(file.as_uri())
        await page.until("document.querySelector('.stage.opens')")
        await page.ask("document.querySelectorAll('.stage.opens')[1].dispatchEvent(new Event('click'))")
        await page.until("location.hash === '#/run/run%2Fcheck' && document.querySelector('.tiles')")
        await page.ask("location.hash = '/run/run%2Fcheck/rows'")
        await page.until("document.querySelectorAll('tbody tr').length === 3")
        await page.ask("location.hash = '/run/run%2Fcheck/row/1'")
        await page.until("document.body.innerText.includes('said Check said Read b')")
        assert page.problems == []


@thorough
async def test_a_hundred_thousand_rows_are_paged_by_the_server(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", 20)
    line = (run / "results.jsonl").read_bytes().splitlines()[0]
    record = json.loads(line)
    with (run / "results.jsonl").open("wb") as file:
        for index in range(100_000):
            file.write(json.dumps(record | {"index": index, "job_id": f"row-{index}"}).encode() + b"\n")
    async with opened(run, place="/run/run/rows") as page:
        await page.until("document.querySelector('tbody tr')")
        await page.until("document.body.innerText.includes('of 100,000')")
        assert await page.ask("document.querySelectorAll('tbody tr').length") == 100
        await page.ask("[...document.querySelectorAll('th')].find((t) => t.innerText.startsWith('#')).click()")
        await page.until("document.querySelector('tbody td').innerText === '99999'")
        await page.ask("location.hash = '/run/run/rows?q=row-77777'")
        await page.until("document.body.innerText.includes('1 of 1')")


@thorough
async def test_the_page_is_readable_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", 12)
    async with opened(run, place="/run/run") as page:
        await page.size(390, 800)
        await page.scheme("dark")
        await page.until("document.querySelector('.tiles')")
        for place in ("overview", "rows", "row/3", "timeline"):
            await page.ask(f"location.hash = '/run/run/{place}'")
            await asyncio.sleep(0.3)
            assert await page.ask("document.documentElement.scrollWidth") <= 390
        assert await page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 20)"


BEYOND = """[...document.querySelectorAll('.panel')].flatMap((panel) => [...panel.querySelectorAll('table, svg, ul')]
  .filter((each) => !each.closest('.scroll'))
  .filter((each) => each.getBoundingClientRect().right > panel.getBoundingClientRect().right)
  .map((each) => panel.innerText))"""
AXES = """[...document.querySelectorAll('.chart')].map((chart) => [...chart.querySelectorAll('text')]
  .map((each) => [each.textContent, parseFloat(getComputedStyle(each).fontSize) * each.getCTM().a]))"""
KEEP = """const write = CanvasRenderingContext2D.prototype.fillText; window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    written.push(text);
    write.call(this, text, ...place);
  }"""


async def test_charts_and_tables_of_a_fleet_stay_readable_on_a_phone(tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", 12, max_inflight=1)
    async with opened(run, place="/run/run") as page:
        await page.size(390, 800)
        await page.until("document.querySelectorAll('.chart svg').length === 4")
        assert await page.ask(BEYOND) == []
        for axis in await page.ask(AXES):
            assert min(size for _, size in axis) >= 11
            texts = [text for text, _ in axis]
            assert len(texts) == len(set(texts))  # not 0, 1, 1
        await page.ask(KEEP)
        await page.ask("location.hash = '/run/run/timeline'")
        await page.until("window.written.length")
        names = {name for name in await page.ask("window.written") if "//" in name}
        assert names and not any("…" in name for name in names)


async def test_the_stages_of_a_pipeline_stand_one_below_the_other_on_a_phone(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda request: Say("it"))
    stages = Pipeline(["a", "b"]).map(name="one", task="{input}").map(name="two", task="{input}")
    await stages.map(name="three", task="{input}").run(backend=backend, run_dir=tmp_path / "run")
    async with opened(tmp_path / "run", place="/run/run") as page:
        tops = "new Set([...document.querySelectorAll('.stage')].map((each) => each.getBoundingClientRect().top)).size"
        await page.until("document.querySelectorAll('.stage').length === 3")
        assert await page.ask(tops) == 1
        await page.size(390, 800)
        await page.until(f"{tops} === 3")
        assert await page.ask("document.querySelector('.stages').parentElement.scrollWidth") <= 390


@thorough
async def test_rows_with_a_long_column_name_fit_a_phone(tmp_path: Path) -> None:
    inputs = [{"a_column_with_a_name_" + "that_goes_on_and_on_" * 5: "some words " * 20}] * 3
    await BatchAgent.run(
        task="Say it", inputs=inputs, backend=ScriptedBackend(lambda request: Say("it")), run_dir=tmp_path
    )
    async with opened(tmp_path, place=f"/run/{tmp_path.name}/rows") as page:
        await page.size(390, 800)
        await page.until("document.querySelector('tbody tr')")
        await page.ask("document.querySelector('details.menu').open = true")
        assert await page.ask("document.documentElement.scrollWidth") <= 390


async def test_a_report_of_two_runs_opens_with_their_comparison(tmp_path: Path) -> None:
    one, other = await recorded(tmp_path / "one", 12), await recorded(tmp_path / "other", 12, seed="x")
    file = tmp_path / "report.html"
    assert await asyncio.to_thread(main, ["report", str(one), str(other), "-o", str(file)]) == 0
    async with chromium() as page:
        await page.goto(file.as_uri())
        await page.until("location.hash === '#/compare/one/other' && document.querySelector('.difference')")
        await page.ask("location.hash = '/run/other/row/3'")
        await page.until("document.body.innerText.includes('T-1003')")
        assert page.problems == []


@thorough
async def test_a_page_that_is_opened_before_its_run_begins_shows_it_then(tmp_path: Path) -> None:
    async with page_of(tmp_path / "run") as server, chromium() as page:
        await page.goto(f"{server.base}/?token={server.token}#/run/run")
        await page.until("document.body.innerText.includes('has not started')")
        await recorded(tmp_path / "run", 8)
        await page.until("document.querySelector('.tiles')")


async def test_the_page_of_a_row_shows_the_entries_of_its_cascade(tmp_path: Path) -> None:
    async with (
        ScriptedServer(lambda request: Say("<b>no json</b>"), models=["small"]) as one,
        ScriptedServer(lambda request: Say('{"mood": "good"}'), models=["large"]) as two,
    ):
        await BatchAgent.run(
            task="{input}",
            inputs=["a"],
            output_schema={"mood": "good|bad"},
            max_retries=0,
            cascade=[{"backend": one.backend_url}, {"backend": two.backend_url}, "people"],
            escalate="output.mood == 'good'",
            run_dir=tmp_path / "run",
            progress=False,
        )
    async with opened(tmp_path / "run", place="/run/run/row/0") as page:
        await page.until("document.body.innerText.includes('This row waits for people.')")
        shown = await page.text()
        assert "answered by large" in shown
        assert "small" in shown and "NotJSON" in shown

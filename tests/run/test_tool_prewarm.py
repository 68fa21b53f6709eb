"""Tool calls that are begun before a model asks for them, because an earlier run made them."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from batch_agent import AgentResult, BatchAgent, SpecError, StoreError, Tool, ToolContext
from batch_agent.observe.statistics import Prewarm, Statistics
from batch_agent.observe.summary import summary_lines
from batch_agent.testing import CallTools, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.tools import read_file

TURN, SLOW = 1.0, 5.0


class Library:
    """A slow tool, and when it was asked for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.ended: list[str] = []

    def tool(self, **options: Any) -> Tool:
        async def look(word: str) -> str:
            self.asked.append((word, asyncio.get_running_loop().time()))
            try:
                await asyncio.sleep(SLOW)
            finally:
                self.ended.append(word)
            return f"about {word}"

        return Tool.define(look, **{"cacheable": True, **options})

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.asked]


def words_of(turn: int, row: str) -> list[str]:
    return [f"{row}-{turn}-a", f"{row}-{turn}-b"]


def script(request: Request, *, turns: int = 2, swerves: int | None = None) -> Say:
    """Two calls in each of two turns; from turn ``swerves`` on, other ones than last time."""
    row = str(request.messages[-1 - 3 * request.turn]["content"])
    if request.turn >= turns:
        return Say("done", latency=TURN)
    name = row if swerves is None or request.turn < swerves else f"other {row}"
    calls = [ToolUse("look", {"word": word}) for word in words_of(request.turn, name)]
    return CallTools(*calls, latency=TURN)


async def run(
    tools: list[Any], answer: Any = script, **options: Any
) -> tuple[list[AgentResult[Any]], Statistics, float]:
    began = asyncio.get_running_loop().time()
    known: dict[str, Any] = {"task": "{input}", "inputs": ["x", "y"], "streaming_tool_dispatch": False}
    async with BatchAgent.open(backend=ScriptedBackend(answer), tools=tools, **{**known, **options}) as opened:
        results = [result async for result in opened.results()]
    return results, opened.statistics(), asyncio.get_running_loop().time() - began


@virtual_clock
async def test_calls_of_last_time_run_while_the_model_thinks(tmp_path: Path) -> None:
    _, before, slow = await run([Library().tool()], run_dir=tmp_path)
    assert before.prewarm is None
    library = Library()
    results, statistics, fast = await run([library.tool()], predictive_prewarm=tmp_path)
    assert all(result.output == "done" for result in results)
    assert statistics.prewarm == Prewarm(begun=8, hits=8, misses=0) and statistics.prewarm.wasted == 0
    assert sorted(library.words) == sorted(word for row in "xy" for turn in (0, 1) for word in words_of(turn, row))
    # A call begins with the turn before the one that asks for it.
    began = asyncio.get_running_loop().time() - fast
    assert {round(at - began, 3) for _, at in library.asked} == {0.0, TURN}
    assert fast == pytest.approx(2 * TURN + SLOW) and slow > 3 * TURN + 2 * SLOW


@virtual_clock
async def test_hits_misses_and_waste_are_counted_and_said(tmp_path: Path) -> None:
    await run([Library().tool()], run_dir=tmp_path / "a")
    library = Library()
    _, statistics, _ = await run(
        [library.tool()],
        lambda request: script(request, swerves=0),
        inputs=["x", "new"],
        predictive_prewarm=tmp_path / "a",
        run_dir=tmp_path / "b",
    )
    # Two calls of the first answer were begun for nothing; the answer was another, and no more were.
    assert statistics.prewarm == Prewarm(begun=2, hits=0, misses=8)
    assert statistics.prewarm.wasted == 2
    said = "  prewarm  2 calls begun before they were asked for: 0 used, 2 wasted; 8 calls were not foreseen"
    assert said in summary_lines(statistics)
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["prewarm"] == {"begun": 2, "hits": 0, "misses": 8, "wasted": 2}


@virtual_clock
async def test_what_an_agent_never_asked_for_is_given_up_with_it(tmp_path: Path) -> None:
    await run([Library().tool()], run_dir=tmp_path, inputs=["x"])
    library = Library()
    tool = library.tool()
    [result], statistics, seconds = await run(
        [tool], lambda request: Say("done", latency=TURN), inputs=["x"], predictive_prewarm=tmp_path
    )
    assert result.ok and seconds == pytest.approx(TURN)
    assert library.ended == words_of(0, "x")
    assert statistics.prewarm == Prewarm(begun=2, hits=0, misses=0)


@pytest.mark.parametrize("options", [{"cacheable": False}, {"cacheable": None, "effect": "write"}, {"cacheable": None}])
@virtual_clock
async def test_only_cacheable_tools_are_called_before_anybody_asks(tmp_path: Path, options: dict[str, Any]) -> None:
    await run([Library().tool(**options)], run_dir=tmp_path)
    library = Library()
    _, statistics, _ = await run([library.tool(**options)], predictive_prewarm=tmp_path)
    assert len(library.asked) == 8 and min(at for _, at in library.asked) > TURN
    assert statistics.prewarm == Prewarm(0, 0, 0)


@virtual_clock
async def test_a_tool_that_asks_for_its_row_is_not_called_for_nobody(tmp_path: Path) -> None:
    turns = []

    @Tool.define(cacheable=True)
    async def look(word: str, context: ToolContext) -> str:
        turns.append(context.turn)
        return word

    await run([look], run_dir=tmp_path, inputs=["x"])
    _, statistics, _ = await run([look], predictive_prewarm=tmp_path, inputs=["x"])
    assert turns == [1, 1, 2, 2] * 2 and statistics.prewarm == Prewarm(0, 0, 4)


@pytest.mark.parametrize(("max_age", "runs"), [(TURN + 1, 1), (TURN / 2, 2)])
@virtual_clock
async def test_a_result_that_nobody_asked_for_in_time_is_made_again(tmp_path: Path, max_age: float, runs: int) -> None:
    calls = 0

    @Tool.define(cacheable=True)
    async def look(word: str) -> str:
        nonlocal calls
        calls += 1
        return word

    def once(request: Request) -> Say:
        return script(request, turns=1) if request.turn == 0 else Say("done")

    await run([look], once, run_dir=tmp_path, inputs=["x"])
    calls = 0
    _, statistics, _ = await run([look], once, predictive_prewarm=tmp_path, inputs=["x"], prewarm_max_age=max_age)
    assert calls == 2 * runs
    assert statistics.prewarm == (Prewarm(2, 2, 0) if runs == 1 else Prewarm(2, 0, 2))


async def test_a_file_that_changed_since_is_read_again(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("old words")

    def read(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("read_file", {"path": "page.txt"}))
        return Say(str(request.messages[-1]["content"]))

    def edit_and_read(request: Request) -> Say:
        if request.turn == 0:  # by now it is being read
            page.write_text("new words")
            os.utime(page, ns=(1, 1))
        return read(request)

    tools = [read_file(roots=[tmp_path])]
    await run(tools, read, run_dir=tmp_path / "run", inputs=["x"])
    [same], kept, _ = await run(tools, read, predictive_prewarm=tmp_path / "run", inputs=["x"])
    assert (same.output, kept.prewarm) == ("old words", Prewarm(1, 1, 0))
    [changed], missed, _ = await run(tools, edit_and_read, predictive_prewarm=tmp_path / "run", inputs=["x"])
    assert (changed.output, missed.prewarm) == ("new words", Prewarm(1, 0, 1))


@virtual_clock
async def test_who_may_ask_never_stands_in_line_before_who_asks(tmp_path: Path) -> None:
    await run([Library().tool()], run_dir=tmp_path)
    library = Library()
    _, statistics, _ = await run([library.tool(max_concurrent=1)], predictive_prewarm=tmp_path)
    assert statistics.prewarm is not None
    assert statistics.prewarm.begun == statistics.prewarm.hits == 1 and len(library.asked) == 8


@virtual_clock
async def test_a_row_that_asks_another_task_now_is_known_by_its_content_and_true_means_its_own_directory(
    tmp_path: Path,
) -> None:
    await run([Library().tool()], run_dir=tmp_path)
    library = Library()

    def other(request: Request) -> Say:
        return Say("done") if request.turn else CallTools(ToolUse("look", {"word": "x-0-a"}), latency=TURN)

    options = {"task": "Anew: {input}", "inputs": ["x"], "run_dir": tmp_path, "resume": True}
    _, statistics, _ = await run([library.tool()], other, **options, predictive_prewarm=True, on_change="resend")
    # The second answer of last time had two more calls, which were begun as well.
    assert statistics.prewarm == Prewarm(begun=4, hits=1, misses=0)


@virtual_clock
async def test_a_resumed_row_follows_its_record_and_nothing_is_begun_for_it(tmp_path: Path) -> None:
    await run([Library().tool()], run_dir=tmp_path)
    library = Library()
    results, statistics, _ = await run([library.tool()], run_dir=tmp_path, resume=True, predictive_prewarm=True)
    assert all(result.resumed for result in results) and library.asked == []
    assert statistics.prewarm == Prewarm(0, 0, 0)


@virtual_clock
async def test_a_first_run_has_nothing_to_go_by(tmp_path: Path) -> None:
    results, statistics, _ = await run([Library().tool()], run_dir=tmp_path, predictive_prewarm=True)
    assert all(results) and statistics.prewarm == Prewarm(0, 0, 8)


@virtual_clock
async def test_batched_look_ups_are_begun_together(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    async def batch(keys: list[str]) -> dict[str, str]:
        asked.append(sorted(keys))
        return {key: f"about {key}" for key in keys}

    @Tool.batchable(key_arg="word", batch=batch, cacheable=True)
    def look(word: str) -> str:
        return ""

    await run([look], run_dir=tmp_path)
    asked.clear()
    _, statistics, _ = await run([look], predictive_prewarm=tmp_path)
    assert statistics.prewarm == Prewarm(8, 8, 0)
    assert asked == [[word for row in "xy" for word in words_of(turn, row)] for turn in (0, 1)]


@virtual_clock
async def test_leaving_a_run_ends_what_was_begun(tmp_path: Path) -> None:
    await run([Library().tool()], run_dir=tmp_path)
    library = Library()
    async with BatchAgent.open(
        task="{input}",
        inputs=["x"],
        tools=[library.tool()],
        backend=ScriptedBackend(lambda request: Hang()),
        predictive_prewarm=tmp_path,
    ):
        await asyncio.sleep(TURN)
    assert library.ended == words_of(0, "x")


async def test_an_earlier_run_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no run"):
        await run([Library().tool()], predictive_prewarm=tmp_path / "nowhere", run_dir=tmp_path / "b")
    assert not (tmp_path / "b").exists()
    with pytest.raises(SpecError, match="give its directory in place of True, or run_dir"):
        await run([Library().tool()], predictive_prewarm=True)
    with pytest.raises(SpecError, match="predictive_prewarm is empty"):
        await run([Library().tool()], predictive_prewarm=" ")


@virtual_clock
async def test_a_damaged_journal_is_named_and_a_damaged_record_only_not_foreseen(tmp_path: Path) -> None:
    await run([Library().tool()], run_dir=tmp_path)
    with sqlite3.connect(tmp_path / "journal.db") as journal:
        journal.execute("UPDATE record SET body = 'x' WHERE agent = 1")
    journal.close()
    library = Library()
    results, statistics, _ = await run([library.tool()], predictive_prewarm=tmp_path)
    assert all(results) and statistics.prewarm == Prewarm(4, 4, 4)
    (tmp_path / "journal.db").write_text("no database, and long enough to be looked at" * 100)
    with pytest.raises(StoreError, match=r"journal\.db"):
        await run([Library().tool()], predictive_prewarm=tmp_path)

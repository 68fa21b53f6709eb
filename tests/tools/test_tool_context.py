"""Tools that ask for the row they work for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tools.tool_calls import call, settle

from batch_agent import BatchAgent, SpecError, Tool, ToolContext
from batch_agent.job import Job
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.tools import ToolPool, resolve_tools

OpenPool = Callable[..., ToolPool]


def job(index: int) -> Job:
    return Job(index, f"row-{index}", {"n": index}, "")


def ask_twice(request: Request) -> Say:
    if request.turn < 2:
        return CallTools(ToolUse("note", {"word": "w"}))
    return Say("done")


@pytest.mark.parametrize("streaming", [True, False])
@virtual_clock
async def test_a_tool_learns_its_row_its_job_and_its_turn(streaming: bool) -> None:
    seen = []

    @Tool.define(effect="read")
    async def note(word: str, who: ToolContext) -> str:
        seen.append((word, who.row, who.job_id, who.index, who.turn))
        return "noted"

    rows = [{"id": "a", "n": 1}, {"id": "b", "n": 2}]
    backend = ScriptedBackend(ask_twice)
    await BatchAgent.run(
        task="{n}", inputs=rows, tools=[note], backend=backend, streaming_tool_dispatch=streaming, max_inflight=1
    )
    expected = [("w", row, row["id"], index, turn) for index, row in enumerate(rows) for turn in (1, 2)]
    assert sorted(seen, key=lambda item: (item[3], item[4])) == expected


@virtual_clock
async def test_an_undeclared_function_may_ask_for_it_too_and_all_calls_share_one_state() -> None:
    async def note(word: str, context: ToolContext) -> int:
        counts = context.state.setdefault("counts", [])
        counts.append(context.index)
        return len(counts)

    backend = ScriptedBackend(ask_twice)
    results = await BatchAgent.run(task="{input}", inputs=["a", "b"], tools=[note], backend=backend)
    told = [message.content for result in results for message in result.messages if message.role == "tool"]
    assert sorted(told) == ["1", "2", "3", "4"]
    again = await BatchAgent.run(task="{input}", inputs=["a"], tools=[note], backend=ScriptedBackend(ask_twice))
    assert [message.content for message in again[0].messages if message.role == "tool"] == ["1", "2"]


def test_the_model_does_not_see_it() -> None:
    def note(word: str, context: ToolContext | None = None) -> str:
        """Note a word.

        Args:
            word: what to note
            context: none of the model's business
        """
        return word

    [tool] = resolve_tools([note])
    assert tool.spec.parameters["properties"] == {"word": {"type": "string", "description": "what to note"}}
    assert tool("x") == "x"


async def test_a_model_cannot_give_one(open_pool: OpenPool) -> None:
    @Tool.define(effect="read")
    def note(context: ToolContext, **more: object) -> str:
        return str(context.row)

    async with open_pool(note) as pool:
        outcome = await pool.start(call("note", context="mine"), job(1)).wait()
        assert not outcome.ok and "context: there is no such argument" in outcome.text


async def test_rows_do_not_share_the_calls_of_a_tool_that_knows_them(open_pool: OpenPool) -> None:
    @Tool.define(cacheable=True)
    async def mine(word: str, context: ToolContext) -> str:
        await asyncio.sleep(0)
        return f"{word} of {context.job_id}"

    async with open_pool(mine) as pool:
        pending = [pool.start(call("mine", word="w"), job(n)) for n in (1, 2, 1)]
        outcomes = [await one.wait() for one in pending]
        assert [outcome.text for outcome in outcomes] == ["w of row-1", "w of row-2", "w of row-1"]
        assert [outcome.source for outcome in outcomes] == ["run", "run", "shared"]
        assert (await pool.start(call("mine", word="w"), job(2)).wait()).source == "cache"


@pytest.mark.parametrize("how", ["abandoned", "timeout", "closed"])
async def test_a_function_in_a_thread_hears_that_nobody_waits_for_it(open_pool: OpenPool, how: str) -> None:
    began, heard = threading.Event(), threading.Event()

    @Tool.define(effect="read", timeout=0.01 if how == "timeout" else None)
    def slow(context: ToolContext) -> str:
        began.set()
        if context.cancelled.wait(30):
            heard.set()
        return "late"

    async with open_pool(slow) as pool:
        pending = pool.start(call("slow"), job(1))
        await asyncio.to_thread(began.wait)
        if how == "abandoned":
            pending.abandon()
        elif how == "timeout":
            assert "ran longer than" in (await pending.wait()).text
    assert await asyncio.to_thread(heard.wait, 30)


async def test_one_that_leaves_a_shared_call_cancels_nothing(open_pool: OpenPool) -> None:
    contexts = []
    release = asyncio.Event()

    @Tool.define(effect="read")
    async def slow(context: ToolContext) -> str:
        contexts.append(context)
        await release.wait()
        return "done"

    async with open_pool(slow) as pool:
        first, second = pool.start(call("slow"), job(1)), pool.start(call("slow"), job(1))
        await settle()
        first.abandon()
        await settle()
        assert [context.cancelled.is_set() for context in contexts] == [False]
        release.set()
        assert (await second.wait()).text == "done"


def test_two_contexts_are_one_too_many() -> None:
    def odd(one: ToolContext, two: ToolContext) -> str:
        return ""

    with pytest.raises(SpecError, match="one and two both take a ToolContext"):
        Tool.define(odd)


@virtual_clock
async def test_a_resumed_call_is_not_run_again_for_its_context(tmp_path: Path) -> None:
    runs = []

    @Tool.define(effect="read")
    async def note(word: str, context: ToolContext) -> str:
        runs.append(context.turn)
        return "noted"

    options = {"task": "{input}", "inputs": ["a"], "tools": [note], "run_dir": tmp_path, "resume": True}
    await BatchAgent.run(backend=ScriptedBackend(ask_twice), **options)
    [result] = await BatchAgent.run(backend=ScriptedBackend(ask_twice), **options)
    assert result.resumed and runs == [1, 2]

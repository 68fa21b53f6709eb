"""A worker that is not the loop of a model with tools, accompanied by a run: recorded, killed and resumed like any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from batch_agent import AgentResult, BatchAgent, Tool
from batch_agent.agent.agent import InnerWorker
from batch_agent.agent.dialogue import Dialogue
from batch_agent.errors import BackendError, NotJSON, SpecError
from batch_agent.record.reader import look
from batch_agent.run.run import Run
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ran.clear()


@Tool.define(effect="write")
async def note(text: str) -> str:
    ran.append(text)
    return f"noted {text}"


async def debate(row: object, ctx: Dialogue) -> object:
    """Asks, lets the model use a tool, asks back, and makes its own value of what it was told."""
    first = await ctx.ask()
    [noted] = await ctx.call(first.tool_calls)
    ctx.say("Are you sure?")
    second = await ctx.ask()
    return {"row": row, "noted": noted, "sure": second.text}


def script(request: Request) -> Say:
    if request.turn == 0:
        return CallTools(ToolUse("note", {"text": "it"}))
    return Say(f"yes, {request.text}")


async def run(
    worker: InnerWorker, backend: ScriptedBackend, directory: Path | None = None, **options: Any
) -> list[AgentResult[Any]]:
    known = {"task": "{input}", "inputs": ["a"], "max_retries": 0, "tools": [note], "resume": directory is not None}
    prepared = BatchAgent.plan(backend=backend, run_dir=directory, **{**known, **options})
    async with Run[Any](prepared, worker=worker) as running:
        return sorted([result async for result in running.results()], key=lambda result: result.index)


async def test_a_worker_asks_and_calls_through_its_context_and_its_value_is_the_output() -> None:
    backend = ScriptedBackend(script)
    [result] = await run(debate, backend)
    assert result.output == {"row": "a", "noted": "noted it", "sure": "yes, Are you sure?"}
    assert [message.role for message in result.messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert (result.turns, ran) == (2, ["it"])


async def test_a_worker_that_was_killed_finds_itself_where_it_was(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda request: script(request) if request.turn == 0 else Hang())
    prepared = BatchAgent.plan(
        task="{input}", inputs=["a"], tools=[note], backend=backend, run_dir=tmp_path, max_retries=0
    )
    async with Run[Any](prepared, worker=debate):
        while len(backend.requests) < 2:
            await asyncio.sleep(0)
    again = ScriptedBackend(script)
    [result] = await run(debate, again, tmp_path)
    assert ([request.turn for request in again.requests], ran) == ([1], ["it"])
    assert (result.output["sure"], result.turns, result.resumed) == ("yes, Are you sure?", 2, False)
    [kept] = await run(debate, ScriptedBackend(lambda _: Fail(500)), tmp_path)
    assert (kept.output, kept.messages, kept.resumed) == (result.output, result.messages, True)


async def test_a_worker_that_ends_with_a_call_or_asks_nothing_is_done_all_the_same(tmp_path: Path) -> None:
    async def noting(row: object, ctx: Dialogue) -> object:
        return None if row == "silent" else await ctx.call((await ctx.ask()).tool_calls)

    options = {"inputs": ["a", "silent"]}
    first = await run(noting, ScriptedBackend(script), tmp_path, **options)
    again = await run(noting, ScriptedBackend(lambda _: Fail(500)), tmp_path, **options)
    assert [result.output for result in first] == [result.output for result in again] == [["noted it"], None]
    assert ([result.resumed for result in again], ran) == ([True, True], ["it"])


async def test_another_worker_is_another_question(tmp_path: Path) -> None:
    async def other(row: object, ctx: Dialogue) -> object:
        return (await ctx.ask()).text

    await run(other, ScriptedBackend([Say("one")]), tmp_path)
    backend = ScriptedBackend(script)
    [result] = await run(debate, backend, tmp_path, on_change="resend")
    assert (result.ok, len(backend.requests)) == (True, 2)


@pytest.mark.parametrize(
    "error, kind", [(KeyError("x"), "WorkerFailed"), (SpecError("inner"), "WorkerFailed"), (NotJSON("n"), "NotJSON")]
)
async def test_what_a_worker_raises_fails_its_row_alone(error: Exception, kind: str) -> None:
    async def choosy(row: object, ctx: Dialogue) -> object:
        if row == "b":
            raise error
        return row

    a, b, c = await run(choosy, ScriptedBackend(), inputs=["a", "b", "c"])
    assert (a.ok, c.ok, b.error and b.error.type) == (True, True, kind)


async def test_a_worker_cannot_make_up_for_a_question_that_failed(tmp_path: Path) -> None:
    async def forgiving(row: object, ctx: Dialogue) -> object:
        try:
            await ctx.ask()
        except BackendError:
            with pytest.raises(BackendError):
                await ctx.ask()
        return "never mind"

    backend = ScriptedBackend(lambda _: Fail(422))
    [result] = await run(forgiving, backend, tmp_path)
    assert (result.error and result.error.type, result.output, len(backend.requests)) == ("Rejected", None, 1)
    [kept] = await run(forgiving, backend, tmp_path, retry_failed=False)
    assert (kept.error, kept.resumed, len(backend.requests)) == (result.error, True, 1)


async def test_max_turns_counts_the_questions_of_a_worker_only_where_it_is_given() -> None:
    async def insistent(row: object, ctx: Dialogue) -> object:
        return [(await ctx.ask()).text for _ in range(12)]

    [free] = await run(insistent, ScriptedBackend(lambda _: Say("again")))
    assert free.turns == 12
    [limited] = await run(insistent, ScriptedBackend(lambda _: Say("again")), max_turns=3)
    assert (limited.error and limited.error.type, limited.turns) == ("LimitExceeded", 3)


@virtual_clock
async def test_a_worker_holds_no_slot_while_it_does_something_else() -> None:
    alive: list[object] = []
    both = asyncio.Event()

    async def meeting(row: object, ctx: Dialogue) -> object:
        alive.append(row)
        if len(alive) == 2:
            both.set()
        await both.wait()
        return (await ctx.ask()).text

    results = await run(meeting, ScriptedBackend(lambda _: Say("met", latency=1)), inputs=["a", "b"], max_inflight=1)
    assert [result.output for result in results] == ["met", "met"]


@virtual_clock
async def test_the_deadline_of_an_agent_is_a_worker_s_too(tmp_path: Path) -> None:
    async def endless(row: object, ctx: Dialogue) -> object:
        return await asyncio.get_running_loop().create_future()

    [result] = await run(endless, ScriptedBackend(), tmp_path, timeout_per_agent=5)
    assert result.error is not None and result.error.type == "TimeoutError"
    assert look(tmp_path).state == "complete"


async def test_a_worker_may_read_its_rows_in_its_own_way_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def echo(row: object, ctx: Dialogue) -> object:
        return row

    prepared = BatchAgent.plan(task="Say hello", inputs=["a", "b"], backend=ScriptedBackend())
    async with Run[Any](prepared, worker=echo) as opened:
        assert sorted([result.output async for result in opened.results()]) == ["a", "b"]
    assert caplog.records == []

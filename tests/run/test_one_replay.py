"""The record of the tool loop is found by content, as that of a user's worker is."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batch_agent import AgentContext, AgentResult, BatchAgent, Tool
from batch_agent.agent.dialogue import Dialogue
from batch_agent.errors import ToolError
from batch_agent.record.codec import FORMAT, OLDEST, decode
from batch_agent.record.steps import CallEnded
from batch_agent.run.run import Run
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse

ran: list[str] = []
JOURNALS = Path(__file__).parent.parent / "record" / "journals"


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ran.clear()


@Tool.define(effect="write")
async def note(text: str) -> str:
    ran.append(text)
    return f"note {len(ran)}"


@Tool.define(effect="read")
async def look_up(text: str) -> str:
    ran.append(text)
    raise ToolError(f"attempt {len(ran)}")


NOTE = ToolUse("note", {"text": "it"})


async def run(directory: Path, script: Any, **options: Any) -> tuple[AgentResult[Any], ScriptedBackend]:
    backend, known = ScriptedBackend(script), {"task": "{input}", "inputs": ["a"], "tools": [note, look_up]}
    known |= {"run_dir": directory, "resume": True, "max_retries": 0, "retry_from": "failure"}
    [result] = await BatchAgent.run(backend=backend, **{**known, **options})
    return result, backend


def told(messages: Any) -> list[Any]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def records(directory: Path, query: str = "SELECT rowid, kind, body FROM record") -> list[Any]:
    with closing(sqlite3.connect(directory / "journal.db", isolation_level=None)) as db:
        return db.execute(query).fetchall()


async def test_equal_calls_of_one_answer_and_of_later_ones_have_their_own_outcomes_again(tmp_path: Path) -> None:
    fails = True

    def script(request: Request) -> Any:
        if request.turn < 2:
            return CallTools(NOTE, ToolUse("look_up", {"text": "x"}), NOTE)
        return Fail(400) if fails else Say("done")

    _, backend = await run(tmp_path, script)
    first = told(backend.requests[-1].messages)
    assert (len(first), len(set(first))) == (6, 6)
    for _ in range(2):
        _, backend = await run(tmp_path, script)
        assert [told(request.messages) for request in backend.requests] == [first] * len(backend.requests)
    fails = False
    result, backend = await run(tmp_path, script)
    assert (result.output, len(backend.requests), len(ran)) == ("done", 1, 6)
    before = records(tmp_path)
    result, backend = await run(tmp_path, script)
    assert (result.resumed, backend.requests, records(tmp_path)) == (True, [], before)


@pytest.mark.parametrize("stuck", [0, 1])
async def test_of_equal_writes_in_one_answer_the_one_that_ended_is_known_whatever_its_place(
    tmp_path: Path, stuck: int
) -> None:
    begun, ended = 0, asyncio.Event()

    @Tool.define(effect="write")
    async def send(to: str) -> str:
        nonlocal begun
        begun += 1
        if begun == stuck + 1:
            await asyncio.get_running_loop().create_future()
        ended.set()
        return f"sent as number {begun}"

    calls, fails = CallTools(ToolUse("send", {"to": "x"}), ToolUse("send", {"to": "x"})), True

    def script(request: Request) -> Any:
        return calls if request.turn == 0 else Fail(400) if fails else Say("done")

    start: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "tools": [send], "run_dir": tmp_path}
    async with BatchAgent.open(backend=ScriptedBackend(script), **start):
        await ended.wait()
        await asyncio.sleep(0)
    for _ in range(2):
        result, backend = await run(tmp_path, script, tools=[send])
        [texts] = [told(request.messages) for request in backend.requests]
        assert "its outcome is unknown" in texts[stuck] and "sent as number" in texts[1 - stuck]
        kept, _ = await run(tmp_path, script, tools=[send], retry_failed=False)
        assert kept.messages == result.messages
        fails = False
    assert (result.output, begun) == ("done", 2)


async def test_a_read_that_was_interrupted_is_made_again_and_its_equal_that_ended_is_not(tmp_path: Path) -> None:
    """Only the second of two equal reads is recorded. The model has read neither."""

    look = ToolUse("look_up", {"text": "x"})
    _, backend = await run(tmp_path, lambda r: CallTools(look, look) if r.turn == 0 else Fail(400))
    _, ended = told(backend.requests[-1].messages)
    steps = [(number, decode(kind, body)) for number, kind, body in records(tmp_path)]
    [first] = [number for number, step in steps if isinstance(step, CallEnded) and step.nth == 0]
    records(tmp_path, f"DELETE FROM record WHERE rowid = {first}")
    for answer in (Fail(400), Say("done")):
        _, backend = await run(tmp_path, lambda _, answer=answer: answer)
        assert told(backend.requests[0].messages) == ["Error: attempt 3", ended]
    assert len(ran) == 3


async def test_a_change_in_the_middle_is_named_and_nothing_paid_is_dropped(tmp_path: Path) -> None:
    questions = ["one?", "two?", "three?"]

    async def ask(row: object, dialogue: Dialogue) -> object:
        replies = []
        for question in questions:
            replies.append((await dialogue.ask()).text)
            dialogue.say(question)
        return [*replies, (await dialogue.ask()).text]

    async def session(**options: Any) -> tuple[AgentResult[Any], ScriptedBackend]:
        backend = ScriptedBackend(lambda request: Say(f"answer to {request.text}"))
        prepared = BatchAgent.plan(
            task="{input}", inputs=["a"], backend=backend, run_dir=tmp_path, resume=True, **options
        )
        async with Run[Any](prepared, worker=ask) as running:
            [result] = [result async for result in running.results()]
            return result, backend

    first, _ = await session()
    questions[1] = "not two?"
    for _ in range(2):
        changed, backend = await session()
        assert changed.error is not None and "message 5 (user) differs" in changed.error.message
        assert (changed.error.type, backend.requests, changed.usage) == ("ReplayMismatch", [], first.usage)
    kept, backend = await session(force_resume=True)
    assert (kept.output, backend.requests) == (first.output, [])
    questions.append("more?")
    kept, backend = await session(force_resume=True)
    assert kept.output == [*first.output, "answer to more?"]
    assert [request.text for request in backend.requests] == ["more?"]


async def test_a_write_of_a_conversation_that_was_left_has_one_text_in_the_next_one(tmp_path: Path) -> None:
    last: Any = Say("not JSON")

    def script(request: Request) -> Any:
        return CallTools(NOTE) if request.turn == 0 else last

    options = {"output_schema": dict[str, int]}
    result, _ = await run(tmp_path, script, **options)
    assert result.error is not None and result.error.type == "NotJSON"
    for place, answer in enumerate((Fail(400), Fail(400), Say('{"a": 1}'))):
        last = answer
        result, backend = await run(tmp_path, script, **options, retry_from="failure" if place else "start")
        assert told(backend.requests[-1].messages) == ["note 1"]
        kept, _ = await run(tmp_path, script, **options, retry_failed=False)
        assert kept.messages == result.messages
    assert (result.output, ran, len(backend.requests)) == ({"a": 1}, ["it"], 1)
    before = records(tmp_path)
    result, backend = await run(tmp_path, script, **options)
    assert (result.resumed, backend.requests, records(tmp_path)) == (True, [], before)


async def test_a_worker_that_takes_over_the_record_of_the_tool_loop_learns_that_a_call_failed(tmp_path: Path) -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        try:
            return await ctx.call("look_up", text="x")
        except ToolError as error:
            return f"failed: {error}"

    look = CallTools(ToolUse("look_up", {"text": "x"}))
    await run(tmp_path, lambda r: look if r.turn == 0 else Say("done"))
    result, _ = await run(tmp_path, Say, worker=work, force_resume=True)
    assert (result.output, ran) == ("failed: attempt 1", ["x"])


async def test_a_worker_that_takes_over_the_record_of_the_tool_loop_learns_that_an_outcome_is_unknown(
    tmp_path: Path,
) -> None:
    """The loop told its model, and recorded what it told. A write that failed is no unknown outcome."""

    @Tool.define(effect="write")
    async def send(to: str) -> str:
        ran.append(to)
        if to == "nobody":
            raise ToolError("there is no such address")
        return str(await asyncio.get_running_loop().create_future())

    async def work(row: str, ctx: AgentContext) -> object:
        errors = list[str]()
        for to in ("nobody", "x"):
            try:
                await ctx.call("send", to=to)
            except ToolError as error:
                errors.append(error.type)
        return errors

    def script(request: Request) -> Any:
        return CallTools(*(ToolUse("send", {"to": to}) for to in ("nobody", "x"))) if request.turn == 0 else Say("done")

    start: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "tools": [send], "run_dir": tmp_path}
    async with BatchAgent.open(backend=ScriptedBackend(script), **start):
        while len(ran) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    _, backend = await run(tmp_path, script, tools=[send])
    assert "its outcome is unknown" in told(backend.requests[-1].messages)[1]
    result, _ = await run(tmp_path, Say, tools=[send], worker=work, force_resume=True)
    assert (result.output, ran) == (["ToolFailed", "OutcomeUnknown"], ["nobody", "x"])


@pytest.mark.parametrize("format", range(OLDEST, FORMAT))
async def test_kept_answers_of_every_format_are_used_in_their_order(tmp_path: Path, format: int) -> None:
    shutil.copy(JOURNALS / f"format-{format}.db", tmp_path / "journal.db")
    backend = ScriptedBackend(lambda request: Fail(400) if request.turn == 0 else Say('{"word": "new"}'))
    results = await BatchAgent.run(
        task="Now in other words: {input}",
        inputs=["done", "mended", "unfinished"],
        output_schema=dict[str, str],
        backend=backend,
        model="another",
        run_dir=tmp_path,
        resume=True,
        force_resume=True,
    )
    assert [result.output for result in results] == [{"word": "done"}, {"word": "mended"}, {"word": "new"}]
    assert [request.turn for request in backend.requests] == [1]


@pytest.mark.parametrize("milliseconds", [0, 3, 6, 9, 12, 15])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_write_that_was_cancelled_before_it_started_is_made_by_the_next_session(
    tmp_path: Path, milliseconds: int, waits: bool
) -> None:
    """The run is cancelled between the model's answer and the call: while the call is being recorded, or while it
    ``waits`` for the tool's rate limit."""

    @Tool.define(effect="write", rate_limit="1/hour" if waits else None)
    async def send(to: str) -> str:
        ran.append(to)
        return "sent"

    def script(request: Request) -> Any:
        row = str(request.messages[-1]["content"])
        return CallTools(ToolUse("send", {"to": row})) if request.turn == 0 else Say(row)

    rows = [f"row-{n}" for n in range(8)]
    given: dict[str, Any] = {"task": "{input}", "inputs": rows, "tools": [send], "run_dir": tmp_path}
    first = ScriptedBackend(script)
    async with BatchAgent.open(backend=first, **given) as running:
        while len(first.requests) < len(rows):
            await asyncio.sleep(0)
        await asyncio.sleep(milliseconds / 1000)
        running.cancel()
    made = list(ran)
    assert len(made) <= 1 or not waits
    again = replace(send, rate_limit=None)
    results = await BatchAgent.run(**{**given, "tools": [again]}, backend=ScriptedBackend(script), resume=True)
    assert [result.output for result in results] == ["sent"] * len(rows)
    assert sorted(ran) == rows


async def test_a_worker_may_make_a_write_again_that_it_cancelled_before_it_started(tmp_path: Path) -> None:
    @Tool.define(effect="write", rate_limit="10/s")
    async def send(to: str) -> str:
        ran.append(to)
        return "sent"

    async def work(row: str, ctx: AgentContext) -> object:
        for number in range(10):
            await ctx.call("send", to=f"before {number}")
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await ctx.call("send", to="x")
        return await ctx.call("send", to="x")

    result, _ = await run(tmp_path, Say, tools=[send], worker=work)
    assert (result.output, ran.count("x")) == ("sent", 1)

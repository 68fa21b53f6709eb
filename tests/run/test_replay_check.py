"""A recorded answer is used for the request that it answers, and for no other."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from batch_agent import AgentResult, BatchAgent, SpecError, Tool
from batch_agent.agent.dialogue import Dialogue
from batch_agent.run.run import Run
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ran.clear()


@Tool.define(effect="write")
async def note(text: str) -> str:
    ran.append(text)
    return f"noted {text}"


def mending(complaint: str) -> type[BaseModel]:
    """A schema whose JSON form is always the same, and which refuses the word "bad" in its own words."""

    class Answer(BaseModel):
        word: str

        @field_validator("word")
        @classmethod
        def good(cls, word: str) -> str:
            if word == "bad":
                raise ValueError(complaint)
            return word

    return Answer


async def run(directory: Path, backend: ScriptedBackend, **options: Any) -> list[AgentResult[Any]]:
    known: dict[str, Any] = {"inputs": ["a"], "run_dir": directory, "resume": True, "max_retries": 1}
    return await BatchAgent.run(task="{input}", backend=backend, **{**known, **options})


def once_bad(request: Request) -> Say:
    return Say('{"word": "good"}' if "too bad" in request.text else '{"word": "bad"}')


async def test_a_row_that_would_ask_something_else_fails_and_says_what_differs(tmp_path: Path) -> None:
    [first] = await run(tmp_path, ScriptedBackend(once_bad), output_schema=mending("too bad"))
    assert (first.ok, first.turns) == (True, 2)
    backend = ScriptedBackend(lambda _: Fail(500))
    [result] = await run(tmp_path, backend, output_schema=mending("worse"))
    assert result.error is not None and result.error.type == "ReplayMismatch"
    assert "message 3 (user) differs" in result.error.message and "--keep-answers" in result.error.message
    [kept] = await run(tmp_path, backend, output_schema=mending("too bad"))
    [forced] = await run(tmp_path, backend, output_schema=mending("worse"), force_resume=True)
    assert kept.output.word == forced.output.word == "good"
    assert (kept.resumed, forced.resumed, backend.requests) == (True, True, [])


async def test_a_worker_of_ours_that_asks_otherwise_gets_no_old_answer(tmp_path: Path) -> None:
    question = "sure?"

    async def twice(row: object, ctx: Dialogue) -> object:
        await ctx.ask()
        ctx.say(question)
        return (await ctx.ask()).text

    async def session() -> AgentResult[Any]:
        prepared = BatchAgent.plan(
            task="{input}", inputs=["a"], backend=ScriptedBackend(lambda r: Say(r.text)), run_dir=tmp_path, resume=True
        )
        async with Run[Any](prepared, worker=twice) as running:
            [result] = [result async for result in running.results()]
            return result

    assert (await session()).output == "sure?"
    question = "really?"
    error = (await session()).error
    assert error is not None and "message 3 (user) differs" in error.message


async def test_an_answer_of_two_models_is_dropped_only_if_asked_for_and_its_writes_are_not_repeated(
    tmp_path: Path,
) -> None:
    stuck = asyncio.Event()

    def script(request: Request) -> Say | Hang:
        if request.turn == 0:
            return CallTools(ToolUse("note", {"text": "it"}))
        if request.body["model"] == "one" and not stuck.is_set():
            stuck.set()
            return Hang()
        return Say(str(request.body["model"]))

    async def session(model: str, **options: Any) -> tuple[AgentResult[Any], int]:
        backend = ScriptedBackend(script)
        [result] = await run(tmp_path, backend, tools=[note], model=model, **options)
        return result, len(backend.requests)

    first = asyncio.create_task(session("one"))
    await stuck.wait()
    first.cancel()
    await asyncio.wait([first])
    kept, sent = await session("two", on_change="keep")
    assert (kept.output, sent, ran) == ("two", 1, ["it"])
    again, sent = await session("two")
    assert (again.output, again.resumed, sent) == ("two", True, 0), "what is kept stays kept"
    other, _ = await session("one", on_change="resend")
    assert other.output == "one"
    before = len(ran)  # another question is another row, which writes too
    with pytest.raises(SpecError, match="1 recorded answer would be dropped"):
        await session("two")
    anew, sent = await session("two", on_change="resend")
    assert (anew.output, anew.resumed, sent) == ("two", False, 2)
    assert len(ran) == before
    last, sent = await session("two")
    assert (last.output, last.resumed, sent) == ("two", True, 0)


async def test_a_damaged_record_with_a_write_that_was_begun_is_not_taken_for_none(tmp_path: Path) -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("note", {"text": "it"})) if request.turn == 0 else Say("done")

    await run(tmp_path, ScriptedBackend(script), tools=[note])
    db = sqlite3.connect(tmp_path / "journal.db")
    db.execute("UPDATE record SET body = CAST('[]' AS BLOB) WHERE kind = 10")
    db.commit()
    db.close()
    for _ in range(2):
        backend = ScriptedBackend(script)
        [result] = await run(tmp_path, backend, tools=[note])
        assert result.error is not None and result.error.type == "RecordUnreadable"
        assert (ran, backend.requests) == (["it"], [])


async def test_a_row_with_a_damaged_record_gives_its_slot_back(tmp_path: Path) -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("note", {"text": "it"})) if request.turn == 0 else Say("done")

    await run(tmp_path, ScriptedBackend(script), tools=[note])
    db = sqlite3.connect(tmp_path / "journal.db")
    db.execute("UPDATE record SET body = CAST('[]' AS BLOB) WHERE kind = 10")
    db.commit()
    db.close()
    async with asyncio.timeout(30):
        results = await run(tmp_path, ScriptedBackend(script), tools=[note], inputs=["a", "b", "c"], max_inflight=1)
    assert [result.error and result.error.type for result in results] == ["RecordUnreadable", None, None]

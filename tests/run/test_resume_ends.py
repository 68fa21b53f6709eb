"""Sessions that do not reach their end, failures that stay, answers that are kept, budgets over several sessions."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, RunRejected, SpecError, StoreError, Tool
from batch_agent.messages import Usage
from batch_agent.record.reader import look
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse, virtual_clock


class Answer(BaseModel):
    word: str


def echo(request: Request) -> Say:
    return Say(request.text)


async def run(directory: Path, script: Any = echo, **options: Any) -> tuple[list[AgentResult[Any]], ScriptedBackend]:
    backend = ScriptedBackend(script)
    known = {"task": "{input}", "inputs": ["a", "b", "c"], "run_dir": directory, "resume": True, "max_retries": 0}
    return await BatchAgent.run(backend=backend, **{**known, **options}), backend


def indexes(directory: Path, name: str = "results.jsonl") -> list[int]:
    return sorted(json.loads(line)["index"] for line in (directory / name).read_text().splitlines())


# The files of a session that stops early


async def test_a_resume_that_is_refused_takes_no_line_away(tmp_path: Path) -> None:
    rows = [str(n) for n in range(500)]
    await run(tmp_path, inputs=rows)
    results, _ = await run(tmp_path, lambda _: Fail(401), inputs=[*rows, "new"])
    assert sum(result.ok for result in results) == 500
    assert look(tmp_path).state == "failed"
    assert indexes(tmp_path) == list(range(500))
    with pytest.raises(SpecError, match="500 recorded answers would be dropped"):
        await run(tmp_path, lambda _: Fail(401), inputs=rows, task="Another {input}")
    assert indexes(tmp_path) == list(range(500))
    with pytest.raises(RunRejected, match="401"):
        await run(tmp_path, lambda _: Fail(401), inputs=rows, task="Another {input}", on_change="resend")
    assert (indexes(tmp_path), look(tmp_path).latest.ok) == ([], 0)  # the old answers are not those of this task
    _, backend = await run(tmp_path, inputs=rows)
    assert (indexes(tmp_path), backend.requests) == (list(range(500)), [])  # and were not lost
    assert not list(tmp_path.glob("*.new"))


async def test_a_resume_that_is_out_of_budget_or_drained_takes_no_line_away(tmp_path: Path) -> None:
    rows = [str(n) for n in range(500)]
    await run(tmp_path, inputs=rows)
    await run(tmp_path, inputs=["new", *rows], max_total_tokens=10)
    assert look(tmp_path).state == "out of budget"
    assert len(indexes(tmp_path)) == 500
    async with BatchAgent.open(
        task="{input}", inputs=iter(rows), backend=ScriptedBackend(echo), run_dir=tmp_path, resume=True
    ) as drained:
        async for _ in drained.results():
            drained.drain()
    assert indexes(tmp_path) == list(range(500))


async def test_a_failed_row_that_is_mended_before_a_resume_stops_has_one_line(tmp_path: Path) -> None:
    await run(tmp_path, lambda request: Fail(400) if request.text in ("a", "c") else echo(request))
    assert indexes(tmp_path, "failures.jsonl") == [0, 2]
    async with BatchAgent.open(
        task="{input}",
        inputs=iter("abc"),
        backend=ScriptedBackend(echo),
        run_dir=tmp_path,
        resume=True,
        max_agents=1,
        max_total_tokens=100_000,
    ) as stopped:
        async for result in stopped.results():
            if result.index == 0:
                stopped.cancel()
    assert 0 in indexes(tmp_path)
    assert 0 not in indexes(tmp_path, "failures.jsonl")
    assert sorted(indexes(tmp_path) + indexes(tmp_path, "failures.jsonl")) == [0, 1, 2]


async def test_one_damaged_record_costs_one_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run(tmp_path)
    db = sqlite3.connect(tmp_path / "journal.db")
    db.execute("UPDATE record SET body = x'00' WHERE agent = 2")
    db.commit()
    db.close()
    results, backend = await run(tmp_path)
    assert [result.output for result in results] == ["a", "b", "c"]
    assert [request.text for request in backend.requests] == ["b"]
    assert "is unreadable and is ignored" in caplog.text


async def test_a_drain_when_every_row_is_done_leaves_a_complete_run(tmp_path: Path) -> None:
    async with BatchAgent.open(
        task="{input}", inputs=["a", "b"], backend=ScriptedBackend(echo), run_dir=tmp_path
    ) as drained:
        count = 0
        async for _ in drained.results():
            count += 1
            if count == 2:
                drained.drain()
    assert drained.statistics().ended == "complete"
    assert look(tmp_path).state == "complete"


# Faults


async def test_absurd_counts_of_a_server_stop_nothing(tmp_path: Path) -> None:
    results, _ = await run(tmp_path, lambda _: Say("x", usage=Usage(10**19, 0, 1)))
    assert all(result.ok for result in results)
    assert look(tmp_path).state == "complete"


async def test_a_session_that_cannot_be_ended_fails_the_run(tmp_path: Path) -> None:
    class Breaking(ScriptedBackend):
        async def __aexit__(self, *_: object) -> None:
            db = sqlite3.connect(tmp_path / "journal.db")
            db.execute("DROP TABLE session")
            db.close()

    with pytest.raises(StoreError, match="damaged: no such table"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=Breaking(echo), run_dir=tmp_path)


async def test_an_input_that_cannot_be_written_is_recorded_and_found_again(tmp_path: Path) -> None:
    endless: dict[str, object] = {"word": "a"}
    endless["self"] = endless
    for requests in (1, 0):
        [result], backend = await run(tmp_path, task="{word}", inputs=[endless])
        assert (result.output, len(backend.requests)) == ("a", requests)


# Failures


def paying(ran: list[str]) -> Tool:
    @Tool.define(effect="write")
    async def pay(to: str) -> str:
        ran.append(to)
        return "paid"

    return pay


async def test_a_row_that_stays_failed_runs_no_tool_and_asks_nothing(tmp_path: Path) -> None:
    ran: list[str] = []
    options = {"inputs": ["a"], "tools": [paying(ran)], "max_turns": 2}
    script = lambda _: CallTools(ToolUse("pay", {"to": "x"}))  # noqa: E731
    [first], _ = await run(tmp_path, script, **options)
    assert first.error is not None and first.error.type == "LimitExceeded"
    for _ in range(2):
        [again], backend = await run(tmp_path, script, **options, retry_failed=False)
        assert (again.error, again.messages, again.resumed) == (first.error, first.messages, True)
        assert (backend.requests, ran) == ([], ["x"])


async def test_more_turns_that_are_not_given_make_a_row_fail_again_for_nothing(tmp_path: Path) -> None:
    ran: list[str] = []
    options = {"inputs": ["a"], "tools": [paying(ran)], "max_turns": 2}
    script = lambda _: CallTools(ToolUse("pay", {"to": "x"}))  # noqa: E731
    [first], _ = await run(tmp_path, script, **options)
    [again], backend = await run(tmp_path, script, **options, retry_from="failure")
    assert (again.error, backend.requests, ran) == (first.error, [], ["x"])
    [again], backend = await run(tmp_path, script, **options)
    assert (again.error, again.turns, len(backend.requests), ran) == (first.error, 2, 2, ["x"])


async def test_a_row_whose_answer_failed_is_repaired_and_its_writes_are_not_repeated(tmp_path: Path) -> None:
    ran: list[str] = []

    def script(request: Request) -> Any:
        if request.turn == 0:
            return CallTools(ToolUse("pay", {"to": "x"}))
        return Say('{"word": "mended"}') if request.turn == 4 else Say("no JSON")

    options = {"inputs": ["a"], "tools": [paying(ran)], "output_schema": Answer}
    turns = []
    for max_retries in (0, 0, 2, 3):  # over all sessions
        [result], backend = await run(tmp_path, script, **options, max_retries=max_retries, retry_from="failure")
        turns.append([request.turn for request in backend.requests])
    assert turns == [[0, 1], [], [2, 3], [4]]
    assert (result.output, result.turns, ran) == (Answer(word="mended"), 5, ["x"])
    assert "JSON" in str(backend.requests[0].messages[-1]["content"])


async def test_a_kept_failure_of_an_answer_comes_back_with_the_same_conversation(tmp_path: Path) -> None:
    [first], _ = await run(tmp_path, lambda _: Say("no JSON"), inputs=["a"], output_schema=Answer)
    [again], backend = await run(tmp_path, inputs=["a"], output_schema=Answer, retry_failed=False)
    assert (again.error, again.messages, backend.requests) == (first.error, first.messages, [])


async def test_an_error_type_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no error type 'ratelimited'.*RateLimited"):
        await run(tmp_path, retry_failed=["ratelimited"])


# Answers that are kept


async def test_force_takes_the_newest_answer_of_the_same_row_and_none_for_an_edited_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]
    for task in ("A {text}", "B {text}"):
        await run(tmp_path, task=task, inputs=rows, on_change="resend")
    edited = [{"id": 1, "text": "edited"}, rows[1]]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "batch_agent"):
        results, _ = await run(tmp_path, task="A {text}", inputs=edited, force_resume=True)
        assert [result.output for result in results] == ["A edited", "A b"]
        results, _ = await run(tmp_path, task="C {text}", inputs=rows, force_resume=True)
        assert [result.output for result in results] == ["B a", "B b"]
    assert caplog.text.count("--keep-answers") == 2


async def test_answers_that_were_kept_stay_kept_until_the_spec_changes_again(tmp_path: Path) -> None:
    await run(tmp_path)
    await run(tmp_path, task="New {input}", force_resume=True)
    results, backend = await run(tmp_path, task="New {input}")
    assert ([result.output for result in results], backend.requests) == (["a", "b", "c"], [])
    _, backend = await run(tmp_path, task="Newer {input}", on_change="resend")
    assert len(backend.requests) == 3


# What earlier sessions spent


@pytest.mark.parametrize(
    "script",
    [
        lambda _: Say("cut", usage=Usage(100, 0, 100), finish_reason="length"),
        lambda _: Say("uncounted" * 50, usage=Usage()),
    ],
    ids=["truncated", "uncounted"],
)
async def test_what_is_in_no_record_counts_against_the_budget_of_later_sessions(tmp_path: Path, script: Any) -> None:
    asked = []
    for _ in range(3):
        _, backend = await run(
            tmp_path, script, inputs=map(str, range(30)), max_total_tokens=1000, max_tokens=100, max_inflight=1
        )
        asked.append(len(backend.requests))
    assert 0 < asked[0] < 30
    assert asked[1:] == [0, 0]


@virtual_clock
async def test_gpu_time_of_earlier_sessions_counts_with_the_seconds_that_no_row_used(tmp_path: Path) -> None:
    @Tool.define(effect="read")
    async def rest() -> str:
        await asyncio.sleep(9)
        return "rested"

    def script(request: Request) -> Say:
        return CallTools(ToolUse("rest", {}), latency=1) if request.turn == 0 else Say("done", latency=1)

    await run(tmp_path, script, inputs=["a"], tools=[rest], prices={"gpu_hour": 3600.0})
    assert look(tmp_path).latest.cost == pytest.approx(11.0, abs=0.1)


async def test_a_run_without_a_price_has_no_cost(tmp_path: Path) -> None:
    await run(tmp_path)
    assert look(tmp_path).latest.cost is None

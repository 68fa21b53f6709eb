"""Resuming: nothing that was recorded is asked again, and everything comes back as it was."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, Tool
from batch_agent.errors import SpecError, StoreError
from batch_agent.record.reader import look
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock


class Answer(BaseModel):
    word: str


@Tool.define(effect="read")
async def look_up(word: str) -> str:
    return f"about {word}"


def echo(request: Request) -> Say:
    return Say(request.text)


def answer(request: Request) -> Say:
    return Say(json.dumps({"word": request.text}))


def tool_then_answer(request: Request) -> Say:
    if request.turn == 0:
        return CallTools(ToolUse("look_up", {"word": request.text}), text="let me see", reasoning="hm")
    return Say('{"word": "done"}', reasoning="so be it")


async def run(directory: Path, script: Any = echo, **options: Any) -> tuple[list[AgentResult[Any]], ScriptedBackend]:
    backend = ScriptedBackend(script)
    known = {"task": "{input}", "inputs": ["a", "b", "c"], "run_dir": directory, "resume": True, "max_retries": 0}
    return await BatchAgent.run(backend=backend, **{**known, **options}), backend


def word_of(request: Request) -> object:
    return next(message["content"] for message in request.messages if message["role"] == "user")


def asked(backend: ScriptedBackend) -> list[str]:
    return sorted(request.text for request in backend.requests)


async def test_finished_rows_are_not_asked_again_and_come_back_typed_and_complete(tmp_path: Path) -> None:
    options = {"tools": [look_up], "output_schema": Answer, "system_prompt": "Be brief."}
    first, _ = await run(tmp_path, tool_then_answer, **options)
    again, backend = await run(tmp_path, tool_then_answer, **options)
    assert backend.requests == []
    assert [result.output for result in again] == [Answer(word="done")] * 3
    for old, new in zip(first, again, strict=True):
        assert (old.resumed, new.resumed) == (False, True)
        assert (new.usage, new.turns, new.attempts, new.raw_text) == (old.usage, old.turns, old.attempts, old.raw_text)
        assert new.messages == old.messages
        assert new.timings.inference == old.timings.inference


@dataclass
class Point:
    x: int
    y: int = 2


@pytest.mark.parametrize(
    "schema, text, output",
    [
        (None, "free text", "free text"),
        (Point, '{"x": 1}', Point(1, 2)),
        (list[Answer], 'Sure: [{"word": "w"}]', [Answer(word="w")]),
        (int, "7", 7),
        ({"type": "object", "required": ["k"]}, '{"k": 1}', {"k": 1}),
    ],
)
async def test_outputs_of_every_kind_of_schema_come_back_as_they_were(
    tmp_path: Path, schema: Any, text: str, output: object
) -> None:
    for _ in range(2):
        [result], _ = await run(tmp_path, lambda _: Say(text), inputs=["a"], output_schema=schema)
        assert result.output == output
    assert result.resumed


async def test_recorded_rows_pass_on_result_and_stream_like_all_others(tmp_path: Path) -> None:
    await run(tmp_path, inputs=["a", "b"])
    seen: list[AgentResult[str]] = []
    results, _ = await run(tmp_path, on_result=seen.append)
    assert sorted(result.index for result in seen) == [0, 1, 2]
    assert [result.resumed for result in results] == [True, True, False]


async def test_rows_that_were_added_removed_reordered_or_edited_reuse_what_is_still_valid(tmp_path: Path) -> None:
    await run(tmp_path, inputs=["a", "b", "c"])
    results, backend = await run(tmp_path, inputs=["c", "new", "a", "b!"], on_change="resend")
    assert asked(backend) == ["b!", "new"]
    assert [(result.output, result.resumed) for result in results] == [
        ("c", True),
        ("new", False),
        ("a", True),
        ("b!", False),
    ]


async def test_a_column_that_the_task_does_not_use_and_an_id_may_change(tmp_path: Path) -> None:
    task = "Say {word}"
    await run(tmp_path, task=task, inputs=[{"id": 1, "word": "a", "note": "x"}, {"id": 2, "word": "a", "note": "x"}])
    _, backend = await run(tmp_path, task=task, inputs=[{"id": 2, "word": "a", "note": "y"}, {"id": 3, "word": "a"}])
    assert asked(backend) == []


async def test_equal_rows_have_an_answer_each(tmp_path: Path) -> None:
    numbers = iter(range(100))
    first, _ = await run(tmp_path, lambda _: Say(str(next(numbers))), inputs=["same"] * 3)
    again, backend = await run(tmp_path, lambda _: Say(str(next(numbers))), inputs=["same"] * 4)
    assert {result.output for result in first} < {result.output for result in again}
    assert len({result.output for result in again}) == 4
    assert len(backend.requests) == 1


async def test_hoisting_a_value_or_not_does_not_make_another_question(tmp_path: Path) -> None:
    long = "the same long text for every row " * 200
    task = "{word}: {text}"
    rows = [{"word": word, "text": long} for word in "ab"]
    first, _ = await run(tmp_path, task=task, inputs=rows)
    again, backend = await run(tmp_path, task=task, inputs=[*rows, {"word": "c", "text": "other"}])
    assert first[0].messages != (await run(tmp_path, task=task, inputs=rows, no_hoist=True))[0][0].messages
    assert len(backend.requests) == 1
    assert [result.resumed for result in again] == [True, True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "Again: {input}"},
        {"system_prompt": "Be loud."},
        {"model": "other"},
        {"temperature": 0.5},
        {"seed": 7},
        {"stop": "x"},
        {"extra_body": {"k": 1}},
        {"tools": [look_up]},
        {"output_schema": {"type": "string"}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_never_an_old_answer_for_a_new_question(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await run(tmp_path)
    with caplog.at_level(logging.WARNING, "batch_agent"):
        with pytest.raises(SpecError, match=f'(?s){next(iter(change))}.*3 recorded answers.*on_change="keep"'):
            await run(tmp_path, **change)
        assert look(tmp_path).latest.ok == 3
        results, backend = await run(tmp_path, lambda _: Say('"new"'), on_change="resend", **change)
    assert len(backend.requests) == 3
    assert not any(result.resumed for result in results)
    assert "rows without an answer to the new request are sent" in caplog.text


async def test_a_tool_of_another_version_is_another_question(tmp_path: Path) -> None:
    def tool(version: str) -> object:
        return Tool.define(look_up.function, name="look_up", effect="read", version=version)

    await run(tmp_path, tools=[tool("1")])
    assert (await run(tmp_path, tools=[tool("1")]))[1].requests == []
    assert len((await run(tmp_path, tools=[tool("2")], on_change="resend"))[1].requests) == 3


@pytest.mark.parametrize(
    "change",
    [{"max_retries": 2}, {"max_inflight": 1}, {"timeout_per_turn": 9}, {"max_turns": 5}, {"max_tokens": 9}],
)
async def test_how_a_run_is_driven_is_no_part_of_the_question(tmp_path: Path, change: dict[str, Any]) -> None:
    await run(tmp_path)
    assert (await run(tmp_path, **change))[1].requests == []


async def test_force_resume_keeps_old_answers_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run(tmp_path)
    with caplog.at_level(logging.WARNING, "batch_agent"):
        results, backend = await run(tmp_path, task="New: {input}", inputs=["b", "d"], force_resume=True)
    assert asked(backend) == ["New: d"]
    assert [result.output for result in results] == ["b", "New: d"]
    assert "keep the answers" in caplog.text
    assert json.loads((tmp_path / "run.json").read_text())["forced"] is True


async def test_a_forced_answer_that_does_not_fit_the_new_schema_is_asked_for_again(tmp_path: Path) -> None:
    await run(tmp_path, inputs=["a"])
    [result], backend = await run(
        tmp_path, lambda _: Say('{"word": "w"}'), inputs=["a"], output_schema=Answer, force_resume=True, max_retries=1
    )
    assert result.output == Answer(word="w")
    assert len(backend.requests) == 1


async def interrupt(directory: Path, script: Any, wait: int, **options: Any) -> None:
    """A run that is left while its ``wait``-th request hangs."""
    backend = ScriptedBackend(script)
    known = {"task": "{input}", "inputs": ["a"], "run_dir": directory, "max_retries": 0}
    async with BatchAgent.open(backend=backend, **{**known, **options}):
        while len(backend.requests) < wait:
            await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_an_interrupted_agent_goes_on_from_its_last_turn_with_its_tool_results(tmp_path: Path) -> None:
    ran: list[str] = []

    @Tool.define(effect="read")
    async def count(word: str) -> str:
        ran.append(word)
        return f"counted {word}"

    def script(request: Request) -> Any:
        if request.turn < 2:
            return CallTools(ToolUse("count", {"word": f"w{request.turn}"}), text=f"turn {request.turn}")
        return Say("the end")

    await interrupt(tmp_path, lambda r: script(r) if r.turn < 2 else Hang(), 3, tools=[count])
    assert look(tmp_path).state == "interrupted"
    [result], backend = await run(tmp_path, script, inputs=["a"], tools=[count])
    assert ran == ["w0", "w1"]
    assert [request.turn for request in backend.requests] == [2]
    assert [message["content"] for message in backend.requests[0].messages if message["role"] == "tool"] == [
        "counted w0",
        "counted w1",
    ]
    assert (result.output, result.turns, result.attempts, result.resumed) == ("the end", 3, 1, False)
    assert result.usage.completion_tokens > 0


async def test_usage_of_recorded_turns_counts_on_the_result_and_not_as_sent(tmp_path: Path) -> None:
    await interrupt(tmp_path, lambda r: tool_then_answer(r) if r.turn < 1 else Hang(), 2, tools=[look_up])
    backend = ScriptedBackend(tool_then_answer)
    async with BatchAgent.open(
        task="{input}", inputs=["a"], tools=[look_up], backend=backend, run_dir=tmp_path, resume=True
    ) as resumed:
        [result] = [result async for result in resumed.results()]
        statistics = resumed.statistics()
    assert result.turns == 2
    assert statistics.turns == 1
    assert 0 < statistics.usage.prompt_tokens < result.usage.prompt_tokens


async def test_an_interrupted_repair_goes_on_with_the_repair(tmp_path: Path) -> None:
    def script(request: Request) -> Any:
        return Say("no JSON") if request.turn == 0 else Say('{"word": "mended"}')

    options = {"output_schema": Answer, "max_retries": 2}
    await interrupt(tmp_path, lambda r: script(r) if r.turn == 0 else Hang(), 2, **options)
    [result], backend = await run(tmp_path, script, inputs=["a"], **options)
    assert (result.output, result.turns, result.attempts) == (Answer(word="mended"), 2, 2)
    assert len(backend.requests) == 1
    [again], backend = await run(tmp_path, script, inputs=["a"], output_schema=Answer, max_retries=0)
    assert (again.output, again.attempts, backend.requests) == (Answer(word="mended"), 2, [])


async def test_a_write_that_was_begun_and_not_recorded_is_not_run_again_and_the_model_is_told(tmp_path: Path) -> None:
    ran: list[str] = []
    running = asyncio.Event()

    @Tool.define(effect="write")
    async def send(to: str) -> str:
        ran.append(to)
        running.set()
        if len(ran) == 1:
            await asyncio.get_running_loop().create_future()
        return "sent"

    def script(request: Request) -> Any:
        return CallTools(ToolUse("send", {"to": "x"})) if request.turn == 0 else Say(request.text)

    options: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "tools": [send], "run_dir": tmp_path}
    async with BatchAgent.open(backend=ScriptedBackend(script), **options):
        await running.wait()
    [result], _ = await run(tmp_path, script, **options)
    assert ran == ["x"]
    assert isinstance(result.output, str)
    assert "interrupted" in result.output and "unknown" in result.output
    [again], backend = await run(tmp_path, script, **options)
    assert (again.output, backend.requests) == (result.output, [])


async def test_failed_rows_are_tried_again_and_others_are_not(tmp_path: Path) -> None:
    def flaky(request: Request) -> Any:
        return Fail(422) if request.text == "b" else Say(request.text)

    first, _ = await run(tmp_path, flaky)
    assert [result.ok for result in first] == [True, False, True]
    again, backend = await run(tmp_path)
    assert asked(backend) == ["b"]
    assert [result.output for result in again] == ["a", "b", "c"]
    assert (tmp_path / "failures.jsonl").read_text() == ""


async def test_a_failed_row_that_is_not_to_be_tried_again_comes_back_as_it_failed(tmp_path: Path) -> None:
    def script(request: Request) -> Any:
        return tool_then_answer(request) if request.turn == 0 else Fail(422)

    [first], _ = await run(tmp_path, script, inputs=["a"], tools=[look_up])
    [again], backend = await run(tmp_path, script, inputs=["a"], tools=[look_up], retry_failed=False)
    assert backend.requests == []
    assert again.resumed and not again.ok
    assert (again.error, again.usage, again.turns, again.attempts, again.messages) == (
        first.error,
        first.usage,
        first.turns,
        first.attempts,
        first.messages,
    )


async def test_only_failures_of_the_named_types_are_tried_again(tmp_path: Path) -> None:
    def script(request: Request) -> Any:
        return {"a": Say("half", finish_reason="length"), "b": Fail(400)}.get(request.text, Say("ok"))

    await run(tmp_path, script, truncated="fail")
    results, backend = await run(tmp_path, retry_failed="Rejected")
    assert asked(backend) == ["b"]
    assert [result.error and result.error.type for result in results] == ["Truncated", None, None]


@pytest.mark.parametrize(
    ("retry_from", "turns"),
    [
        ("auto", [("self", 0), ("self", 1), ("server", 1)]),
        ("start", [("self", 0), ("self", 1), ("server", 0), ("server", 1)]),
        ("failure", [("self", 2), ("server", 1)]),
    ],
)
async def test_a_failed_row_starts_again_unless_the_cause_was_outside_of_it_or_it_is_told_otherwise(
    tmp_path: Path, retry_from: str, turns: list[tuple[str, int]]
) -> None:
    def broken(request: Request) -> Any:
        if request.turn == 0:
            return tool_then_answer(request)
        return Fail(500) if word_of(request) == "server" else Say("not JSON")

    options = {"inputs": ["server", "self", "good"], "tools": [look_up], "output_schema": Answer}
    first, _ = await run(tmp_path, lambda r: tool_then_answer(r) if word_of(r) == "good" else broken(r), **options)
    assert [result.error and result.error.type for result in first] == ["Unavailable", "NotJSON", None]
    again, backend = await run(tmp_path, tool_then_answer, **options, retry_from=retry_from, max_retries=1)
    assert all(result.ok for result in again)
    assert sorted((word_of(request), request.turn) for request in backend.requests) == turns
    paid = [len(request.messages) for request in backend.requests]
    assert again[1].turns == (3 if retry_from == "failure" else 2) and max(paid) <= (
        6 if retry_from == "failure" else 4
    )
    assert again[1].usage.prompt_tokens > first[1].usage.prompt_tokens  # what was paid before counts too
    later, backend = await run(tmp_path, tool_then_answer, **options)
    assert backend.requests == []
    assert [result.messages for result in later] == [result.messages for result in again]


async def test_an_agent_that_ran_out_of_turns_goes_on_when_it_gets_more(tmp_path: Path) -> None:
    def script(request: Request) -> Any:
        return Say("enough") if request.turn == 3 else CallTools(ToolUse("look_up", {"word": "x"}))

    [first], _ = await run(tmp_path, script, inputs=["a"], tools=[look_up], max_turns=2)
    assert first.error is not None and first.error.type == "LimitExceeded"
    more: dict[str, Any] = {"inputs": ["a"], "tools": [look_up], "retry_from": "failure"}
    [again], backend = await run(tmp_path, script, **more, max_turns=2)
    assert (again.error, backend.requests) == (first.error, [])  # the limit counts over all sessions
    [again], backend = await run(tmp_path, script, **more, max_turns=4)
    assert (again.output, [request.turn for request in backend.requests]) == ("enough", [2, 3])


async def test_a_row_that_cannot_be_rendered_is_a_failure_each_time_and_harms_no_other(tmp_path: Path) -> None:
    rows = [{"word": "a"}, {"other": 1}, {"word": "b"}]
    for requests in (2, 0):
        results, backend = await run(tmp_path, task="{word}", inputs=rows)
        assert [result.ok for result in results] == [True, False, True]
        assert len(backend.requests) == requests
    [line] = (tmp_path / "failures.jsonl").read_text().splitlines()
    failure = json.loads(line)
    assert (failure["stage"], failure["type"], failure["attempts"]) == ("compile", "InputError", 0)


async def test_a_drained_run_says_that_it_was_interrupted_and_the_rest_is_done_later(tmp_path: Path) -> None:
    def drain_at_the_third(request: Request) -> Say:
        if request.number == 2:
            first.drain()
        return echo(request)

    backend = ScriptedBackend(drain_at_the_third)
    options = {"task": "{input}", "run_dir": tmp_path, "max_inflight": 1, "max_agents": 1}
    inputs = [str(n) for n in range(20)]
    async with BatchAgent.open(inputs=inputs, backend=backend, **options) as first:
        assert len([result async for result in first.results()]) == 3
    assert look(tmp_path).state == "interrupted"
    results, rest = await run(tmp_path, inputs=inputs)
    assert len(backend.requests) + len(rest.requests) == 20
    assert [result.output for result in results] == inputs
    assert look(tmp_path).state == "complete"


async def test_a_run_that_is_refused_says_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        await run(tmp_path, lambda _: Fail(401))
    view = look(tmp_path)
    assert (view.state, view.latest.failed) == ("failed", 0)
    assert "every row is refused" in str(view.facts["why"])
    assert len((await run(tmp_path))[1].requests) == 3


async def test_a_directory_that_holds_a_run_is_not_begun_anew_by_accident(tmp_path: Path) -> None:
    await run(tmp_path)
    with pytest.raises(SpecError, match="holds a run already"):
        await run(tmp_path, resume=False)


async def test_a_second_run_on_the_same_directory_gets_a_clear_error_and_the_first_goes_on(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda _: Hang())
    async with BatchAgent.open(task="{input}", inputs=["a"], backend=backend, run_dir=tmp_path):
        while not backend.requests:
            await asyncio.sleep(0)
        with pytest.raises(StoreError, match="in use by process"):
            await run(tmp_path)
        assert look(tmp_path).state == "running"
    assert look(tmp_path).state == "interrupted"


async def test_checkpoint_dir_is_another_name_and_resume_needs_a_directory(tmp_path: Path) -> None:
    await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(echo), checkpoint_dir=tmp_path)
    assert look(tmp_path).state == "complete"
    with pytest.raises(SpecError, match="resume needs run_dir"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(echo), resume=True)


async def test_the_files_of_a_run_say_what_it_was(tmp_path: Path) -> None:
    await run(tmp_path, lambda r: Fail(400, {"error": {"message": "no"}}) if r.text == "b" else Say(r.text), seed=3)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["state"], facts["total"], facts["model"], facts["rows"]["read"]) == ("complete", 3, "scripted", 3)
    assert {"batch-agent", "python", "journal"} == facts["versions"].keys()
    assert facts["started"] <= facts["ended"]
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(result["index"] for result in results) == [0, 2]
    [failure] = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert (failure["index"], failure["stage"], failure["type"], failure["attempts"]) == (1, "infer", "Rejected", 1)
    assert json.loads((tmp_path / "summary.json").read_text())["rows"]["ok"] == 2


async def test_a_torn_last_line_is_gone_after_the_next_session(tmp_path: Path) -> None:
    await run(tmp_path)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"index": 3, "jo')
    await run(tmp_path)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in lines) == [0, 1, 2]


@virtual_clock
async def test_a_result_is_delivered_only_when_it_is_on_disk(tmp_path: Path) -> None:
    seen: list[int] = []

    def on_result(result: AgentResult[str]) -> None:
        seen.append(look(tmp_path).latest.tokens)

    results, _ = await run(tmp_path, inputs=[str(n) for n in range(50)], on_result=on_result)
    assert len(seen) == 50
    assert min(seen) > 0
    assert seen == sorted(seen)
    assert seen[-1] == sum(r.usage.prompt_tokens + r.usage.completion_tokens for r in results)


async def test_a_cut_text_comes_back_from_the_record_marked_or_as_a_failure(tmp_path: Path) -> None:
    await run(tmp_path, lambda _: Say("half", finish_reason="length"))
    kept, backend = await run(tmp_path)
    assert ([(result.output, result.truncated) for result in kept], backend.requests) == ([("half", True)] * 3, [])
    failed, backend = await run(tmp_path, truncated="fail")
    assert [result.error and result.error.type for result in failed] == ["Truncated"] * 3
    assert backend.requests == []

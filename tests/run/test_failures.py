"""Faults of servers, models and rows: each ends where it belongs, and nowhere else."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, RunRejected, RunUnreachable, SpecError, Tool, ToolError
from batch_agent.errors import BatchAgentError
from batch_agent.events import LimitChanged, TurnFailed
from batch_agent.files.read import read_inputs
from batch_agent.job import AgentResult
from batch_agent.testing import (
    Body,
    CallTools,
    Cut,
    Fail,
    Hang,
    Malformed,
    Request,
    Say,
    ScriptedBackend,
    StreamError,
    ToolUse,
    virtual_clock,
)


class Answer(BaseModel):
    number: int


@Tool.define(effect="read")
async def look_up(word: str) -> str:
    return f"about {word}"


async def run_one(script: object, **options: object) -> AgentResult[object]:
    backend = ScriptedBackend(script)  # type: ignore[arg-type]
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, **options)  # type: ignore[call-overload]
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("reply", "kind", "attempts"),
    [  # of what may be the server's fault, a lone row is sent again for a while
        (Fail(500), "Unavailable", 4),
        (Fail(503), "Unavailable", 4),
        (Fail(400), "Rejected", 1),
        (Fail(413), "Rejected", 1),
        (Fail(422), "Rejected", 1),
        (Cut(), "Unavailable", 4),
        (Malformed(b'{"choices": [{"mess'), "BadResponse", 4),
        (Malformed(b"<html>hello</html>"), "BadResponse", 4),
        (Body({"choices": []}), "BadResponse", 4),
        (Body({"error": {"message": "overloaded", "code": 503}}), "Unavailable", 4),
        (CallTools(ToolUse("look_up", {"word": "x"}), text="I look", finish_reason="length"), "Truncated", 1),
        (Say("<think>It must be", finish_reason="length"), "Truncated", 1),
        (Say("half an ans", finish_reason="abort"), "BadResponse", 4),
    ],
    ids=str,
)
def test_what_is_not_an_answer_is_an_error_of_its_type(reply: object, kind: str, attempts: int) -> None:
    @virtual_clock
    async def scenario() -> AgentResult[object]:
        return await run_one(lambda request: Say("OK") if request.is_control else reply)

    result = scenario()
    assert result.error is not None
    assert (result.ok, result.output, result.error.type) == (False, None, kind)
    assert result.attempts == attempts


@pytest.mark.parametrize("reply", [Fail(429), StreamError(code=429)], ids=str)
def test_a_server_that_refuses_every_request_for_load_ends_the_run_and_fails_no_row(reply: object) -> None:
    @virtual_clock
    async def scenario() -> None:
        with pytest.raises(RunUnreachable, match="max_outage, 60 s"):
            await run_one(lambda request: reply, max_outage=60)

    scenario()


@virtual_clock
async def test_a_cut_stream_is_asked_again_and_the_tools_it_started_do_no_harm() -> None:
    def script(request: Request) -> Say | Cut:
        if request.number == 0:
            return Cut(CallTools(ToolUse("look_up", {"word": "x"}), text="a long answer"), after_chunks=8)
        return CallTools(ToolUse("look_up", {"word": "x"})) if request.turn == 0 else Say("done")

    result = await run_one(script, tools=[look_up])
    assert (result.output, result.attempts, result.turns) == ("done", 2, 2)


@virtual_clock
async def test_free_text_that_was_cut_at_its_limit_is_the_output_and_marked() -> None:
    result = await run_one([Say("half an ans", finish_reason="length")])
    assert (result.ok, result.output, result.truncated, result.turns) == (True, "half an ans", True, 1)
    assert (await run_one([Say("a whole answer")])).truncated is False


@pytest.mark.parametrize("options", [{"truncated": "fail"}, {"output_schema": dict[str, int]}], ids=str)
@virtual_clock
async def test_a_cut_answer_fails_its_row_with_a_schema_or_on_demand_and_keeps_its_text(options: Any) -> None:
    result = await run_one([Say('{"a": 1', finish_reason="length")], **options)
    assert (result.ok, result.truncated, result.raw_text) == (False, False, '{"a": 1')
    assert result.error is not None
    assert (result.error.type, "max_tokens" in result.error.message) == ("Truncated", True)


@virtual_clock
async def test_reasoning_that_is_never_closed_is_an_error_and_not_the_output() -> None:
    result = await run_one([Say("<think>It must be 42, or else")])
    assert (result.ok, result.output, result.raw_text) == (False, None, "<think>It must be 42, or else")
    assert result.error is not None
    assert (result.error.stage, result.error.type) == ("validate", "OutputError")


@virtual_clock
async def test_retry_after_in_seconds_and_as_a_date_is_honoured() -> None:
    loop = asyncio.get_running_loop()
    for value, least in (("7", 7.0), (formatdate(time.time() + 90, usegmt=True), 80.0)):
        began = loop.time()
        result = await run_one([Fail(429, headers={"Retry-After": value}), Say("ok")])
        assert (result.ok, result.attempts) == (True, 2)
        assert loop.time() - began >= least


@virtual_clock
async def test_an_overloaded_server_gets_half_and_more_again_when_it_recovers() -> None:
    loop = asyncio.get_running_loop()
    limits: list[int | None] = []

    def script(request: Request) -> Say | Fail:
        return Fail(503, latency=0.1) if loop.time() < 1 else Say("ok", latency=0.1)

    backend = ScriptedBackend(script)
    async with BatchAgent.open(
        task="{input}",
        inputs=map(str, range(200)),
        backend=backend,
        max_inflight=16,
        max_retries=8,
        sinks=[lambda event: limits.append(event.max_inflight) if isinstance(event, LimitChanged) else None],
    ) as run:
        results = [result async for result in run.results()]
    assert all(result.ok for result in results)
    assert limits[:2] == [16, 8]
    assert limits[-1] is not None and limits[-1] > min(limit for limit in limits if limit is not None)


@virtual_clock
async def test_no_answer_in_time_is_a_timeout_and_tried_again() -> None:
    result = await run_one([Hang(), Say("ok")], timeout_per_turn=5)
    assert (result.ok, result.attempts) == (True, 2)
    assert result.timings.inference == pytest.approx(5.0)


@pytest.mark.parametrize("limit", ["timeout_per_turn", "timeout_per_agent"])
@virtual_clock
async def test_the_text_of_an_answer_that_times_out_in_mid_stream_is_kept(limit: str) -> None:
    slow = Say("one two three four five six", chunk_delay=1.0)
    result = await run_one([slow], tools=[look_up], max_retries=0, **{limit: 2.5})
    assert result.error is not None and result.error.type == "TimeoutError"
    assert result.raw_text and slow.text.startswith(result.raw_text) and result.raw_text != slow.text


@virtual_clock
async def test_the_text_of_an_answer_that_breaks_off_in_mid_stream_is_kept() -> None:
    result = await run_one([Cut(Say("one two three"), after_chunks=2)], tools=[look_up], max_retries=0)
    assert result.error is not None and result.error.type == "Unavailable"
    assert result.raw_text == "one two "


@virtual_clock
async def test_timeout_per_agent_is_over_the_whole_agent_waiting_included() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=8))
    results = await BatchAgent.run(
        task="{input}", inputs=["a", "b", "c"], backend=backend, max_inflight=1, timeout_per_agent=10
    )
    assert [result.ok for result in results] == [True, True, True]
    [late] = await BatchAgent.run(
        task="{input}",
        inputs=["a"],
        backend=ScriptedBackend([Fail(429, headers={"Retry-After": "60"})]),
        timeout_per_agent=10,
    )
    assert late.error is not None
    assert (late.error.type, late.error.retryable, late.attempts) == ("TimeoutError", False, 1)


@virtual_clock
async def test_a_row_that_cannot_be_rendered_is_one_failed_result() -> None:
    rows = [{"x": "a"}, {"y": "b"}, {"x": object()}, {"x": "d"}]
    backend = ScriptedBackend(lambda request: Say(request.text))
    results = await BatchAgent.run(task="{x}", inputs=iter(rows), backend=backend)
    assert [result.ok for result in results] == [True, False, False, True]
    assert [result.error.type for result in results if result.error] == ["InputError", "InputError"]
    assert [result.attempts for result in results] == [1, 0, 0, 1]


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_template_that_names_a_field_the_first_input_lacks_is_refused_before_any_request(lazy: bool) -> None:
    backend = ScriptedBackend()
    rows = [{"x": "a"}]
    with pytest.raises(SpecError, match="path"):
        await BatchAgent.run(task="Review {path}", inputs=iter(rows) if lazy else rows, backend=backend)
    assert backend.requests == []


@virtual_clock
async def test_an_input_that_can_never_fit_fails_before_any_request() -> None:
    backend = ScriptedBackend()
    results = await BatchAgent.run(
        task="{input}",
        inputs=["short", "long " * 1000],
        backend=backend,
        model_max_context=500,
        min_response_tokens=100,
    )
    assert [result.ok for result in results] == [True, False]
    assert results[1].error is not None
    assert (results[1].error.type, results[1].attempts) == ("OVERSIZED", 0)
    assert len(backend.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_for_all_stops_the_run_at_once(status: int) -> None:
    @virtual_clock
    async def scenario() -> int:
        backend = ScriptedBackend(lambda request: Fail(status, latency=1))
        with pytest.raises(RunRejected, match=str(status)):
            await BatchAgent.run(task="{input}", inputs=map(str, range(10_000)), backend=backend, max_inflight=4)
        assert backend.inflight == backend.entered == 0
        return len(backend.requests)

    assert scenario() <= 8


@virtual_clock
async def test_the_same_refusal_is_data_once_a_row_has_succeeded() -> None:
    backend = ScriptedBackend(lambda request: Fail(403, latency=1) if request.text == "bad" else Say("ok"))
    results = await BatchAgent.run(task="{input}", inputs=["good", "bad", "good"], backend=backend, max_inflight=1)
    assert [result.ok for result in results] == [True, False, True]


@virtual_clock
async def test_an_answer_that_does_not_validate_is_shown_to_the_model_with_its_errors() -> None:
    backend = ScriptedBackend([Say('{"number": "many"}'), Say("sorry: {'number': 3,}")])
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, output_schema=Answer)
    assert (result.output, result.attempts, result.turns) == (Answer(number=3), 2, 2)
    assert result.repaired
    shown = str(backend.requests[1].messages[-1]["content"])
    assert "number" in shown and "integer" in shown
    assert backend.requests[1].messages[:-2] == backend.requests[0].messages


@virtual_clock
async def test_after_max_retries_the_raw_text_stays_on_the_result() -> None:
    backend = ScriptedBackend(lambda request: Say("I would rather not."))
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, output_schema=Answer, max_retries=2)
    assert result.error is not None
    assert (result.error.type, result.error.stage) == ("NotJSON", "validate")
    assert (result.attempts, result.raw_text) == (3, "I would rather not.")


@virtual_clock
async def test_a_tool_that_raises_tells_the_model_and_the_agent_goes_on() -> None:
    @Tool.define(effect="read")
    async def fragile(kind: str) -> str:
        if kind == "polite":
            raise ToolError("no such page; try another")
        raise KeyError("boom")

    def script(request: Request) -> Say:
        kinds = ["polite", "rude"]
        if request.turn < 2:
            return CallTools(ToolUse("fragile", {"kind": kinds[request.turn]}))
        return Say("done")

    backend = ScriptedBackend(script)
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], tools=[fragile], backend=backend)
    said = [message.content for message in result.messages if message.role == "tool"]
    assert result.ok
    assert said[0] == "Error: no such page; try another"
    assert "KeyError" in said[1]


@virtual_clock
async def test_a_call_to_a_tool_that_is_not_offered_or_has_wrong_arguments_is_explained_to_the_model() -> None:
    replies = [
        CallTools(ToolUse("look_upp", {"word": "x"})),
        CallTools(ToolUse("look_up", {"wrd": "x"})),
        CallTools(ToolUse("look_up", "{not json")),
        Say("done"),
    ]
    result = await run_one(replies, tools=[look_up])
    said = [message.content for message in result.messages if message.role == "tool"]
    assert result.output == "done"
    assert all(text.startswith("Error: ") for text in said)
    assert "look_up" in said[0] and "word" in said[1] and "JSON" in said[2]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_callback_that_raises_is_reported_once_and_loses_nothing(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def plain(result: AgentResult[str]) -> None:
        seen.append(result.index)
        raise RuntimeError("my callback is broken")

    async def slow(result: AgentResult[str]) -> None:
        await asyncio.sleep(0)
        plain(result)

    with caplog.at_level(logging.ERROR, logger="batch_agent"):
        results = await BatchAgent.run(
            task="{input}",
            inputs=map(str, range(5)),
            backend=ScriptedBackend(),
            on_result=slow if asynchronous else plain,
        )
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert all(result.ok for result in results)
    assert len(caplog.records) == 1


async def test_a_task_that_uses_no_field_of_its_rows_is_a_warning_before_anything_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warned: list[str] = []

    def answer(request: Request) -> Say:
        warned.append(caplog.text)
        return Say("ok")

    await BatchAgent.run(task="Say hello", inputs=iter(["a", "b"]), backend=ScriptedBackend(answer))
    assert all("the task uses no field of its rows (input)" in text for text in warned)
    assert len(caplog.records) == 1


@virtual_clock
async def test_inputs_that_raise_end_the_run_with_that_exception() -> None:
    def rows() -> object:
        yield "a"
        raise OSError("the file is gone")

    backend = ScriptedBackend(lambda request: Say("ok", latency=100))
    with pytest.raises(OSError, match="the file is gone"):
        await BatchAgent.run(task="{input}", inputs=rows(), backend=backend)
    assert backend.inflight == 0


@virtual_clock
async def test_a_fault_of_the_backend_that_is_not_its_own_error_stops_the_run_with_it() -> None:
    def script(request: Request) -> Say:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        await run_one(script)


@virtual_clock
async def test_failed_requests_are_events_that_say_when_they_are_sent_again() -> None:
    failed: list[TurnFailed] = []
    backend = ScriptedBackend([Fail(500), Fail(400)])
    async with BatchAgent.open(
        task="{input}",
        inputs=["a"],
        backend=backend,
        sinks=[lambda event: failed.append(event) if isinstance(event, TurnFailed) else None],
    ) as run:
        assert [result.ok async for result in run.results()] == [False]
    assert failed[0].retry_in is not None
    assert failed[1].retry_in is None


@virtual_clock
async def test_a_sink_that_raises_does_not_touch_the_run() -> None:
    def broken(event: object) -> None:
        raise RuntimeError("broken view")

    logging.getLogger("batch_agent").addHandler(logging.NullHandler())
    async with BatchAgent.open(task="{input}", inputs=["a"], backend=ScriptedBackend(), sinks=[broken]) as run:
        assert [result.ok async for result in run.results()] == [True]
        assert run.statistics().ok == 1


async def test_rows_before_the_unreadable_part_of_a_file_are_processed(tmp_path: Path) -> None:
    """Several rows of a file are read at once; an error among them concerns only those after it."""
    path = tmp_path / "rows.jsonl.gz"
    lines = b"".join(b'{"a": %d}\n' % (number * 7919 % 10_007) for number in range(3_000))
    path.write_bytes(gzip.compress(lines)[:-1000])
    readable = 0
    with pytest.raises(BatchAgentError):
        for _ in read_inputs(path, at_once_bytes=0):
            readable += 1
    results: list[AgentResult[object]] = []
    with pytest.raises(BatchAgentError, match=f"after {readable:,} rows"):
        async for result in BatchAgent.stream(
            task="{a}", inputs=read_inputs(path, at_once_bytes=0), backend=ScriptedBackend(lambda _: Say("x"))
        ):
            results.append(result)
    assert readable % 16 and len(results) == readable

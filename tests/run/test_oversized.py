"""Rows that do not fit the model's context: they fail, are cut, or are done in parts whose answers are merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_serializer

from batch_agent import AgentResult, BatchAgent
from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, virtual_clock

CONTEXT = 1_000


class Found(BaseModel):
    numbers: list[int]


def book(pages: int) -> str:
    return "\n\n".join(f"# Page {page}\n\n{'Nothing happens. ' * 20}" for page in range(pages))


def read(request: Request) -> Say:
    """The pages of the part; or those of all the answers that are to be merged."""
    if "<answer" in request.text:
        numbers = {n for line in request.text.splitlines() if line.startswith("{") for n in json.loads(line)["numbers"]}
    else:
        numbers = {int(line.split()[-1]) for line in request.text.splitlines() if line.startswith("# Page")}
    return Say(json.dumps({"numbers": sorted(numbers)}), latency=1, usage=Usage(100, 0, 10))


async def run(script: Any = read, **options: Any) -> tuple[list[AgentResult[Any]], ScriptedBackend]:
    backend = ScriptedBackend(script)
    known: dict[str, Any] = {
        "task": "List the pages, as {style}:\n{text}",
        "inputs": [{"text": book(40), "style": "JSON"}],
        "output_schema": Found,
        "model_max_context": CONTEXT,
        "min_response_tokens": 100,
        "oversized": "chunk",
        "max_retries": 0,
    }
    return await BatchAgent.run(backend=backend, **{**known, **options}), backend


@virtual_clock
async def test_a_row_that_does_not_fit_is_done_in_parts_and_merged_into_one_result() -> None:
    [result], backend = await run()
    assert result.error is None
    assert result.output == Found(numbers=list(range(40)))
    parts = [request for request in backend.requests if "[Part" in request.text]
    merges = [request for request in backend.requests if "<answer" in request.text]
    assert result.chunks == len(parts) > 4
    assert len(merges) == 1
    assert "as JSON:\n[text: read in parts]" in merges[0].text
    assert result.turns == len(backend.requests)
    assert result.usage == Usage(100 * result.turns, 0, 10 * result.turns)
    assert result.input == {"text": book(40), "style": "JSON"}


@virtual_clock
async def test_no_request_is_longer_than_the_context() -> None:
    _, backend = await run()
    assert max(len(request.raw) for request in backend.requests) / 4 < CONTEXT


@virtual_clock
async def test_answers_that_do_not_fit_one_request_are_merged_in_levels() -> None:
    [result], backend = await run(inputs=[{"text": book(400), "style": "JSON"}])
    merges = [request for request in backend.requests if "<answer" in request.text]
    assert result.output == Found(numbers=list(range(400)))
    assert len(merges) > 1


@virtual_clock
async def test_rows_of_very_different_length_do_not_hold_each_other_up() -> None:
    done: list[int] = []
    rows = [{"text": book(pages), "style": "JSON"} for pages in (60, 1, 1, 1)]
    await run(inputs=rows, max_inflight=4, on_result=lambda result: done.append(result.index))
    assert (sorted(done), done[-1]) == ([0, 1, 2, 3], 0)


@virtual_clock
async def test_one_agent_at_a_time_is_enough_for_a_row_in_parts() -> None:
    [result], backend = await run(max_agents=1, max_inflight=1)
    assert result.ok
    assert backend.peak_inflight == 1


@virtual_clock
async def test_a_part_that_fails_fails_its_row_and_no_other() -> None:
    def script(request: Request) -> Any:
        return Fail(400) if "[Part 2 " in request.text else read(request)

    rows = [{"text": book(pages), "style": "JSON"} for pages in (40, 1)]
    (long, short), backend = await run(script, inputs=rows)
    assert long.error is not None
    assert (long.error.type, long.ok, long.output) == ("Rejected", False, None)
    assert long.error.message.startswith(f"part 2 of {long.chunks}: ")
    assert short.ok
    assert not any("<answer" in request.text for request in backend.requests)


@virtual_clock
async def test_a_row_in_parts_is_resumed_with_only_the_parts_that_are_missing(tmp_path: Path) -> None:
    def script(request: Request) -> Any:
        return Fail(400) if "[Part 2 " in request.text else read(request)

    options = {"run_dir": tmp_path, "resume": True, "max_inflight": 1}
    [failed], backend = await run(script, **options)
    assert not failed.ok
    before = len(backend.requests)
    [result], backend = await run(**options)
    assert result.ok and not result.resumed
    assert len(backend.requests) == result.chunks + 1 - (before - 1)
    [again], backend = await run(**options)
    assert again.resumed
    assert (again.output, again.usage, again.chunks) == (result.output, result.usage, result.chunks)
    assert backend.requests == []
    [line] = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["chunks"] == result.chunks


@virtual_clock
async def test_a_budget_that_ends_between_two_parts_interrupts_the_row() -> None:
    run_ = BatchAgent.open(
        task="{input}",
        inputs=[book(40)],
        backend=ScriptedBackend(read),
        model_max_context=CONTEXT,
        oversized="chunk",
        max_inflight=1,
        max_wall_time=2.5,
    )
    async with run_ as running:
        [result] = [result async for result in running.results()]
        assert result.error is not None and result.error.type == "Interrupted"
        assert running.statistics().ended == "out of budget"


@virtual_clock
async def test_a_drain_between_two_parts_leaves_the_row_for_the_next_session() -> None:
    def drain(request: Request) -> Say:
        running.drain()
        return read(request)

    backend = ScriptedBackend(drain)
    options: dict[str, Any] = {"model_max_context": CONTEXT, "oversized": "chunk", "max_inflight": 1}
    async with BatchAgent.open(task="{input}", inputs=[book(40)], backend=backend, **options) as running:
        [result] = [result async for result in running.results()]
    assert result.error is not None and result.error.type == "Interrupted"
    assert len(backend.requests) == 1


@virtual_clock
async def test_truncating_sends_the_beginning_and_says_so() -> None:
    rows = [{"text": book(pages), "style": "JSON"} for pages in (40, 1)]
    (long, short), backend = await run(inputs=rows, oversized="truncate")
    assert (long.ok, long.shortened, long.chunks) == (True, True, 1)
    assert not short.shortened
    assert long.output is not None and 0 < len(long.output.numbers) < 40
    assert "left out.]" in backend.requests[0].text


@virtual_clock
async def test_what_was_cut_off_is_no_part_of_the_question(tmp_path: Path) -> None:
    options = {"oversized": "truncate", "run_dir": tmp_path, "resume": True}
    await run(**options)
    _, backend = await run(**{**options, "inputs": [{"text": book(40), "style": "JSON"}]})
    assert backend.requests == []
    _, backend = await run(**{**options, "model_max_context": CONTEXT - 200, "on_change": "resend"})
    assert len(backend.requests) == 1


async def test_a_row_that_cutting_does_not_help_fails() -> None:
    [result], backend = await run(system_prompt="long " * 1_000)
    assert result.error is not None
    assert result.error.type == "OVERSIZED"
    assert "cutting 'text' is not enough" in result.error.message
    assert backend.requests == []


@virtual_clock
async def test_a_long_text_that_all_rows_share_is_cut_in_each(tmp_path: Path) -> None:
    rows = [{"style": style, "text": book(40)} for style in ("JSON", "a list")]
    results, _ = await run(inputs=rows)
    assert [result.output for result in results] == [Found(numbers=list(range(40)))] * 2


async def test_cutting_needs_to_know_the_context() -> None:
    with pytest.raises(SpecError, match="needs model_max_context"):
        await run(model_max_context=None)


@virtual_clock
async def test_an_answer_that_cannot_be_written_fails_its_row() -> None:
    class Odd(Found):
        @field_serializer("numbers")
        def write(self, numbers: list[int]) -> str:
            raise RuntimeError("no")

    [result], backend = await run(output_schema=Odd)
    assert result.error is not None
    assert result.error.type == "Invalid"
    assert not any("<answer" in request.text for request in backend.requests)


@virtual_clock
async def test_a_row_in_parts_is_one_row_in_the_view() -> None:
    seen: list[tuple[int, int]] = []

    def look(request: Request) -> Say:
        statistics = running.statistics()
        seen.append((statistics.running, statistics.queued))
        return read(request)

    options: dict[str, Any] = {"model_max_context": CONTEXT, "oversized": "chunk", "max_inflight": 4}
    async with BatchAgent.open(task="{input}", inputs=[book(40)], backend=ScriptedBackend(look), **options) as running:
        [result] = [result async for result in running.results()]
        statistics = running.statistics()
    assert set(seen) == {(1, 0)}
    assert (statistics.total, statistics.done, statistics.ok) == (1, 1, 1)
    assert (statistics.running, statistics.queued) == (0, 0)
    assert statistics.turns == result.turns == result.chunks + 1

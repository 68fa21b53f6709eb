"""``run_with_reduce``: what the reducer sees, what comes back, and what is not lost when something fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, SpecError
from batch_agent.messages import Usage
from batch_agent.record.reader import look
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend, virtual_clock
from batch_agent.testing.replies import ScriptedReply


class Note(BaseModel):
    text: str


class Summary(BaseModel):
    words: list[str]


class Elsewhere(ScriptedBackend):
    """At another place, with slots of its own."""

    @property
    def name(self) -> str:
        return "elsewhere://"


def rows_of(request: Request) -> list[dict[str, Any]]:
    return [json.loads(line) for line in request.text.splitlines() if line.startswith('{"status"')]


def is_reduction(request: Request) -> bool:
    return bool(rows_of(request))


def answer(request: Request) -> ScriptedReply:
    """Notes say their input back; a summary has the words of all its rows."""
    rows = rows_of(request)
    if not rows:
        if "bad" in request.text:
            return Fail(400)
        return Say(json.dumps({"text": request.text.removeprefix("note ")}), latency=1)
    outputs = [row["output"] for row in rows if row["status"] == "ok"]
    words = [word for output in outputs for word in output.get("words", [output.get("text")])]
    return Say(json.dumps({"words": words}), latency=1)


async def reduced(backend: ScriptedBackend, inputs: Any, **options: Any) -> Any:
    known = {"task": "note {input}", "output_schema": Note, "reduce": "Sum up {n} notes", "reduce_schema": Summary}
    return await BatchAgent.run_with_reduce(inputs=inputs, backend=backend, **(known | options))


@virtual_clock
async def test_the_reducer_sees_every_row_and_its_value_comes_back_beside_the_results() -> None:
    backend = ScriptedBackend(answer)
    results, summary = await reduced(backend, ["a", "bad", "c"])
    assert [result.output for result in results] == [Note(text="a"), None, Note(text="c")]
    assert summary == Summary(words=["a", "c"])
    [request] = filter(is_reduction, backend.requests)
    assert request.text.startswith("Sum up 3 notes\n\n")
    first, second, third = rows_of(request)
    assert first == {"status": "ok", "index": 0, "output": {"text": "a"}}
    assert (second["status"], second["index"], second["error"]["type"]) == ("error", 1, "Rejected")
    assert third["index"] == 2


@virtual_clock
async def test_the_reduction_says_what_it_covers() -> None:
    outcome = await reduced(ScriptedBackend(answer), ["a", "bad", "c"])
    reduction = outcome.reduction
    assert (reduction.ok, reduction.covers, reduction.failed, reduction.lost) == (True, (0, 2), (1,), ())
    assert (reduction.requests, reduction.levels, reduction.output) == (1, 1, outcome[1])


@virtual_clock
async def test_a_brace_in_the_prompt_is_text_and_n_is_the_number_of_results() -> None:
    backend = ScriptedBackend(answer)
    await reduced(backend, ["a", "b"], reduce='{n} of {"x": {y}} {name} {}')
    assert backend.requests[-1].text.startswith('2 of {"x": {y}} {name} {}\n')


@virtual_clock
async def test_without_a_schema_the_summary_is_text() -> None:
    backend = ScriptedBackend(lambda request: Say("all" if "status" in request.text else "one"))
    results, summary = await BatchAgent.run_with_reduce(task="{input}", inputs=["a"], backend=backend, reduce="Sum up")
    assert (results[0].output, summary) == ("one", "all")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"reduce": " "}, "reduce is empty"),
        ({"reduce_schema": "Summary"}, "reduce: output_schema is"),
        ({"reduce_tree": 1}, "reduce_tree must be auto, flat or a number of rows above 1"),
        ({"reduce_tree": "deep"}, "reduce_tree must be"),
        ({"reducer_temprature": 1}, "reduce: there is no option 'temprature'; did you mean 'temperature'"),
        ({"reducer_max_cost": 1}, "max_cost is an option of the whole"),
        ({"reducer_backend": "vlm://x"}, "reduce: there is no backend scheme"),
        ({"model_max_context": 300, "min_response_tokens": 290}, "leave no room for results"),
        ({"task": "note {imput}"}, "Did you mean {input}"),
        ({"max_inflght": 3}, "did you mean 'max_inflight'"),
    ],
)
async def test_everything_is_checked_before_the_map_starts(options: dict[str, Any], says: str) -> None:
    backend = ScriptedBackend(answer)
    with pytest.raises(SpecError, match=says):
        await reduced(backend, ["a"], **options)
    assert not backend.requests


@virtual_clock
async def test_a_reduction_that_fails_leaves_the_results_and_is_a_result_that_is_false() -> None:
    backend = ScriptedBackend(lambda request: Fail(400) if is_reduction(request) else answer(request))
    results, summary = await reduced(backend, ["a", "b"])
    assert all(result.ok for result in results)
    assert isinstance(summary, AgentResult) and not summary
    assert summary.error is not None and summary.error.type == "Rejected"


@virtual_clock
async def test_a_reducer_that_cannot_even_start_leaves_the_results_too() -> None:
    other = Elsewhere(lambda _: Fail(401))
    results, summary = await reduced(ScriptedBackend(answer), ["a", "b"], reducer_backend=other)
    assert [result.ok for result in results] == [True, True]
    assert (bool(summary), summary.error.type) == (False, "RunRejected")


@virtual_clock
async def test_no_model_is_asked_to_make_something_of_nothing() -> None:
    backend = ScriptedBackend(answer)
    results, summary = await reduced(backend, ["a", "bad"][1:] * 2, max_retries=0, task="note {input} {input}")
    assert not any(results) and not summary
    assert summary.error.message == "all of results 0 to 1 failed"
    assert not any(map(is_reduction, backend.requests))
    results, summary = await reduced(backend, [])
    assert (results, summary.error.message) == ([], "there is nothing to reduce: there are no results")


@virtual_clock
async def test_what_is_on_the_map_alone_does_not_reach_the_reducer() -> None:
    backend = ScriptedBackend(answer)
    seen: list[int] = []
    await reduced(
        backend,
        ["a", "b"],
        system_prompt="You write notes.",
        max_tokens=50,
        temperature=0,
        reducer_model="big",
        reducer_system_prompt="You sum up.",
        on_result=lambda result: seen.append(result.index),
    )
    first, last = backend.requests[0], backend.requests[-1]
    assert (first.body["max_tokens"], first.model, first.messages[0]["content"]) == (50, "scripted", "You write notes.")
    assert (last.max_tokens, last.model, last.messages[0]["content"]) == (None, "big", "You sum up.")
    assert (last.body["temperature"], sorted(seen)) == (0, [0, 1])


@virtual_clock
async def test_another_backend_has_slots_of_its_own_and_another_model_its_own_prices() -> None:
    at_once: list[int] = []

    def priced(request: Request) -> ScriptedReply:
        at_once.append(here.inflight + there.inflight)
        text = json.dumps({"words": ["x"]} if is_reduction(request) else {"text": "x"})
        return Say(text, latency=1, usage=Usage(1_000_000, 0, 0))

    here, there = ScriptedBackend(priced), Elsewhere(priced)
    outcome = await reduced(
        here,
        list("abcdefgh"),
        max_inflight=1,
        reduce_tree=2,
        reducer_backend=there,
        prices={"input": 1, "output": 1},
        reducer_prices={"input": 10, "output": 10},
        max_cost=1_000,
    )
    assert [result.cost for result in outcome[0]] == [1] * 8
    assert outcome.reduction.cost == 10
    assert (here.peak_inflight, there.peak_inflight, len(there.requests)) == (1, 1, 7)
    assert max(at_once) == 2


@virtual_clock
async def test_the_whole_has_one_budget() -> None:
    backend = ScriptedBackend(lambda request: Say('{"text": "x"}', usage=Usage(100, 0, 10)))
    results, summary = await reduced(
        backend, [str(number) for number in range(40)], max_total_tokens=1_000, max_tokens=9
    )
    assert any(result.ok for result in results) and any(not result.ok for result in results)
    assert (bool(summary), summary.error.type) == (False, "Interrupted")
    assert "out of budget" in summary.error.message


@virtual_clock
async def test_a_run_directory_holds_map_and_reduce_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    backend = ScriptedBackend(answer)
    first = await reduced(backend, ["a", "b", "c"], run_dir=tmp_path, reduce_tree=2)
    asked = len(backend.requests)
    assert [look(tmp_path / name).state for name in ("", "map", "reduce")] == ["complete"] * 3
    assert len((tmp_path / "reduce" / "results.jsonl").read_text().splitlines()) == 3
    again = await reduced(backend, ["a", "b", "c"], run_dir=tmp_path, reduce_tree=2, resume=True)
    assert again[1] == first[1] and [result.resumed for result in again[0]] == [True] * 3
    assert len(backend.requests) == asked
    with pytest.raises(SpecError, match="holds a run already"):
        await reduced(backend, ["a"], run_dir=tmp_path)


@virtual_clock
async def test_a_run_that_is_stopped_during_the_reduction_goes_on_there(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda request: Hang() if is_reduction(request) else Say('{"text": "x"}'))
    task = asyncio.ensure_future(reduced(backend, ["a", "b"], run_dir=tmp_path, resume=True))
    while len(backend.requests) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = ScriptedBackend(answer)
    _, summary = await reduced(again, ["a", "b"], run_dir=tmp_path, resume=True)
    assert summary == Summary(words=["x", "x"])
    assert [is_reduction(request) for request in again.requests] == [True]

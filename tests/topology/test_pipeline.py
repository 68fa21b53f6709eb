"""Pipelines: what each stage does with rows, and that they overlap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentContext, Pipeline, SpecError
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, virtual_clock


class Word(BaseModel):
    word: str


def echo(request: Request) -> Say:
    return Say(json.dumps({"word": request.text.split()[-1]}), latency=1)


def words(*texts: str, name: str = "map") -> Pipeline[Word]:
    return Pipeline(texts).map(name=name, task="say {input}", output_schema=Word)


@virtual_clock
async def test_a_row_goes_on_as_soon_as_it_is_ready() -> None:
    times: dict[str, float] = {}

    def slow_first(request: Request) -> Say:
        times[request.text] = asyncio.get_running_loop().time()
        return Say(json.dumps({"word": request.text.split()[-1]}), latency=10 if request.text == "say a" else 1)

    pipeline = words("a", "b").map(name="again", task="again {word}", output_schema=Word)
    outcome = await pipeline.run(backend=ScriptedBackend(slow_first))
    assert times == {"say a": 0, "say b": 0, "again b": 1, "again a": 10}
    assert [word.word for word in outcome.outputs] == ["a", "b"]


@virtual_clock
async def test_flat_map_numbers_its_rows_in_order_and_filter_leaves_rows_out() -> None:
    pipeline = words("a-b", "c", "d-e-f").flat_map(lambda word: word.word.split("-")).filter(lambda part: part != "e")
    mapped = pipeline.map(name="parts", task="part {input}", output_schema=Word)
    outcome = await mapped.run(backend=ScriptedBackend(echo))
    assert [(result.index, result.output.word) for result in outcome.results["parts"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
        (5, "f"),
    ]


@virtual_clock
async def test_functions_before_the_first_model_read_the_inputs_as_they_are_needed() -> None:
    read: list[int] = []

    async def inputs() -> AsyncIterator[int]:
        for number in range(1_000):
            read.append(number)
            yield number

    pipeline = Pipeline(inputs()).filter(lambda number: number % 2).flat_map(lambda number: [str(number)])
    flow = pipeline.map(task="say {input}", output_schema=Word).open(backend=ScriptedBackend(echo), max_inflight=2)
    async with flow:
        await asyncio.sleep(1.5)
        assert len(read) < 150
        await flow.finish()
    assert len(flow.nodes[0].results) == 500


@virtual_clock
async def test_a_row_that_fails_goes_on_as_a_failure_and_the_reducer_sees_it() -> None:
    backend = ScriptedBackend(lambda request: Fail(400) if request.text == "say b" else echo(request))

    def choosy(word: Word) -> list[str]:
        if word.word == "c":
            raise ValueError("no c")
        return [word.word]

    pipeline = words("a", "b", "c", "d").flat_map(choosy).map(name="again", task="{input}", output_schema=Word)
    outcome = await pipeline.reduce("Sum up").run(backend=backend, max_retries=0)
    errors = [result.error and result.error.type for result in outcome.results["again"]]
    assert errors == [None, "Rejected", "WorkerFailed", None]
    assert "ValueError: no c" in outcome.results["again"][2].error.message  # type: ignore[union-attr]
    assert outcome.reductions["reduce"].failed == (1, 2)
    assert len(outcome.failures) == 3


@virtual_clock
async def test_join_pairs_rows_by_key_as_soon_as_both_are_there() -> None:
    left, right = words("a", "b", "c", "a", name="left"), words("b", "a", "z", name="right")
    joined = left.join(right, key=lambda word: word.word, other_key=lambda word: word.word)
    pipeline = joined.flat_map(lambda pair: [f"{pair[0].word}={pair[1].word}"])
    flow = pipeline.map(name="pairs", task="pair {input}", output_schema=Word).open(backend=ScriptedBackend(echo))
    async with flow:
        await flow.finish()
    results = sorted(flow.nodes[-1].results, key=lambda result: result.index)
    assert [result.output.word if result.ok else result.error.message for result in results] == [
        "a=a",
        "b=b",
        "join: no row has the key 'c'",
        "a=a",
    ]


@virtual_clock
async def test_a_key_that_is_there_twice_is_no_guess() -> None:
    joined = words("a", name="left").join(
        words("x", "x", name="right"), key=lambda word: word.word, other_key=lambda word: word.word
    )
    with pytest.raises(SpecError, match="two rows have the key 'x'"):
        await joined.run(backend=ScriptedBackend(echo))


@pytest.mark.parametrize(
    "pipeline, options, says",
    [
        (Pipeline(["a"]), {}, "needs a stage that calls a model"),
        (words("a").map(task="{word}"), {}, "two stages are called 'map'"),
        (words("a").map(name="b", task="{wrod}"), {}, r"Did you mean \{word\}"),
        (words("a").reduce("Sum up").map(name="b", task="{word}"), {}, "which the first input does not have"),
        (words("a"), {"task": "x"}, "task is an option of a stage"),
        (words("a"), {"max_inflight": 0}, "map: max_inflight"),
    ],
)
async def test_a_pipeline_is_checked_before_anything_is_sent(
    pipeline: Pipeline[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        pipeline.open(**({"backend": ScriptedBackend(echo)} | options))
    with pytest.raises(SpecError, match="a stage's name"):
        words("a", name="../x")
    with pytest.raises(SpecError, match="run_dir is an option of the whole"):
        Pipeline(["a"]).map(task="x", run_dir="here")


@virtual_clock
async def test_all_stages_share_the_slots() -> None:
    backend = ScriptedBackend(echo)
    pipeline = words(*"abcdefgh").map(name="again", task="{word}", output_schema=Word)
    await pipeline.run(backend=backend, max_inflight=3, max_agents=3)
    assert backend.peak_inflight == 3
    assert len(backend.requests) == 16


@virtual_clock
async def test_a_drained_pipeline_finishes_what_it_began_and_follows_nothing_up(tmp_path: Path) -> None:
    backend = ScriptedBackend(echo)
    flow = words(*"abcdefgh").reduce("Sum up").open(backend=backend, max_inflight=2)
    async with flow:
        await asyncio.sleep(1.5)
        flow.drain()
        await flow.finish()
    assert flow.statistics().ended == "drained"
    reduction = flow.reductions["reduce"]
    assert reduction.error is not None and reduction.error.type == "Interrupted"
    assert len(backend.requests) == 4


@virtual_clock
async def test_inputs_that_raise_end_a_pipeline_with_their_error() -> None:
    def inputs() -> Any:
        yield "a"
        raise ValueError("torn")

    pipeline = Pipeline(inputs()).filter(bool).map(task="say {input}").reduce("Sum up")
    with pytest.raises(ValueError, match="torn"):
        await pipeline.run(backend=ScriptedBackend(echo))


@virtual_clock
async def test_leaving_a_pipeline_early_leaves_nothing_behind() -> None:
    backend = ScriptedBackend(echo)
    async with words(*"abcdefgh").reduce("Sum up").open(backend=backend, max_inflight=2):
        await asyncio.sleep(0.5)
    assert (backend.inflight, backend.entered) == (0, 0)
    assert len(asyncio.all_tasks()) == 1


@virtual_clock
async def test_a_row_that_nobody_can_judge_is_not_waited_for_by_the_stages_after_it() -> None:
    """A lone refusal is held until others tell whether all are refused; stages that wait for it are no others."""
    with pytest.raises(SpecError, match="401"):
        await words("a").reduce("Sum up").run(backend=ScriptedBackend(lambda _: Fail(401)), max_retries=0)


async def test_a_stage_may_have_a_worker_of_its_own_and_a_finished_row_is_not_worked_on_again(tmp_path: Path) -> None:
    worked: list[str] = []

    async def twice(row: Word, ctx: AgentContext) -> object:
        worked.append(row.word)
        return {"word": (await ctx.ask(f"say {row.word}{row.word}", output_schema=Word)).output.word}

    for _ in range(2):
        pipeline = words("a", "b").map(name="twice", worker=twice, output_schema=Word).reduce("Sum up {n} words")
        backend = ScriptedBackend(lambda request: Say("all") if "Sum up" in request.text else echo(request))
        outcome = await pipeline.run(backend=backend, run_dir=tmp_path, resume=True)
        assert [result.output.word for result in outcome.results["twice"]] == ["aa", "bb"]
        assert (outcome.outputs, sorted(worked)) == (["all"], ["a", "b"])
    with pytest.raises(SpecError, match="task is missing: say what to do with each row, or give a worker"):
        Pipeline(["a"]).map(name="nothing")


@virtual_clock
async def test_an_outcome_prints_as_a_summary_that_names_the_stages_and_what_never_reached_them() -> None:
    pipeline = words("a", "b", "").flat_map(lambda word: [word.word[0]]).map(name="again", task="again {input}")
    outcome = await pipeline.reduce("Sum up {n}").run(backend=ScriptedBackend(echo))
    assert str(outcome) == repr(outcome)
    for line in ("map: 3/3", "again: 3/3", "reduce: 1/1"):
        assert line in str(outcome)
    assert outcome.results["map"].ok and outcome.results["map"].outputs[0].word == "a"

    def broken(word: Word) -> list[str]:
        raise ValueError(word.word)

    outcome = (
        await words("a", "b")
        .flat_map(broken)
        .map(name="again", task="again {input}")
        .run(backend=ScriptedBackend(echo))
    )
    assert "again: 0/0, 2 failed before it" in str(outcome)


def test_a_pipeline_is_planned_without_sending_or_calling_anything() -> None:
    called: list[Word] = []
    backend = ScriptedBackend(echo)
    pipeline = words("a", "b").filter(called.append).map(name="again", task="again {word}").reduce("Sum up {n}")
    plan = pipeline.plan(backend=backend, prices={"input": 1.0, "output": 1.0})
    text = str(plan)
    assert "at most 2: a filter comes before it" in text and "again «[word of map]»" in text
    assert plan.cost is not None and plan.cost[1] > 0
    assert not called and not backend.requests

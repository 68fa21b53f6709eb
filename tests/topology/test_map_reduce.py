"""``run_with_map_reduce``: a plan, its items, one answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, SpecError, Tool
from batch_agent.record.reader import look
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, virtual_clock
from batch_agent.testing.replies import ScriptedReply


class Question(BaseModel):
    question: str
    depth: int


class Questions(BaseModel):
    items: list[Question]


class Finding(BaseModel):
    text: str


def answer(request: Request) -> ScriptedReply:
    text = request.text
    if text.startswith("Plan"):
        topic = text.split()[-1]
        if "$defs" in json.dumps(request.schema):
            return Say(json.dumps({"items": [{"question": f"{topic}{n}", "depth": n} for n in range(2)]}), latency=1)
        return Say(json.dumps({"items": [f"{topic}{n}" for n in range(3)]}), latency=1)
    if text.startswith("Sum up"):
        return Say("survey", latency=1)
    return Say(json.dumps({"text": text}), latency=1)


async def research(backend: ScriptedBackend, **options: Any) -> Any:
    known = {
        "plan_prompt": "Plan for {topic}",
        "plan_inputs": [{"topic": "x"}],
        "task": "Find {item} as number {index}",
        "output_schema": Finding,
        "reduce": "Sum up {n} findings",
    }
    return await BatchAgent.run_with_map_reduce(backend=backend, **(known | options))


@virtual_clock
async def test_a_plan_s_items_become_agents_and_their_results_one_answer() -> None:
    backend = ScriptedBackend(answer)
    results, survey = await research(backend)
    assert [result.output.text for result in results] == [f"Find x{n} as number {n}" for n in range(3)]
    assert ([result.index for result in results], survey) == ([0, 1, 2], "survey")
    assert backend.requests[-1].text.startswith("Sum up 3 findings\n")


@virtual_clock
async def test_items_that_are_objects_give_their_fields() -> None:
    results, _ = await research(
        ScriptedBackend(answer), plan_output_schema=Questions, task="{index}: {question} {depth} {item}"
    )
    assert results[1].output.text == '1: x1 1 {"question":"x1","depth":1}'


@virtual_clock
async def test_items_of_several_plans_are_numbered_in_the_order_of_the_plans() -> None:
    def slow_x(request: Request) -> ScriptedReply:
        if request.text == "Plan for x":
            return Say(json.dumps({"items": ["x0", "x1"]}), latency=9)
        return answer(request)

    results, _ = await research(ScriptedBackend(slow_x), plan_inputs=[{"topic": "x"}, {"topic": "y"}])
    assert [result.output.text.split()[1] for result in results] == ["x0", "x1", "y0", "y1", "y2"]
    assert [result.input["index"] for result in results] == [0, 1, 2, 3, 4]


@virtual_clock
async def test_each_stage_has_its_own_model_tools_and_turns_and_on_result_is_the_map_s() -> None:
    backend = ScriptedBackend(answer)
    seen: list[str] = []
    await research(
        backend,
        model="plain",
        planner_model="wise",
        worker_model="quick",
        reducer_model="long",
        tools=[Tool.read_file],
        reducer_max_tokens=900,
        on_result=lambda result: seen.append(result.output.text),
    )
    plan, *found, survey = backend.requests
    assert (plan.model, {request.model for request in found}, survey.model) == ("wise", {"quick"}, "long")
    assert ([bool(request.tools) for request in (plan, found[0], survey)], survey.max_tokens) == (
        [False, True, False],
        900,
    )
    assert len(seen) == 3


@pytest.mark.parametrize(
    "options, says",
    [
        ({"plan_output_schema": Finding}, "plan_output_schema must have a field items"),
        ({"plan_output_schema": str}, "plan_output_schema must have a field items"),
        ({"task": "Find {itm}"}, r"Did you mean \{item\}"),
        ({"task": "{answer}", "plan_output_schema": Questions}, "item, index, question, depth"),
        ({"inputs": ["a"]}, "use plan_inputs"),
        ({"plan_prompt": "Plan for {topik}"}, r"plan: .*Did you mean \{topic\}"),
        ({"planner_max_turn": 3}, "plan: there is no option 'max_turn'"),
        ({"reduce_schema": 5}, "reduce: output_schema"),
    ],
)
async def test_everything_is_checked_before_the_planner_is_asked(options: dict[str, Any], says: str) -> None:
    backend = ScriptedBackend(answer)
    with pytest.raises(SpecError, match=says):
        await research(backend, **options)
    assert not backend.requests


@virtual_clock
async def test_without_plan_inputs_the_planner_is_asked_once() -> None:
    backend = ScriptedBackend(answer)
    results, _ = await research(backend, plan_prompt="Plan for z", plan_inputs=[{}], plan_output_schema=list[str])
    assert not results[0].ok  # the script answers with an object
    results, _ = await BatchAgent.run_with_map_reduce(
        plan_prompt="Plan for z", task="{item}", output_schema=Finding, reduce="Sum up", backend=backend
    )
    assert [result.output and result.output.text for result in results] == ["z0", "z1", "z2"]


@virtual_clock
async def test_a_plan_that_fails_is_a_failed_result_and_nothing_is_reduced() -> None:
    backend = ScriptedBackend(lambda request: Fail(400) if "for y" in request.text else answer(request))
    results, survey = await research(backend, plan_inputs=[{"topic": "y"}, {"topic": "x"}])
    assert [result.ok for result in results] == [False, True, True, True]
    assert survey == "survey"
    results, survey = await research(backend, plan_inputs=[{"topic": "y"}, {"topic": "y"}], max_retries=0)
    assert (len(results), bool(survey)) == (2, False)


@virtual_clock
async def test_a_finished_stage_is_not_run_again(tmp_path: Path) -> None:
    down = ScriptedBackend(lambda request: Fail(400) if request.text.startswith("Sum") else answer(request))
    results, survey = await research(down, run_dir=tmp_path, resume=True)
    assert len(results) == 3 and not survey
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"plan", "map", "reduce"}
    backend = ScriptedBackend(answer)
    _, survey = await research(backend, run_dir=tmp_path, resume=True)
    assert (survey, [request.text.split()[0] for request in backend.requests]) == ("survey", ["Sum"])
    assert look(tmp_path).state == "complete"


class Loose(BaseModel):
    items: list[dict[str, str]]


def loose(request: Request) -> ScriptedReply:
    if request.text.startswith("Plan"):
        return Say(json.dumps({"items": [{"question": "why"}, {"question": "how"}]}))
    return answer(request)


@virtual_clock
async def test_one_mapping_is_one_row_of_the_plan() -> None:
    backend = ScriptedBackend(answer)
    results, _ = await research(backend, plan_inputs={"topic": "x"})
    assert backend.requests[0].text == "Plan for x"
    assert len(results) == 3


@virtual_clock
async def test_items_that_are_free_mappings_are_named_by_their_fields() -> None:
    known = {"plan_output_schema": Loose, "task": "Find {question} as number {index}"}
    results, _ = await research(ScriptedBackend(loose), **known)
    assert [result.output.text for result in results] == ["Find why as number 0", "Find how as number 1"]


@virtual_clock
async def test_a_field_that_a_free_mapping_lacks_is_named_when_the_plan_is_known() -> None:
    backend = ScriptedBackend(loose)
    results, survey = await research(backend, plan_output_schema=Loose, task="Find {answer}")
    assert not survey
    for result in results:
        assert "{answer}, which this row does not have (its fields: item, index, question)" in result.error.message
    assert [request.text for request in backend.requests] == ["Plan for x"]


@virtual_clock
async def test_what_was_reduced_is_there_as_results_with_tables_and_the_progress_is_shown_where_it_is_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reduced = await research(ScriptedBackend(answer), progress=True)
    results, _ = reduced
    assert list(results.to_pandas()["output.text"]) == [result.output.text for result in results]
    assert "map: 3/3" in str(reduced.summary)
    assert "map: 3/3" in capsys.readouterr().err

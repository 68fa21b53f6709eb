"""What later stages know of the row that an item came from: its id, and the fields that it carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.run.process_work import WarmCrew

from batch_agent import AgentContext, BatchAgent, Pipeline, SpecError
from batch_agent.errors import InputError
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, ScriptedServer, virtual_clock

MAILS = [{"mail_id": "m7", "text": "tea-milk"}, {"mail_id": "m8", "text": "bad"}, {"mail_id": "m9", "text": "salt"}]


class Mail(BaseModel):
    topic: str
    claims: list[str]


def answer(request: Request) -> Say | Fail:
    words = request.text.split()
    if words[0] == "Read":
        return Fail(400) if words[1] == "bad" else Say(json.dumps({"topic": "food", "claims": words[1].split("-")}))
    return Say(request.text)


def mails(inputs: Any = MAILS, **check: Any) -> Pipeline[Any]:
    return (
        Pipeline(inputs)
        .map(name="read", task="Read {text}", output_schema=Mail, carry=["mail_id"])
        .filter(lambda mail: mail.topic == "food")
        .flat_map(lambda mail: mail.claims)
        .map(name="check", task="Check {input} in {mail_id}", **check)
    )


OPTIONS: dict[str, Any] = {"model": "m", "max_retries": 0, "id_column": "mail_id"}


@virtual_clock
async def test_fields_and_ids_of_the_input_reach_later_stages_after_filter_and_flat_map() -> None:
    outcome = await mails().reduce("Sum up {n}").run(backend=ScriptedBackend(answer), **OPTIONS)
    assert [result.job_id for result in outcome.results["read"]] == ["m7", "m8", "m9"]
    assert [(result.job_id, result.input, result.output) for result in outcome.results["check"]] == [
        ("m7.0", {"mail_id": "m7", "input": "tea"}, "Check tea in m7"),
        ("m7.1", {"mail_id": "m7", "input": "milk"}, "Check milk in m7"),
        ("m8", {"mail_id": "m8"}, None),
        ("m9.0", {"mail_id": "m9", "input": "salt"}, "Check salt in m9"),
    ]
    [line] = [line for line in outcome.outputs[0].splitlines() if '"index":1' in line]
    assert json.loads(line)["carried"] == {"mail_id": "m7"}
    table = outcome.results["check"].to_pandas()
    assert list(table["mail_id"]) == ["m7", "m7", "m8", "m9"]


@virtual_clock
async def test_a_stage_carries_its_own_fields_and_those_that_it_was_given() -> None:
    mapped = Pipeline([{"id": 5, "text": "tea"}]).map(name="read", task="Read {text}", output_schema=Mail, carry=["id"])
    again = mapped.map(name="word", task="Word {topic}", carry=["topic"]).map(name="last", task="{id} {topic} {input}")
    outcome = await again.run(backend=ScriptedBackend(answer), model="m")
    assert outcome.outputs == ["5 food Word food"]
    assert outcome.results["last"][0].input == {"id": 5, "topic": "food", "input": "Word food"}
    assert [results[0].job_id for results in outcome.results.values()] == ["5", "5", "5"]


@virtual_clock
async def test_repeated_ids_are_made_unique_and_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    same = [{"mail_id": "m7", "text": "tea-milk"}, {"mail_id": "m7", "text": "salt"}, {"mail_id": "m8", "text": "oil"}]
    outcome = await mails(same).run(backend=ScriptedBackend(answer), **OPTIONS)
    assert [result.job_id for result in outcome.results["read"]] == ["m7", "m7~2", "m8"]
    assert [result.job_id for result in outcome.results["check"]] == ["m7.0", "m7.1", "m7~2.0", "m8.0"]
    filtered = Pipeline(same).filter(lambda row: True).map(name="read", task="Read {text}")
    outcome = await filtered.run(backend=ScriptedBackend(answer), **OPTIONS)
    assert [result.job_id for result in outcome.results["read"]] == ["m7", "m7~2", "m8"]
    assert caplog.text.count("more than one row has the id 'm7'") == 2


@virtual_clock
async def test_inputs_that_a_function_reads_first_keep_their_ids() -> None:
    rows = Pipeline(MAILS).filter(lambda row: row["text"] != "bad").map(name="read", task="Read {text}")
    outcome = await rows.run(backend=ScriptedBackend(answer), **OPTIONS)
    assert [result.job_id for result in outcome.results["read"]] == ["m7", "m9"]


@virtual_clock
async def test_run_with_reduce_takes_both_options_and_the_reducer_sees_the_ids() -> None:
    known = {"inputs": [{"mail_id": "m7", "text": "x"}], "task": "Say {text}", "reduce": "Sum up {n}"}
    results, said = await BatchAgent.run_with_reduce(
        **known, carry=["mail_id"], id_column="mail_id", backend=ScriptedBackend(answer), model="m"
    )
    assert results[0].job_id == "m7" and '"carried":{"mail_id":"m7"}' in str(said)


@virtual_clock
async def test_a_resumed_pipeline_asks_nothing_again_and_has_the_same_names(tmp_path: Path) -> None:
    first, again = ScriptedBackend(answer), ScriptedBackend(answer)
    known = {**OPTIONS, "run_dir": tmp_path, "resume": True}
    before = await mails().run(backend=first, **known)
    after = await mails().run(backend=again, **known)
    assert [request.text for request in again.requests] == ["Read bad"]  # the failed row alone
    assert [(result.job_id, result.output) for result in after.results["check"]] == [
        (result.job_id, result.output) for result in before.results["check"]
    ]
    lines = (tmp_path / "check" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["job_id"] for line in lines} == {"m7.0", "m7.1", "m9.0"}


@virtual_clock
async def test_an_id_from_an_earlier_stage_is_no_part_of_the_question(tmp_path: Path) -> None:
    """So answers that were recorded under a position stay valid."""
    rows = Pipeline([{"name": "n1", "text": "tea"}]).map(name="read", task="Read {text}", output_schema=Mail)
    pipeline, known = rows.map(name="word", task="Word {topic}"), {"model": "m", "run_dir": tmp_path, "resume": True}
    await pipeline.run(backend=ScriptedBackend(answer), **known)
    again = ScriptedBackend(answer)
    outcome = await pipeline.run(backend=again, id_column="name", **known)
    assert again.requests == []  # its own id may change
    assert outcome.results["word"][0].job_id == "n1"


async def test_worker_processes_name_rows_as_the_feeder_does(tmp_path: Path) -> None:
    async with ScriptedServer(answer, models=["m"]) as server:
        crew = WarmCrew(Path(__file__).parent)
        known = {**OPTIONS, "backend": server.backend_url, "cluster": crew, "run_dir": tmp_path / "run"}
        outcome = await mails().run(**known, progress=False)
    assert [(result.job_id, result.output) for result in outcome.results["check"] if result.ok] == [
        ("m7.0", "Check tea in m7"),
        ("m7.1", "Check milk in m7"),
        ("m9.0", "Check salt in m9"),
    ]


def test_a_dry_run_shows_the_carried_fields() -> None:
    plan = mails().plan(backend=ScriptedBackend(answer), **OPTIONS)
    assert "in «[mail_id]»" in str(plan)


@pytest.mark.parametrize(
    "pipeline, says",
    [
        (Pipeline(MAILS).map(task="{text}", carry=["mail-id"]), "map: carry: .*'mail-id' .*did you mean 'mail_id'"),
        (
            Pipeline(MAILS)
            .map(name="read", task="{text}", output_schema=Mail)
            .map(task="{topic}", carry=["topics"])
            .map(name="b", task="x"),
            "map: carry: the rows have no field 'topics'",
        ),
        (
            Pipeline([{"topic": "t"}])
            .map(name="read", task="{topic}", output_schema=Mail, carry=["topic"])
            .map(task="{topic}"),
            "its rows have a field 'topic' of their own",
        ),
        (mails().map(name="b", task="{mail_di}"), r"Did you mean \{mail_id\}"),
        (mails().reduce("Sum up").map(name="b", task="{mail_id}"), "which the first input does not have"),
    ],
)
def test_what_cannot_be_carried_is_named_before_anything_is_sent(pipeline: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        pipeline.open(backend=ScriptedBackend(answer), model="m")


async def as_dict(row: dict[str, str], ctx: AgentContext) -> dict[str, str]:
    return {"word": row["text"]} if row["text"] != "odd" else {"other": "x"}


@virtual_clock
async def test_a_worker_without_a_schema_returns_dicts_and_each_row_is_checked_when_it_comes() -> None:
    rows = Pipeline([{"text": "odd"}, {"text": "tea"}, {"text": "odd"}]).map(name="make", worker=as_dict)
    backend = ScriptedBackend(answer)
    outcome = await rows.map(name="say", task="Say {word}").run(backend=backend, model="m")
    first, second, third = outcome.results["say"]
    assert second.output == "Say tea"
    for result in (first, third):
        assert result.error is not None and result.error.type == InputError.type
        assert "word" in result.error.message and "its fields: other" in result.error.message
    assert len(backend.requests) == 1

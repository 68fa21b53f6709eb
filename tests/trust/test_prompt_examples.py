"""Examples in the prompt: checked before anything is sent, shared by all rows, recorded, and out of the score."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import batch_agent
from batch_agent import BatchAgent, Pipeline, SpecError
from batch_agent.cli.main import main
from batch_agent.testing import Request, Say, ScriptedBackend, ScriptedServer

SCHEMA = {"mood": "good|bad", "stars": "integer"}
ROWS = [{"id": f"r{number}", "text": f"text {number}", "label": "good"} for number in range(6)]
PAIRS = [({"text": "It is  BROKEN"}, {"mood": "bad", "stars": 1}), ({"text": "Fine"}, {"mood": "good", "stars": 5})]


@pytest.fixture(autouse=True)
def here(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def asking(requests: list[Request] | None = None) -> ScriptedBackend:
    def answer(request: Request) -> Say:
        if requests is not None:
            requests.append(request)
        return Say(json.dumps({"mood": "good", "stars": 4}))

    return ScriptedBackend(answer)


def options(**more: Any) -> dict[str, Any]:
    given = {"task": "Mood of {text}", "output_schema": SCHEMA, "inputs": ROWS, "examples": PAIRS}
    return {**given, "backend": asking(), **more}


async def test_examples_are_in_the_prompt_that_all_rows_share() -> None:
    requests: list[Request] = []
    await BatchAgent.run(**options(backend=asking(requests)))
    systems = {str(request.messages[0]["content"]) for request in requests}
    assert len(systems) == 1
    (system,) = systems
    assert "<message>\nMood of It is  BROKEN\n</message>" in system
    assert '<answer>\n{"mood": "bad", "stars": 1}\n</answer>' in system


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([({"words": "Fine"}, {"mood": "good", "stars": 5})], "number 1.*text"),
        ([PAIRS[0], ({"text": "Fine"}, {"mood": "great", "stars": 5})], "number 2 does not fit the schema"),
        ([({"text": "Fine"}, {"mood": "good"})], "number 1 does not fit the schema.*stars"),
        ([{"text": "Fine"}], "number 1 must be a pair"),
        ([], "there are none"),
        ("none.csv", "none.csv"),
    ],
)
async def test_a_wrong_example_is_refused_before_anything_is_sent(given: object, words: str) -> None:
    requests: list[Request] = []
    with pytest.raises(SpecError, match=words):
        await BatchAgent.run(**options(examples=given, backend=asking(requests)))
    assert not requests


async def test_examples_are_not_for_a_worker_of_ones_own() -> None:
    async def work(row: object, ctx: object) -> str:
        return "done"

    with pytest.raises(SpecError, match="examples are for the tool loop"):
        await BatchAgent.run(inputs=ROWS, worker=work, examples=PAIRS, backend=asking())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("examples.csv", "text,mood,stars\nIt is broken,bad,1\nFine,good,5\n"),
        ("examples.csv", "id,text,output.mood,output.stars\nr1,It is broken,bad,1\nr2,Fine,good,5\n"),
        ("examples.jsonl", '{"input": {"text": "It is broken"}, "output": {"mood": "bad", "stars": 1}}\n'),
    ],
)
async def test_a_file_of_examples_has_columns_of_rows_and_answers(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    plan = BatchAgent.plan(**options(examples=name))
    assert "Mood of It is broken" in str(plan) and '{"mood": "bad", "stars": 1}' in str(plan)
    (tmp_path / "wrong.csv").write_text("text,mood,stars\nFine,good,five\n")
    with pytest.raises(SpecError, match=r"wrong\.csv row 1: stars: it is not a whole number"):
        BatchAgent.plan(**options(examples="wrong.csv"))


async def test_text_answers_need_text() -> None:
    plan = BatchAgent.plan(**options(output_schema=None, examples=[({"text": "Fine"}, "good")]))
    assert "<answer>\ngood\n</answer>" in str(plan)
    with pytest.raises(SpecError, match="must be text"):
        BatchAgent.plan(**options(output_schema=None, examples=[({"text": "Fine"}, {"mood": "good"})]))


async def test_rows_with_the_content_of_an_example_leave_the_score_which_says_how_many() -> None:
    rows = [
        *ROWS,
        {"id": "a", "text": "it is broken", "label": "bad"},
        {"id": "b", "text": "\uff26\uff29ne ", "label": "good"},
    ]
    results = await BatchAgent.run(**options(inputs=rows, gold={"mood": "label"}))
    score = results.score()
    assert (score.excluded, score["mood"].rows, score["mood"].right) == (2, 6, 6)
    assert "2 rows are left out, because they are examples" in str(score)
    assert results.summary.to_json()["score"]["excluded"] == 2  # type: ignore[index]
    assert len(results) == 8
    without = await BatchAgent.run(**options(inputs=rows, gold={"mood": "label"}, examples=None))
    assert (without.score().excluded, without.score()["mood"].rows) == (0, 8)
    compared = batch_agent.compare(without, results)
    assert (compared.excluded, compared["mood"].scored) == (2, 6)


async def test_examples_are_recorded_and_a_change_of_them_is_another_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {"id": "a", "text": "FINE", "label": "good"}]
    place = str(tmp_path / "run")
    await BatchAgent.run(**options(inputs=rows, run_dir=place))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["examples"]["rows"][0] == {"input": PAIRS[0][0], "output": PAIRS[0][1]}
    (tmp_path / "gold.csv").write_text("id,mood\n" + "".join(f"r{n},good\n" for n in range(6)) + "a,good\n")
    assert main(["score", place, "--gold", "gold.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["excluded"] == 1
    with pytest.raises(SpecError, match="examples: changed"):
        await BatchAgent.run(**options(inputs=rows, run_dir=place, resume=True, examples=PAIRS[:1]))


async def test_a_stage_of_a_pipeline_has_its_own_examples(tmp_path: Path) -> None:
    requests: list[Request] = []
    stages = Pipeline(ROWS).map(name="one", task="Mood of {text}", output_schema=SCHEMA, examples=PAIRS)
    outcome = await stages.map(name="two", task="Sum up {mood}").run(backend=asking(requests))
    assert len(outcome.outputs) == len(ROWS)
    assert sum("BROKEN" in str(request.messages[0]["content"]) for request in requests) == len(ROWS)


async def test_the_command_takes_a_file_of_examples_and_knows_it_when_it_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "shots.csv").write_text("text,mood,stars\nTEXT  3,bad,1\n")
    (tmp_path / "spec.yaml").write_text(
        "task: Mood of {text}\nmodel: m\nexamples: shots.csv\noutput_schema: {mood: good|bad, stars: integer}\n"
    )

    async def command(*arguments: str) -> int:
        return await asyncio.to_thread(main, [*arguments, "--json", "--run-dir", "run", "--output", "out.jsonl"])

    async with ScriptedServer(lambda _: Say('{"mood": "good", "stars": 4}'), models=["m"]) as server:
        where = ("--backend", server.backend_url, "--gold", "mood=label", "--max-inflight", "1")
        assert await command("run", "spec.yaml", "--inputs", "rows.jsonl", *where) == 0
        assert json.loads(capfd.readouterr().out)["score"]["excluded"] == 1
        assert "Mood of TEXT  3" in server.requests[0].body["messages"][0]["content"]
        assert await asyncio.to_thread(main, ["resume", "run", "--output", "again.jsonl"]) == 0
        assert server.received == len(ROWS)
        (tmp_path / "other.csv").write_text("text,mood,stars\nother,bad,1\n")
        assert await asyncio.to_thread(main, ["resume", "run", "--examples", "other.csv"]) == 1
        assert "examples: changed" in capfd.readouterr().err
        assert server.received == len(ROWS)

"""``batch-agent score``, and what a run with gold prints and ends with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent, rows, serving, started

from batch_agent.testing import Fail, Request, Say, ScriptedServer
from batch_agent.trust.intervals import at_least, clopper_pearson

SPEC = """
output_schema: {mood: "angry|calm"}
"""


pytestmark = pytest.mark.usefixtures("state")


def calm(request: Request) -> Say | Fail:
    return Say('{"mood": "calm"}')


def but_one(request: Request) -> Say | Fail:
    return Fail(400) if "t3" in str(request.body) else Say('{"mood": "calm"}')


def labelled(directory: Path, count: int = 20) -> None:
    made = [{"id": f"r{row}", "input": f"t{row}", "label": "calm" if row % 4 else "angry"} for row in range(count)]
    rows(directory, *made)


async def run(directory: Path, *flags: str, script: Any = calm, spec: str = SPEC) -> Any:
    async with serving(directory, script, spec) as server:
        server_flags = ("--run-dir", "run", "--output", "out.jsonl", *flags)
        outcome = await batch_agent(directory, "run", "spec.yaml", "--inputs", "rows.jsonl", *server_flags)
        return outcome, [request.body for request in server.requests if "messages" in (request.body or {})]


async def test_a_run_with_gold_prints_its_score(tmp_path: Path) -> None:
    labelled(tmp_path)
    outcome, asked = await run(tmp_path, "--gold", "label")
    assert outcome.code == 0, outcome.stderr
    low = at_least(15, 20)
    assert f"score    mood  0.75 measured (15 of 20), at least {low:.2f}"[:-1] in outcome.stderr
    assert "always saying calm: 0.75" in outcome.stderr
    assert "rows that you chose: nothing follows for the others" in outcome.stderr
    assert len(asked) == 20
    assert "label" not in json.dumps(asked)
    assert "label" not in (tmp_path / "out.jsonl").read_text()

    found = await batch_agent(tmp_path, "score", "run", "--json")
    score = json.loads(found.stdout)
    assert found.code == 0
    assert score["fields"]["mood"]["interval"] == pytest.approx(list(clopper_pearson(15, 20)))
    assert score["fields"]["mood"]["confusion"] == {"angry": {"calm": 5}, "calm": {"calm": 15}}
    assert (score["looks"], score["pending"], score["excluded"]) == (0, 0, 0)

    status = json.loads((await batch_agent(tmp_path, "status", "run", "--json")).stdout)
    assert status["score"]["fields"]["mood"]["right"] == 15
    assert "0.75 measured" in (await batch_agent(tmp_path, "status", "run")).stdout
    wrong = (await batch_agent(tmp_path, "score", "run", "--wrong")).stdout
    assert "5 wrong rows" in wrong
    assert "r4  mood: calm, gold angry" in wrong


@pytest.mark.parametrize(
    ("flags", "script", "code"),
    [
        (("--require", "mood.accuracy >= 0.5"), calm, 0),
        (("--require", "mood.accuracy >= 0.7"), calm, 6),
        (("--require", "mood.accuracy >= 0.5", "--require", "recall[angry] >= 0.1"), calm, 6),
        (("--require", "mood.accuracy >= 0.4"), but_one, 2),
        (("--require", "mood.accuracy >= 0.7"), but_one, 6),
        (("--require", "mood.accuracy >= 0.7", "--max-cost", "0.000001"), calm, 3),
    ],
)
async def test_the_exit_status_is_6_if_what_is_required_is_not_met(
    tmp_path: Path, flags: tuple[str, ...], script: Any, code: int
) -> None:
    labelled(tmp_path)
    prices = "\nprices: {input: 1.0, output: 1.0}" if "--max-cost" in flags else ""
    outcome, _ = await run(tmp_path, "--gold", "label", *flags, script=script, spec=SPEC + prices)
    assert outcome.code == code, outcome.stderr
    if code == 6:
        assert "is not met: " in outcome.stderr


async def test_a_misspelt_requirement_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    labelled(tmp_path)
    outcome, asked = await run(tmp_path, "--gold", "label", "--require", "mood.acuracy >= 0.9")
    assert outcome.code == 1
    assert "accuracy, coverage, precision, recall, f1, median_error" in outcome.stderr
    assert not asked


async def test_a_complete_run_is_scored_again_without_asking(tmp_path: Path) -> None:
    labelled(tmp_path)
    await run(tmp_path, "--gold", "label")
    again = await batch_agent(tmp_path, "resume", "run")
    assert again.code == 0
    assert "0.75 measured" in again.stderr
    found = await batch_agent(tmp_path, "resume", "run", "--json")
    assert json.loads(found.stdout)["score"]["fields"]["mood"]["right"] == 15


async def test_gold_is_added_to_a_finished_run(tmp_path: Path) -> None:
    labelled(tmp_path)
    async with serving(tmp_path, calm, SPEC) as server:
        where = ("--inputs", "rows.jsonl", "--run-dir", "run", "--output", "out.jsonl")
        await batch_agent(tmp_path, "run", "spec.yaml", *where)
        asked = len(server.requests)
        without = await batch_agent(tmp_path, "score", "run")
        assert without.code == 1
        assert "give gold" in without.stderr
        by_column = await batch_agent(tmp_path, "score", "run", "--gold", "label", "--require", "accuracy >= 0.7")
        assert by_column.code == 6
        assert "0.75 measured (15 of 20)" in by_column.stdout
        resumed = await batch_agent(tmp_path, "resume", "run", "--gold", "label", "--require", "accuracy >= 0.7")
        assert resumed.code == 6, resumed.stderr
        chat = [request for request in server.requests[asked:] if "messages" in (request.body or {})]
        assert not chat


async def test_a_file_of_results_is_scored_by_a_gold_file(tmp_path: Path) -> None:
    labelled(tmp_path)
    await run(tmp_path)
    (tmp_path / "gold.csv").write_text("id,mood\nr0,angry\nr1,calm\nr2,calm\nr3,\n")
    for name in ("out.jsonl", "out.csv"):
        if name.endswith("csv"):
            await batch_agent(tmp_path, "export", "run", "--output", name)
        found = await batch_agent(tmp_path, "score", name, "--gold", "gold.csv", "--json")
        assert found.code == 0, found.stderr
        score = json.loads(found.stdout)
        assert (score["fields"]["mood"]["right"], score["fields"]["mood"]["rows"]) == (2, 3)
        assert any("schema of the answers is not known" in note for note in score["notes"])
    (tmp_path / "results.jsonl").write_bytes((tmp_path / "run" / "results.jsonl").read_bytes())
    found = await batch_agent(tmp_path, "score", "results.jsonl", "--gold", "input", "--json")
    assert json.loads(found.stdout)["fields"]["mood"]["right"] == 0  # a column of the inputs, and the only field
    other = await batch_agent(tmp_path, "score", "rows.jsonl", "--gold", "gold.csv")
    assert other.code == 1
    assert "no file of results" in other.stderr


async def test_a_record_without_a_schema_is_scored_by_the_type_of_its_answers(tmp_path: Path) -> None:
    labelled(tmp_path)
    await run(tmp_path)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts.pop("schema")["properties"]["mood"]["enum"] == ["angry", "calm"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    found = await batch_agent(tmp_path, "score", "run", "--gold", "mood=label", "--json")
    score = json.loads(found.stdout)
    assert score["fields"]["mood"]["right"] == 15
    assert any("allowed values are not checked" in note for note in score["notes"])


async def test_flags_of_several_fields_are_pairs(tmp_path: Path) -> None:
    made = [{"id": f"r{row}", "input": f"t{row}", "m": "calm", "p": row} for row in range(4)]
    rows(tmp_path, *made)
    script = lambda _: Say('{"mood": "calm", "price": 1.5}')  # noqa: E731
    spec = '\noutput_schema: {mood: "angry|calm", price: number}\n'
    outcome, _ = await run(
        tmp_path, "--gold", "mood=m", "--gold", "price=p", "--tolerance", "price=0.5", script=script, spec=spec
    )
    assert outcome.code == 0, outcome.stderr
    score = json.loads((await batch_agent(tmp_path, "score", "run", "--json")).stdout)
    assert score["fields"]["price"]["right"] == 2
    assert score["fields"]["price"]["median_error"]["value"] == pytest.approx(1.0)
    assert score["fields"]["price"]["bias"]["approximate"] is True


async def test_sealed_gold_is_opened_by_score(tmp_path: Path) -> None:
    labelled(tmp_path, 60)
    outcome, _ = await run(tmp_path, "--gold", "label", "--gold-sealed", "--gold-sample", "random")
    assert "is sealed" in outcome.stderr
    half = json.loads((await batch_agent(tmp_path, "score", "run", "--json")).stdout)
    rest = json.loads((await batch_agent(tmp_path, "score", "run", "--open-sealed", "--json")).stdout)
    assert half["all"]["rows"] + rest["all"]["rows"] == 60
    assert half["sealed"] == rest["all"]["rows"]
    assert rest["sample"] == "a random sample of the table"


async def test_the_stop_after_a_pilot_wins_over_what_is_required(tmp_path: Path) -> None:
    labelled(tmp_path)
    outcome, asked = await run(tmp_path, "--gold", "label", "--pilot", "5", "--require", "accuracy >= 0.99")
    assert outcome.code == 7, outcome.stderr
    assert "is not met" in outcome.stderr
    assert len(asked) == 5
    score = json.loads((await batch_agent(tmp_path, "score", "run", "--json")).stdout)
    assert (score["all"]["rows"], score["pending"], score["population"]) == (5, 0, 20)
    assert score["sample"] == "a random sample of the table"


async def test_a_run_that_runs_is_scored_and_counts_its_pending_rows(tmp_path: Path) -> None:
    labelled(tmp_path)
    go = asyncio.Event()

    async def script(request: Request) -> Say:
        if "t7" in str(request.body):
            await go.wait()
        return calm(request)  # type: ignore[return-value]

    async with serving(tmp_path, script, SPEC) as server:
        flags = ("--inputs", "rows.jsonl", "--run-dir", "run", "--output", "out.jsonl", "--gold", "label")
        async with started(tmp_path, "run", "spec.yaml", *flags) as process:
            while len(server.requests) < 20 or not (tmp_path / "run" / "results.jsonl").exists():
                await asyncio.sleep(0.01)
            score: dict[str, Any] = {"all": {"rows": 0}}
            while score["all"]["rows"] < 19:
                found = await batch_agent(tmp_path, "score", "run", "--json")
                assert found.code == 0, found.stderr
                score = json.loads(found.stdout)
            assert score["pending"] == 1
            assert score["all"]["interval"] == pytest.approx(list(clopper_pearson(14, 20)))
            go.set()
            await process.communicate()
    assert process.returncode == 0


async def test_a_pipeline_of_a_spec_file_is_scored(tmp_path: Path) -> None:
    labelled(tmp_path)
    spec = """
stages:
  - map: {name: short, task: "Shorten {input}"}
  - map: {name: mood, task: "Mood of {input}", output_schema: {mood: "angry|calm"}}
gold: label
require: ["mood.accuracy >= 0.99"]
"""
    async with ScriptedServer(calm, models=["m"]) as server:
        text = f"model: m\nbackend: {server.backend_url}\ninputs: rows.jsonl\n{spec}"
        (tmp_path / "spec.yaml").write_text(text)
        planned = await batch_agent(tmp_path, "plan", "spec.yaml")
        assert planned.code == 0, planned.stderr
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--run-dir", "run", "--output", "out.jsonl")
    assert outcome.code == 6, outcome.stderr
    assert "0.75 measured (15 of 20)" in outcome.stderr
    score = json.loads((await batch_agent(tmp_path, "score", "run", "--json")).stdout)
    assert score["fields"]["mood"]["right"] == 15
    assert score["looks"] == 0
    status = json.loads((await batch_agent(tmp_path, "status", "run", "--json")).stdout)
    assert status["score"]["fields"]["mood"]["right"] == 15
    exported = await batch_agent(tmp_path, "export", "run", "--format", "csv")
    assert exported.stdout.splitlines()[0].endswith(",gold,right")


async def test_gold_and_functions_of_a_spec_file_are_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "specs"
    folder.mkdir()
    labelled(folder)
    (folder / "gold.csv").write_text("id,mood\nr0,angry\nr1,calm\n")
    (folder / "judging.py").write_text("def kind(answer, gold):\n    return True\n")
    async with ScriptedServer(calm, models=["m"]) as server:
        (folder / "spec.yaml").write_text(
            f"task: '{{input}}'\nmodel: m\nbackend: {server.backend_url}\ninputs: rows.jsonl\n"
            'output_schema: {mood: "angry|calm"}\ngold: gold.csv\nscore: {mood: "judging:kind"}\n'
        )
        outcome = await batch_agent(tmp_path, "run", "specs/spec.yaml", "--run-dir", "run", "--output", "out.jsonl")
    assert outcome.code == 0, outcome.stderr
    assert "1.00 measured (2 of 2)" in outcome.stderr


async def test_a_killed_run_is_scored_and_its_gold_survives(tmp_path: Path) -> None:
    labelled(tmp_path)
    hang = asyncio.Event()

    async def script(request: Request) -> Say:
        if "t19" in str(request.body) and not hang.is_set():
            await hang.wait()
        return calm(request)  # type: ignore[return-value]

    async with serving(tmp_path, script, SPEC) as server:
        flags = ("--inputs", "rows.jsonl", "--run-dir", "run", "--output", "out.jsonl", "--gold", "label")
        async with started(tmp_path, "run", "spec.yaml", *flags) as process:
            results = tmp_path / "run" / "results.jsonl"
            new = tmp_path / "run" / "results.jsonl.new"
            while sum(path.read_bytes().count(b"\n") for path in (results, new) if path.exists()) < 19:
                await asyncio.sleep(0.01)
            process.kill()
            await process.communicate()
        score = json.loads((await batch_agent(tmp_path, "score", "run", "--json")).stdout)
        assert (score["all"]["rows"], score["pending"]) == (19, 1)
        hang.set()
        asked = len(server.requests)
        outcome = await batch_agent(tmp_path, "resume", "run", "--require", "accuracy >= 0.99")
        assert outcome.code == 6, outcome.stderr
        assert len([each for each in server.requests[asked:] if "messages" in (each.body or {})]) == 1
    after = json.loads((await batch_agent(tmp_path, "score", "run", "--json")).stdout)
    assert (after["all"]["rows"], after["pending"], after["looks"]) == (20, 0, 0)

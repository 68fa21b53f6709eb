"""Comparing runs: what differs, and with gold, what became right and what became wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batch_agent
from batch_agent import BatchAgent, Pipeline, SpecError
from batch_agent.cli.main import main
from batch_agent.results import Results
from batch_agent.testing import Request, Say, ScriptedBackend
from batch_agent.trust.paired import difference, mcnemar

SCHEMA = {"mood": "good|bad"}


def rows(count: int = 60) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "text": f"text {number}", "label": "good"} for number in range(count)]


pytestmark = pytest.mark.usefixtures("state")


async def run(wrong: Callable[[int], bool], inputs: list[dict[str, Any]] | None = None, **options: Any) -> Results[Any]:
    """Rows for which ``wrong`` is true get the wrong answer."""

    def answer(request: Request) -> Say:
        number = int(request.text.split()[-1])
        return Say(json.dumps({"mood": "bad" if wrong(number) else "good"}))

    backend = ScriptedBackend(answer)
    given = {"task": "Mood of {text}", "output_schema": SCHEMA, "inputs": rows() if inputs is None else inputs}
    return await BatchAgent.run(**{**given, "backend": backend, **options})


async def test_with_gold_the_rows_that_changed_are_counted_tested_and_listed() -> None:
    one = await run(lambda number: number < 20, gold="label")
    other = await run(lambda number: 15 <= number < 23, gold="label")
    mood = batch_agent.compare(one, other)["mood"]
    assert (mood.rows, mood.scored, mood.differs) == (60, 60, 18)
    assert (len(mood.better), len(mood.worse)) == (15, 3)
    assert mood.right == (40, 52)
    assert mood.difference == pytest.approx(12 / 60)
    assert mood.interval == difference(15, 3, 60)
    assert mood.p == mood.p_holm == mcnemar(15, 3)
    assert mood.smallest_visible is not None and 0 < mood.smallest_visible < 0.2
    assert {row.name for row in mood.worse} == {"r20", "r21", "r22"}
    assert mood.worse[0].gold == "good" and mood.worse[0].answers == ("good", "bad")


async def test_without_gold_it_says_what_differs_and_never_what_is_better() -> None:
    one, other = await run(lambda number: number < 20), await run(lambda number: number < 10)
    found = batch_agent.compare(one, other)
    assert "mood  differs in 10 of 60 rows" in str(found)
    assert "better" not in str(found) and "right" not in str(found)
    assert found["mood"].accuracy is None and "better" not in json.dumps(found.to_json())


async def test_rows_of_one_run_only_and_rows_with_another_content_are_left_out_and_counted() -> None:
    inputs = rows()
    changed = [*inputs[:5], {**inputs[5], "text": "text 50"}, *inputs[6:50], {"id": "new", "text": "text 1"}]
    found = batch_agent.compare(await run(lambda _: False, inputs), await run(lambda _: True, changed))
    assert (found.rows, found.changed) == (49, 1)
    assert [side.only for side in found.runs] == [10, 1]
    with pytest.raises(SpecError, match="no row is in all"):
        batch_agent.compare(await run(lambda _: True, inputs[:2]), await run(lambda _: True, inputs[2:4]))


async def test_the_gold_column_of_one_run_does_not_make_its_rows_other_rows() -> None:
    with_gold = await run(lambda number: number < 9, gold="label")
    without = await run(lambda number: number < 4)  # its rows have the column
    assert len(batch_agent.compare(with_gold, without)["mood"].better) == 5
    assert len(batch_agent.compare(without, with_gold, gold="label")["mood"].worse) == 5


async def test_three_runs_are_compared_in_pairs_and_corrected() -> None:
    runs = [await run(lambda number, most=most: number < most, gold="label") for most in (30, 18, 16)]
    found = batch_agent.compare(*runs)
    assert [(pair.a, pair.b) for pair in found.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    values = [pair["mood"].p for pair in found.pairs]
    corrected = [pair["mood"].p_holm for pair in found.pairs]
    assert values == [mcnemar(12, 0), mcnemar(14, 0), mcnemar(2, 0)]
    assert corrected == [pytest.approx(2 * mcnemar(12, 0)), pytest.approx(3 * mcnemar(14, 0)), pytest.approx(0.5)]
    with pytest.raises(KeyError, match="pairs"):
        found["mood"]


async def test_groups_and_sealed_gold_claim_nothing() -> None:
    inputs = [{**row, "customer": f"c{number % 6}"} for number, row in enumerate(rows())]
    one, other = [await run(lambda n, most=most: n < most, inputs, gold="label", groups="customer") for most in (20, 5)]
    mood = batch_agent.compare(one, other)["mood"]
    assert (mood.p, mood.interval, len(mood.better)) == (None, None, 15)
    one, other = [await run(lambda n, most=most: n < most, gold="label", gold_sealed=True) for most in (20, 5)]
    found = batch_agent.compare(one, other)
    assert 0 < found.sealed < 60 and found["mood"].scored == 60 - found.sealed


async def test_the_command_compares_run_directories_and_files_of_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(tmp_path / name) for name in ("one", "other")]
    for most, place in zip((20, 8), places, strict=True):
        await run(
            lambda number, most=most: number < most, gold="label", run_dir=place, prices={"input": 1, "output": 1}
        )
    assert main(["compare", *places, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [side["cost"] is not None for side in found["runs"]] == [True, True]
    assert (len(found["pairs"][0]["fields"]["mood"]["better"]), found["rows"]) == (12, 60)
    files = [f"{place}/results.jsonl" for place in places]
    assert main(["compare", *files]) == 0
    assert "mood  differs in 12 of 60 rows" in capsys.readouterr().out
    gold = tmp_path / "gold.csv"
    gold.write_text("id,mood\n" + "".join(f"r{number},good\n" for number in range(30)))
    assert main(["compare", *files, "--gold", str(gold)]) == 0
    text = capsys.readouterr().out
    assert "12 became right, 0 became wrong; p = 0.000488 (McNemar's exact test)" in text
    assert "of 30 rows with gold" in text and "could have shown" in text
    assert main(["compare", places[0]]) == 1
    for place in places:
        assert main(["export", place, "--output", f"{place}.csv"]) == 0
    capsys.readouterr()
    assert main(["compare", *(f"{place}.csv" for place in places), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [side["cost"] for side in tables["runs"]] == [side["cost"] for side in found["runs"]]
    assert tables["pairs"][0]["fields"]["mood"]["differs"] == 12


async def test_outcomes_of_pipelines_are_compared_by_their_last_stage() -> None:
    first = Pipeline(rows()).map(name="one", task="{text}")
    stages = first.map(name="two", task="Mood of {input}", output_schema=SCHEMA)

    def backend(wrong: int) -> ScriptedBackend:
        def answer(request: Request) -> Say:
            number = int(request.text.split()[-1])
            mood = json.dumps({"mood": "bad" if number < wrong else "good"})
            return Say(mood if request.text.startswith("Mood") else f"text {number}")

        return ScriptedBackend(answer)

    one, other = [await stages.run(backend=backend(most)) for most in (9, 4)]
    assert batch_agent.compare(one, other)["mood"].differs == 5
    with pytest.raises(SpecError, match="compare takes runs"):
        batch_agent.compare(one, 3)  # type: ignore[arg-type]

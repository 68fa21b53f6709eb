"""Scores: what is counted, what is exact, and what is said of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.trust.gold import gold_of
from batch_agent.trust.intervals import at_least, clopper_pearson, finite, median
from batch_agent.trust.require import check_requirements, read_requirements, with_required
from batch_agent.trust.score import Score, Scorer

SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["angry", "calm"]},
        "price": {"type": "number"},
        "town": {"type": "string"},
    },
}


def scorer(**options: object) -> Scorer:
    return Scorer(gold_of({"mood": "m"}, SCHEMA), **options)  # type: ignore[arg-type]


def scored(right: int, wrong: int, failed: int = 0, pending: int = 0) -> Scorer:
    made = scorer()
    for row in range(right + wrong + failed):
        ok = row < right + wrong
        made.add(str(row), {"mood": "calm"}, {"mood": "calm" if row < right else "angry"}, ok=ok)
    for row in range(pending):
        made.skip(f"p{row}", {"mood": "calm"})
    return made


def test_the_accuracy_has_its_interval_and_its_bound() -> None:
    found = scored(46, 4).score()["mood"]
    assert (found.rows, found.right, found.accuracy) == (50, 46, 0.92)
    assert found.interval == pytest.approx(clopper_pearson(46, 50))
    assert found.bound == pytest.approx(0.826, abs=5e-4)
    assert str(scored(46, 4).score()).startswith("mood  0.92 measured (46 of 50), at least 0.82")


def test_a_failed_row_is_wrong_and_lowers_the_coverage() -> None:
    found = scored(40, 5, failed=5).score()["mood"]
    assert (found.rows, found.accuracy, found.coverage.value) == (50, 0.8, 0.9)
    assert found.coverage.at_least == pytest.approx(at_least(45, 50))
    assert found.confusion == {"calm": {"angry": 5, "calm": 40, "(failed)": 5}}


def test_a_pending_row_counts_as_wrong_in_the_interval_and_the_bound_only() -> None:
    score = scored(40, 0, pending=10).score()
    found = score["mood"]
    assert (score.pending, found.rows, found.accuracy) == (10, 40, 1.0)
    assert found.interval == pytest.approx(clopper_pearson(40, 50))
    assert found.bound == pytest.approx(at_least(40, 50))
    assert found.classes is not None
    assert found.classes["calm"].recall.value == 1.0
    assert found.classes["calm"].recall.at_least == pytest.approx(at_least(40, 50))


def test_of_a_random_sample_of_a_finite_table_the_interval_is_hypergeometric() -> None:
    found = scored(46, 4).score("random", 200)
    assert found["mood"].interval == pytest.approx(finite(46, 50, 200))
    assert found.sample == "a random sample of the table"


def test_a_table_with_gold_on_all_rows_is_counted() -> None:
    found = scored(46, 4).score("random", 50)
    assert found["mood"].interval == (0.92, 0.92)
    assert found["mood"].bound == 0.92
    assert "counted" in found.sample
    assert "at least" not in str(found)
    half = scored(23, 2, pending=25).score("random", 50)
    assert (half.sample, half["mood"].bound) == ("a random sample of the table", 0.46)
    assert "0.92 measured (23 of 25), at least 0.46" in str(half)


def test_rows_that_were_chosen_say_nothing_about_the_others() -> None:
    assert scored(46, 4).score().sample == "rows that you chose: nothing follows for the others"


def test_a_sample_that_was_looked_at_says_so() -> None:
    from dataclasses import replace

    score = replace(scored(46, 4).score("random", 200), looks=6)
    assert score.sample == "a random sample that was looked at 6 times before"


def test_classes_have_precision_recall_and_f1_with_exact_intervals() -> None:
    made = scorer()
    for number, (gold, answer) in enumerate(
        [("angry", "angry")] * 8 + [("angry", "calm")] * 2 + [("calm", "angry")] * 3 + [("calm", "calm")] * 37
    ):
        made.add(str(number), {"mood": gold}, {"mood": answer})
    found = made.score()["mood"]
    assert found.classes is not None
    angry = found.classes["angry"]
    assert (angry.rows, angry.answers, angry.right) == (10, 11, 8)
    assert angry.precision.value == pytest.approx(8 / 11)
    assert angry.recall.interval == pytest.approx(clopper_pearson(8, 10))
    assert angry.f1.value == pytest.approx(16 / 21)
    low, high = clopper_pearson(8, 13)
    assert angry.f1.interval == pytest.approx((2 * low / (1 + low), 2 * high / (1 + high)))
    assert found.majority == 0.8
    assert found.majority_class == "calm"
    assert found.macro_f1 is not None
    assert found.macro_f1.to_json()["approximate"] is True


def test_a_text_with_few_values_has_classes_and_one_with_many_has_none() -> None:
    gold = gold_of("t", None)
    few, many = Scorer(gold), Scorer(gold)
    for row in range(200):
        few.add(str(row), {"output": ["Spam", "ham"][row % 2]}, "SPAM ")
        many.add(str(row), {"output": f"text {row}"}, f"TEXT {row}")
    found = few.score()["output"]
    assert found.confusion == {"ham": {"spam": 100}, "spam": {"spam": 100}}
    assert found.majority == 0.5
    assert many.score()["output"].classes is None
    assert many.score()["output"].accuracy == 1.0


def test_a_failed_row_has_an_infinite_error() -> None:
    made = Scorer(gold_of({"price": "p"}, SCHEMA))
    errors = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, math.inf]
    for row, error in enumerate(errors):
        made.add(str(row), {"price": 10.0}, {"price": 10.0 + error}, ok=not math.isinf(error))
    found = made.score()["price"].errors
    assert found is not None
    assert found.median == median(errors)
    assert found.mean is not None
    assert found.bias is not None
    assert found.mean.value == pytest.approx(1.75)
    assert found.bias.value == pytest.approx(1.75)
    assert found.to_json()["mean_absolute_error"]["approximate"] is True  # type: ignore[index,call-overload]


def test_groups_widen_the_interval_and_too_few_have_none() -> None:
    def grouped(groups: int) -> Score:
        made = scorer(groups="customer")
        for row in range(groups * 10):
            good = (row // 10) % 5 != 0
            made.add(str(row), {"mood": "calm"}, {"mood": "calm" if good else "angry"}, group=row // 10)
        return made.score()

    wide, narrow = grouped(40)["mood"], clopper_pearson(320, 400)
    assert wide.interval is not None
    assert wide.interval.low < narrow.low
    assert wide.interval.high > narrow.high
    few = grouped(19)
    assert few["mood"].interval is None
    assert few["mood"].bound is None
    assert few["mood"].accuracy is not None
    assert any("19 groups of customer" in note for note in few.notes)


def test_a_random_sample_of_the_table_is_never_widened_for_groups() -> None:
    made = scorer(groups="customer")
    for row in range(100):
        made.add(str(row), {"mood": "calm"}, {"mood": "calm" if row // 10 else "angry"}, group=row // 10)
    assert made.score("random", 1000)["mood"].interval == pytest.approx(finite(90, 100, 1000))


def test_the_same_is_scored_per_value_of_a_column() -> None:
    made = scorer(by="language")
    for row in range(100):
        made.add(str(row), {"mood": "calm"}, {"mood": "calm" if row % 4 else "angry"}, by=["en", "de"][row % 2])
    found = made.score()
    assert found.by is not None
    assert [(value, fields["mood"].right) for value, fields in found.by.items()] == [("de", 50), ("en", 25)]


def test_certain_wrong_answers_come_first_and_failed_rows_last() -> None:
    made = scorer(keeps_wrong=True)
    for name, doubt, ok in [("a", 0.5, True), ("b", 0.01, True), ("c", None, True), ("d", None, False)]:
        made.add(name, {"mood": "calm"}, {"mood": "angry"}, ok=ok, doubt=doubt, error=None if ok else "timeout")
    wrong = made.score().wrong
    assert wrong is not None
    assert [row.name for row in wrong] == ["b", "a", "c", "d"]
    assert "look at the gold of these" in str(made.score())


def test_the_digest_of_gold_depends_on_ids_and_values_and_not_on_their_order() -> None:
    def digest(*rows: tuple[str, str]) -> str:
        made = scorer()
        for name, gold in rows:
            made.add(name, {"mood": gold}, {"mood": "calm"})
        return made.score().digests["mood"]

    assert digest(("1", "calm"), ("2", "angry")) == digest(("2", "angry"), ("1", "calm"))
    assert digest(("1", "calm"), ("2", "angry")) != digest(("1", "angry"), ("2", "calm"))


def test_what_is_required_is_tested_at_the_bound() -> None:
    def unmet(text: str) -> list[str]:
        made = scored(46, 4)
        needed = check_requirements(read_requirements(text), made.gold.fields)
        return [*with_required(made.score(), needed).unmet]

    assert unmet("mood.accuracy >= 0.82") == []
    assert unmet("accuracy>=0.9") == ["accuracy>=0.9 is not met: 0.92 measured (46 of 50), at least 0.8262"]
    assert unmet("recall[calm] >= 0.9") != []
    assert unmet("all.coverage >= 0.9") == []
    assert unmet("accuracy <= 0.98") == []
    assert unmet("accuracy <= 0.93") != []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mood.acuracy >= 0.9", "'accuracy'.*accuracy, coverage, precision, recall, f1, median_error"),
        ("mood.macro_f1 >= 0.9", "approximate"),
        ("mood.bias <= 0.9", "approximate"),
        ("mod.accuracy >= 0.9", "'mood'"),
        ("accuracy > 0.9", "write >= or <="),
        ("accuracy >= 90", "from 0 to 1"),
        ("accuracy >= most", "not a number"),
        ("accuracy", "METRIC"),
        ("recall >= 0.9", r"recall\[CLASS\]"),
        ("accuracy[calm] >= 0.9", "not of a class"),
        ("recall[happy] >= 0.9", "angry, calm"),
        ("median_error <= 1", "of a number"),
    ],
)
def test_a_requirement_that_cannot_be_decided_is_refused_with_the_list(text: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        check_requirements(read_requirements(text), gold_of({"mood": "m"}, SCHEMA).fields)


def test_the_form_of_the_json_is_the_one_on_the_page() -> None:
    made, cells = scorer(), [("angry", "angry", 20), ("angry", "calm", 2), ("calm", "angry", 1), ("calm", "calm", 26)]
    rows = [(gold, answer, True) for gold, answer, count in cells for _ in range(count)] + [("calm", None, False)]
    for number, (gold, answer, ok) in enumerate(rows):
        made.add(str(number), {"mood": gold}, {"mood": answer}, ok=ok)
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
    shown = page.partition("### The form of the JSON")[2].partition("```text")[2].partition("```")[0]
    assert json.loads(shown) == rounded(made.score("random", 2000).to_json())


def rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value

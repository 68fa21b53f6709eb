"""Promises: how they are read, the thresholds, the order of tests, and what people still have to do."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from batch_agent.errors import SpecError
from batch_agent.trust.forecast import interval, plan, possible
from batch_agent.trust.promise import (
    ALL_KEPT,
    ALL_SENT,
    Tables,
    Walk,
    band,
    first_step,
    fixed_size,
    grid,
    most_wrong_of,
    outcomes_in_order,
    people_error,
    promised_fields,
    read_promise,
)

PROMISE = read_promise("label.accuracy >= 0.96")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "label": {"enum": ["a", "b"]},
        "angry": {"type": "boolean"},
        "count": {"type": "integer"},
        "price": {"type": "number"},
        "short": {"type": "string", "maxLength": 64},
        "why": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}


def test_a_promise_is_read_with_its_exact_share() -> None:
    assert (PROMISE.field, PROMISE.share) == ("label", Fraction(24, 25))
    assert PROMISE.most_wrong(300) == 12  # 0.04 * 300 as floats is less
    assert read_promise("all >= 0.9").field == read_promise("all.accuracy ≥ 0.9").field == "all"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("label.accuracy <= 0.9", "not about the accuracy from below"),
        ("label.recall[a] >= 0.9", "not about the accuracy from below"),
        ("label.accuracy >= 1", "above 0 and below 1"),
        ("label is right", "is not [FIELD.]METRIC"),
        ("label.acuracy >= 0.9", "did you mean 'accuracy'"),
    ],
)
def test_what_is_no_promise_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_promise(text)
    assert said in str(refused.value)
    assert str(refused.value).startswith("promise: ")


@pytest.mark.parametrize("name", ["label", "angry", "count", "short"])
def test_fields_that_two_people_would_write_equally_can_be_promised(name: str) -> None:
    promise, fields = promised_fields(read_promise(f"{name}.accuracy >= 0.9"), SCHEMA)
    assert promise.field == name
    assert [*fields] == [name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("why.accuracy >= 0.9", "why is free text"),
        ("price.accuracy >= 0.9", "price is a number: say with tolerance"),
        ("tags.accuracy >= 0.9", "tags is a list or an object"),
        ("all >= 0.9", "all means every field"),
        ("accuracy >= 0.9", "an answer has 7 fields: name one"),
        ("lable.accuracy >= 0.9", "has no field 'lable'"),
    ],
)
def test_fields_with_several_right_values_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        promised_fields(read_promise(text), SCHEMA)
    assert said in str(refused.value)


def test_a_number_with_a_tolerance_can_be_promised_and_free_answers_cannot() -> None:
    _, fields = promised_fields(read_promise("price.accuracy >= 0.9"), SCHEMA, {"price": 0.5})
    assert fields["price"].right(1.4, 1.0)
    with pytest.raises(SpecError, match="output is free text"):
        promised_fields(read_promise("accuracy >= 0.9"), None)


def test_the_first_step_is_half_as_much_again_as_a_sample_without_a_wrong_row_needs() -> None:
    assert first_step(PROMISE, None) == 111  # 1.5 * ln 0.05 / ln 0.96 = 110.08
    assert first_step(PROMISE, 50) == 111
    assert first_step(PROMISE, 400) == 400


def test_the_grid_has_twenty_quantiles_from_everything_to_people_to_nothing() -> None:
    found = grid([row / 1000 for row in range(1000)])
    assert found[0] == ALL_SENT
    assert found[-1] == ALL_KEPT
    assert [*found[1:-1]] == [pytest.approx(step / 20 - 0.001) for step in range(1, 20)]
    assert grid([0.0] * 50 + [0.5]) == (ALL_SENT, 0.0, ALL_KEPT)
    assert grid([]) == (ALL_SENT, ALL_KEPT)
    assert [band(found, doubt) for doubt in (0.0, 0.049, 0.05, 1.0, None)] == [1, 1, 2, 20, 21]


def walk_of(bands: list[int], error: float = 0.0, lost: list[int] | None = None) -> Walk:
    return Walk(Tables.of_bands(PROMISE, bands, error, lost))


def test_tables_are_tested_in_their_order_and_one_that_passed_stays_passed() -> None:
    walk = walk_of([0, 1000, 1000, 1000, 0])  # three thresholds that keep rows
    assert (walk.passed, walk.next) == (0, 1)  # everything to people keeps the promise
    for _ in range(98):
        assert walk.next == 1
        walk.add(1, wrong=False)
    assert walk.passed == 3  # all tables have the same rows, without a wrong one
    for _ in range(60):
        walk.add(1, wrong=True)
    assert walk.passed == 3
    assert walk.bound(3) <= 0.04
    assert walk.measured(3) == pytest.approx(60 / 158)


def test_a_wrong_row_counts_where_it_is_kept_and_not_where_it_is_sent_to_people() -> None:
    walk = walk_of([0, 1500, 1500, 0])
    for row in range(300):
        walk.add(2 if row % 2 else 1, wrong=row % 4 == 1)
    assert walk.wrong == [0, 0, 75]
    assert (walk.passed, walk.next) == (1, 2)


def test_rows_that_people_repair_and_rows_without_an_answer_take_from_what_may_be_wrong() -> None:
    assert walk_of([0, 1000, 2000], error=0.02).most == [60, 80]
    assert walk_of([0, 1000, 2000], lost=[100, 100]).most == [20, 20]
    never = walk_of([0, 1000, 2000], lost=[200, 200])
    assert (never.passed, never.next) == (None, None)
    assert not possible(never, [0, 0, 0], 10_000)


def test_an_error_of_people_that_breaks_the_promise_alone_skips_the_tables_that_need_most_of_them() -> None:
    walk = walk_of([0, 1000, 2000, 0], error=0.05)
    assert walk.most == [-30, 20, 120]
    assert (walk.passed, walk.next) == (None, 1)


def test_rows_that_another_model_answers_are_counted_as_that_model_answers_them() -> None:
    walk = Walk(Tables.of_bands(PROMISE, [0, 1500, 1500], 0.0, by_people=False))
    assert walk.passed is None  # nothing is known of the other model
    walk.add(1, wrong=True, sent_wrong=False)
    walk.add(2, wrong=True, sent_wrong=True)
    assert walk.wrong == [1, 2]


def test_the_audit_ends_at_the_first_row_that_is_open() -> None:
    assert [*outcomes_in_order([1, 2, None, 3])] == [1, 2]


def test_the_error_of_people_is_measured_from_thirty_rows_on() -> None:
    assert people_error(3, 29) == 0.02
    assert people_error(3, 30) == 0.05
    assert people_error(3, 29, 0.01) == 0.01


def table(seed: int, rows: int = 3_000, accuracy: float = 0.94) -> tuple[list[int], list[bool], Walk]:
    draw = random.Random(seed)
    wrong = [draw.random() > accuracy for _ in range(rows)]
    doubts = [min(1.0, max(0.0, draw.gauss(0.3 + 0.25 * each, 0.2))) for each in wrong]
    thresholds = grid(doubts)
    own = [band(thresholds, doubt) for doubt in doubts]
    counts = [0] * (len(thresholds) + 1)
    for each in own:
        counts[each] += 1
    return own, wrong, Walk(Tables.of_bands(PROMISE, counts, 0.02))


def test_the_plan_weighs_rows_of_the_audit_against_repairs_and_comes_to_an_end() -> None:
    own, wrong, walk = table(1)
    before = plan(walk, walk.seen, first=111)
    assert before.audit >= 111
    for row in range(3_000):
        walk.add(own[row], wrong=wrong[row])
        found = plan(walk, walk.seen)
        if walk.drawn >= 111 and not found.audit:
            break
    assert found.threshold == walk.passed
    assert found.repair == walk.tables.sent[walk.passed or 0] - sum(walk.seen[(walk.passed or 0) + 1 :])
    assert walk.drawn + found.repair < 2_000


def test_the_interval_of_the_judgements_left_contains_the_plan_and_is_the_same_after_a_kill() -> None:
    own, wrong, walk = table(2)
    for row in range(150):
        walk.add(own[row], wrong=wrong[row])
    low, high = interval(walk, walk.seen)
    assert low <= plan(walk, walk.seen).left <= high
    assert interval(walk, walk.seen) == (low, high)
    assert not possible(walk, walk.seen, 20)
    assert possible(walk, walk.seen, 3_000)


def test_an_audit_of_a_fixed_size_decides_at_its_end_by_the_exact_bound() -> None:
    promise, rows, size = read_promise("label.accuracy >= 0.9"), 500, 120
    bad = 51  # one more than may be wrong
    ways = [math.comb(bad, found) * math.comb(rows - bad, size - found) for found in range(size + 1)]
    level = [sum(ways[: found + 1]) / math.comb(rows, size) for found in range(size + 1)]
    most = max(found for found in range(size + 1) if level[found] <= 0.05)
    tables = Tables.of_bands(promise, [0, rows, 0], 0.0, by_people=False)
    for wrong in (most, most + 1):
        walk = Walk(tables, fixed=size)
        for row in range(size):
            assert walk.passed is None
            walk.add(1, wrong=row < wrong)
        assert walk.passed == (1 if wrong == most else 0)
        assert (walk.bound(1) <= 0.1) is (wrong == most)


def test_an_audit_of_a_fixed_size_can_always_show_the_promise_and_grows_slower_than_the_table() -> None:
    for share in ("0.8", "0.9", "0.96", "0.99"):
        promise = read_promise(f"label.accuracy >= {share}")
        for rows in (10, 300, 5_000, 1_000_000):
            size = fixed_size(promise, rows)
            assert size <= rows
            assert most_wrong_of(0, size, rows) <= promise.most_wrong(rows)
    sizes = [fixed_size(promise, rows) for rows in (1_000, 10_000, 100_000, 1_000_000)]
    assert sizes == [448, 600, 1_898, 6_000]

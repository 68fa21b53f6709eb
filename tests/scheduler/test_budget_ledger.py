"""The ledger in any order of reservations and settlements, what is expected of a call, and how seconds are shared."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.messages import Usage
from batch_agent.scheduler.budget import (
    FIRST_ANSWER_TOKENS,
    TEMPLATE_TOKENS,
    UNKNOWN_TEMPLATE_TOKENS,
    Amount,
    Estimator,
    Ledger,
    TimeShare,
)

CALLS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 700)), max_size=40)


@given(st.integers(1, 2000), CALLS, st.randoms(use_true_random=False))
def test_what_is_spent_exceeds_a_limit_by_no_more_than_the_calls_exceeded_their_estimates(
    limit: int, calls: list[tuple[int, int]], chance: object
) -> None:
    ledger = Ledger(max_tokens=limit)
    flying: list[tuple[int, int]] = []
    overrun = 0
    for estimate, actual in calls:
        amount = Amount(estimate)
        if ledger.short(amount) is None:
            ledger.reserve(amount)
            flying.append((estimate, actual))
        if flying and chance.random() < 0.5:  # type: ignore[attr-defined]
            done = flying.pop(chance.randrange(len(flying)))  # type: ignore[attr-defined]
            ledger.settle(Amount(done[0]), Amount(done[1]))
            overrun += max(0, done[1] - done[0])
        assert ledger.spent.tokens + ledger.reserved.tokens <= limit + overrun
        assert ledger.in_flight == len(flying)
    for estimate, actual in flying:
        ledger.settle(Amount(estimate), Amount(actual))
        overrun += max(0, actual - estimate)
    assert ledger.spent.tokens <= limit + overrun
    assert ledger.reserved == Amount()


@given(st.lists(st.floats(1e-9, 1.0), max_size=50))
def test_with_nothing_in_flight_nothing_is_reserved_however_floats_add_up(costs: list[float]) -> None:
    ledger = Ledger(max_cost=1000.0)
    for cost in costs:
        ledger.reserve(Amount(0, cost))
    for cost in costs:
        ledger.settle(Amount(0, cost), Amount(0, cost))
    assert ledger.reserved == Amount()
    assert ledger.spent.cost == pytest.approx(sum(costs))


def test_a_limit_that_is_short_says_which_it_is_and_what_is_needed() -> None:
    ledger = Ledger(max_tokens=1000, max_cost=0.5)
    ledger.spent = Amount(900, 0.45)
    assert ledger.short(Amount(100, 0.05)) is None
    assert ledger.short(Amount(101, 0.0)) == (
        "max_total_tokens 1,000: 900 are spent, and the next call takes about 101"
    )
    assert ledger.short(Amount(1, 0.06)) == "max_cost $0.5: $0.45 is spent, and the next call costs about $0.06"


def test_without_limits_everything_fits() -> None:
    assert Ledger().short(Amount(10**15, 1e12)) is None


def test_an_answer_is_expected_to_be_max_tokens_long_else_as_long_as_those_before() -> None:
    estimator = Estimator()
    assert estimator.expect(10, 64, alone=True).completion_tokens == 64
    assert estimator.expect(10, None, alone=True).completion_tokens == FIRST_ANSWER_TOKENS
    estimator.learn(10, Usage(10, completion_tokens=20))
    estimator.learn(10, Usage(10, completion_tokens=41))
    assert estimator.expect(10, None, alone=True).completion_tokens == 31
    assert estimator.expect(10, 64, alone=True).completion_tokens == 64


def test_before_anything_is_known_a_prompt_has_as_many_tokens_as_bytes_and_a_templates() -> None:
    estimator = Estimator()
    assert estimator.expect(1000, 1, alone=True).prompt_tokens == 1000 + TEMPLATE_TOKENS
    assert estimator.expect(1000, 1, alone=False).prompt_tokens == 1000 + UNKNOWN_TEMPLATE_TOKENS


def test_prompts_are_expected_to_be_as_dense_as_the_densest_with_a_margin_that_narrows() -> None:
    estimator = Estimator()
    expected = []
    for tokens in (250, 100, 150, *[100] * 97):
        estimator.learn(1000, Usage(tokens, completion_tokens=1))
        expected.append(estimator.expect(1000, 1, alone=True).prompt_tokens - TEMPLATE_TOKENS)
    assert (expected[0], expected[2], expected[-1]) == (1000, 500, 258)
    assert expected == sorted(expected, reverse=True)


@given(st.lists(st.integers(0, 2000), min_size=1), st.integers(0, 5000))
def test_no_prompt_is_expected_to_have_more_tokens_than_bytes_and_what_was_added_to_one(
    counts: list[int], size: int
) -> None:
    estimator = Estimator()
    for count in counts:
        estimator.learn(500, Usage(count, completion_tokens=1))
    added = max(TEMPLATE_TOKENS, *(count - 500 for count in counts))
    assert estimator.expect(size, 1, alone=True).prompt_tokens <= size + added
    assert estimator.expect(500, 1, alone=True).prompt_tokens >= max(counts)


def test_a_server_that_counts_nothing_tells_nothing_about_prompts_and_answers() -> None:
    estimator = Estimator()
    estimator.learn(100, Usage())
    assert estimator.expect(1000, None, alone=False) == Usage(1000 + TEMPLATE_TOKENS, 0, FIRST_ANSWER_TOKENS)


def test_a_second_is_divided_evenly_among_the_calls_in_flight() -> None:
    shares = TimeShare()
    first = shares.begin(100.0)
    second = shares.begin(101.0)
    assert shares.end(first, 103.0) == 2.0
    assert shares.end(second, 104.0) == 2.0
    third = shares.begin(110.0)  # six seconds with no call belong to nobody
    assert shares.end(third, 111.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20))
def test_the_shares_of_all_calls_are_the_seconds_in_which_there_was_one(spans: list[tuple[float, float]]) -> None:
    shares = TimeShare()
    events = sorted(
        [(start, 0, number) for number, (start, length) in enumerate(spans)]
        + [(start + length, 1, number) for number, (start, length) in enumerate(spans)]
    )
    begun: dict[int, float] = {}
    total, busy, last = 0.0, 0.0, 0.0
    for at, kind, number in events:
        busy += at - last if begun else 0.0
        last = at
        if kind == 0:
            begun[number] = shares.begin(at)
        else:
            total += shares.end(begun.pop(number), at)
    assert math.isclose(total, busy, rel_tol=1e-9, abs_tol=1e-6)

"""The ledger in any order of reservations and settlements, what is expected of a call, and how seconds are shared."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.messages import Usage
from batch_agent.scheduler.budget import (
    FIRST_ANSWER_TOKENS,
    TEMPLATE_TOKENS,
    UNKNOWN_TEMPLATE_TOKENS,
    Amount,
    Counted,
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
    assert ledger.short(Amount(101, 0.0)) == ("max_total_tokens 1,000: 900 are spent, and the next call may take 101")
    assert ledger.short(Amount(1, 0.06)) == "max_cost $0.5: $0.45 is spent, and the next call may cost $0.06"


def test_without_limits_everything_fits() -> None:
    assert Ledger().short(Amount(10**15, 1e12)) is None


@given(st.integers(1, 2000), CALLS, st.randoms(use_true_random=False))
def test_over_kills_at_any_moment_a_recorded_run_spends_no_more_than_its_limit(
    limit: int, calls: list[tuple[int, int]], chance: random.Random
) -> None:
    """Each session begins with what the advance of the one before says."""
    billed, advance = 0, Amount()
    ledger, flying = _session(limit, advance)
    for most, part in calls:
        amount, actual = Amount(most), min(most, part)
        if ledger.short(amount) is None:
            if not ledger.covers(amount):
                ledger.advance = advance = ledger.next_advance(amount)
            assert ledger.covers(amount)
            ledger.reserve(amount)
            flying.append((most, actual))
        if flying and chance.random() < 0.5:
            most, actual = flying.pop(chance.randrange(len(flying)))
            ledger.settle(Amount(most), Amount(actual))
            billed += actual
        if chance.random() < 0.2:
            ledger.advance = advance = ledger.next_advance(Amount())  # with any commit
        if chance.random() < 0.1:
            billed += sum(actual for _, actual in flying)  # answers that were lost with the process
            ledger, flying = _session(limit, advance)
        assert billed + sum(actual for _, actual in flying) <= advance.tokens
    assert billed + sum(actual for _, actual in flying) <= limit


def _session(limit: int, before: Amount) -> tuple[Ledger, list[tuple[int, int]]]:
    ledger = Ledger(max_tokens=limit)
    ledger.spent = ledger.advance = before
    return ledger, []


def test_a_kill_costs_a_recorded_run_at_most_a_part_of_what_is_left() -> None:
    ledger, _ = _session(1000, Amount())
    assert ledger.short(Amount(900)) is None  # alone
    sent = 0
    while ledger.short(Amount(60)) is None:
        ledger.reserve(Amount(60))
        sent += 1
    assert (sent, ledger.next_advance(Amount()).tokens) == (8, 600)
    assert Ledger(max_tokens=1000).short(Amount(900), beside=Amount(100)) is None  # nothing is recorded


def test_an_answer_is_as_long_as_max_tokens_else_as_the_longest_before_with_a_margin_that_narrows() -> None:
    estimator = Estimator()
    assert estimator.bound(10, None, 64, alone=True).completion_tokens == 64
    assert estimator.bound(10, None, None, alone=True).completion_tokens == FIRST_ANSWER_TOKENS
    for length in (20, 41, 30, 30):
        estimator.learn(10, Usage(10, completion_tokens=length))
    assert estimator.bound(10, None, None, alone=True).completion_tokens == 41 + FIRST_ANSWER_TOKENS // 4
    assert estimator.bound(10, None, 64, alone=True).completion_tokens == 64


def test_a_prompt_has_as_many_tokens_as_its_beginning_was_counted_to_have_and_one_for_each_byte_after_it() -> None:
    estimator = Estimator()
    assert estimator.bound(1000, None, 1, alone=True).prompt_tokens == 1000 + TEMPLATE_TOKENS
    assert estimator.bound(1000, None, 1, alone=False).prompt_tokens == 1000 + UNKNOWN_TEMPLATE_TOKENS
    assert estimator.bound(1000, Counted(900, 200), 1, alone=False).prompt_tokens == 300
    assert estimator.bound(1000, Counted(0, 10_000), 1, alone=True).prompt_tokens == 1000 + UNKNOWN_TEMPLATE_TOKENS


def test_for_limits_by_the_minute_prompts_are_as_dense_as_the_densest_with_a_margin_that_narrows() -> None:
    estimator = Estimator()
    expected = []
    for tokens in (250, 100, 150, *[100] * 97):
        estimator.learn(1000, Usage(tokens, completion_tokens=1))
        expected.append(estimator.most(1000, 1).prompt_tokens - TEMPLATE_TOKENS)
    assert (expected[0], expected[2], expected[-1]) == (1000, 500, 258)
    assert expected == sorted(expected, reverse=True)


def test_a_server_that_counts_nothing_tells_nothing_about_prompts_and_answers() -> None:
    estimator = Estimator()
    estimator.learn(100, Usage())
    assert estimator.most(1000, None) == Usage(1000 + TEMPLATE_TOKENS, 0, FIRST_ANSWER_TOKENS)


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

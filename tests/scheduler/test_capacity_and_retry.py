"""The capacity controller and the waits between tries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.retry import FIRST, LONGEST, retry_delay


def test_a_refusal_halves_what_is_in_flight() -> None:
    capacity = Capacity(64)
    assert capacity.overloaded(capacity.generation, inflight=40)
    assert capacity.limit == 20


def test_the_siblings_of_a_refused_request_do_not_halve_again() -> None:
    capacity = Capacity(64)
    sent = capacity.generation
    assert capacity.overloaded(sent, inflight=64)
    assert not any(capacity.overloaded(sent, inflight=63 - n) for n in range(60))
    assert capacity.limit == 32


def test_good_answers_raise_the_limit_by_one_per_round_up_to_the_ceiling() -> None:
    capacity = Capacity(8)
    capacity.overloaded(0, inflight=8)
    rises = [capacity.succeeded() for _ in range(4 + 5 + 6 + 7 + 50)]
    assert sum(rises) == 4
    assert capacity.limit == 8


def test_without_a_ceiling_a_refusal_makes_a_limit() -> None:
    capacity = Capacity(None)
    capacity.overloaded(0, inflight=100)
    assert capacity.limit == 50


@given(st.integers(1, 100), st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=200))
def test_the_limit_stays_between_one_and_the_ceiling(ceiling: int, steps: list[int | None]) -> None:
    capacity = Capacity(ceiling)
    for step in steps:
        if step is None:
            capacity.succeeded()
        else:
            capacity.overloaded(capacity.generation, step)
        assert capacity.limit is not None
        assert 1 <= capacity.limit <= ceiling


@given(st.integers(1, 1000), st.floats(0, 1))
def test_a_wait_is_a_share_of_a_span_that_doubles_and_is_bounded(failures: int, chance: float) -> None:
    assert 0 <= retry_delay(failures, None, chance) <= min(LONGEST, FIRST * 2 ** min(failures, 20))


@given(st.integers(1, 10), st.floats(0, 1), st.floats(0, 1e6))
def test_the_servers_retry_after_is_the_least_wait(failures: int, chance: float, after: float) -> None:
    assert retry_delay(failures, after, chance) >= after


def test_after_a_refusal_the_limit_comes_back_fast_to_just_below_where_it_was_refused() -> None:
    capacity = Capacity(512)
    capacity.overloaded(0, 512)
    assert capacity.limit == 256
    for _ in range(224):
        capacity.succeeded()
    assert capacity.limit == 480
    for _ in range(480):
        capacity.succeeded()
    assert capacity.limit == 481


def test_after_an_outage_the_limit_begins_at_one_and_doubles_with_each_round_to_where_it_was() -> None:
    capacity = Capacity(64)
    capacity.succeeded()
    for _ in range(3):  # refusals for load that were part of the outage
        capacity.overloaded(capacity.generation, 64)
    capacity.restart(64)
    rounds = 0
    while capacity.limit != 64:
        for _ in range(capacity.limit or 0):
            capacity.succeeded()
        rounds += 1
    assert rounds == 6


def test_an_outage_while_the_limit_grows_back_does_not_forget_where_it_was() -> None:
    capacity = Capacity(64)
    capacity.succeeded()
    capacity.restart(64)
    capacity.succeeded()
    capacity.restart(2)
    for _ in range(63):
        capacity.succeeded()
    assert capacity.limit == 64


def test_without_a_ceiling_the_limit_comes_back_fast_to_what_was_in_flight() -> None:
    capacity = Capacity(None)
    capacity.restart(100)
    for _ in range(99):
        capacity.succeeded()
    assert capacity.limit == 100

"""The capacity controller and the waits between tries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.scheduler.capacity import Capacity, LimitSearch, is_chance
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.retry import FIRST, LONGEST, retry_delay


def good(capacity: Capacity, now: float = 1.0) -> str:
    """An answer while all slots are in use."""
    capacity.filled = True
    return capacity.succeeded(sent_at=0.0, seconds=1.0, tokens=1, now=now)


def refuse(capacity: Capacity, inflight: int, wait: float = 0.0, now: float = 0.0) -> str:
    """Refuse requests of one generation until the limit falls, as a full server does."""
    sent = capacity.generation
    for _ in range(inflight):
        if reason := capacity.overloaded(sent, inflight, wait, now):
            return reason
    return ""


def rounds_until(limit: int, capacity: Capacity, now: float = 1.0) -> float:
    """Rounds of good answers until the limit is ``limit``."""
    rounds = 0.0
    while capacity.limit != limit:
        rounds += 1 / (capacity.limit or 1)
        good(capacity, now)
        assert rounds < 100
    return rounds


def test_a_refusal_halves_what_is_in_flight() -> None:
    capacity = Capacity(64)
    assert refuse(capacity, 40)
    assert capacity.limit == 20


def test_the_siblings_of_a_refused_request_do_not_halve_again() -> None:
    capacity = Capacity(64)
    sent = capacity.generation
    assert refuse(capacity, 64)
    assert not any(capacity.overloaded(sent, inflight=63 - n) for n in range(60))
    assert capacity.limit == 32


def test_after_a_refusal_the_limit_doubles_with_each_round_up_to_an_eighth_and_one_below_it() -> None:
    capacity = Capacity(512)
    refuse(capacity, 512)
    assert capacity.limit == 256
    assert rounds_until(447, capacity) < 1


def test_then_it_climbs_faster_and_faster_up_to_the_ceiling() -> None:
    capacity = Capacity(1_000)
    refuse(capacity, 64)
    rounds_until(55, capacity)
    paces = [rounds_until(limit, capacity) for limit in (56, 57, 58, 59)]
    assert paces[0] > 2
    assert paces == sorted(paces, reverse=True)
    rounds_until(64, capacity)
    assert rounds_until(1_000, capacity) < 15


def test_a_number_that_was_refused_is_tried_again_only_after_some_rounds() -> None:
    capacity = Capacity(1000)
    refuse(capacity, 51)
    for _ in range(3):  # a server that takes 50
        rounds_until(50, capacity)
        assert rounds_until(51, capacity) > N.several
        refuse(capacity, 51)


@pytest.mark.parametrize(("wait", "after"), [(2.0, N.busy), (15.0, 15.0)])
def test_a_number_whose_refusal_asked_for_a_wait_is_tried_again_after_it_and_ten_seconds_at_least(
    wait: float, after: float
) -> None:
    capacity = Capacity(1000)
    refuse(capacity, 51, wait=wait, now=1.0)
    for _ in range(10_000):
        good(capacity)
    assert capacity.limit == 50
    assert not good(capacity, now=1.0 + after / 2)
    assert good(capacity, now=1.0 + after)


def test_refusals_without_an_answer_between_them_do_not_lower_what_the_limit_comes_back_to() -> None:
    capacity = Capacity(64)
    while capacity.limit != 1:  # a server that is full of others' requests
        refuse(capacity, 64)
    assert rounds_until(55, capacity) < 6


def test_a_limit_that_fell_at_the_server_is_followed_by_halving() -> None:
    capacity = Capacity(50)
    for _ in range(100):
        good(capacity)
    refuse(capacity, 50)
    assert capacity.limit == 25


def test_the_limit_does_not_grow_beyond_what_is_used() -> None:
    capacity = Capacity(100)
    refuse(capacity, 20)
    rounds_until(19, capacity)
    capacity.filled = False
    for _ in range(1_000):
        capacity.succeeded(sent_at=1.0, seconds=1.0, tokens=1, now=2.0)
    assert capacity.limit == 19


def test_answers_that_arrive_together_count_as_a_whole_round() -> None:
    """The next requests are sent after all of them were handled, so no slot is in use between two of them."""
    capacity = Capacity(128)
    refuse(capacity, 8)
    for now in range(1, 31):
        capacity.filled = True
        for _ in range(capacity.limit or 0):
            capacity.succeeded(sent_at=now - 1, seconds=1.0, tokens=1, now=now)
    assert capacity.limit == 128


def test_without_a_ceiling_a_refusal_makes_a_limit() -> None:
    capacity = Capacity(None)
    refuse(capacity, 100)
    assert capacity.limit == 50


@given(st.integers(1, 100), st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=200))
def test_the_limit_stays_between_one_and_the_ceiling(ceiling: int, steps: list[int | None]) -> None:
    capacity = Capacity(ceiling)
    for step in steps:
        if step is None:
            good(capacity)
        else:
            refuse(capacity, step)
        assert capacity.limit is not None
        assert 1 <= capacity.limit <= ceiling


@given(st.integers(1, 1000), st.floats(0, 1))
def test_a_wait_is_a_share_of_a_span_that_doubles_and_is_bounded(failures: int, chance: float) -> None:
    assert 0 <= retry_delay(failures, None, chance) <= min(LONGEST, FIRST * 2 ** min(failures, 20))


@given(st.integers(1, 10), st.floats(0, 1), st.floats(0, 1e6))
def test_the_servers_retry_after_is_the_least_wait(failures: int, chance: float, after: float) -> None:
    assert retry_delay(failures, after, chance) >= after


def test_after_an_outage_the_limit_begins_at_one_and_doubles_with_each_round_to_where_it_was() -> None:
    capacity = Capacity(64)
    good(capacity)
    for _ in range(3):  # refusals for load that were part of the outage
        refuse(capacity, 64)
    capacity.restart(64)
    assert rounds_until(64, capacity) < 6


def test_an_outage_while_the_limit_grows_back_does_not_forget_where_it_was() -> None:
    capacity = Capacity(64)
    good(capacity)
    capacity.restart(64)
    good(capacity)
    capacity.restart(2)
    for _ in range(63):
        good(capacity)
    assert capacity.limit == 64


def test_without_a_ceiling_the_limit_comes_back_fast_to_what_was_in_flight() -> None:
    capacity = Capacity(None)
    capacity.restart(100)
    for _ in range(99):
        good(capacity)
    assert capacity.limit == 100


@pytest.mark.parametrize(
    ("first", "seconds", "waited"),
    [
        ([100.0] * 6, 190.0, False),  # too few answers to know how much they differ
        ([100.0] * 7, 190.0, True),  # the second wave
        ([60.0, 80.0, 90.0, 95.0, 100.0, 105.0, 120.0, 130.0], 140.0, False),  # answers differ in length
        ([60.0, 80.0, 90.0, 95.0, 100.0, 105.0, 120.0, 130.0], 200.0, True),
    ],
)
def test_an_answer_has_waited_if_it_took_much_longer_than_fast_ones(
    first: list[float], seconds: float, waited: bool
) -> None:
    capacity = Capacity(1024, LimitSearch(128))
    capacity.patience = 600.0
    for number, took in enumerate([*first, seconds]):
        capacity.succeeded(0.0, took, 10, took, number + 1)
    assert (capacity.limit == 128) != waited


def test_a_refusal_is_taken_back_when_its_row_is_refused_again_and_others_are_not() -> None:
    capacity = Capacity(64)
    sent = capacity.generation
    for _ in range(12):
        capacity.overloaded(sent, 40, now=1.0, cause="bad")
    assert capacity.limit == 20
    assert not capacity.pardon("bad", answered=0.9), "nothing that was sent since was answered"
    assert capacity.pardon("bad", answered=1.1) and capacity.limit == 64
    assert not capacity.causes
    assert not refuse(capacity, 2), "and is not counted any more"


@pytest.mark.parametrize(
    ("refused", "is_full"),
    [
        (24, False),  # less than half of those in flight: single rows may be the cause
        (54, True),  # the server took ten of 64; a row that is refused twice was unlucky
    ],
)
def test_a_refusal_is_not_taken_back_if_most_requests_were_refused_with_it(refused: int, is_full: bool) -> None:
    capacity = Capacity(64)
    sent = capacity.generation
    for row in range(refused):
        capacity.overloaded(sent, 64 - row, now=1.0, cause=row)
    cause = next(cause for cause, (_, lowered, _) in capacity.causes.items() if lowered)
    capacity.pardon(cause, answered=1.1)
    assert (capacity.limit == 64) != is_full


def test_a_refusal_is_not_taken_back_once_a_refused_row_was_answered() -> None:
    capacity = Capacity(64)
    sent = capacity.generation
    for cause in range(32):
        capacity.overloaded(sent, 40, cause=cause)
    lowered = next(cause for cause, (_, lowered, _) in capacity.causes.items() if lowered)
    capacity.confirm(lowered)
    assert not capacity.pardon(0, 1.0) and not capacity.pardon(lowered, 1.0)
    assert capacity.limit == 20


def test_a_search_goes_on_when_the_refusal_that_ended_it_is_taken_back() -> None:
    search = LimitSearch(64)
    capacity = Capacity(None, search)
    while capacity.search is not None:
        capacity.overloaded(capacity.generation, 64, cause="bad")
    capacity.pardon("bad", answered=1.0)
    assert (capacity.search, capacity.limit) == (search, 64)


def test_an_outage_leaves_no_refusal_to_take_back() -> None:
    capacity = Capacity(64)
    sent = capacity.generation
    for _ in range(32):
        capacity.overloaded(sent, 40, cause="bad")
    capacity.restart(64)
    assert not capacity.pardon("bad", answered=1.0) and capacity.limit == 1


@pytest.mark.parametrize(
    ("refused", "requests", "chance"),
    [
        (2, 2, True),  # too few to tell
        (3, 4, False),
        (3, 10, True),
        (4, 10, False),
        (12, 64, True),  # one first wave in ten thousand of a server that refuses a twentieth
        (13, 64, False),
        (14, 64, False),  # a server with 50 slots
        (75, 1_000, True),
        (126, 1_000, False),  # with many requests a tenth is hardly more than a tenth
    ],
)
def test_refusals_of_about_a_tenth_may_be_chance(refused: int, requests: int, chance: bool) -> None:
    assert is_chance(refused, requests) == chance


@pytest.mark.parametrize(
    ("at", "answers", "rows", "lowered"),
    [
        (40, 1, "a", False),  # the server took 63 before: one refusal at 40 may be chance
        (40, 1, "ab", True),  # but not two in a round
        (40, 45, "ab", False),
        (40, 45, "aa", True),  # the row came back, and the server was still full
        (63, 1, "a", True),  # the server was full at this number
    ],
)
def test_a_refusal_at_a_clearly_smaller_number_than_before_is_confirmed_by_a_second(
    at: int, answers: int, rows: str, lowered: bool
) -> None:
    capacity = full()
    for _ in range(answers):
        good(capacity)
    capacity.limit = at
    for row in rows:
        capacity.overloaded(capacity.generation, at, cause=row)
    assert (capacity.limit < at) == lowered


@pytest.mark.parametrize(("rows", "lowered"), [(range(12), False), ([*range(9), 0, 1, 2], True), (range(13), True)])
def test_more_refusals_than_a_tenth_are_tolerated_only_if_no_row_is_refused_twice(
    rows: Iterable[int], lowered: bool
) -> None:
    capacity = Capacity(64, LimitSearch(64))
    for row in rows:
        capacity.overloaded(capacity.generation, 64, cause=row)
    assert capacity.limit is not None and (capacity.limit < 64) == lowered


def full(now: float = 1.0) -> Capacity:
    """A limit that refusals have lowered from 64 to 32, while 64 requests were in flight."""
    capacity = Capacity(1000)
    refuse(capacity, 64, now=now)
    assert capacity.limit == 32
    return capacity


@pytest.mark.parametrize(
    ("answered", "refused", "pending", "is_dry"),
    [
        (0, 3, 0, False),  # all slots of the server may be in use
        (40, 2, 0, False),  # few are in flight; two refusals may be chance
        (40, 3, 0, True),  # all that were sent since are refused: not too many at once, but too many per minute
        (40, 3, 5, False),  # the server has taken others that were sent since
    ],
)
def test_refusals_although_few_are_in_flight_leave_one_request_at_a_time(
    answered: int, refused: int, pending: int, is_dry: bool
) -> None:
    capacity = full()
    for _ in range(answered):
        capacity.succeeded(sent_at=0.0, seconds=2.0, tokens=1, now=2.0)
    for _ in range(refused):  # one after another, beside those that were in flight before
        capacity.overloaded(capacity.generation, 63 - answered + pending + 1, now=2.1)
    assert (capacity.limit == 1) == is_dry


def test_answers_to_old_requests_do_not_raise_a_limit_of_one_request_at_a_time() -> None:
    capacity = full()
    for _ in range(40):
        capacity.succeeded(sent_at=0.0, seconds=2.0, tokens=1, now=2.0)
    for _ in range(3):
        capacity.overloaded(capacity.generation, 24, now=2.1)
    assert capacity.limit == 1
    for _ in range(20):
        capacity.succeeded(sent_at=0.0, seconds=2.0, tokens=1, now=2.2)
    assert capacity.limit == 1
    capacity.succeeded(sent_at=2.2, seconds=1.0, tokens=1, now=3.2)
    assert capacity.limit == 2


def test_the_search_takes_no_step_by_the_clock_before_a_refused_request_was_sent_again() -> None:
    capacity = Capacity(None, LimitSearch(64))
    capacity.ramp(64, 0.0)
    capacity.filled = True
    capacity.overloaded(capacity.generation, 64, now=0.1)
    assert not capacity.ramp(64, 0.2) and capacity.limit == 64
    assert capacity.ramp(64, 0.1 + FIRST) and capacity.limit == 128

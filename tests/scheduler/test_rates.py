"""Budgets by the minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.messages import Allowance, Quota, Usage
from batch_agent.scheduler.rates import MINUTE, SLACK, LearntRate, Rates, Reservation, is_spent


def begin(rates: Rates, now: float) -> Reservation:
    return rates.unreserve(rates.begin(now))


def test_no_more_requests_leave_in_any_minute() -> None:
    rates = Rates(rpm=3)
    for now in (0.0, 1.0, 2.0):
        assert rates.free_at(now) <= now
        rates.begin(now)
    assert rates.free_at(2.0) == MINUTE + SLACK
    rates.begin(MINUTE + SLACK)
    assert rates.free_at(MINUTE + SLACK) == 1.0 + MINUTE + SLACK


@given(st.integers(1, 20), st.lists(st.floats(0, 30), max_size=200))
def test_whenever_requests_come_no_minute_has_more_than_its_budget(rpm: int, gaps: list[float]) -> None:
    rates, now, sent = Rates(rpm=rpm), 0.0, []
    for gap in gaps:
        now = max(now + gap, rates.free_at(now + gap))
        rates.begin(now)
        sent.append(now)
    for at in sent:
        assert sum(1 for other in sent if at <= other < at + MINUTE) <= rpm


def test_tokens_are_reserved_before_and_settled_after() -> None:
    rates = Rates(tpm=1_000)
    expected = Usage(prompt_tokens=300, completion_tokens=500)
    reservation = rates.reserve(begin(rates, 0.0), expected, 0.0)
    assert reservation is not None
    assert rates.free_at(0.0) > 0.0  # another like it does not fit
    rates.settle(reservation, Usage(prompt_tokens=100, completion_tokens=50), 1.0)
    assert rates.free_at(1.0) <= 1.0  # it took less


def test_tokens_count_for_a_minute_from_the_answer_on() -> None:
    rates = Rates(tpm=1_000)
    reservation = rates.reserve(begin(rates, 0.0), Usage(prompt_tokens=900), 0.0)
    assert reservation is not None
    rates.settle(reservation, Usage(prompt_tokens=900), 20.0)
    assert rates.free_at(30.0) == 20.0 + MINUTE + SLACK


def test_a_request_beyond_the_whole_budget_goes_alone() -> None:
    rates = Rates(tpm=100)
    reservation = rates.reserve(begin(rates, 0.0), Usage(prompt_tokens=500), 0.0)
    assert reservation is not None
    assert rates.reserve(begin(rates, 0.0), Usage(prompt_tokens=500), 0.0) is None


def test_an_answer_from_elsewhere_gives_all_of_it_back() -> None:
    rates = Rates(rpm=1, tpm=100)
    reservation = rates.reserve(begin(rates, 0.0), Usage(prompt_tokens=100), 0.0)
    assert reservation is not None
    rates.unsend(reservation, 0.0)
    assert rates.free_at(0.0) <= 0.0


def test_what_the_headers_leave_is_kept_to_until_they_say_it_is_full() -> None:
    rates = Rates()
    rates.learn(Quota(requests=Allowance(100, 2, 30.0)), None, 0, Usage(), 10.0)
    for _ in range(2):
        assert rates.free_at(10.0) <= 10.0
        rates.begin(10.0)
    assert rates.free_at(10.0) == 40.0 + SLACK
    assert rates.free_at(41.0) <= 41.0


def test_what_left_since_is_taken_off_what_the_headers_leave() -> None:
    rates = Rates()
    rates.learn(Quota(requests=Allowance(100, 50, 60.0)), None, 0, Usage(), 0.0)
    first = rates.begin(0.0)
    for _ in range(9):
        rates.begin(0.0)
    rates.learn(Quota(requests=Allowance(100, 9, 60.0)), first, 9, Usage(), 1.0)  # said before the other nine came
    assert rates.free_at(1.0) > 1.0


@pytest.mark.parametrize(
    ("apart", "order"),
    [
        (0.0, [0, 1, 2, 3, 4]),  # they arrived as they left: the last one reports that nothing remains
        (0.0, [4, 3, 2, 1, 0]),  # the last one arrived first, and reports four that the others take
        (0.0, [2]),  # the others may have arrived before it, or not
        (2.0, [4]),  # seconds apart they arrive as they left
        (2.0, [2]),  # two have left after it
    ],
)
def test_requests_that_leave_together_arrive_in_any_order(apart: float, order: list[int]) -> None:
    """Five requests of a limit of five. ``order``: which of them arrived first, second and so on, and report."""
    rates = Rates()
    rates.learn(Quota(requests=Allowance(5, 5, None)), None, 0, Usage(), 0.0)
    sent = [rates.begin(apart * number) for number in range(5)]
    arrived = sorted(range(5)) if apart else order
    for number in order:
        remaining = 4 - arrived.index(number)
        rates.learn(Quota(requests=Allowance(5, remaining, None)), sent[number], 0, Usage(), 10.0)
        assert rates.free_at(10.0) > 10.0
    newest = apart * max(order)
    assert rates.free_at(10.0) == newest + MINUTE + SLACK, "a minute after the newest that has reported"


def test_a_bucket_that_fills_up_is_used_when_later_requests_report_more() -> None:
    rates = Rates()
    rates.learn(Quota(requests=Allowance(60, 3, None)), None, 0, Usage(), 0.0)
    first, second = rates.begin(0.0), rates.begin(5.0)
    rates.learn(Quota(requests=Allowance(60, 0, None)), first, 1, Usage(), 6.0)
    assert rates.free_at(6.0) > 6.0
    rates.learn(Quota(requests=Allowance(60, 4, None)), second, 0, Usage(), 7.0)
    for _ in range(4):
        assert rates.free_at(7.0) <= 7.0
        rates.begin(7.0)
    assert rates.free_at(7.0) > 7.0


def test_what_requests_took_less_than_was_reserved_is_free_once_the_headers_tell() -> None:
    rates = Rates()
    rates.learn(Quota(tokens=Allowance(1_000, 900, 60.0)), None, 0, Usage(), 0.0)
    began = [begin(rates, 0.0) for _ in range(3)]
    sent = [rates.reserve(reservation, Usage(prompt_tokens=300), 0.0) for reservation in began]
    assert rates.free_at(0.0) > 0.0
    for reservation, left in zip(sent, (870, 840, 810), strict=True):
        assert reservation is not None
        rates.learn(Quota(tokens=Allowance(1_000, left, 59.0)), reservation, 0, Usage(), 1.0)
        rates.settle(reservation, Usage(prompt_tokens=30), 1.0)
    for _ in range(2):  # of 810
        assert rates.reserve(begin(rates, 1.0), Usage(prompt_tokens=300), 1.0) is not None
    assert rates.free_at(1.0) > 1.0


def test_a_request_that_had_to_wait_counts_after_those_that_left_meanwhile() -> None:
    rates = Rates()
    rates.learn(Quota(tokens=Allowance(1_000, 600, 60.0)), None, 0, Usage(), 0.0)
    waits, goes = begin(rates, 0.0), rates.reserve(begin(rates, 0.0), Usage(prompt_tokens=500), 0.0)
    assert goes is not None
    assert rates.reserve(waits, Usage(prompt_tokens=500), 0.0) is None
    later = rates.reserve(begin(rates, 0.0), Usage(prompt_tokens=50), 0.0)
    assert later is not None
    rates.learn(Quota(tokens=Allowance(1_000, 590, 60.0)), goes, 0, Usage(), 1.0)
    assert rates.reserve(waits, Usage(prompt_tokens=500), 1.0) is not None
    rates.learn(Quota(tokens=Allowance(1_000, 580, 60.0)), later, 0, Usage(), 2.0)  # said before that one came
    assert rates.reserve(begin(rates, 2.0), Usage(prompt_tokens=100), 2.0) is None


def test_requests_on_their_way_before_anything_was_told_count_as_later() -> None:
    rates = Rates()
    rates.learn(Quota(requests=Allowance(100, 20, 60.0)), None, 20, Usage(), 1.0)
    assert rates.free_at(1.0) > 1.0


def test_a_spent_budget_is_told_from_a_server_that_is_busy() -> None:
    assert is_spent(Quota(tokens=Allowance(1000, 0, 3.0)))
    assert not is_spent(Quota(requests=Allowance(10, 5, 3.0)))
    assert not is_spent(None)


def learnt(number: int, seconds: float = 1.0, free_at: float = 60.0) -> LearntRate:
    rate = LearntRate()
    assert rate.dry_up(number, seconds, now=2.0)
    rate.learn(free_at)
    return rate


def send(rate: LearntRate, now: float) -> int:
    """Send what may be sent now."""
    sent = 0
    while rate.free_at(now) <= now:
        rate.take(now)
        sent += 1
    return sent


def test_a_provider_that_refuses_everything_gets_what_it_took_in_a_minute() -> None:
    rate = learnt(60)
    assert send(rate, 60.0 + SLACK + 1.0) == 61  # one to confirm it
    rate.refused()
    assert rate.is_spent(62.0, 62.0)
    assert rate.free_at(62.0) == 61.0 + SLACK + MINUTE + SLACK


def test_requests_that_were_not_counted_leave_the_count_as_slowly_as_they_were_sent() -> None:
    rate = learnt(60, seconds=30.0)
    assert send(rate, 60.0 + SLACK) == 1
    assert 29 <= send(rate, 75.0 + SLACK) <= 30


def test_too_few_requests_do_not_show_a_limit() -> None:
    rate = LearntRate()
    assert not rate.dry_up(5, 10.0, now=10.0)
    assert rate.free_at(10.0) <= 10.0


def test_a_learnt_limit_is_confirmed_by_one_request_and_then_raised_rarely() -> None:
    rate = learnt(100)
    assert send(rate, 62.0) == 101, "one more request shows whether it is a limit"
    rate.refused()
    assert rate.is_spent(62.0, 62.1)
    assert rate.limit == 100
    assert send(rate, 64.5) == 0
    assert send(rate, 123.0 + SLACK) == 100
    assert send(rate, 190.0) == 102, "two minutes after the refusal"
    for _ in range(2):
        rate.refused()
        assert rate.is_spent(190.0, 190.1)
    assert rate.limit == 100


def test_a_limit_that_no_refusal_confirms_is_soon_none() -> None:
    rate = learnt(100)
    assert [send(rate, 62.0 + seconds) for seconds in (0, 1, 2, 4, 6)] == [101, 0, 26, 64, 191]


def test_a_limit_whose_old_requests_may_still_count_is_not_tested_before_they_left() -> None:
    rate = learnt(100, seconds=30.0)
    assert send(rate, 75.0) < 60 and send(rate, 90.0) <= 52 and rate.limit == 100
    assert send(rate, 91.0) > 0 and rate.limit == 101


def test_a_refusal_far_below_the_learnt_limit_is_not_due_to_it() -> None:
    rate = learnt(100)
    for _ in range(50):
        rate.take(62.0)
    rate.refused()
    assert not rate.is_spent(62.0, 62.1) and rate.limit == 100


def test_a_second_drought_counts_what_was_sent() -> None:
    rate = learnt(100)
    for _ in range(40):
        rate.take(62.0)
    assert rate.dry_up(1_000, 60.0, now=63.0)
    rate.learn(100.0)
    assert rate.limit == 40

"""What an engine says of itself, and what becomes of the limit."""

from __future__ import annotations

from batch_agent.backends.base import Load
from batch_agent.scheduler.capacity import MOST, Capacity, LimitSearch


def on_an_engine(capacity: Capacity, sequences: int, readings: int, **more: int) -> None:
    """That runs so many, all slots in use."""
    for _ in range(readings):
        inflight = capacity.limit or 0
        running = min(inflight, sequences)
        capacity.loaded(Load(running=running, waiting=inflight - running, **more), inflight)


def test_while_the_queue_is_short_the_limit_grows() -> None:
    capacity = Capacity(MOST, LimitSearch())
    assert capacity.loaded(Load(running=64), 64) == "the queue stays short"
    assert capacity.limit == 128


def test_an_engine_is_kept_full_with_a_queue_that_is_not_long() -> None:
    capacity = Capacity(MOST, LimitSearch())
    on_an_engine(capacity, 300, readings=60)
    assert 300 <= (capacity.limit or 0) <= 600


def test_a_queue_that_is_long_once_moves_nothing() -> None:
    capacity = Capacity(256)
    assert not capacity.loaded(Load(running=50, waiting=200), 256)
    assert not capacity.loaded(Load(running=250, waiting=6), 256)
    assert capacity.limit == 256


def test_a_queue_that_stays_long_brings_the_limit_down_but_not_below_what_runs() -> None:
    capacity = Capacity(512)
    on_an_engine(capacity, 64, readings=10)
    assert 64 <= (capacity.limit or 0) <= 128


def test_the_ceiling_of_the_user_is_never_passed() -> None:
    capacity = Capacity(40)
    on_an_engine(capacity, 1000, readings=20)
    assert capacity.limit == 40


def test_two_runs_on_one_engine_come_to_equal_shares() -> None:
    first, second = Capacity(MOST, LimitSearch(256)), Capacity(MOST, LimitSearch(16))
    for _ in range(300):
        inflight = (first.limit or 0) + (second.limit or 0)
        load = Load(running=min(inflight, 256), waiting=max(0, inflight - 256))
        for capacity in (first, second):
            capacity.loaded(load, capacity.limit or 0)
    assert (second.limit or 0) > 0.5 * (first.limit or 0)


def test_an_engine_that_puts_many_requests_back_gets_fewer() -> None:
    capacity = Capacity(256)
    capacity.loaded(Load(running=200, waiting=56, preemptions=10), 256)
    assert capacity.loaded(Load(running=200, waiting=56, preemptions=100), 256) == "the engine is short of memory"
    assert (capacity.limit or 0) < 256


def test_a_full_cache_is_no_time_to_grow() -> None:
    capacity = Capacity(MOST, LimitSearch())
    assert not capacity.loaded(Load(running=64, kv_usage=0.99), 64)


def test_slots_that_are_not_in_use_are_no_reason_to_grow() -> None:
    capacity = Capacity(MOST, LimitSearch())
    assert not capacity.loaded(Load(running=10), 10)


def test_what_was_refused_is_not_passed_because_a_queue_is_short() -> None:
    capacity = Capacity(MOST, LimitSearch())
    for _ in range(16):
        capacity.overloaded(0, 64)
    on_an_engine(capacity, 1000, readings=20)
    assert (capacity.limit or 0) <= 60


def test_an_engine_that_can_no_longer_be_read_gets_the_users_number_again() -> None:
    capacity = Capacity(512)
    on_an_engine(capacity, 64, readings=10)
    capacity.unread()
    for _ in range(512):
        capacity.succeeded(0.0, 1.0, 10, 1.0)
    assert capacity.limit == 512

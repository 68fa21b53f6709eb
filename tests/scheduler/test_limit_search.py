"""The number of calls in flight that nobody gave, on models of servers."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from math import inf

import pytest

from batch_agent.scheduler.capacity import BLIND, MOST, RAMPED, START, Capacity, LimitSearch

Seconds = Callable[[int], float]  # that an answer takes with so many in flight


def settle(seconds: Seconds, capacity: Capacity, rounds: int = 12, now: float = 0.0) -> float:
    """Whole rounds of answers, all slots in use."""
    for _ in range(rounds):
        limit = capacity.limit or 0
        sent_at, took = now, seconds(limit)
        now += took
        for _ in range(limit):
            capacity.filled = True
            capacity.succeeded(sent_at, took, 10, now)
    return now


def engine(sequences: int) -> Seconds:
    """So many at once, for a second each; the others wait."""
    return lambda inflight: max(1.0, inflight / sequences)


@pytest.mark.parametrize(
    ("sequences", "least", "most"), [(100, 64, 128), (256, 256, 256), (600, 512, MOST), (8, 8, 64)]
)
def test_it_is_raised_while_more_bring_more(sequences: int, least: int, most: int) -> None:
    capacity = Capacity(MOST, LimitSearch())
    settle(engine(sequences), capacity)
    assert least <= (capacity.limit or 0) <= most


def test_a_server_without_an_end_is_filled_up_to_the_most() -> None:
    capacity = Capacity(MOST, LimitSearch())
    settle(lambda inflight: 1.0, capacity)
    assert capacity.limit == MOST


def test_it_never_goes_beyond_the_ceiling() -> None:
    capacity = Capacity(100, LimitSearch())
    settle(lambda inflight: 1.0, capacity)
    assert capacity.limit == 100


def test_a_ramp_finds_the_knee() -> None:
    capacity = Capacity(MOST, LimitSearch(8, 8))
    settle(engine(32), capacity)
    assert capacity.knee == 32
    assert capacity.limit == 32


def test_what_was_found_before_is_where_it_begins() -> None:
    capacity = Capacity(MOST, LimitSearch(96, 96, settled=True))
    assert capacity.limit == capacity.knee == 96


def test_what_was_found_before_is_kept_for_a_minute_before_another_number_is_tried() -> None:
    capacity = Capacity(MOST, LimitSearch(96, 96, settled=True))
    now = settle(engine(96), capacity, rounds=30)
    assert (now, capacity.limit) == (30.0, 96)
    limits = []
    for _ in range(40):
        now = settle(engine(96), capacity, 1, now)
        limits.append(capacity.limit)
    assert 64 in limits


def test_later_it_is_tried_whether_fewer_are_as_good_and_whether_more_are_better() -> None:
    capacity = Capacity(MOST, LimitSearch())
    now = settle(engine(8), capacity)
    now = settle(engine(8), capacity, rounds=200, now=now)
    assert (capacity.limit or 0) < 30
    settle(engine(400), capacity, rounds=1_000, now=now)
    assert (capacity.limit or 0) > 200


def test_slots_that_nobody_uses_are_no_reason_for_more() -> None:
    capacity = Capacity(MOST, LimitSearch())
    for _ in range(10_000):
        capacity.succeeded(0.0, 1.0, 10, 1.0)
    assert capacity.limit == START


def test_before_the_first_answers_it_is_raised_by_the_clock_and_further_when_one_has_come() -> None:
    capacity = Capacity(MOST, LimitSearch())
    search = capacity.search
    assert search is not None
    now = 0.0
    capacity.ramp(1, now)
    while search.ramp_at != inf:
        assert search.ramp_at is not None
        now = search.ramp_at
        capacity.ramp(capacity.limit or 0, now)
    assert capacity.limit == BLIND
    assert now < 2
    capacity.filled = True
    capacity.succeeded(0.0, 1.0, 10, 1.0)
    assert capacity.limit == RAMPED


def test_an_answer_that_took_long_does_not_raise_it() -> None:
    search = LimitSearch()
    search.ramp(START, 0.0)
    for now in (1.0, 2.0):
        search.ramp(search.limit, now)
    search.answered(0.0, 120.0, 10, filled=True, now=120.0)
    assert search.limit == BLIND


def test_the_clock_raises_nothing_that_nobody_wants() -> None:
    capacity = Capacity(MOST, LimitSearch())
    capacity.ramp(1, 0.0)
    assert not capacity.ramp(10, 100.0)
    assert capacity.limit == START


def test_a_refusal_ends_the_search() -> None:
    capacity = Capacity(MOST, LimitSearch())
    for _ in range(START // 4):
        capacity.overloaded(0, START)
    assert (capacity.limit, capacity.search) == (START // 2, None)


def test_after_an_outage_the_search_goes_on_where_it_was() -> None:
    capacity = Capacity(MOST, LimitSearch())
    now = settle(engine(256), capacity)
    capacity.restart(256)
    assert capacity.limit == 1
    settle(engine(256), capacity, now=now)
    assert capacity.limit == 256


# One endpoint of a fleet


class QueueingServer:
    """Computes ``slots`` requests at once, each for ``seconds``, and has a queue for the rest."""

    def __init__(self, slots: int, seconds: float = 0.5, *, lengths: float = 1.0, tokens: int = 100) -> None:
        self.slots, self.seconds, self.lengths, self.tokens = slots, seconds, lengths, tokens
        self.capacity = Capacity(MOST, LimitSearch(16, by_clock=False))
        self.answers = 0
        self.now = 0.0
        self._chance = random.Random(1)
        self._inflight = 0
        self._running: list[tuple[float, int, float, int]] = []  # when done, a number, when sent, tokens
        self._queue: deque[tuple[float, int]] = deque()
        self._sent = 0

    def answer(self, rounds: float) -> int:
        """The limit after so many rounds of 16 answers."""
        self._send()
        for _ in range(round(16 * rounds)):
            self.now, _, sent_at, tokens = heapq.heappop(self._running)
            if self._queue:
                self._start(*self._queue.popleft())
            self.capacity.succeeded(sent_at, self.now - sent_at, tokens, self.now)
            self._inflight -= 1
            self._send()
        assert self.capacity.limit is not None
        return self.capacity.limit

    def _send(self) -> None:
        while self._inflight < (self.capacity.limit or 0):
            self._inflight += 1
            self.capacity.filled = self.capacity.filled or self._inflight == self.capacity.limit
            length = self._chance.uniform(1, self.lengths)
            request = self.now, round(self.tokens * length)
            if len(self._running) < self.slots:
                self._start(*request)
            else:
                self._queue.append(request)

    def _start(self, sent_at: float, tokens: int) -> None:
        self._sent += 1
        seconds = self.seconds * tokens / self.tokens
        heapq.heappush(self._running, (self.now + seconds, self._sent, sent_at, tokens))


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_a_large_server_of_a_fleet_gets_more_after_each_round_and_a_small_one_less(seconds: float) -> None:
    assert QueueingServer(64, seconds).answer(rounds=1) == 64
    assert QueueingServer(4, seconds).answer(rounds=2) <= 8


@pytest.mark.parametrize("slots", [2, 4, 8, 30, 64, 200])
def test_one_of_a_fleet_comes_to_what_it_computes_at_once(slots: int) -> None:
    limits = [QueueingServer(slots, lengths=lengths).answer(rounds=20 * max(1, slots / 16)) for lengths in (1.0, 3.0)]
    assert all(slots <= limit <= 3 * slots for limit in limits)


def test_answers_that_are_longer_are_not_taken_for_answers_that_waited() -> None:
    assert QueueingServer(200, lengths=3.0).answer(rounds=20) >= 128


def test_one_of_a_fleet_is_not_raised_by_the_clock() -> None:
    capacity = Capacity(MOST, LimitSearch(16, by_clock=False))
    assert not any(capacity.ramp(16, now / 10) for now in range(1_000))
    assert capacity.limit == 16


def test_one_of_a_fleet_that_grows_is_found_out() -> None:
    server = QueueingServer(4)
    assert server.answer(rounds=20) <= 8
    server.slots = 64
    assert server.answer(rounds=200) >= 64

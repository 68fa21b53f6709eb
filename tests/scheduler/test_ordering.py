"""What is expected of agents, and which waiting one goes next: learnt turns, the nearest, the longest at the end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import LAST, AgentForecast, Queue, TurnForecast


def outlook_of(ended: Iterable[int], *, turn: float = 1.0, tool: float = 0.0) -> TurnForecast:
    """What is known when agents have ended that took so many turns each, one after the other."""
    forecast, now = TurnForecast(), 0.0
    for turns in ended:
        progress = AgentForecast()
        forecast.start()
        for taken in range(turns):
            forecast.go_on(progress, taken, now)
            now += turn
            forecast.answered(progress, turn, now)
            now += tool
        forecast.end(progress, turns)
    return forecast


def start(forecast: TurnForecast, turns: int = 0) -> AgentForecast:
    """An agent under way that has taken so many turns and asks for another."""
    progress = AgentForecast()
    forecast.start()
    forecast.go_on(progress, turns, now=0.0)
    return progress


def test_before_any_agent_has_ended_all_are_expected_to_take_twice_what_the_furthest_took() -> None:
    forecast = TurnForecast()
    start(forecast, 4)
    assert [forecast.turns_left(turns) for turns in range(5)] == [8, 7, 6, 5, 4]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_the_turns_left_are_the_mean_over_those_that_took_more(ended: list[int]) -> None:
    forecast = outlook_of(ended)
    for taken in range(max(ended)):
        more = [turns - taken for turns in ended if turns > taken]
        assert math.isclose(forecast.turns_left(taken), sum(more) / len(more))


def test_where_chance_decides_an_agent_has_as_much_left_however_far_it_is() -> None:
    chance = random.Random(1)
    forecast = outlook_of(next(n for n in range(1, 1_000) if chance.random() < 0.2) for _ in range(20_000))
    assert all(4.5 < forecast.turns_left(taken) < 5.5 for taken in range(10))


def test_where_the_tail_is_heavy_the_furthest_have_the_most_left() -> None:
    forecast = outlook_of([2] * 60 + [20] * 4)
    assert forecast.turns_left(3) > forecast.turns_left(0)


def test_agents_under_way_teach_that_others_go_on() -> None:
    forecast = outlook_of([1])
    for _ in range(9):
        start(forecast, 1)
    forecast.end(start(forecast, 1), 2)
    assert forecast.turns_left(0) > 1.8  # one in eleven ended after its first turn


def test_a_turn_that_is_asked_for_again_teaches_nothing() -> None:
    forecast, progress = outlook_of([3] * 8), AgentForecast()
    forecast.start()
    before = forecast.live_turns
    for _ in range(50):
        forecast.go_on(progress, 0, now=1.0)
    assert forecast.live_turns == before
    assert forecast.turns_left(0) == 3


def test_an_agent_that_failed_in_its_first_turn_took_one() -> None:
    forecast, progress = TurnForecast(), AgentForecast()
    forecast.start()
    forecast.go_on(progress, 0, now=0.0)
    forecast.end(progress, 0)
    assert forecast.turns_left(0) == 1
    assert forecast.live_turns == 0


lives = st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@given(lives)
def test_what_is_expected_of_all_is_the_sum_of_what_is_expected_of_each(steps: list[tuple[int, bool]]) -> None:
    forecast = TurnForecast()
    live: list[AgentForecast] = []
    for number, ends in steps:
        if not live or number == 0:
            live.append(start(forecast))
        elif ends:
            progress = live.pop(number % len(live))
            forecast.end(progress, progress.turns + number % 2)
        else:
            progress = live[number % len(live)]
            forecast.go_on(progress, progress.turns + number % 3, now=0.0)
        expected = sum(forecast.turns_left(progress.turns) for progress in live)
        assert math.isclose(forecast.live_turns, expected, abs_tol=1e-9)
        assert all(forecast.turns_left(progress.turns) >= 1 for progress in live)


def test_a_batch_ends_when_the_work_left_fits_into_a_few_ways() -> None:
    forecast = outlook_of([5] * 8, turn=1.0, tool=1.0)  # a fresh agent's way is 9 s
    forecast.rows = 1_000
    assert not forecast.ending(0, slots=8)
    forecast.rows = 16  # 80 turns, 10 s for each slot
    assert forecast.ending(0, slots=8)
    assert not forecast.ending(4, slots=8)  # an agent with one turn left keeps nobody waiting


def test_where_the_number_of_rows_is_not_known_no_batch_is_ending() -> None:
    forecast = outlook_of([5] * 8)
    assert not any(forecast.ending(turns, slots=1_000) for turns in range(6))


def test_the_agent_that_is_expected_to_end_soonest_goes_first_even_if_it_has_taken_fewer_turns() -> None:
    forecast = outlook_of([2] * 60 + [20] * 4)
    queue: Queue[str] = Queue(forecast)
    queue.add("on a long way", 3)
    queue.add("about to end", 1)
    assert [queue.take(None), queue.take(None)] == ["about to end", "on a long way"]


def test_equals_go_in_the_order_they_came() -> None:
    queue: Queue[int] = Queue(outlook_of([3]))
    for number in range(5):
        queue.add(number, 1)
    queue.remove(2, 1)
    assert [queue.take(1) for _ in range(4)] == [0, 1, 3, 4]


def taken_of_near_and_far(slots: int) -> list[str]:
    """Who is taken while as many wait with five turns to go as with one."""
    forecast = outlook_of([5] * 8)
    forecast.rows = 0
    queue: Queue[tuple[str, int]] = Queue(forecast)
    for number in range(4):
        start(forecast)
        start(forecast, 4)
        queue.add(("far", number), 0)
        queue.add(("near", number), 4)
    return [queue.take(slots)[0] for _ in range(4)]


def test_at_the_end_every_other_slot_goes_to_the_longest_way() -> None:
    assert taken_of_near_and_far(slots=1) == ["near"] * 4  # 24 turns are left, and the longest way is 5
    assert sorted(taken_of_near_and_far(slots=3)) == ["far", "far", "near", "near"]


def test_when_the_work_left_hardly_lasts_longer_than_the_longest_way_that_one_gets_every_slot() -> None:
    assert taken_of_near_and_far(slots=4) == ["far"] * 4


def test_an_old_waiter_is_not_starved_by_a_stream_of_agents_nearer_their_end() -> None:
    queue: Queue[int] = Queue(outlook_of([5] * 8))
    old = 0
    queue.add(old, 0)
    taken = []
    for near in range(1, 2 * N.rarely):
        queue.add(near, 4)
        taken.append(queue.take(1))
    assert old in taken
    assert old not in taken[: N.rarely // 2]


steps = st.lists(st.tuples(st.sampled_from(["add", "take", "remove"]), st.integers(0, 5)), max_size=200)


@settings(max_examples=examples(200), deadline=None)
@given(steps, st.one_of(st.none(), st.integers(0, 9)), st.one_of(st.none(), st.integers(1, 8)))
def test_whoever_waits_is_taken_once_and_in_the_order_of_its_line(
    steps: list[tuple[str, int]], rows: int | None, slots: int | None
) -> None:
    forecast = outlook_of([1, 4, 6])
    forecast.rows = rows
    queue: Queue[int] = Queue(forecast)
    waiting: dict[int, int] = {}  # who, and the turns it has taken, in the order they came
    for who, (step, number) in enumerate(steps):
        if step == "add":
            queue.add(who, number)
            waiting[who] = number
        elif waiting and step == "take":
            taken = queue.take(slots)
            turns = waiting[taken]
            assert taken == next(other for other in waiting if waiting[other] == turns)
            if rows is None or slots is None:
                assert forecast.turns_left(turns) == min(map(forecast.turns_left, waiting.values()))
            del waiting[taken]
        elif waiting and step == "remove":
            gone = list(waiting)[number % len(waiting)]
            queue.remove(gone, waiting.pop(gone))
    assert {queue.take(slots) for _ in range(len(waiting))} == set(waiting)


def test_somebody_goes_next_also_while_there_is_no_slot_but_a_trial() -> None:
    forecast = outlook_of([3])
    forecast.rows = 5
    queue: Queue[str] = Queue(forecast)
    queue.add("on a long way", 1)
    queue.add("about to end", 2)
    assert queue.take(slots=0) == "about to end"


def test_a_chore_goes_when_nobody_else_waits_and_after_long_enough_all_the_same() -> None:
    forecast = outlook_of([3] * 4)
    queue: Queue[str] = Queue(forecast)
    queue.add("chore", LAST)
    for turns in (0, 1, 2):
        queue.add(f"turn {turns}", turns)
    assert [queue.take(4) for _ in range(4)] == ["turn 2", "turn 1", "turn 0", "chore"]
    queue.add("chore", LAST)
    for number in range(2 * N.rarely + 1):
        queue.add(str(number), 0)
    assert "chore" in [queue.take(4) for _ in range(2 * N.rarely)]

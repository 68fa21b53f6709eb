"""Which contexts are still in a cache, what evictions tell of its size, and who goes first."""

from __future__ import annotations

from batch_agent.scheduler.forecast import Progress, TurnForecast
from batch_agent.scheduler.ordering import EVICTED_TURN, ResidentFirst
from batch_agent.scheduler.residency import LearntCapacity, Residency


def test_the_contexts_used_longest_ago_are_evicted_first() -> None:
    residency = Residency()
    first, second, third = Progress(), Progress(), Progress()
    for progress in (first, second):
        residency.answered(progress, 400, 1_000)
    residency.answered(first, 450, 1_000)  # used again
    residency.answered(third, 400, 1_000)
    assert first in residency and third in residency
    assert second not in residency


def test_a_context_in_flight_is_not_evicted() -> None:
    residency = Residency()
    flying, other, new = Progress(), Progress(), Progress()
    residency.sent(flying, 400, 1_000)
    residency.answered(other, 400, 1_000)
    residency.answered(new, 400, 1_000)
    assert flying in residency and new in residency
    assert other not in residency


def test_the_distance_counts_contexts_used_since_and_those_in_flight() -> None:
    residency = Residency()
    flying, agent, later = Progress(), Progress(), Progress()
    residency.sent(flying, 100, 10_000)  # before the agent's turn, and it may be computed after it
    residency.answered(agent, 10, 10_000)
    residency.answered(later, 1, 10_000)
    assert residency.distance(agent) == 111
    residency.end(flying)
    assert residency.distance(agent) == 11
    assert residency.distance(Progress()) is None


def test_a_capacity_is_learnt_from_the_first_eviction_and_corrected_by_later_ones_and_by_hits() -> None:
    learnt = LearntCapacity()
    assert not learnt.learn(5_000, evicted=False)
    assert learnt.tokens is None
    assert learnt.learn(10_000, evicted=True)
    assert learnt.learn(9_000, evicted=True)
    assert learnt.tokens == 9_000
    learnt.learn(100, evicted=True)  # one eviction that others caused does not undo it
    assert learnt.tokens == 7_200
    learnt.learn(9_500, evicted=False)
    assert learnt.tokens == 9_500
    assert not learnt.learn(1_000, evicted=False)


def queue_of(*evicted: str) -> ResidentFirst[str]:
    forecast = TurnForecast()
    for _ in range(8):
        forecast.start()
    return ResidentFirst(forecast, lambda name: name in evicted)


def test_agents_whose_contexts_were_evicted_come_after_the_others() -> None:
    queue = queue_of("a", "b", "z")
    queue.add("z", 0)
    assert queue.take(None) == "z"  # the only one
    for name in ("a", "b", "c", "d"):
        queue.add(name, 0)
    queue.remove("b", 0)
    assert [queue.take(None) for _ in range(3)] == ["c", "d", "a"]
    assert not queue


def test_agents_whose_contexts_were_evicted_do_not_starve() -> None:
    queue = queue_of("late")
    queue.add("late", 0)
    for number in range(2 * EVICTED_TURN):
        queue.add(f"other {number}", 0)
    granted = [queue.take(None) for _ in range(EVICTED_TURN + 1)]
    assert "late" in granted

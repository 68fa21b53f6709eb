"""Which contexts are still in a cache, and who goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import AgentForecast, ResidentFirst, TurnForecast
from batch_agent.scheduler.residency import PLACES, Residency


def test_the_contexts_used_longest_ago_are_evicted_first() -> None:
    residency = Residency()
    first, second, third = AgentForecast(), AgentForecast(), AgentForecast()
    for progress in (first, second):
        residency.answered(progress, 400)
    residency.answered(first, 450)  # used again
    residency.answered(third, 400)
    assert residency.holds(first, 1_000) and residency.holds(third, 1_000)
    assert not residency.holds(second, 1_000)


def test_a_context_in_flight_is_not_evicted() -> None:
    residency = Residency()
    flying, other, new = AgentForecast(), AgentForecast(), AgentForecast()
    residency.sent(flying, 400)
    residency.answered(other, 400)
    residency.answered(new, 400)
    assert residency.holds(flying, 1_000) and residency.holds(new, 1_000)
    assert not residency.holds(other, 1_000)


def test_the_distance_counts_contexts_used_since_and_those_in_flight() -> None:
    residency = Residency()
    flying, agent, later = AgentForecast(), AgentForecast(), AgentForecast()
    residency.sent(flying, 100)  # before the agent's turn, and it may be computed after it
    residency.answered(agent, 10)
    residency.answered(later, 1)
    assert residency.distance(agent) == 111
    residency.end(flying)
    assert residency.distance(agent) == 11
    assert residency.distance(AgentForecast()) is None


@given(st.lists(st.tuples(st.sampled_from(["sent", "answered", "end"]), st.integers(0, 5), st.integers(0, 50))))
def test_the_distance_is_the_sum_that_a_walk_over_the_list_gives(steps: list[tuple[str, int, int]]) -> None:
    agents, residency = [AgentForecast() for _ in range(6)], Residency()
    order: dict[AgentForecast, int] = {}
    flying: set[AgentForecast] = set()
    for what, number, tokens in steps:
        progress = agents[number]
        if what == "end":
            residency.end(progress)
            flying.discard(progress)
            continue
        (residency.sent if what == "sent" else residency.answered)(progress, tokens)
        (flying.add if what == "sent" else flying.discard)(progress)
        order.pop(progress, None)
        order[progress] = tokens
    for progress in order:
        used = list(order)
        since = used[used.index(progress) :]
        expected = sum(order[each] for each in used if each in since or each in flying)
        assert residency.distance(progress) == expected


def test_places_are_numbered_again_and_the_oldest_contexts_forgotten() -> None:
    residency, first = Residency(), AgentForecast()
    residency.answered(first, 1)
    for _ in range(PLACES):
        residency.answered(AgentForecast(), 1)
    last = AgentForecast()
    residency.answered(last, 1)
    assert residency.distance(first) is None
    assert residency.distance(last) == 1


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
    for number in range(2 * N.few):
        queue.add(f"other {number}", 0)
    granted = [queue.take(None) for _ in range(N.few + 1)]
    assert "late" in granted

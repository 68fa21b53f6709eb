"""How long a context is pinned."""

from __future__ import annotations

from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import (
    UNKNOWN_SECONDS,
    AgentForecast,
    TurnForecast,
    pin_seconds,
)


def forecast(turns: int, request: float, tool: float, agents: int = 4) -> TurnForecast:
    """After some agents that each took ``turns`` turns with a tool between them."""
    learnt, now = TurnForecast(), 0.0
    for _ in range(agents):
        progress = AgentForecast()
        learnt.start()
        for taken in range(turns):
            learnt.go_on(progress, taken, now)
            now += request
            learnt.answered(progress, request, now)
            now += tool
        learnt.end(progress, turns)
    return learnt


def test_an_agent_that_comes_back_soon_is_pinned_for_longer_than_its_tool_takes() -> None:
    assert pin_seconds(forecast(turns=3, request=1.0, tool=2.0), 0) == N.much_slower * 2.0 + N.short_wait


def test_an_agent_that_asks_for_its_last_answer_is_not_pinned() -> None:
    learnt = forecast(turns=3, request=1.0, tool=2.0)
    assert pin_seconds(learnt, 1) > 0
    assert pin_seconds(learnt, 2) == 0


def test_before_anything_is_known_an_agent_is_expected_back() -> None:
    assert pin_seconds(TurnForecast(), 0) == UNKNOWN_SECONDS

"""Computes how long an engine should keep an agent's context after its next answer.

An engine evicts the least recently used context. It does not know which agent will continue. A pin
(``batch_agent.vllm_pin``) keeps the context of an agent in a tool wait, so that contexts of ended agents are evicted
first.
"""

from __future__ import annotations

from batch_agent.scheduler.forecast import TurnForecast

LIKELY = 0.5  # minimum probability of another turn to pin a context
SOON = 10.0  # times the mean seconds of a request: an agent with a longer tool wait is not pinned
LATE = 2.0  # times the mean tool wait, after which the agent is no longer expected
SLACK_SECONDS = 2.0  # for the time until the next request arrives
UNKNOWN_SECONDS = 15.0  # length of a pin while no agent has returned from a tool, or tools take no time


def pin_seconds(forecast: TurnForecast, turns: int) -> float:
    """Return how long to pin the context of an agent that has taken ``turns``; 0: no pin."""
    if forecast.goes_on(turns + 1) < LIKELY:
        return 0.0
    wait = forecast.seconds_between_turns
    if not wait:
        return UNKNOWN_SECONDS
    return LATE * wait + SLACK_SECONDS if wait <= SOON * forecast.seconds_per_turn else 0.0

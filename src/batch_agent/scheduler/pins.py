"""How long an engine should keep an agent's context after its next answer.

An engine evicts the context that was used least recently. It does not know which agent comes back. With a pin
(``batch_agent.vllm_pin``) the context of an agent in a tool wait stays, so that contexts of ended agents go first.
"""

from __future__ import annotations

from batch_agent.scheduler.forecast import TurnForecast

LIKELY = 0.5  # the least chance of another turn for which a context is pinned
SOON = 10.0  # times the mean seconds of a request: an agent that waits longer for its tool leaves its memory to others
LATE = 2.0  # times the mean tool wait, after which the agent is no longer expected
SLACK_SECONDS = 2.0  # for the way to the next request
UNKNOWN_SECONDS = 15.0  # of a pin, while no agent has come back from a tool, or tools take no time


def pin_seconds(forecast: TurnForecast, turns: int) -> float:
    """Seconds for which to pin the context of an agent that has taken ``turns`` and asks for its next answer; 0 if it
    should not be pinned."""
    if forecast.goes_on(turns + 1) < LIKELY:
        return 0.0
    wait = forecast.seconds_between_turns
    if not wait:
        return UNKNOWN_SECONDS
    return LATE * wait + SLACK_SECONDS if wait <= SOON * forecast.seconds_per_turn else 0.0

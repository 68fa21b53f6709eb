"""The parts of scheduling by an engine's KV cache. Each can be switched on and off alone.

``kvflow="auto"`` enables the parts with a measured gain (docs/kv.md), ``True`` all of them, ``False`` none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from batch_agent.scheduler.forecast import TurnForecast

LIKELY = 0.5  # minimum probability of another turn to pin a context
SOON = 10.0  # times the mean seconds of a request: an agent with a longer tool wait is not pinned
LATE = 2.0  # times the mean tool wait, after which the agent is no longer expected
SLACK_SECONDS = 2.0  # for the time until the next request arrives
UNKNOWN_SECONDS = 15.0  # length of a pin while no agent has returned from a tool, or tools take no time


@dataclass(frozen=True, slots=True)
class KvParts:
    admission: bool = True  # an agent whose context does not fit waits
    order: bool = True  # among ready agents, those whose context is probably still cached go first
    touch: bool = False  # an evicted context is computed again while the agent's tool runs
    keep_alive: bool = False  # the shared prefix is touched while all agents wait for tools and others use the engine
    pin: bool = False  # engines that support it keep the contexts of agents that wait for tools

    @classmethod
    def of(cls, kvflow: bool | Literal["auto"]) -> Self:
        """Return the parts that a value of the option ``kvflow`` enables."""
        return cls() if kvflow == "auto" else cls(*(5 * [kvflow]))

    @property
    def any(self) -> bool:
        return self.admission or self.order or self.touch or self.keep_alive or self.pin


def pin_seconds(forecast: TurnForecast, turns: int) -> float:
    """Return how long an engine should keep the context of an agent that has taken ``turns``; 0: no pin. An engine
    evicts the least recently used context, and does not know that an agent in a tool wait will continue."""
    if forecast.goes_on(turns + 1) < LIKELY:
        return 0.0
    wait = forecast.seconds_between_turns
    if not wait:
        return UNKNOWN_SECONDS
    return LATE * wait + SLACK_SECONDS if wait <= SOON * forecast.seconds_per_turn else 0.0

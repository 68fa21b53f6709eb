"""Estimates the rest of an agent from the run so far: turns, seconds per turn, seconds between turns.

After each turn an agent continues or ends. The share that continues after its n-th turn, among all agents that took it,
gives the expected number of turns left after n turns. This is the Kaplan-Meier estimate: running agents count as much
as finished ones. If all agents take the same number of turns, the estimate falls by one with each turn. If chance
decides (geometric distribution), it stays the same. With a heavy tail it grows. Until the first agent has ended, all
agents are expected to take twice as many turns as the furthest one.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batch_agent.scheduler.endpoint import Endpoint

ENDING = 1.7  # the batch is ending if the work left per slot takes at most this many times the longest remaining agent
FEW = 8  # this many agents do not fill an engine, so the order in which it serves them hardly matters
FIRST_GUESS = 4  # minimum turns expected of an agent until one has ended
LEARN_AGAIN = 8  # estimates are updated when another eighth of the agents has ended


class AgentProgress:
    """The state of one agent."""

    __slots__ = ("answered_at", "distance", "expected", "home", "key", "live", "model", "tokens", "turns")

    def __init__(self, turns: int = 0, *, key: str = "", model: str = "") -> None:
        self.turns = turns  # turns taken when it last requested another
        self.key = key  # agents with the same key should share an endpoint
        self.model = model  # the model that it uses; "": any
        self.home: Endpoint | None = None  # the endpoint of its last answer, which has its prefix cached
        self.tokens = 0  # of that prefix
        self.expected = 0  # estimated tokens of its next prompt
        self.distance: int | None = None  # tokens of other contexts used between its last turn and this one
        self.live = False  # between the start and the end of an agent
        self.answered_at: float | None = None  # time of its last answer, until it requests the next turn


class TurnForecast:
    def __init__(self) -> None:
        self.rows: int | None = None  # rows still to be started; None: unknown
        self.live_turns = 0.0  # sum of the expected turns of all live agents
        self.started = 0  # agents, in all
        # Indexed by turns taken; the last index is the most that any agent has taken.
        self._live = [0]
        self._went_on = [0]
        self._ended = [0]
        self._turns_left = [1.0]
        self._ends = 0
        self._learn_at = 1
        self._turn_count = self._rest_count = 0
        self._turn_seconds = self._rest_seconds = 0.0

    def start(self) -> None:
        self.started += 1
        self._live[0] += 1
        self.live_turns += self._turns_left[0]

    def go_on(self, progress: AgentProgress, turns: int, now: float) -> None:
        """Record that the agent has taken ``turns`` and requests the next one. Repeats are ignored."""
        if progress.answered_at is not None:
            self._rest_count += 1
            self._rest_seconds += now - progress.answered_at
            progress.answered_at = None
        if turns <= progress.turns:
            return
        further = self._see(progress, turns)
        self._live[turns] += 1
        self.live_turns += self._turns_left[turns]
        progress.turns = turns
        if further:
            self._learn()

    def answered(self, progress: AgentProgress, seconds: float, now: float) -> None:
        self._turn_count += 1
        self._turn_seconds += seconds
        progress.answered_at = now

    def end(self, progress: AgentProgress, turns: int) -> None:
        """Record that the agent has ended. A turn that it requested and never got counts as its last."""
        turns = max(turns, progress.turns + 1)
        self._see(progress, turns)
        self._went_on[turns] -= 1
        self._ended[turns] += 1
        self._ends += 1
        if self._ends >= self._learn_at:
            self._learn_at = self._ends + self._ends // LEARN_AGAIN + 1
            self._learn()

    @property
    def turns_to_come(self) -> float:
        """Total expected turns, including those in flight; infinite if the number of rows is unknown."""
        return inf if self.rows is None else self.live_turns + self.rows * self._turns_left[0]

    def turns_left(self, turns: int) -> float:
        """Return the expected turns left of an agent that has taken ``turns``."""
        return self._turns_left[turns]

    @property
    def live(self) -> int:
        """Number of agents that have started and not ended."""
        return sum(self._live)

    @property
    def all_started(self) -> bool:
        """Whether every agent of the batch has started, and there are more than a few."""
        return self.rows == 0 and self.started > FEW

    @property
    def furthest(self) -> int:
        """The most turns that any agent has taken."""
        return len(self._live) - 1

    @property
    def seconds_per_turn(self) -> float:
        """Mean seconds of a request; 0 before the first answer."""
        return self._turn_seconds / self._turn_count if self._turn_count else 0.0

    @property
    def seconds_between_turns(self) -> float:
        """Mean seconds from an answer to the agent's next request."""
        return self._rest_seconds / self._rest_count if self._rest_count else 0.0

    def goes_on(self, turns: int) -> float:
        """Return the probability that an agent that has taken ``turns`` takes another one."""
        if not turns:
            return 1.0
        furthest = len(self._live) - 1
        if turns > furthest or not (resolved := self._went_on[turns] + self._ended[turns]):
            return 1.0 if not self._ends and turns < max(FIRST_GUESS, 2 * furthest) else 0.0
        return self._went_on[turns] / resolved

    def slack(self, turns: int, slots: int) -> float:
        """Return the ratio of the work left per slot to the remaining time of an agent that has taken ``turns``.

        The remaining time is how long the agent takes if it never waits for a slot. Infinite while the number of rows
        or the length of a turn is unknown.
        """
        if self.rows is None or not self._turn_seconds:
            return inf
        left = self._turns_left[turns]
        rest = self._rest_seconds / self._rest_count if self._rest_count else 0.0
        way = left + (left - 1) * rest * self._turn_count / self._turn_seconds  # in turns, like the work
        return (self.live_turns + self.rows * self._turns_left[0]) / slots / way

    def ending(self, turns: int, slots: int) -> bool:
        """Return whether an agent that has taken ``turns`` is among those that determine the end of the batch."""
        return self.slack(turns, slots) <= ENDING

    def _see(self, progress: AgentProgress, turns: int) -> bool:
        """Record that the agent continued up to ``turns``. Returns True if no agent was as far before."""
        self._live[progress.turns] -= 1
        self.live_turns -= self._turns_left[progress.turns]
        further = turns >= len(self._live)
        while turns >= len(self._live):
            self._live.append(0)
            self._went_on.append(0)
            self._ended.append(0)
            self._turns_left.append(self._turns_left[-1])
        for taken in range(progress.turns + 1, turns + 1):
            self._went_on[taken] += 1
        return further

    def _learn(self) -> None:
        furthest = len(self._live) - 1
        # No agent was seen beyond the furthest: expect the same number again or, once agents have ended, the mean
        # between ends.
        left = (sum(self._went_on) + self._ends) / self._ends if self._ends else float(furthest)
        self._turns_left[furthest] = left = max(1.0, left)
        for taken in range(furthest, 0, -1):
            goes_on = self._went_on[taken] / (self._went_on[taken] + self._ended[taken])
            self._turns_left[taken - 1] = left = 1.0 + goes_on * left
        self.live_turns = sum(live * left for live, left in zip(self._live, self._turns_left, strict=True))

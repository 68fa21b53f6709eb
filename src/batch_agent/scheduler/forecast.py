"""What may be expected of agents, learnt from the run so far: turns, seconds per turn, seconds between turns.

After each turn an agent goes on or ends. The share that goes on after its n-th turn, among all that took it, gives the
turns that an agent with n taken may be expected to have left (Kaplan and Meier's estimate: agents under way teach as
much as finished ones). Where all agents take equally many turns that is one fewer with each turn; where chance decides
(geometric) it stays the same; with a heavy tail it grows. Until the first agent has ended, all are expected to take
twice as many turns as the furthest one.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batch_agent.scheduler.endpoint import Endpoint

ENDING = 1.7  # the batch ends when the work left for each slot takes at most this many times as long as the longest way
FIRST_GUESS = 4  # turns of an agent, at least, until one has ended
LEARN_AGAIN = 8  # expectations are computed again when another eighth of the agents has ended


class Progress:
    """How far one agent has come."""

    __slots__ = ("answered_at", "distance", "expected", "home", "key", "live", "model", "tokens", "turns")

    def __init__(self, turns: int = 0, *, key: str = "", model: str = "") -> None:
        self.turns = turns  # taken when it last asked for another
        self.key = key  # agents with the same key should share an endpoint
        self.model = model  # that it asks; "": any
        self.home: Endpoint | None = None  # where it was last answered, and its prefix is cached
        self.tokens = 0  # of that prefix
        self.expected = 0  # tokens of its next prompt, as far as is known
        self.distance: int | None = None  # tokens of other contexts used since its last turn, when this one was sent
        self.live = False  # between the start and the end of an agent
        self.answered_at: float | None = None  # time of its last answer, until it asks for the next turn


class TurnForecast:
    def __init__(self) -> None:
        self.rows: int | None = None  # still to be started; None: unknown
        self.live_turns = 0.0  # expected of all live agents together
        # By turns taken; the last is the most that any agent has taken.
        self._live = [0]
        self._went_on = [0]
        self._ended = [0]
        self._turns_left = [1.0]
        self._ends = 0
        self._learn_at = 1
        self._turn_count = self._rest_count = 0
        self._turn_seconds = self._rest_seconds = 0.0

    def start(self) -> None:
        self._live[0] += 1
        self.live_turns += self._turns_left[0]

    def go_on(self, progress: Progress, turns: int, now: float) -> None:
        """The agent has taken ``turns`` and asks for the next one. Asking again for the same turn teaches nothing."""
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

    def answered(self, progress: Progress, seconds: float, now: float) -> None:
        self._turn_count += 1
        self._turn_seconds += seconds
        progress.answered_at = now

    def end(self, progress: Progress, turns: int) -> None:
        """The agent has ended. A turn that it asked for and never got counts as its last."""
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
        """Turns expected in all, those in flight included; infinite if the number of rows is unknown."""
        return inf if self.rows is None else self.live_turns + self.rows * self._turns_left[0]

    def turns_left(self, turns: int) -> float:
        """Turns expected of an agent that has taken ``turns``."""
        return self._turns_left[turns]

    @property
    def live(self) -> int:
        """Agents that have started and not ended."""
        return sum(self._live)

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
        """The chance that an agent that has taken ``turns`` takes another one."""
        if not turns:
            return 1.0
        furthest = len(self._live) - 1
        if turns > furthest or not (resolved := self._went_on[turns] + self._ended[turns]):
            return 1.0 if not self._ends and turns < max(FIRST_GUESS, 2 * furthest) else 0.0
        return self._went_on[turns] / resolved

    def slack(self, turns: int, slots: int) -> float:
        """How many times as long as the way of an agent that has taken ``turns`` the work left for each slot takes.

        A way is how long the agent takes if it never waits for a slot. Infinite while the number of rows or the length
        of a turn is unknown."""
        if self.rows is None or not self._turn_seconds:
            return inf
        left = self._turns_left[turns]
        rest = self._rest_seconds / self._rest_count if self._rest_count else 0.0
        way = left + (left - 1) * rest * self._turn_count / self._turn_seconds  # in turns, as the work is
        return (self.live_turns + self.rows * self._turns_left[0]) / slots / way

    def ending(self, turns: int, slots: int) -> bool:
        """Whether an agent that has taken ``turns`` is among those that decide when the batch ends."""
        return self.slack(turns, slots) <= ENDING

    def _see(self, progress: Progress, turns: int) -> bool:
        """Move the agent on: it went on after each turn up to ``turns``. True if no agent was as far before."""
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
        # Nothing was seen beyond the furthest: expect as many again, or, once agents have ended, the mean between ends.
        left = (sum(self._went_on) + self._ends) / self._ends if self._ends else float(furthest)
        self._turns_left[furthest] = left = max(1.0, left)
        for taken in range(furthest, 0, -1):
            goes_on = self._went_on[taken] / (self._went_on[taken] + self._ended[taken])
            self._turns_left[taken - 1] = left = 1.0 + goes_on * left
        self.live_turns = sum(live * left for live, left in zip(self._live, self._turns_left, strict=True))

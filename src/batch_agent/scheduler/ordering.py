"""Which waiting turn goes next.

Nearest first: the agent with the fewest turns left, as far as the forecast can tell, because an agent that ends gives a
result and frees its context. Alone, that rule leaves the longest ways for last, and they are then walked with most
slots idle. So where the number of rows is known and the batch comes to its end, every other slot goes to the agent with
the longest way to go: half of the slots are enough to keep the longest ways moving, and the other half still brings
results as early as before.

What is no agent's turn but a chore, a summary say, has a line of its own, which comes last.

Agents that have taken as many turns are alike and wait in one line; lines are compared when a slot is free, with what
is known by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from batch_agent.scheduler.forecast import TurnForecast

LAST = -1  # the line of those that go when nobody else waits, in place of turns taken
PATIENCE = 1024  # every so many grants, one that has seen as many pass goes first, so that nobody waits for ever

Waiting = TypeVar("Waiting", bound=Hashable)


class Queue(Generic[Waiting]):
    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self._lines: dict[int, OrderedDict[Waiting, int]] = {}  # by turns taken; none is empty
        self._taken = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, waiting: Waiting, turns: int, *, first: bool = False) -> None:
        line = self._lines.get(turns)
        if line is None:
            line = self._lines[turns] = OrderedDict()
        line[waiting] = self._taken
        if first:
            line.move_to_end(waiting, last=False)

    def remove(self, waiting: Waiting, turns: int) -> None:
        line = self._lines[turns]
        del line[waiting]
        if not line:
            del self._lines[turns]

    def take(self, slots: int | None) -> Waiting:
        """The next one, of at least one; ``slots`` is how many there are in all."""
        self._taken += 1
        turns = self._next_line(slots)
        line = self._lines[turns]
        waiting, _ = line.popitem(last=False)
        if not line:
            del self._lines[turns]
        return waiting

    def _next_line(self, slots: int | None) -> int:
        lines, forecast = self._lines, self._forecast
        if len(lines) == 1:
            return next(iter(lines))
        if self._taken % PATIENCE == 0:
            oldest = min(lines, key=self._joined)
            if self._taken - self._joined(oldest) >= PATIENCE:
                return oldest
        if LAST in lines:
            lines = {turns: line for turns, line in lines.items() if turns != LAST}
        if self._taken % 2 and slots:  # none while every endpoint is down and one is tried
            longest = max(lines, key=forecast.turns_left)
            if forecast.ending(longest, slots):
                return longest
        return min(lines, key=forecast.turns_left)

    def _joined(self, turns: int) -> int:
        """How many had been taken when the first of this line joined it."""
        return next(iter(self._lines[turns].values()))

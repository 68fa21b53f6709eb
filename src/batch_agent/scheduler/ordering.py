"""Decides which waiting turn goes next.

The agent with the fewest expected turns left goes first, because an agent that ends gives a result and frees its
context. This rule alone leaves the longest agents for last, and they then run with most slots idle. So when the number
of rows is known and the batch is ending, every other slot goes to the agent with the most turns left: half of the slots
work on the longest agents, and the other half delivers results early. When the work left per slot takes hardly longer
than the longest agent, that agent gets every slot: each of its waits would delay the end.

Requests that are not an agent's turn, such as summaries, have a queue of their own, which comes last. Interactive
requests have one that comes first.

Agents that have taken the same number of turns wait in one queue. The queues are compared when a slot is free, with the
estimates of that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from batch_agent.scheduler.forecast import ENDING, TurnForecast

FIRST = -2  # instead of turns taken: the queue that is served before all others
LAST = -1  # instead of turns taken: the queue that is served when all others are empty
PATIENCE = 1024  # after this many grants the oldest waiter is served, so that none waits forever
EVICTED_TURN = 8  # one in this many grants goes to an agent whose context was evicted
URGENT = 1.3  # the longest agent gets every slot if the work left per slot takes at most this many times as long

Waiting = TypeVar("Waiting", bound=Hashable)


class Queue(Generic[Waiting]):
    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self._lines: dict[int, OrderedDict[Waiting, int]] = {}  # by turns taken; without empty queues
        self._taken = 0
        self.size = 0  # turns that wait

    def __bool__(self) -> bool:
        return self.size > 0

    def add(self, waiting: Waiting, turns: int, *, first: bool = False) -> None:
        line = self._lines.get(turns)
        if line is None:
            line = self._lines[turns] = OrderedDict()
        line[waiting] = self._taken
        self.size += 1
        if first:
            line.move_to_end(waiting, last=False)

    def remove(self, waiting: Waiting, turns: int) -> None:
        line = self._lines[turns]
        del line[waiting]
        self.size -= 1
        if not line:
            del self._lines[turns]

    @property
    def has_first(self) -> bool:
        """Return whether an interactive request waits."""
        return FIRST in self._lines

    def first(self) -> Sequence[Waiting]:
        """Return the interactive requests that wait, in their order."""
        return tuple(self._lines.get(FIRST, ()))

    def newest(self) -> Iterator[Waiting]:
        """Return the newest turn for each number of turns taken. Turns that failed wait before new ones."""
        return (next(reversed(line)) for line in self._lines.values())

    def take(self, slots: int | None) -> Waiting:
        """Remove and return the next turn. The queue must not be empty. ``slots`` is the total number of slots."""
        self._taken += 1
        turns = self._next_line(slots)
        line = self._lines[turns]
        waiting, _ = line.popitem(last=False)
        self.size -= 1
        if not line:
            del self._lines[turns]
        return waiting

    def _next_line(self, slots: int | None) -> int:
        lines, forecast = self._lines, self._forecast
        if len(lines) == 1:
            return next(iter(lines))
        if FIRST in lines:
            return FIRST
        if self._taken % PATIENCE == 0:
            oldest = min(lines, key=self._joined)
            if self._taken - self._joined(oldest) >= PATIENCE:
                return oldest
        if LAST in lines:
            lines = {turns: line for turns, line in lines.items() if turns != LAST}
        if slots:  # it is 0 while every endpoint is down
            longest = max(lines, key=forecast.turns_left)
            slack = forecast.slack(longest, slots)
            if slack <= URGENT or (slack <= ENDING and self._taken % 2):
                return longest
        return min(lines, key=forecast.turns_left)

    def _joined(self, turns: int) -> int:
        """Return the number of grants when the first turn of this queue joined it."""
        return next(iter(self._lines[turns].values()))

    def is_urgent(self, slots: int | None) -> bool:
        """Return whether a turn that waits here determines the end of the batch."""
        turns = [turns for turns in self._lines if turns >= 0]
        if not slots or not turns:
            return False
        return self._forecast.slack(max(turns, key=self._forecast.turns_left), slots) <= URGENT


class ResidentFirst(Queue[Waiting]):
    """A queue in which agents with evicted contexts come last. They need more of the engine, and would delay agents
    that can continue at once. One in EVICTED_TURN grants goes to them, and every grant if they determine the end of the
    batch."""

    def __init__(self, forecast: TurnForecast, is_evicted: Callable[[Waiting], bool]) -> None:
        super().__init__(forecast)
        self._is_evicted = is_evicted
        self._evicted: Queue[Waiting] = Queue(forecast)
        self._late: set[Waiting] = set()  # turns in ``_evicted``

    def add(self, waiting: Waiting, turns: int, *, first: bool = False) -> None:
        if self._is_evicted(waiting):
            self._late.add(waiting)
            self.size += 1
            self._evicted.add(waiting, turns, first=first)
        else:
            super().add(waiting, turns, first=first)

    def remove(self, waiting: Waiting, turns: int) -> None:
        if waiting in self._late:
            self._late.remove(waiting)
            self.size -= 1
            self._evicted.remove(waiting, turns)
        else:
            super().remove(waiting, turns)

    def newest(self) -> Iterator[Waiting]:
        yield from super().newest()
        yield from self._evicted.newest()

    def take(self, slots: int | None) -> Waiting:
        late = self._evicted
        if not late.size:
            return super().take(slots)
        if self._lines and self._taken % EVICTED_TURN and not late.is_urgent(slots):
            return super().take(slots)
        self._taken += 1
        self.size -= 1
        waiting = late.take(slots)
        self._late.remove(waiting)
        return waiting

"""Turns that wait for one endpoint although others may be free.

Each place has a queue of its own, so these turns do not block others. A place is an endpoint, or the name of a model
that no free endpoint serves. A turn stops waiting once that costs more than recomputing the prefix.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

from batch_agent.scheduler.forecast import TurnForecast
from batch_agent.scheduler.ordering import Queue

Waiting = TypeVar("Waiting", bound=Hashable)
Place = TypeVar("Place", bound=Hashable)


class Parking(Generic[Waiting, Place]):
    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self._lines: dict[Place, Queue[Waiting]] = {}  # without empty queues
        self.parked: dict[Waiting, tuple[Place, int, int]] = {}  # place, turns taken, and the number of its entry
        self.names: dict[str, None] = {}  # the places that are model names
        self._counts: dict[Place, int] = {}
        self._dues: list[tuple[float, int, Waiting]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self.parked)

    def __contains__(self, place: Place) -> bool:
        return place in self._lines

    def waiting(self, place: Place) -> int:
        return self._counts.get(place, 0)

    def park(self, waiting: Waiting, turns: int, place: Place, due: float = inf) -> None:
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = Queue(self._forecast)
            if isinstance(place, str):
                self.names[place] = None
        line.add(waiting, turns)
        self._counts[place] = self._counts.get(place, 0) + 1
        self._numbers += 1
        self.parked[waiting] = place, turns, self._numbers
        if due < inf:
            heappush(self._dues, (due, self._numbers, waiting))

    def take(self, place: Place, slots: int | None) -> Waiting | None:
        """Remove and return the next turn that waits for this place, or None."""
        line = self._lines.get(place)
        if line is None:
            return None
        waiting = line.take(slots)
        self._forget(waiting)
        return waiting

    def remove(self, waiting: Waiting) -> None:
        place, turns, _ = self.parked[waiting]
        self._lines[place].remove(waiting, turns)
        self._forget(waiting)

    def impatient(self, now: float) -> Waiting | None:
        """Remove and return a turn that has waited long enough, or None."""
        if self.due > now:
            return None
        _, _, waiting = heappop(self._dues)
        self.remove(waiting)
        return waiting

    @property
    def due(self) -> float:
        """When the next turn will have waited long enough; infinite if none will."""
        while self._dues:
            due, number, waiting = self._dues[0]
            parked = self.parked.get(waiting)
            if parked is not None and parked[2] == number:
                return due
            heappop(self._dues)
        return inf

    def _forget(self, waiting: Waiting) -> None:
        place, _, _ = self.parked.pop(waiting)
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._counts[place], self._lines[place]
            if isinstance(place, str):
                del self.names[place]

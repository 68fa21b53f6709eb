"""Requests that may go to one endpoint only. Each endpoint has its own queue.

A free slot goes to the endpoint with the fewest requests in flight. So an endpoint that hangs holds no more than its
share of all slots, even if many requests wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from batch_agent.scheduler.server import Endpoint

Waiting = TypeVar("Waiting", bound=Hashable)


class Lanes(Generic[Waiting]):
    def __init__(self) -> None:
        self._lines: dict[Endpoint, OrderedDict[Waiting, None]] = {}  # without empty queues
        self.places: dict[Waiting, Endpoint] = {}  # the endpoint of each waiting request
        self._heap: list[tuple[int, int, Endpoint]] = []  # by requests in flight
        self._entries: dict[Endpoint, int] = {}  # number of its valid entry in the heap; others are outdated
        self._numbers = 0

    def add(self, waiting: Waiting, endpoint: Endpoint, *, first: bool = False) -> None:
        line = self._lines.setdefault(endpoint, OrderedDict())
        line[waiting] = None
        if first:
            line.move_to_end(waiting, last=False)
        self.places[waiting] = endpoint
        if endpoint not in self._entries:
            self.touch(endpoint)

    def remove(self, waiting: Waiting) -> None:
        endpoint = self.places.pop(waiting)
        line = self._lines[endpoint]
        del line[waiting]
        if not line:
            del self._lines[endpoint]

    def touch(self, endpoint: Endpoint) -> None:
        """Record that the endpoint has changed."""
        if endpoint in self._lines:
            self._numbers += 1
            self._entries[endpoint] = self._numbers
            heappush(self._heap, (endpoint.inflight, self._numbers, endpoint))

    def take(self, now: float) -> tuple[Waiting, Endpoint] | None:
        """Remove and return the next request and its endpoint, or None. Call ``touch`` for the endpoint when the slot
        is taken. An endpoint without a slot is skipped until it is touched."""
        while self._heap:
            _, number, endpoint = heappop(self._heap)
            if self._entries.get(endpoint) != number:
                continue
            del self._entries[endpoint]
            if endpoint in self._lines and endpoint.has_slot(now):
                waiting = next(iter(self._lines[endpoint]))
                self.remove(waiting)
                return waiting, endpoint
        return None

"""One timer for the alarms of all endpoints, so that a timer never scans every endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from batch_agent.scheduler.endpoint import Endpoint


class Alarms:
    """Calls ``ring`` with the endpoints whose alarm is due. An early alarm is harmless: ``ring`` sets the next one."""

    def __init__(self, ring: Callable[[list[Endpoint]], None]) -> None:
        self._ring = ring
        self._heap: list[tuple[float, int, Endpoint]] = []
        self._set: dict[Endpoint, float] = {}  # due time of each endpoint; other heap entries of it are stale
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._set

    def set(self, endpoint: Endpoint, due: float) -> None:
        """Set the alarm, unless an earlier one is already set."""
        if due < self._set.get(endpoint, inf):
            self._set[endpoint] = due
            self._numbers += 1
            heappush(self._heap, (due, self._numbers, endpoint))
            self._set_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        while self._heap and self._set.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        due = self._heap[0][0] if self._heap else inf
        if due != self._timer_at:
            self.close()
            self._timer_at = due
            self._timer = None if due == inf else asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timer, self._timer_at = None, inf
        due: list[Endpoint] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, endpoint = heappop(self._heap)
            if self._set.get(endpoint) == at:
                del self._set[endpoint]
                due.append(endpoint)
        self._ring(due)
        self._set_timer()

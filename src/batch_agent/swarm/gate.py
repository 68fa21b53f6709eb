"""Bounds the requests in flight of a pool and its sub-pools, and shares them fairly between servers.

A free slot goes to the server with the fewest requests in flight. A server that hangs therefore holds no more than its
share, however many requests wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from batch_agent.errors import Timeout


@dataclass(slots=True)
class _Lane:
    inflight: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Gate:
    def __init__(self, limit: int) -> None:
        self._free = limit
        self._lanes: dict[Hashable, _Lane] = {}
        # Lanes with waiters, by their requests in flight. An entry whose number has changed since is passed over.
        self._queue: list[tuple[int, int, _Lane]] = []
        self._number = count()

    @asynccontextmanager
    async def hold(self, server: Hashable) -> AsyncIterator[None]:
        """Holds one slot for one request. Timeout if the server was given up meanwhile."""
        lane = self._lanes.get(server)
        if lane is None:
            lane = self._lanes[server] = _Lane()
        if self._free:
            self._take(lane)
        else:
            await self._wait(lane)
        try:
            yield
        finally:
            lane.inflight -= 1
            self._free += 1
            self._queue_up(lane)
            self._grant()

    def give_up(self, server: Hashable, why: str) -> None:
        """Fails all requests that wait for this server: it did not answer those before them."""
        lane = self._lanes[server]
        for waiter in lane.waiting:
            if not waiter.done():
                waiter.set_exception(Timeout(why, unreached=True))
        lane.waiting.clear()

    async def _wait(self, lane: _Lane) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.waiting.append(waiter)
        self._queue_up(lane)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:  # it was just granted
                lane.inflight -= 1
                self._free += 1
                self._grant()
            raise

    def _take(self, lane: _Lane) -> None:
        self._free -= 1
        lane.inflight += 1

    def _queue_up(self, lane: _Lane) -> None:
        if lane.waiting:
            heappush(self._queue, (lane.inflight, next(self._number), lane))

    def _grant(self) -> None:
        while self._free and self._queue:
            inflight, _, lane = heappop(self._queue)
            if inflight != lane.inflight:
                continue
            while lane.waiting and lane.waiting[0].done():  # cancelled
                lane.waiting.popleft()
            if lane.waiting:
                waiter = lane.waiting.popleft()
                self._take(lane)
                waiter.set_result(None)
                self._queue_up(lane)

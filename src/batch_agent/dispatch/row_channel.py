"""A channel of rows between two stages of a pipeline that run at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Self, TypeVar

T = TypeVar("T")

FULL = 16  # rows waiting at most before a source or a function pauses


class RowChannel(Generic[T]):
    """An async iterator over the rows that were ``put``, in that order, until ``close``."""

    def __init__(self) -> None:
        self._rows: deque[T] = deque()
        self._closed = False
        self._taker: asyncio.Future[None] | None = None
        self._putters: list[asyncio.Future[None]] = []

    @property
    def waiting(self) -> int:
        """Return the number of rows that were put and not yet taken."""
        return len(self._rows)

    def put(self, row: T) -> None:
        self._rows.append(row)
        self._wake_taker()

    def close(self) -> None:
        """Close the channel. Either side may do it; afterwards nothing is put and no one waits."""
        self._closed = True
        self._wake_taker()
        self._wake_putters()

    async def room(self) -> bool:
        """Wait until fewer than ``FULL`` rows are waiting. Returns False if the channel is closed."""
        while len(self._rows) >= FULL and not self._closed:
            putter = asyncio.get_running_loop().create_future()
            self._putters.append(putter)
            await putter
        return not self._closed

    async def take_all(self) -> list[T]:
        """Wait for a row and return all rows that are there; empty at the end."""
        await self._wait()
        rows = list(self._rows)
        self._rows.clear()
        self._wake_putters()
        return rows

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self._wait()
        if not self._rows:
            raise StopAsyncIteration
        row = self._rows.popleft()
        if len(self._rows) < FULL:
            self._wake_putters()
        return row

    async def _wait(self) -> None:
        while not self._rows and not self._closed:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker

    def _wake_taker(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def _wake_putters(self) -> None:
        putters, self._putters = self._putters, []
        for putter in putters:
            if not putter.done():
                putter.set_result(None)

"""The inputs of a run that others put there while it goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self


class RowChannel:
    """An async iterator of what was ``put``, in that order, until ``close``. ``fetch`` is awaited for more when nothing
    is there: it puts something, or closes; without it, others are waited for. Rows that are ``patient`` are not what
    the runs beside this one wait for: one round of slots, when those have nothing left to start, does them all."""

    def __init__(self, fetch: Callable[[], Awaitable[None]] | None = None, *, patient: bool = False) -> None:
        self.patient = patient
        self._fetch = fetch
        self._rows: deque[object] = deque()
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def waiting(self) -> int:
        """Rows that were put and not taken."""
        return len(self._rows)

    def put(self, row: object) -> None:
        self._rows.append(row)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        while not self._rows:
            if self._closed:
                raise StopAsyncIteration
            if self._fetch is not None:
                await self._fetch()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._rows.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

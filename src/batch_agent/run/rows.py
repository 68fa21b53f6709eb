"""Reads inputs as they are needed: a list, an iterator, an async iterator, or another run's results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from itertools import islice

from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.files.read import LazyRows
from batch_agent.foreign import describe

_END = object()


class Rows:
    """A plain iterator is advanced on the event loop, so one that blocks should be async."""

    def __init__(self, inputs: Iterable[object] | AsyncIterable[object]) -> None:
        self._file = inputs if isinstance(inputs, LazyRows) else None
        self.channel = inputs if isinstance(inputs, RowChannel) else None
        self._async = aiter(inputs) if isinstance(inputs, AsyncIterable) else None
        self._plain = iter(()) if isinstance(inputs, AsyncIterable) else iter(inputs)
        self._peeked: list[object] = []
        self.seen = False  # there was at least one input

    @property
    def waiting(self) -> int | None:
        """Number of rows that can be read now; None if unknown."""
        return None if self.channel is None else self.channel.waiting

    async def peek(self) -> list[object]:
        """Return the first input, or nothing. ``read`` returns it again."""
        self._peeked = await self.read(1)
        return self._peeked

    async def read(self, count: int) -> list[object]:
        """Return the next inputs, at most ``count``, and one of an async iterator; empty at the end."""
        if self._peeked:
            values, self._peeked = self._peeked, []
            return values
        try:
            values = list(islice(self._plain, count)) if self._async is None else await self._next()
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            raise RuntimeError("the inputs raised CancelledError") from None
        except (SystemExit, GeneratorExit) as error:  # it must not end this process, and must not escape from a task
            raise RuntimeError(f"the inputs raised {describe(error)}") from error
        self.seen = self.seen or bool(values)
        return values

    async def read_ready(self, count: int) -> list[object]:
        """Return what ``read`` returns, and of another run's results also those that are there already."""
        values = await self.read(count)
        while values and len(values) < count and self.channel is not None and self.channel.waiting:
            values += await self.read(1)
        return values

    def close(self) -> None:
        """Close an input file. The user closes a generator of their own."""
        if self._file is not None:
            self._file.close()

    async def _next(self) -> list[object]:
        assert self._async is not None
        value = await anext(self._async, _END)
        return [] if value is _END else [value]

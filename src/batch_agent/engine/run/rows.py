"""Inputs read as they are needed: a list, an iterator, a generator, their async kin, or what another run hands on."""

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
    """A plain iterator is advanced on the event loop: one that waits for something should be async."""

    def __init__(self, inputs: Iterable[object] | AsyncIterable[object]) -> None:
        self._file = inputs if isinstance(inputs, LazyRows) else None
        self.channel = inputs if isinstance(inputs, RowChannel) else None
        self._async = aiter(inputs) if isinstance(inputs, AsyncIterable) else None
        self._plain = iter(()) if isinstance(inputs, AsyncIterable) else iter(inputs)
        self._peeked: list[object] = []
        self.seen = False  # there was at least one

    @property
    def waiting(self) -> int | None:
        """Rows that are there to be read; None where nobody knows."""
        return None if self.channel is None else self.channel.waiting

    async def peek(self) -> list[object]:
        """The first input, or nothing; ``read`` gives it again."""
        self._peeked = await self.read(1)
        return self._peeked

    async def read(self, count: int) -> list[object]:
        """The next inputs, at most ``count``, none at the end. An async iterator is not waited for twice."""
        if self._peeked:
            values, self._peeked = self._peeked, []
            return values
        try:
            values = list(islice(self._plain, count)) if self._async is None else await self._next()
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            raise RuntimeError("the inputs ended in a cancellation of their own") from None
        except (SystemExit, GeneratorExit) as error:  # not meant for our process, and no task may let it escape
            raise RuntimeError(f"the inputs ended in {describe(error)}") from error
        self.seen = self.seen or bool(values)
        return values

    def close(self) -> None:
        """Nobody reads on; a generator of the user's own is the user's to close."""
        if self._file is not None:
            self._file.close()

    async def _next(self) -> list[object]:
        assert self._async is not None
        value = await anext(self._async, _END)
        return [] if value is _END else [value]

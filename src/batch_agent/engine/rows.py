"""Inputs read one at a time: a list, an iterator, a generator or their async kin."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

END = object()


class Rows:
    """A plain iterator is advanced on the event loop: one that waits for something should be async."""

    def __init__(self, inputs: Iterable[object] | AsyncIterable[object]) -> None:
        self._async = aiter(inputs) if isinstance(inputs, AsyncIterable) else None
        self._plain = iter(()) if isinstance(inputs, AsyncIterable) else iter(inputs)

    async def read(self) -> object:
        """The next input, or END."""
        if self._async is not None:
            return await anext(self._async, END)
        return next(self._plain, END)

"""Sorts lines that arrive in any order by their indices, in constant memory.

A line that arrives too early waits in a file. A second file has its position, sixteen bytes per index. So one slow row
costs disk space, not memory. When no line waits, the files are emptied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO

_PLACE = struct.Struct("<QQ")  # a line's offset and length; a hole in the file reads as length 0, which means no line
_PLACES_AT_ONCE = 4096


class InputOrder:
    """The lines in order. ``waiting`` and ``places`` are empty, unbuffered files, open for reading and writing. The
    caller closes them."""

    def __init__(self, waiting: IO[bytes], places: IO[bytes]) -> None:
        self._waiting, self._places = waiting, places
        self._next = 0
        self._end = 0  # highest waiting index plus 1
        self._count = 0
        self._written = 0

    def put(self, index: int, line: bytes) -> Iterator[bytes]:
        """Take a line, and yield the lines that are next in order."""
        if index > self._next:
            self._keep(index, line)
            return
        yield line
        self._next = max(self._next, index + 1)
        while self._count:
            place = _read_at(self._places, _PLACE.size, _PLACE.size * self._next)
            if not any(place):
                return
            yield self._line(place)
            self._took(self._next)

    def rest(self) -> Iterator[bytes]:
        """Yield all waiting lines in order, even if lines between them are missing."""
        while self._next < self._end:
            first, count = self._next, min(_PLACES_AT_ONCE, self._end - self._next)
            places = _read_at(self._places, _PLACE.size * count, _PLACE.size * first)
            for number in range(count):
                place = places[_PLACE.size * number : _PLACE.size * (number + 1)]
                if any(place):
                    yield self._line(place)
                    self._took(first + number)
            self._next = first + count

    def _keep(self, index: int, line: bytes) -> None:
        _write_at(self._waiting, line, self._written)
        _write_at(self._places, _PLACE.pack(self._written, len(line)), _PLACE.size * index)
        self._written += len(line)
        self._end = max(self._end, index + 1)
        self._count += 1

    def _line(self, place: bytes) -> bytes:
        offset, length = _PLACE.unpack(place)
        return _read_at(self._waiting, length, offset)

    def _took(self, index: int) -> None:
        self._next = index + 1
        self._count -= 1
        if not self._count:
            self._waiting.truncate(0)
            self._places.truncate(0)
            self._written = 0


def _read_at(file: IO[bytes], size: int, offset: int) -> bytes:
    file.seek(offset)
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write_at(file: IO[bytes], data: bytes, offset: int) -> None:
    file.seek(offset)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]

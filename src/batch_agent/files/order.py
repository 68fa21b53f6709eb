"""Lines that come in any order, given out in the order of their indices, in constant memory.

A line that is too early waits in a file, and a second file says, at sixteen bytes per index, where it is: one row that
takes hours costs disk, not memory. When nothing waits, the files are emptied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO

_PLACE = struct.Struct("<QQ")  # a line's offset and length; a hole in the file reads as length 0: no line
_PLACES_AT_ONCE = 4096


class InputOrder:
    """``waiting`` and ``places`` are empty files, unbuffered, open for reading and writing; whoever opened them closes
    them."""

    def __init__(self, waiting: IO[bytes], places: IO[bytes]) -> None:
        self._waiting, self._places = waiting, places
        self._next = 0
        self._end = 0  # above the highest index that waits
        self._count = 0
        self._written = 0

    def put(self, index: int, line: bytes) -> Iterator[bytes]:
        """Take a line; give those whose turn it is now."""
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
        """All that still wait, in order, whatever is missing between them."""
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

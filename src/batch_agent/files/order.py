"""Sorts lines that arrive in any order by their indices.

A line that arrives too early waits in a file, so one slow row costs disk space. Memory holds the position of each line,
eight bytes per row. When no line waits, the file is emptied.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterator
from typing import IO


class InputOrder:
    """The lines in order. ``waiting`` is an empty file, open for reading and writing. The caller closes it."""

    def __init__(self, waiting: IO[bytes]) -> None:
        self._waiting = waiting
        self._places = array("q")  # offset of the line of each index; -1: it does not wait
        self._next = 0
        self._count = 0

    def put(self, index: int, line: bytes) -> Iterator[bytes]:
        """Take a line, and yield the lines that are next in order."""
        if index > self._next:
            self._places.extend(itertools.repeat(-1, index + 1 - len(self._places)))
            self._places[index] = self._waiting.seek(0, os.SEEK_END)
            self._waiting.write(line)
            self._waiting.flush()
            self._count += 1
            return
        yield line
        self._next = max(self._next, index + 1)
        while self._next < len(self._places) and self._places[self._next] >= 0:
            yield self._take()

    def rest(self) -> Iterator[bytes]:
        """Yield all waiting lines in order, even if lines between them are missing."""
        while self._next < len(self._places):
            if self._places[self._next] >= 0:
                yield self._take()
            else:
                self._next += 1

    def _take(self) -> bytes:
        self._waiting.seek(self._places[self._next])
        line = self._waiting.readline()
        self._places[self._next] = -1
        self._next += 1
        self._count -= 1
        if not self._count:
            self._waiting.truncate(0)
        return line

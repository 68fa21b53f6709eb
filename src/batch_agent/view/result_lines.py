"""Reads the result files of a run while they grow: new lines since the last read, and any line by its position."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from batch_agent.files.columns import Record
from batch_agent.files.tables import record_of
from batch_agent.record.rundir import FAILURES, RESULTS

BLOCK = 1 << 18  # bytes read at once, so that a request of the page waits at most for one block
# A later file overrides an earlier one: drafts belong to a running session.
NAMES = (RESULTS, FAILURES, f"{RESULTS}.new", f"{FAILURES}.new")


@dataclass(frozen=True, slots=True)
class LinePlace:
    """The position of a line: the number of its file, its offset and its length in bytes."""

    file: int
    start: int
    length: int


class _Tail:
    """One file. It stays open, so that positions stay valid when another file replaces it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.done = 0  # bytes that were read as complete lines

    def replaced(self) -> bool:
        """Return whether the file was replaced or truncated."""
        if self._file is None:
            return False
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return True
        own = os.fstat(self._file.fileno())
        return (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino) or named.st_size < self.done

    def size(self) -> int:
        """Return the current size of the file in bytes."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return 0
        return os.fstat(self._file.fileno()).st_size

    def block(self) -> list[tuple[int, bytes]]:
        """Return the next complete lines, each with its offset in the file."""
        if self.size() <= self.done or self._file is None:
            return []
        wanted = BLOCK
        while True:
            data = os.pread(self._file.fileno(), wanted, self.done)
            end = data.rfind(b"\n") + 1
            if end or len(data) < wanted:
                break
            wanted *= 2  # one line is longer than that
        lines, start = [], self.done
        for line in data[:end].splitlines(keepends=True):
            lines.append((start, line))
            start += len(line)
        self.done += end
        return lines

    def read(self, start: int, length: int) -> bytes:
        return b"" if self._file is None else os.pread(self._file.fileno(), length, start)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ResultLines:
    """The result files of a run. Open, use and close it in one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._tails = [_Tail(run_dir / name) for name in NAMES]

    def replaced(self) -> bool:
        """Return whether a file was replaced, so that its lines must be read again."""
        return any(tail.replaced() for tail in self._tails)

    def progress(self) -> tuple[int, int]:
        """Return the bytes read and the total size in bytes."""
        return sum(tail.done for tail in self._tails), sum(tail.size() for tail in self._tails)

    def block(self) -> list[tuple[LinePlace, Record]]:
        """Return the next records; an empty list when all are read."""
        for number, tail in enumerate(self._tails):
            if lines := tail.block():
                found = ((LinePlace(number, start, len(line)), parsed(line)) for start, line in lines)
                return [(place, record) for place, record in found if record is not None]
        return []

    def raw(self) -> Iterator[tuple[LinePlace, bytes]]:
        """Yield all lines that were read so far."""
        for number, tail in enumerate(self._tails):
            start = 0
            while start < tail.done:
                data = tail.read(start, min(BLOCK, tail.done - start))
                end = data.rfind(b"\n") + 1
                if not end:
                    end = tail.done - start
                    data = tail.read(start, end)
                for line in data[:end].splitlines(keepends=True):
                    yield LinePlace(number, start, len(line)), line
                    start += len(line)

    def read(self, place: LinePlace) -> Record | None:
        return parsed(self._tails[place.file].read(place.start, place.length))

    def close(self) -> None:
        for tail in self._tails:
            tail.close()


def parsed(line: bytes) -> Record | None:
    """Return a line of results or failures in the format of a result; None if it is neither."""
    try:
        record = orjson.loads(line)
    except ValueError:  # incomplete, or with values that orjson cannot read
        record = record_of(line)
    if not isinstance(record, dict) or not isinstance(record.get("index"), int):
        return None
    if "ok" not in record:
        error = {name: record.pop(name, None) for name in ("stage", "type", "message", "retryable")}
        if "traceback" in record:
            error["traceback"] = record.pop("traceback")
        record = {"ok": False, "output": None, "error": error, **record}
    return record

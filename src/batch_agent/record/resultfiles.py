"""Writes ``results.jsonl`` and ``failures.jsonl``, and keeps them complete when sessions are interrupted.

The first session writes the files themselves. A later session writes drafts beside them (``.new``) and replaces the
files when it ends. If it delivered every row, the drafts are used unchanged. Else the earlier lines of rows that it did
not deliver are added, so that stopping a resumed run loses no line. Drafts left by a kill are merged when the next
session begins. All calls block and raise OSError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from batch_agent.record.private import private

LINE = re.compile(rb'\{"index": ?(\d{1,10}),.*\}\n', re.DOTALL)  # a complete line


class ResultFiles:
    """``paths`` are the files. Each row has its line in one of them."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._drafts = tuple(path.with_name(f"{path.name}.new") for path in paths)
        self._open: tuple[BinaryIO, ...] = ()
        self._drafting = False

    def begin(self, *, drop: bool = False) -> None:
        """``drop``: earlier lines are removed; they belong to answers that are asked again."""
        for path in (*self._paths, *self._drafts) if drop else ():
            path.unlink(missing_ok=True)
        if any(draft.exists() for draft in self._drafts):
            self._merge()
        self._drafting = any(path.exists() and path.stat().st_size for path in self._paths)
        with ExitStack() as opened:
            paths = self._drafts if self._drafting else self._paths
            self._open = tuple(opened.enter_context(open(path, "wb", buffering=0, opener=private)) for path in paths)
            opened.pop_all()

    def write(self, *data: bytes) -> None:
        """Append lines to each of the files."""
        for file, lines in zip(self._open, data, strict=True):
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]

    def end(self, *, every: bool) -> None:
        """Put the lines of this session in place. ``every``: each row of the run has a line of this session. On an
        error the files stay unchanged; the journal has the missing results."""
        opened, self._open = self._open, ()
        try:
            for file in opened:
                with file:
                    os.fsync(file.fileno())
            if opened and self._drafting:
                if every:
                    self._put_in_place()
                else:
                    self._merge()
        except OSError:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Close the files of a session that did not end. The next session puts their lines in place."""
        for file in self._open:
            file.close()
        self._open = ()

    def _merge(self) -> None:
        seen = _Indexes()
        for draft in self._drafts:
            for index, _ in _lines(draft):
                seen.add(index)
        for path, draft in zip(self._paths, self._drafts, strict=True):
            with open(draft, "a+b", opener=private) as file:
                _drop_torn_line(file)
                file.writelines(line for index, line in _lines(path) if seen.add(index))
                file.flush()
                os.fsync(file.fileno())
        self._put_in_place()

    def _put_in_place(self) -> None:
        for path, draft in zip(self._paths, self._drafts, strict=True):
            draft.replace(path)


class _Indexes:
    """A set of indexes, one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, index: int) -> bool:
        """Add an index. Returns whether it is new."""
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        new = not self._bits[byte] & bit
        self._bits[byte] |= bit
        return new


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a file with the indexes of their rows."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (found := LINE.fullmatch(line)) is not None:
                yield int(found[1]), line


def _drop_torn_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, which a kill may have left, before lines are appended."""
    whole = file.seek(0, os.SEEK_END)
    while whole:
        start = max(0, whole - 4096)
        file.seek(start)
        last = file.read(whole - start).rfind(b"\n")
        if last >= 0:
            whole = start + last + 1
            break
        whole = start
    file.truncate(whole)
    file.seek(0, os.SEEK_END)

"""The two files of results, ``results.jsonl`` and ``failures.jsonl``, through sessions that do not reach their end.

A first session writes the files themselves. A later one writes drafts beside them (``.new``) and puts them in place
when it ends: as they are, when it has delivered every row; else with all lines of before whose index it did not
deliver, so that stopping a resumed run takes nothing away. Drafts that a kill left are put in place when the next
session begins. Blocks, raises OSError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from batch_agent.store.private import private

LINE = re.compile(rb'\{"index": ?(\d{1,10}),.*\}\n', re.DOTALL)  # a whole one


class ResultFiles:
    """``paths`` are of the files; a row has its line in one of them."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._drafts = tuple(path.with_name(f"{path.name}.new") for path in paths)
        self._open: tuple[BinaryIO, ...] = ()
        self._drafting = False

    def begin(self) -> None:
        if any(draft.exists() for draft in self._drafts):
            self._merge()
        self._drafting = any(path.exists() and path.stat().st_size for path in self._paths)
        with ExitStack() as opened:
            paths = self._drafts if self._drafting else self._paths
            self._open = tuple(opened.enter_context(open(path, "wb", buffering=0, opener=private)) for path in paths)
            opened.pop_all()

    def write(self, *data: bytes) -> None:
        """Lines for each of the files."""
        for file, lines in zip(self._open, data, strict=True):
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]

    def end(self, *, every: bool) -> None:
        """``every``: each row of the run has a line of this session. When the lines cannot be put in place the files
        stay as they were; the journal has what they lack."""
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
    """A set of indexes, a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, index: int) -> bool:
        """Whether it is new."""
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        new = not self._bits[byte] & bit
        self._bits[byte] |= bit
        return new


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file with their rows' indexes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (found := LINE.fullmatch(line)) is not None:
                yield int(found[1]), line


def _drop_torn_line(file: BinaryIO) -> None:
    """A kill may have torn the last line, which nothing may be appended to."""
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

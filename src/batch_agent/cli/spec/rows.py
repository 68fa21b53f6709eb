"""The rows of a run from a file, a directory, a pipe or standard input.

``batch_agent.files`` reads files. A pipe is read in a thread, so that it does not block the agents.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

from batch_agent.blocking import in_thread
from batch_agent.cli.output.streams import say
from batch_agent.errors import BatchAgentError, SpecError, explained
from batch_agent.files.compression import format_of
from batch_agent.files.read import PARSERS, LazyRows, is_pattern, read_inputs
from batch_agent.files.rows import BOM, Row

STDIN = "-"
STDIN_DESCRIPTOR = 0
CHUNK_BYTES = 64 * 2**10


def read_rows(
    source: str, limit: int | None = None, kind: str | None = None
) -> list[Row] | LazyRows | AsyncIterator[Row]:
    """Return the first ``limit`` rows of a path or, for ``-``, of standard input. ``kind`` overrides the extension."""
    suffix = None if kind is None else f".{kind}"
    if source == STDIN:
        return read_pipe(STDIN_DESCRIPTOR, "standard input", limit, suffix)
    path = Path(source)
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return read_pipe(os.open(path, os.O_RDONLY), source, limit, suffix)
    except OSError as error:
        if not is_pattern(source):
            raise SpecError(f"cannot read the inputs {source}: {error.strerror}") from None
    rows = read_inputs(path, limit, kind=suffix)
    if rows == []:
        say(f"batch-agent: {_nothing_in(path)}")
    return rows


def _nothing_in(path: Path) -> str:
    if path.is_file() and not path.stat().st_size:
        return f"{path} is empty: there are no rows"
    if format_of(path)[0] in (".csv", ".tsv"):
        return f"{path} has only line 1, which names the columns: there are no rows"
    return f"there are no rows in {path}"


async def read_pipe(descriptor: int, name: str, limit: int | None, suffix: str | None = None) -> AsyncIterator[Row]:
    """Yield the rows of a pipe, whose length is unknown."""
    lines = _PipeLines(descriptor, name)
    rows = islice(PARSERS[suffix or ".jsonl"](lines, name), limit)
    seen = False
    try:
        while batch := await in_thread(lambda: _at_hand(rows, lines)):
            seen = True
            for row in batch:
                yield row
        if not seen:
            say(f"batch-agent: there were no rows in {name}")
    except SpecError as error:  # the run has already started
        raise BatchAgentError(str(error)) from None
    finally:
        if descriptor != STDIN_DESCRIPTOR:
            os.close(descriptor)


def _at_hand(rows: Iterator[Row], lines: _PipeLines) -> list[Row]:
    """Wait for the next row. Return it with the rows whose lines have already arrived; empty at the end."""
    batch = list(islice(rows, 1))
    while batch and lines.ready:
        more = list(islice(rows, 1))
        if not more:
            break
        batch += more
    return batch


class _PipeLines(Iterator[bytes]):
    """The lines of a pipe, each with its newline. ``next`` blocks until a line has arrived."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name
        self._waiting: list[bytes] = []  # complete lines, the first one last
        self._parts: list[bytes] = []  # parts of the incomplete line
        self._first = True
        self.ready = 0  # waiting lines that are not blank: a blank line may not be a row

    def __next__(self) -> bytes:
        while not self._waiting:
            chunk = self._read()
            self._parts.append(chunk)
            if chunk and b"\n" not in chunk:
                continue
            *lines, rest = b"".join(self._parts).split(b"\n")
            self._parts = [rest] if chunk else []
            self._waiting = [line + b"\n" for line in reversed(lines)]
            if not chunk and rest:
                self._waiting.insert(0, rest)
            self.ready = sum(not line.isspace() for line in self._waiting)
            if not chunk and not self._waiting:
                raise StopIteration
        line = self._waiting.pop()
        self.ready -= not line.isspace()
        if self._first:
            self._first = False
            line = line.removeprefix(BOM)
        return line

    def _read(self) -> bytes:
        with explained(f"cannot read {self._name}", BatchAgentError):
            return os.read(self._descriptor, CHUNK_BYTES)

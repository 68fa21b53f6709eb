"""The rows of a run from where the command line says: a file, a directory, a pipe, standard input.

Files are ``batch_agent.files``' affair. A pipe is read beside the event loop, so that the agents do not wait for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from batch_agent.blocking import in_thread
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.read import LazyRows, read_inputs
from batch_agent.files.rows import BOM, Row, parse_line

STDIN = "-"
STDIN_DESCRIPTOR = 0
CHUNK_BYTES = 64 * 2**10


def read_rows(source: str, limit: int | None = None) -> list[Row] | LazyRows | AsyncIterator[Row]:
    """The rows of a path, or of standard input for ``-``; the first ``limit`` of them."""
    if source == STDIN:
        return read_pipe(STDIN_DESCRIPTOR, "standard input", limit)
    path = Path(source)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return read_inputs(path, limit)
        return read_pipe(os.open(path, os.O_RDONLY), source, limit)
    except OSError as error:
        raise SpecError(f"cannot read the inputs {source}: {error.strerror}") from None


async def read_pipe(descriptor: int, name: str, limit: int | None) -> AsyncIterator[Row]:
    """JSONL from something that has no end in sight."""
    taken = number = 0
    parts: list[bytes] = []  # of the line that has not ended
    try:
        while taken != limit:
            chunk = await _read_chunk(descriptor, name)
            parts.append(chunk)
            if chunk and b"\n" not in chunk:
                continue
            *lines, rest = b"".join(parts).split(b"\n") if chunk else (b"".join(parts), b"")
            parts = [rest]
            for line in lines:
                number += 1
                row = parse_line(line.removeprefix(BOM) if number == 1 else line, f"{name} line {number}")
                if row is not None and taken != limit:
                    taken += 1
                    yield row
            if not chunk:
                return
    finally:
        if descriptor != STDIN_DESCRIPTOR:
            os.close(descriptor)


async def _read_chunk(descriptor: int, name: str) -> bytes:
    try:
        return await in_thread(lambda: os.read(descriptor, CHUNK_BYTES))
    except OSError as error:
        raise BatchAgentError(f"cannot read {name}: {error.strerror}") from None

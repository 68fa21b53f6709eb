"""What every format gives to whoever reads it: rows one at a time, and an idea of how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batch_agent.files.rows import Row


@dataclass(frozen=True, slots=True)
class Reading:
    rows: Iterator[Row]
    close: Callable[[], None]
    expected: Callable[[int], int]  # how many rows in all, given how many were read so far
    memory_bytes: int  # about what they would take if all were kept

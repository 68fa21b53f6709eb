"""The common interface of all formats: rows one at a time, and an estimate of their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batch_agent.files.rows import Row


@dataclass(frozen=True, slots=True)
class Reading:
    rows: Iterator[Row]
    close: Callable[[], None]
    expected: Callable[[int], int]  # estimated total, from the number of rows read so far
    memory_bytes: int  # estimated memory of all rows together

"""Counts finished rows over the whole run, in constant memory.

Time is divided into equal intervals; when there are too many, each pair is merged. So a run of a minute is shown by the
second, and one of a night by the minute or so.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECES = 120
MARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Pace:
    """Rows finished in each interval of a run, from its start; the last interval may be incomplete."""

    rows: tuple[int, ...] = ()
    seconds: float = 1.0  # of one interval


class History:
    __slots__ = ("_rows", "_seconds")

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds = 1.0

    def add(self, elapsed: float) -> None:
        """Count a row that finished ``elapsed`` seconds after the start."""
        self._reach(elapsed)
        self._rows[-1] += 1

    def pace(self, elapsed: float) -> Pace:
        self._reach(elapsed)
        return Pace(tuple(self._rows), self._seconds)

    def _reach(self, elapsed: float) -> None:
        while elapsed >= PIECES * self._seconds:
            self._rows = [sum(self._rows[place : place + 2]) for place in range(0, len(self._rows), 2)]
            self._seconds *= 2
        wanted = int(max(0.0, elapsed) / self._seconds) + 1
        self._rows += [0] * (wanted - len(self._rows))


def sparkline(pace: Pace, width: int) -> str:
    """Return one mark for each of the last ``width`` intervals, higher for more rows."""
    rows = pace.rows[max(0, len(pace.rows) - width) :] if width > 0 else ()
    most = max(rows, default=0)
    return "".join(" " if not count else MARKS[(len(MARKS) - 1) * count // most] for count in rows)

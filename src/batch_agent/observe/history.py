"""How many rows were done when, over the whole run, in memory that does not grow with it.

Time is cut into equal pieces; when there are too many of them, every two become one. So a run of a minute is told by
the second, and one of a night by the minute or so.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECES = 120
MARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Pace:
    """Rows done in each piece of a run, from its beginning; the last piece may have only begun."""

    rows: tuple[int, ...] = ()
    seconds: float = 1.0  # that a piece lasts


class History:
    __slots__ = ("_rows", "_seconds")

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds = 1.0

    def add(self, elapsed: float) -> None:
        """A row that was done so many seconds after the beginning."""
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
    """One mark for each of the last ``width`` pieces, high where much was done."""
    rows = pace.rows[max(0, len(pace.rows) - width) :] if width > 0 else ()
    most = max(rows, default=0)
    return "".join(" " if not count else MARKS[(len(MARKS) - 1) * count // most] for count in rows)

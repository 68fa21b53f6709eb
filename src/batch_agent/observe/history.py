"""What happened over a whole run, in constant memory: rows that finished, and changes of the concurrency limit.

Time is divided into equal intervals; when there are too many, each pair is merged. So a run of a minute is shown by the
second, and one of a night by the minute or so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from batch_agent.events import LimitChanged

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


KEPT = 16  # steps; the first ones of a long run are dropped


@dataclass(frozen=True, slots=True)
class LimitStep:
    """A change of the concurrency limit; None is no limit."""

    before: int | None
    after: int | None
    reason: str
    endpoint: str = ""

    def __str__(self) -> str:
        where = f"{self.endpoint}: " if self.endpoint else ""
        return f"{where}{_number(self.before)} -> {_number(self.after)}: {self.reason}"


class Limits:
    def __init__(self) -> None:
        self._start: int | None = None
        self._latest: dict[str, int | None] = {}  # by endpoint
        self._steps: deque[LimitStep] = deque(maxlen=KEPT)

    def add(self, event: LimitChanged) -> None:
        if event.reason == "start":
            self._start = event.max_inflight
            return
        before = self._latest.get(event.endpoint, self._start)
        self._latest[event.endpoint] = event.max_inflight
        last = self._steps[-1] if self._steps else None
        if last is not None and (last.endpoint, last.reason) == (event.endpoint, event.reason):
            self._steps[-1] = replace(last, after=event.max_inflight)
        elif before != event.max_inflight:
            self._steps.append(LimitStep(before, event.max_inflight, event.reason, event.endpoint))

    def steps(self) -> tuple[LimitStep, ...]:
        return tuple(self._steps)


def _number(limit: int | None) -> str:
    return "no limit" if limit is None else f"{limit:,}"

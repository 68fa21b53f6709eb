"""Rate limits of tools: reading a rate, the window of calls (pure), and the gate that enforces it.

With "10/s", ten calls start at once, and the next ones when these are a second old: at most ten start in any second.
With "5/hour", one call starts now and the next in twelve minutes.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque

from batch_agent.errors import SpecError
from batch_agent.tools.gates import Line

_SECONDS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400}
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*([a-z]+)\s*", re.IGNORECASE)
# After sleeping until a time, the clock may show slightly less because of rounding.
_TOLERANCE = 1e-6
SLACK_SECONDS = 0.005  # a call that is let through starts a little later


def calls_per_second(rate: object) -> float:
    """Return ``10``, ``"10/s"``, ``"100/min"`` or ``"5/hour"`` as calls per second."""
    value = math.nan
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate)
        if match and (unit := match[2].lower()) in _SECONDS:
            value = float(match[1]) / _SECONDS[unit]
    elif isinstance(rate, int | float) and not isinstance(rate, bool):
        value = float(rate)
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f'rate_limit is {rate!r}: give calls per second, as 10 or "10/s", "100/min", "5/hour"')
    return value


class Window:
    """The latest starts of calls: as many as may start at once. It reads no clock: each method takes the time."""

    def __init__(self, rate: float) -> None:
        calls = max(1, int(rate))
        self._seconds = calls / rate + SLACK_SECONDS
        self._starts = deque([-math.inf] * calls, calls)

    def delay(self, now: float, ahead: int = 0) -> float:
        """Return the seconds until a call with ``ahead`` calls before it may start; 0 means now."""
        windows, place = divmod(ahead, len(self._starts))
        due = max(now, self._starts[place] + self._seconds) + windows * self._seconds
        return due - now if due - now > _TOLERANCE else 0.0

    def take(self, now: float) -> None:
        self._starts.append(now)

    def put_back(self) -> None:
        """Undo the latest start."""
        self._starts.pop()
        self._starts.appendleft(-math.inf)


class RateGate:
    """Gate that admits calls in FIFO order at the rate. A call that leaves the queue uses nothing."""

    def __init__(self, rate: float) -> None:
        self._window = Window(rate)
        self._line = Line()
        self._timer: asyncio.TimerHandle | None = None  # set while a call waits

    def enter_nowait(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._line or self._window.delay(now) > 0:
            return False
        self._window.take(now)
        return True

    async def enter(self) -> None:
        if self.enter_nowait():
            return
        self._set_timer()
        try:
            await self._line.wait(self._missed)
        finally:
            if not self._line and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def expected_wait(self) -> float:
        """Return the seconds that a call would wait now."""
        return self._window.delay(asyncio.get_running_loop().time(), len(self._line))

    def leave(self) -> None:
        """Do nothing: a rate counts the starts of calls."""

    def _missed(self) -> None:
        self._window.put_back()
        self._open()

    def _set_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window.delay(loop.time()), self._due)

    def _due(self) -> None:
        self._timer = None
        self._open()

    def _open(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._line and self._window.delay(now) == 0:
            if self._line.call_next():
                self._window.take(now)
        if self._line:
            self._set_timer()

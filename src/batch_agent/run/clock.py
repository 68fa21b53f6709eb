"""Wall-clock time without jumps: the event loop's time plus the wall-clock time at the start of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Clock:
    """Does not advance until it is started."""

    def __init__(self) -> None:
        self._epoch = time.time()
        self._time: Callable[[], float] = float

    def start(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._epoch = time.time() - self._time()

    def __call__(self) -> float:
        return self._epoch + self._time()

    def at(self, time: float) -> float:
        """Return the wall-clock time at this time of the event loop."""
        return self._epoch + time

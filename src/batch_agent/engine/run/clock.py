"""Wall-clock time that cannot jump: the event loop's, from where the wall clock stood when the run began."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Clock:
    """Stands still until it is started."""

    __slots__ = ("_epoch", "_time")

    def __init__(self) -> None:
        self._epoch = time.time()
        self._time: Callable[[], float] = float

    def start(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._epoch = time.time() - self._time()

    def __call__(self) -> float:
        return self._epoch + self._time()

    def at(self, time: float) -> float:
        """What the wall clock says, or will say, at this time of the event loop."""
        return self._epoch + time

"""The time of day of a server: the wall clock, but never faster or slower than real time by more than a fiftieth.

Deadlines, retention and days of tokens are times of day. If someone sets the wall clock, or it is corrected, they must
not all be over at once. So a jump is noticed, and followed slowly. Real time is what the system has counted since its
boot, with the time that it slept. It is kept in a file, so that a jump between two starts is noticed too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from batch_agent.messages import JsonObject
from batch_agent.serve.directory import read_json_file, write_json

logger = logging.getLogger("batch_agent")

RATE = 0.02  # of real time, by which a jump is followed
JUMP_SECONDS = 10.0  # of the wall clock at once, that are logged
CLOCK_FILE = "clock.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> float:
    """Return the seconds of real time since the system was booted. Time in which it slept is included if the system
    counts it."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if number is None else time.clock_gettime(number)


class ServedClock:
    """The time of a server. ``wall`` is the wall clock, ``elapsed`` real time. ``data`` is the directory in which the
    time is kept between two starts; None: it is not kept. Any thread may ask for the time."""

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = since_boot, data: Path | None = None
    ) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._lock = Lock()
        self._path = None if data is None else data / CLOCK_FILE
        self._boot = _boot_id()
        self._at = elapsed()
        self._now = wall()
        self.ahead = 0.0  # seconds by which the wall clock is ahead of this one
        self._seen = self._now, self._at  # the wall clock and real time at the last look
        self._continue()

    def now(self) -> float:
        """Return the time of day in Unix seconds."""
        with self._lock:
            wall, at = self._wall(), self._elapsed()
            passed = max(0.0, at - self._at)
            steady, most = self._now + passed, passed * RATE
            self._now = steady + min(most, max(-most, wall - steady))
            self._at = at
            self.ahead = wall - self._now
            return self._now

    def look(self) -> None:
        """Log a jump of the wall clock since the last look."""
        (wall, at), self._seen = self._seen, (self._wall(), self._elapsed())
        jump = (self._seen[0] - wall) - (self._seen[1] - at)
        if abs(jump) >= JUMP_SECONDS:
            told = "the wall clock has jumped by %+.0f s: nothing expires for this reason, the server follows it slowly"
            logger.warning(told, jump)

    def save(self) -> None:
        """Keep the time for the next start."""
        if self._path is not None and self._boot:
            now = self.now()
            with suppress(OSError):
                kept: JsonObject = {"boot": self._boot, "elapsed": self._at, "now": now, "wall": now + self.ahead}
                write_json(self._path, kept)

    def _continue(self) -> None:
        """Continue from the time that an earlier start has kept, unless the system was booted since."""
        with suppress(OSError, TypeError, ValueError):
            kept = {} if self._path is None or not self._boot else read_json_file(self._path) or {}
            elapsed, now, wall = [float(str(kept.get(name))) for name in ("elapsed", "now", "wall")]
            if kept.get("boot") == self._boot and elapsed <= self._at:
                self._now, self._at, self._seen = now, elapsed, (wall, elapsed)
        self.look()


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""

"""Rate limits over a kill and a resume: until when an earlier session of a run may have sent requests.

What was sent in the last minute is known to a process and lost with it. So a run with a rate limit of the user's keeps
a file in its run directory whose modification time lies ahead of every request: it is set at most once a second,
before a request is sent. A session that resumes the run takes the minute up to that time as used up.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from batch_agent.scheduler.rates import MINUTE, SLACK
from batch_agent.store.private import private

FILE = "rates.time"
AHEAD = 1.0  # seconds for which one mark covers the requests to come


class RateMark:
    """Made when a session begins: what is there already is of earlier ones. One for all backends of a run."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._covered = 0.0
        try:
            self._before = self._path.stat().st_mtime
        except OSError:
            self._before = 0.0

    def seconds_left(self) -> float:
        """Seconds until every request of earlier sessions is more than a minute old; 0 if all are."""
        return min(MINUTE + SLACK + AHEAD, max(0.0, self._before + MINUTE + SLACK - time.time()))

    def mark(self) -> None:
        """Called before a request is sent."""
        now = time.time()
        if now < self._covered and now > self._covered - 2 * AHEAD:
            return
        self._covered = now + AHEAD
        with open(self._path, "ab", opener=private):
            os.utime(self._path, (self._covered, self._covered))

"""Rate limits across a kill and a resume: until when an earlier session of the run may have sent requests.

A process that is killed forgets what it sent in the last minute. So a run with a user's rate limit keeps a file in its
run directory whose modification time is later than every request sent. The time is updated before a request, at most
once a second. A resumed session treats the minute before that time as used up.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from batch_agent.record.private import private
from batch_agent.scheduler.rates import MINUTE, SLACK

FILE = "rates.time"
AHEAD = 1.0  # seconds of future requests that one update covers


class RateMark:
    """The file of a run. It is created when a session begins; a file that exists then is from earlier sessions. There
    is one for all backends of a run."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._covered = 0.0
        try:
            self._before = self._path.stat().st_mtime
        except OSError:
            self._before = 0.0

    def seconds_left(self) -> float:
        """Return the seconds until every request of earlier sessions is over a minute old; 0 if all are."""
        return min(MINUTE + SLACK + AHEAD, max(0.0, self._before + MINUTE + SLACK - time.time()))

    def mark(self) -> None:
        """Update the file if needed. Called before a request is sent."""
        now = time.time()
        if now < self._covered and now > self._covered - 2 * AHEAD:
            return
        self._covered = now + AHEAD
        with open(self._path, "ab", opener=private):
            os.utime(self._path, (self._covered, self._covered))

"""Decides when a request to a model counts as lost, so that its agent sends another. Pure code.

A server may never answer a request: it restarted, or a proxy dropped the connection. The agent would repeat its last
action until the timeout. So a request that takes much longer than usual is abandoned:

- at once, if requests sent at the same time or later are answered;
- if nothing is answered, the server may just be slow for everyone: one request at a time is sent again, at growing
  intervals, and its answer is the signal for the others.
"""

from __future__ import annotations

from collections import deque
from math import inf

DEADLINES = 3  # minimum wait, in tick deadlines
USUALLY = 2  # minimum wait, in usual request times
LONG = 5.0  # seconds, used instead of the deadlines if ticks have none or a long one
GUESS = 0.5  # assumed seconds of a request until more is known
KEPT = 64


class Patience:
    """What the answers of one backend say about how long to wait for the next."""

    def __init__(self, deadline: float | None) -> None:
        self._least = min(LONG, DEADLINES * (deadline or inf))
        self._times = deque([GUESS], maxlen=KEPT)
        self._answered = -inf  # send time of the newest answered request
        self._tried = -inf  # when a request was last sent again while nothing was answered
        self._tries = 0

    def answered(self, sent_at: float, now: float) -> None:
        self._times.append(now - sent_at)
        self._answered = max(self._answered, sent_at)
        self._tries = 0

    def is_over(self, sent_at: float, now: float, *, own: float, losses: int) -> bool:
        """Return whether to abandon the request. ``own``: time of the agent's last request; ``losses``: how often this
        question was abandoned before. Each time doubles the wait, so that a slow answer is not missed forever."""
        if now - sent_at < self._least:
            return False
        usual = sorted(self._times)[-1 - len(self._times) // 20]  # the 95th percentile
        wait = max(self._least, USUALLY * max(usual, own))
        if now - sent_at < wait * 2**losses:
            return False
        if self._answered < sent_at:
            if now - self._tried < wait * 2**self._tries:
                return False
            self._tried = now
            self._tries += 1
        return True

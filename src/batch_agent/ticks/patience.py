"""When a request to a model is taken for lost, so that its agent is asked again. Pure code.

A server may never answer a request: it restarted, or a proxy dropped the connection. The agent would repeat its last
action until the timeout. So a request is given up if it takes much longer than requests usually do:

- while requests that were sent at the same time or later are answered: at once;
- while nothing is answered, the server may just be slow for everybody: one request at a time is sent again, at growing
  intervals. Its answer is the sign for the others.
"""

from __future__ import annotations

from collections import deque
from math import inf

DEADLINES = 3  # a request is given this many deadlines of a tick,
USUALLY = 2  # and this many times what a request usually takes
LONG = 5.0  # seconds, in place of the deadlines, where ticks have none or a long one
GUESS = 0.5  # seconds that a request is taken to need until more is known
KEPT = 64


class Patience:
    """What the answers of one backend say about how long to wait for the next ones."""

    def __init__(self, deadline: float | None) -> None:
        self._least = min(LONG, DEADLINES * (deadline or inf))
        self._times = deque([GUESS], maxlen=KEPT)
        self._answered = -inf  # when the newest request that was answered had been sent
        self._tried = -inf  # when a request was last sent again while nothing was answered
        self._tries = 0

    def answered(self, sent_at: float, now: float) -> None:
        self._times.append(now - sent_at)
        self._answered = max(self._answered, sent_at)
        self._tries = 0

    def is_over(self, sent_at: float, now: float, *, own: float, losses: int) -> bool:
        """Return whether to give the request up. ``own`` is what the agent's last request took, ``losses`` how often
        this question was given up before: each time doubles the wait, so a slow answer is not missed for ever."""
        if now - sent_at < self._least:
            return False
        usual = sorted(self._times)[-1 - len(self._times) // 20]  # the slowest but for one in twenty
        wait = max(self._least, USUALLY * max(usual, own))
        if now - sent_at < wait * 2**losses:
            return False
        if self._answered < sent_at:
            if now - self._tried < wait * 2**self._tries:
                return False
            self._tried = now
            self._tries += 1
        return True

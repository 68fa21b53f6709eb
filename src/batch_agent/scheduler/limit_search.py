"""The right number of calls in flight where the user gave none: as many as still bring more answers a second.

The number is raised in stages. Of the requests that leave in a stage it is measured how much each slot brings a second
(tokens where the server counts them, else answers); times the slots, that is the throughput of the stage. While a stage
with twice the slots brings clearly more, the next has twice as many again; the first that does not ends the climb, and
the one before it is kept. Every now and then half as many more or a third fewer are tried, because servers and rows
change.

Until the first answers are in nothing can be measured, and a batch of quick rows would be over before that. So the
first steps are taken by the clock, as long as nothing is refused.
"""

from __future__ import annotations

from math import inf

START = 64  # calls in flight
FLEET_START = 40  # the same at each of many servers
RAMPED = 256  # how far the first steps go by the clock: a small server has all of them in its queue
MOST = 1024  # a number that nobody gave is not found beyond this
CALIBRATING = 8  # where a ramp begins that is to find the knee, however slow the engine is
RAMP_SECONDS = 0.2  # long enough for a refusal to come back; each step waits twice as long as the one before
ENOUGH = 16  # answers a stage is judged by, at the least
GROWTH = 4  # times, per stage, where only answers raise the limit
SCALES = 0.8  # of the rate that as many more slots should bring, where only answers raise the limit
MARGIN = 1.25  # times what a server computes at once is kept in flight
SECOND_WAVE = 1.6  # times the fastest answer, from where on an answer has waited for others to be computed
GAIN = 1.08  # that twice as many must bring
PROBE_GAIN, PROBE_LOSS = 1.05, 0.98  # what half as many more must bring, and a third fewer must keep
PROBE_SECONDS = 60.0


class Wave:
    """The answers to requests that were sent together: how many were computed at once.

    A server that computes them in waves answers the first wave soon and the second after twice that time. Answers
    differ in length, so an answer is slow only if it is so by the answer and by the token: a long text raises only the
    one, a long prompt only the other.
    """

    __slots__ = ("_fastest", "_fastest_token", "size")

    def __init__(self) -> None:
        self._fastest = self._fastest_token = inf  # seconds
        self.size = 0  # answers of the first wave

    def is_second(self, seconds: float, tokens: int) -> bool:
        by_token = seconds / (tokens or 1)
        self._fastest, self._fastest_token = min(self._fastest, seconds), min(self._fastest_token, by_token)
        slow = min(seconds / self._fastest, by_token / self._fastest_token) if self._fastest > 0 else 1.0
        if slow > SECOND_WAVE:
            return True
        self.size += 1
        return False


class LimitSearch:
    """``limit`` is the number of the moment. Methods that may change it return why; an empty text when they did not."""

    __slots__ = (
        "_best",
        "_best_rate",
        "_by_clock",
        "_climbing",
        "_count",
        "_down",
        "_most",
        "_pause",
        "_probe_at",
        "_ramp_to",
        "_seconds",
        "_since",
        "_wave",
        "_work",
        "guided",
        "limit",
        "ramp_at",
    )

    def __init__(
        self,
        start: int = START,
        ramp_to: int = RAMPED,
        most: int = MOST,
        *,
        settled: bool = False,
        by_clock: bool = True,
    ) -> None:
        """``settled``: ``start`` was found before. Without ``by_clock`` only answers raise the limit."""
        self.limit = min(start, most)
        self.guided = False  # the engine tells how long its queue is: once the climb is over, that decides
        self.ramp_at: float | None = inf if settled or not by_clock else None  # when the next step by the clock is due
        self._pause = 0.0  # seconds before the next of these
        self._by_clock = by_clock
        self._wave = Wave()
        self._ramp_to = ramp_to
        self._most = most
        self._climbing = not settled
        self._best, self._best_rate = self.limit if settled else 0, 0.0
        self._probe_at = 0.0  # 0: nothing was measured yet at the number that was found
        self._down = False  # whether the next probe goes down
        self.forget()

    @property
    def knee(self) -> int | None:
        """The number, once it is found."""
        return None if self._climbing else self._best or None

    def bound(self, most: int) -> None:
        self._most = min(self._most, most)
        self.limit = min(self.limit, self._most)

    def forget(self) -> None:
        """A stage begins with the next answer."""
        self._since, self._count, self._work, self._seconds = inf, 0, 0, 0.0

    def move(self, limit: int) -> None:
        """The engine's queue decided otherwise."""
        self._climbing = self._climbing and limit > self.limit
        self.limit = limit
        self.ramp_at = inf
        self.forget()

    def ramp(self, inflight: int, now: float) -> str:
        if self.ramp_at is None:
            self.ramp_at, self._pause = now + RAMP_SECONDS, RAMP_SECONDS
            return ""
        if now < self.ramp_at:
            return ""
        most = min(self._ramp_to, self._most)
        if self._best or inflight < self.limit or self.limit >= most:
            self.ramp_at = inf  # answers tell more; or nobody wants more
            return ""
        self._pause *= 2
        self.ramp_at = now + self._pause
        self.limit = min(2 * self.limit, most)  # all of it is the first stage
        return "nothing is refused"

    def answered(self, sent_at: float, seconds: float, tokens: int, filled: bool, now: float) -> str:
        """``filled``: all slots of this stage were in use at some time."""
        if self._since > now:
            self._since = now if self._best else 0.0
        if sent_at < self._since:
            return ""
        self._count += 1
        self._work += tokens or 1
        self._seconds += seconds
        if not self._by_clock and not self._best and self._wave.is_second(seconds, tokens):
            return self._settle(self._wave.size, now) if filled else ""
        if self._count < ENOUGH or self._count < self.limit * (0.5 if self._by_clock else 1):
            return ""
        rate = self.limit * self._work / self._seconds if self._seconds > 0 else inf
        self.forget()
        if not filled:
            return ""  # nobody wants more
        return self._climb(rate, now) if self._climbing else self._probe(rate, now)

    def _settle(self, limit: float, now: float) -> str:
        """More than this only waits in the server's queue."""
        self._climbing = False
        self._best, self._best_rate = max(1, round(MARGIN * limit)), 0.0
        self.forget()
        return self._go(self._best, "more wait in the server's queue", now)

    def _climb(self, rate: float, now: float) -> str:
        if not self._by_clock and self._best and rate < SCALES * self._best_rate * self.limit / self._best:
            return self._settle(self._best * rate / self._best_rate, now)
        if self._best and rate < GAIN * self._best_rate:
            self._climbing = False
            return "" if self.guided else self._go(self._best, "more bring no more", now)
        self._best, self._best_rate = self.limit, rate
        if self.limit >= self._most:
            self._climbing = False
            return ""
        growth = 2 if self._by_clock else GROWTH
        return self._go(min(growth * self.limit, self._most), "more bring more", now)

    def _probe(self, rate: float, now: float) -> str:
        if self.guided:
            return ""
        if self.limit == self._best:
            self._best_rate = rate  # as it is now
            self._probe_at = self._probe_at or now + PROBE_SECONDS
            if now < self._probe_at:
                return ""
            self._probe_at = now + PROBE_SECONDS
            self._down = not self._down
            other = max(1, self._best * 2 // 3) if self._down else min(self._most, self._best * 3 // 2)
            return self._go(other, "fewer are tried" if self._down else "more are tried", now)
        if rate < self._best_rate * (PROBE_LOSS if self.limit < self._best else PROBE_GAIN):
            return self._go(self._best, "it was better before", now)
        self._best = self.limit
        return ""

    def _go(self, limit: int, reason: str, now: float) -> str:
        if limit == self.limit:
            return ""
        self.limit = limit
        self._since = now
        return reason

"""The right number of calls in flight where the user gave none: as many as still bring more answers a second.

The number is raised in stages. A stage measures what one slot brings per second (tokens where the server counts them,
else answers) over the requests that leave in it. Times the slots, that is the throughput of the stage. While a larger
stage brings clearly more, the next one is larger again. The first stage that does not ends the climb, and the number
before it is kept. From time to time half as many more or a third fewer are tried, because servers and rows change.

How the climb begins depends on ``by_clock``:

- One server (True): it starts at 64 and doubles by the clock as long as nothing is refused, up to 256. A batch of
  quick rows would be over before the first answers are measured.
- One of a fleet (False): other servers can take the rows, so an endpoint gets no more than it has shown it can take.
  It starts small and grows with whole rounds of answers, four times per round up to 64, then twice. Answers
  that took much longer than the fastest ones waited in the server's queue: then the number shrinks to what the server
  computes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf

START = 64  # calls in flight
FLEET_START = 40  # the same at each of many servers, where only answers raise it
RAMPED = 256  # where the steps by the clock end: a small server has all of them in its queue
MOST = 1024  # the search ends here
CALIBRATING = 8  # where a search starts that is to find the knee, however slow the engine is
RAMP_SECONDS = 0.2  # long enough for a refusal to come back; each step waits twice as long as the one before
ENOUGH = 16  # answers a stage is judged by, at the least
GAIN = 1.08  # throughput that twice as many must bring
STEEP = 4  # growth per round of one of a fleet, up to ``START``
QUEUED = 1.6  # if even the fast ones of the later answers take so many times as long, they waited in a queue
TINY = 1e-9  # seconds of an answer that took no time
PROBE_GAIN, PROBE_LOSS = 1.05, 0.98  # throughput that half as many more must bring, and a third fewer must keep
PROBE_SECONDS = 60.0
FLEET_PROBE_SECONDS = 15.0  # one of a fleet: a wrong number costs more, because the rows could go elsewhere


class LimitSearch:
    """``limit`` is the current number. Methods that may change it return the reason, or "" if it did not change."""

    __slots__ = (
        "_answers",
        "_best",
        "_best_rate",
        "_by_clock",
        "_climbing",
        "_count",
        "_down",
        "_fast",
        "_most",
        "_pause",
        "_probe_at",
        "_queued",
        "_ramp_to",
        "_seconds",
        "_since",
        "_skip",
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
        """``settled``: ``start`` was found before. ``by_clock``: False for one endpoint of a fleet."""
        self.limit = min(start, most)
        self.guided = False  # the engine reports its queue: once the climb is over, that decides
        self.ramp_at: float | None = None if by_clock and not settled else inf  # when the next step by the clock is due
        self._by_clock = by_clock
        self._pause = 0.0  # seconds before the next of these
        self._ramp_to = ramp_to
        self._most = most
        self._climbing = not settled
        self._best, self._best_rate = self.limit if settled else 0, 0.0
        self._probe_at = 0.0  # 0: nothing was measured yet at the number that was found
        self._down = not by_clock  # whether the last probe went down
        self._queued = False  # one of a fleet has shown a queue
        self._fast = (inf, inf)  # seconds, and seconds per token, of fast answers of the last stage without one
        self._skip = 0  # answers that are not counted
        self.forget()

    @property
    def knee(self) -> int | None:
        """The number once it is found, or None."""
        return None if self._climbing else self._best or None

    def bound(self, most: int) -> None:
        """Search no further than ``most``."""
        self._most = min(self._most, most)
        self.limit = min(self.limit, self._most)

    def forget(self) -> None:
        """Start a stage with the next answer."""
        self._since, self._count, self._work, self._seconds = inf, 0, 0, 0.0
        self._answers: list[tuple[float, int]] = []  # seconds and tokens, of one of a fleet that may have a queue

    def move(self, limit: int) -> None:
        """Take the number that the engine's queue asks for."""
        self._climbing = self._climbing and limit > self.limit
        self.limit = limit
        self.ramp_at = inf
        self.forget()

    def ramp(self, inflight: int, now: float) -> str:
        """Take the next step by the clock if it is due."""
        if self.ramp_at is None:
            self.ramp_at, self._pause = now + RAMP_SECONDS, RAMP_SECONDS
            return ""
        if now < self.ramp_at:
            return ""
        most = min(self._ramp_to, self._most)
        if self._best or inflight < self.limit or self.limit >= most:
            self.ramp_at = inf  # answers tell more, or no more slots are wanted
            return ""
        self._pause *= 2
        self.ramp_at = now + self._pause
        self.limit = min(2 * self.limit, most)  # all of it is the first stage
        return "nothing is refused"

    def answered(self, sent_at: float, seconds: float, tokens: int, filled: bool, now: float) -> str:
        """Count one good answer. ``filled``: all slots were in use at some time of this stage."""
        if self._since > now:
            self._since = now if self._best else 0.0
        if self._skip or sent_at < self._since:
            self._skip = max(0, self._skip - 1)
            return ""
        self._count += 1
        self._work += tokens or 1
        self._seconds += seconds
        if not self._by_clock and (self._climbing or not (self._best or self.guided)):
            self._answers.append((seconds or TINY, tokens or 1))
            first = not self._best and not self._queued  # stage: the sooner it is known, the fewer rows are there
            if first and filled and self._count == max(ENOUGH, self.limit) // 2 and (reason := self._shrink()):
                return reason
        # One of a fleet is judged by whole rounds: the answers of half a round may all be from its first wave.
        if self._count < ENOUGH or (2 if self._by_clock else 1) * self._count < self.limit:
            return ""
        rate = self.limit * self._work / self._seconds if self._seconds > 0 else inf
        if filled and self._answers and (reason := self._shrink()):
            return reason
        self.forget()
        if not filled:
            return ""  # no more slots are wanted
        return self._climb(rate, now) if self._climbing else self._probe(rate, now)

    def _shrink(self) -> str:
        """Give up what waits in the server's queue, if the answers show one."""
        answers, fast = self._answers, self._fast
        if not self._queued:  # else the queue may be as long for all of them
            fast = _low(s for s, _ in answers), _low(s / tokens for s, tokens in answers)
            answers = answers[len(answers) // 2 :]
        # Longer answers take longer, though not always in proportion: what is slow by both measures has waited.
        slowdown = _low(min(s / fast[0], s / tokens / fast[1]) for s, tokens in answers)
        if slowdown < QUEUED or self.limit == 1:
            self._fast = fast
            return ""
        self._fast = min(fast, self._fast)
        self._skip = self.limit  # answers that were in its queue, or leave before it is shorter
        self._queued, self._climbing, self._best = True, False, 0
        self.limit = ceil(self.limit / slowdown)
        self.forget()
        return "answers wait in the server's queue"

    def _climb(self, rate: float, now: float) -> str:
        if self._best and rate < GAIN * self._best_rate:
            self._climbing = False
            return "" if self.guided else self._go(self._best, "more bring no more", now)
        self._best, self._best_rate = self.limit, rate
        if self.limit >= self._most:
            self._climbing = False
            return ""
        steep = not self._by_clock and self.limit < START
        more = min(STEEP * self.limit, max(START, 2 * self.limit)) if steep else 2 * self.limit
        return self._go(min(more, self._most), "more bring more", now)

    def _probe(self, rate: float, now: float) -> str:
        if self.guided:
            return ""
        if not self._best:  # the first stage without a queue: see at once whether more bring more
            self._best, self._down, self._probe_at = self.limit, True, now
        if self.limit == self._best:
            self._best_rate = rate  # as it is now
            pause = PROBE_SECONDS if self._by_clock else FLEET_PROBE_SECONDS
            self._probe_at = self._probe_at or now + pause
            if now < self._probe_at:
                return ""
            self._probe_at = now + pause
            self._down = not self._down
            other = (
                max(1, self._best * 2 // 3) if self._down else min(self._most, max(self._best + 1, self._best * 3 // 2))
            )
            return self._go(other, "fewer are tried" if self._down else "more are tried", now)
        if rate < self._best_rate * (PROBE_LOSS if self.limit < self._best else PROBE_GAIN):
            return self._go(self._best, "it was better before", now)
        if not self._by_clock and self.limit > self._best:  # there is more, perhaps much more
            self._climbing, self._queued = True, False
        self._best, self._best_rate = self.limit, rate
        return ""

    def _go(self, limit: int, reason: str, now: float) -> str:
        if limit == self.limit:
            return ""
        self.limit = limit
        self._since = now
        return reason


def _low(values: Iterable[float]) -> float:
    """The value that an eighth is below: the very fastest answers may come from a cache."""
    ordered = sorted(values)
    return ordered[len(ordered) // 8]

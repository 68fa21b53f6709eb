"""Finds the number of calls in flight if the user gave none: the largest that still increases the throughput.

The number is raised in stages. A stage measures what one slot delivers per second (tokens if the server counts them,
else answers) over the requests sent in it. Multiplied by the slots, that is the throughput of the stage. While a larger
stage delivers clearly more, the next one is larger again. The first stage that does not ends the climb, and the number
before it is kept. From time to time 50% more or a third fewer are tried, because servers and rows change.

The start of the climb depends on ``by_clock``:

- One server (True): it starts at 64 and doubles by the clock while nothing is refused, up to 128, and to
  256 when a quick answer has come. A batch of
  quick rows would be over before the first answers are measured.
- One of a fleet (False): other servers can take the rows, so an endpoint gets only what it has proved to handle.
  It starts small and grows with whole rounds of answers, four times per round up to 64, then twice. Answers
  that took much longer than the fastest ones waited in the server's queue: then the number shrinks to what the server
  computes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf

START = 64  # calls in flight
FLEET_START = 40  # the same at each server of a fleet, where only answers raise it
RAMPED = 256  # where the first steps end; a small server then has all of them in its queue
BLIND = 128  # ... before the first answer
QUICK_SECONDS = 10.0  # an answer within this time allows the steps beyond ``BLIND``
MOST = 1024  # upper end of the search
CALIBRATING = 8  # start of a search that must find the knee even at a slow engine
RAMP_SECONDS = 0.2  # long enough for a refusal to arrive; each step waits twice as long as the one before
ENOUGH = 16  # minimum number of answers to judge a stage
GAIN = 1.08  # throughput gain that twice as many must bring
STEEP = 4  # growth per round of an endpoint in a fleet, up to ``START``
QUEUED = 1.6  # if even the fast ones of the later answers take this many times as long, they waited in a queue
TINY = 1e-9  # seconds to use for an answer that took no time
PROBE_GAIN, PROBE_LOSS = 1.05, 0.98  # throughput that 50% more must bring, and that a third fewer must keep
PROBE_SECONDS = 60.0
FLEET_PROBE_SECONDS = 15.0  # in a fleet a wrong number costs more, because the rows could go elsewhere

Progress = tuple[int, bool, int, float]  # the limit, whether it still climbs, the best limit so far, and its throughput


class LimitSearch:
    """``limit`` is the current number. Methods that may change it return the reason, or "" if it did not change."""

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
        self.guided = False  # the engine reports its queue, which decides after the climb
        self.share = 1.0  # part of the slots that this process has; the other processes of its run have the rest
        self.ramp_at: float | None = None if by_clock and not settled else inf  # when the next step by the clock is due
        self._by_clock = by_clock
        self._pause = 0.0  # seconds before the next step by the clock
        self._ramp_to = ramp_to
        self._most = most
        self._climbing = not settled
        self._best, self._best_rate = self.limit if settled else 0, 0.0
        self._probe_at = 0.0  # 0: nothing was measured yet at the number that was found
        self._down = not by_clock  # whether the last probe used fewer
        self._queued = False  # the endpoint of a fleet has shown a queue
        self._fast = (inf, inf)  # seconds, and seconds per token, of fast answers in the last stage without a queue
        self._heard = False  # the server has answered
        self._blind = False  # the next step by the clock waits for the first answer
        self._skip = 0  # number of answers to ignore
        self.forget()

    @property
    def knee(self) -> int | None:
        """The number once it is found, or None."""
        return None if self._climbing else self._best or None

    @property
    def progress(self) -> Progress:
        """What another process needs in order to continue this search."""
        return self.limit, self._climbing, self._best, self._best_rate

    def adopt(self, progress: Progress) -> None:
        """Continue at the point that the search of another process has reached."""
        self.limit, self._climbing, self._best, self._best_rate = progress
        self.ramp_at = inf
        self._probe_at = 0.0
        self.forget()

    @property
    def _round(self) -> int:
        """Number of answers in which each slot answers once; twice if other processes have slots too, because all
        first requests of this process may have been ahead of theirs in the server's queue."""
        return max(1, round(self.limit * min(1.0, 2 * self._stage_share)))

    def bound(self, most: int) -> None:
        """Limit the search to at most ``most``."""
        self._most = min(self._most, most)
        self.limit = min(self.limit, self._most)

    def forget(self) -> None:
        """Start a stage with the next answer."""
        self._since, self._count, self._work, self._seconds = inf, 0, 0, 0.0
        self._stage_share = self.share
        self._answers: list[tuple[float, int]] = []  # seconds, tokens; for an endpoint of a fleet that may have a queue

    def move(self, limit: int) -> None:
        """Take the number that the engine's queue suggests."""
        self._blind = False
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
        self._blind = not self._heard and self.limit == BLIND < most and inflight >= BLIND
        if self._best or inflight < self.limit or self.limit >= most or self._blind:
            self.ramp_at = inf  # answers are better evidence, or no more slots are wanted
            return ""
        self._pause *= 2
        self.ramp_at = now + self._pause
        self.limit = min(2 * self.limit, most)  # all these steps belong to the first stage
        return "nothing is refused"

    def answered(self, sent_at: float, seconds: float, tokens: int, filled: bool, now: float) -> str:
        """Count one good answer. ``filled``: all slots were in use at some time of this stage."""
        self._heard = True
        if self._blind and filled and seconds < QUICK_SECONDS:
            self._blind = False
            self.limit = min(2 * self.limit, self._ramp_to, self._most)  # the next step by the clock was waiting for it
            return "answers arrive"
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
            first = not self._best and not self._queued  # judged early, so that fewer rows are sent to a full server
            if first and filled and self._count == max(ENOUGH, self._round) // 2 and (reason := self._shrink()):
                return reason
        # An endpoint of a fleet is judged by whole rounds: all answers of half a round may be from its first wave.
        if self._count < ENOUGH or (2 if self._by_clock else 1) * self._count < self._round:
            return ""
        rate = self.limit * self._work / self._seconds if self._seconds > 0 else inf
        if filled and self._answers and (reason := self._shrink()):
            return reason
        self.forget()
        if not filled:
            return ""  # no more slots are wanted
        return self._climb(rate, now) if self._climbing else self._probe(rate, now)

    def _shrink(self) -> str:
        """Lower the limit by the requests that wait in the server's queue, if the answers show a queue."""
        answers, fast = self._answers, self._fast
        if not self._queued:  # else the queue may be equally long for all answers
            fast = _low(s for s, _ in answers), _low(s / tokens for s, tokens in answers)
            answers = answers[len(answers) // 2 :]
        # Longer answers take longer, but not always in proportion. An answer that is slow by both measures has waited.
        slowdown = _low(min(s / fast[0], s / tokens / fast[1]) for s, tokens in answers)
        if slowdown < QUEUED or self.limit == 1:
            self._fast = fast
            return ""
        self._fast = min(fast, self._fast)
        self._skip = self._round  # answers that were in its queue, or that leave before the queue is shorter
        self._queued, self._climbing, self._best = True, False, 0
        self.limit = ceil(self.limit / slowdown)
        self.forget()
        return "answers wait in the server's queue"

    def _climb(self, rate: float, now: float) -> str:
        if self._best and rate < GAIN * self._best_rate:
            self._climbing = False
            return "" if self.guided else self._go(self._best, "more requests do not increase the throughput", now)
        self._best, self._best_rate = self.limit, rate
        if self.limit >= self._most:
            self._climbing = False
            return ""
        steep = not self._by_clock and self.limit < START
        more = min(STEEP * self.limit, max(START, 2 * self.limit)) if steep else 2 * self.limit
        return self._go(min(more, self._most), "more requests increase the throughput", now)

    def _probe(self, rate: float, now: float) -> str:
        if self.guided:
            return ""
        if not self._best:  # the first stage without a queue: test at once whether more increase the throughput
            self._best, self._down, self._probe_at = self.limit, True, now
        if self.limit == self._best:
            self._best_rate = rate  # the current rate
            pause = PROBE_SECONDS if self._by_clock else FLEET_PROBE_SECONDS
            self._probe_at = self._probe_at or now + pause
            if now < self._probe_at:
                return ""
            self._probe_at = now + pause
            self._down = not self._down
            other = (
                max(1, self._best * 2 // 3) if self._down else min(self._most, max(self._best + 1, self._best * 3 // 2))
            )
            return self._go(other, "trying fewer" if self._down else "trying more", now)
        if rate < self._best_rate * (PROBE_LOSS if self.limit < self._best else PROBE_GAIN):
            return self._go(self._best, "the throughput fell", now)
        if not self._by_clock and self.limit > self._best:  # the right number may be much larger
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
    """Return the 1/8 quantile. The very fastest answers may come from a cache."""
    ordered = sorted(values)
    return ordered[len(ordered) // 8]

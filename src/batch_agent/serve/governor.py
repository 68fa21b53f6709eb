"""How many lines may be in flight while people use the same engines. Pure: no await, no clock.

A step of an engine takes longer the more requests are in its batch. So the latency of an interactive request grows with
the lines in flight, even if it never waits. The target is a multiple of the latency on an idle engine. Requests differ
in length; so the latency of one is compared with that of an idle engine for as many tokens.

While people are there, each answer that took longer than the target lowers the limit by a small part, and each that
took less raises it by the same part, so that half of the answers are below the target. If the target is that of another
percentile, one that took longer lowers the limit by a larger part: by 19 times as much for the 95th, so that 19 of 20
are below the target. One that is far above it lowers the limit in proportion. If as many in a row as have one above it
are all far below it, the limit is raised faster. When no request has come for several times the usual gap
between two, there is no limit; the latest one is where it begins when people return. If the latency of an idle engine
is not known when people come, no line starts until one of their requests was answered without lines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from batch_agent.serve import LatencyTarget

QUIET_SECONDS = 5.0  # without an interactive request after which lines fill the engine again, at most
SHORT_QUIET_SECONDS = 1.0  # the same, at least
GAPS = 6.0  # times the usual gap between two interactive requests: then people have gone
FEW = 2  # requests in flight that leave an engine almost idle
MEASURE_SECONDS = 30.0  # for which no line starts, at most, until the latency of an idle engine is known
LEARN = 0.2  # the weight of the latest answer
AIM = 0.97  # part of the target that is held: each answer above it lowers the limit, each below raises it
STEP = 0.01  # by this part, for the median
COMFORT, RAISE = 0.8, 1.05  # part of the target below which an answer raises it faster, and by how much
FAR = 1.2  # times the target of the median: an answer above it lowers the limit in proportion
TAIL_FAR = 2.0  # the same, for the target of a higher percentile, which some answers exceed
TAIL = 1.5  # times the median latency that is expected of a higher percentile at first
SEEN = 100  # latest answers of which the percentile is shown
OVER = 1.25  # times the limit: with more lines in flight, those of an earlier limit are still there
LOWER = 0.5  # the limit is never lowered more than this by one answer
FIRST_PART = 0.25  # of the lines in flight, when people come and nothing is known
OVERHEAD_TOKENS = 8.0  # the time before the first token, in tokens


@dataclass(slots=True)
class TokenPace:
    """Seconds per token of an answer. ``idle`` is the pace of an almost idle engine."""

    idle: float = 0.0
    certain: bool = False  # measured on an idle engine, and not only the best of a busy one

    def learn(self, seconds: float, tokens: float, lines: int, beside: int) -> None:
        """Learn from an answer. ``lines``: largest number of lines that were in flight beside it; ``beside``: largest
        number of all requests beside it."""
        pace = seconds / (tokens + OVERHEAD_TOKENS)
        if beside <= FEW:
            self.idle = pace if not self.certain else self.idle + LEARN * (pace - self.idle)
            self.certain = True
        elif not self.certain and (not self.idle or pace < self.idle):
            self.idle = pace
            self.certain = not lines  # only people were there: their latency without lines


class Governor:
    """Limits the lines in flight. ``target``: the multiple of the idle latency that ``percentile`` of 100 answers may
    take; None for no limit."""

    def __init__(self, target: float | LatencyTarget | None) -> None:
        if not isinstance(target, LatencyTarget | None):
            target = LatencyTarget(target)
        self.told = target
        self.target = None if target is None else target.times
        above = 0.5 if target is None else 1 - target.percentile / 100  # part of the answers that may take longer
        self._is_tail = above < 0.5
        self._lower = STEP / (2 * above)
        self._raise = STEP / (2 * (1 - above))
        self._patience = round(
            0.5 / above
        )  # answers in a row that are far below the target before the limit grows fast
        self._calm = 0  # such answers, up to the latest
        self._seen = deque[float](maxlen=SEEN)  # ratios of the latest answers
        self.pace = TokenPace()
        self.waiting = 0  # interactive requests that wait for a slot, or for the engine to begin
        self.active = 0  # interactive requests that have not ended
        self._smoothed = 0.0  # latency over that of an idle engine
        self.reason = ""  # why the target is given up, for people
        self._limit: float | None = None
        self._kept = 0.0  # the limit when people were there last
        self._busy = (0, 0.0)  # the latest pace beside many lines, and their number
        self._came = -inf  # when the latest interactive request came
        self._gap = QUIET_SECONDS  # the usual one between two of them: long ones count more
        self._asked = -inf  # when the latest one came or ended
        self._changed = -inf

    @property
    def waits(self) -> bool:
        """Whether an interactive request waits for admission."""
        return self.waiting > 0

    @property
    def shown(self) -> float | str | None:
        """The target for display: a number for the median, else a text such as "p95 3"; None without a target."""
        return str(self.told) if self._is_tail else self.target

    @property
    def ratio(self) -> float:
        """Return the latency divided by the latency of an idle engine, at the percentile of the target."""
        if not self._is_tail or not self._seen:
            return self._smoothed
        assert self.told is not None
        ordered = sorted(self._seen)
        return ordered[min(len(ordered) - 1, len(ordered) * self.told.percentile // 100)]

    def people_there(self, now: float) -> bool:
        quiet = min(QUIET_SECONDS, max(SHORT_QUIET_SECONDS, GAPS * self._gap))
        return self.active > 0 or now - self._asked < quiet

    def limit(self, now: float) -> int | None:
        """Return the largest number of lines that may be in flight; None for no limit."""
        if self.target is None:
            return None
        if not self.people_there(now):
            if self._limit is not None:
                self._kept = self._limit if self._busy[0] else 0.0  # without lines it was not tried
                self._limit, self.reason = None, ""
            return None
        if self._limit is None:
            return None
        if not self._limit and now - self._changed < MEASURE_SECONDS:
            return 0
        return max(1, round(self._limit or self._busy[0] * FIRST_PART))

    def give_up(self, reason: str) -> None:
        self.reason = f"the latency target is given up: {reason}"

    def began(self, now: float, lines: int) -> bool:
        """Note that an interactive request has come while ``lines`` lines were in flight. Returns True if it is the
        first after a pause: from now on there is a limit."""
        gap = now - self._came
        if gap < QUIET_SECONDS:  # else they came back
            self._gap += (LEARN if gap < self._gap else 2 * LEARN) * (gap - self._gap)
        self._came = now
        self.waiting += 1
        self.active += 1
        comes = self.target is not None and self._limit is None
        if comes:
            if lines > FEW and not self._busy[0]:
                self._busy = lines, 0.0
            self._limit = self._kept or self._first()
            self._changed = now
        self._asked = now
        return comes

    def _first(self) -> float:
        """Return the first limit after a pause: 0 if the pace of an idle engine must still be measured. It is assumed
        that the pace grows in proportion to the lines."""
        lines, pace = self._busy
        if not self.pace.certain:
            return 0.0
        if not pace or self.target is None:
            return max(1.0, lines * FIRST_PART)
        target = max(self.target / TAIL, 1 + LEARN) if self._is_tail else self.target
        share = (target - 1) / max(pace / self.pace.idle - 1, target - 1)
        return max(1.0, COMFORT * share * lines)

    def admitted(self) -> None:
        """Note that the engine has begun with an interactive request."""
        self.waiting -= 1

    def ended(self, now: float) -> None:
        self.active -= 1
        self._asked = now

    def learn_line(self, seconds: float, tokens: int, beside: int) -> None:
        """Note that a line was answered. At its start and at its end, at most ``beside`` other requests were in
        flight."""
        if tokens:
            if not self.pace.certain:
                self.pace.learn(seconds, tokens, beside, beside)
            if beside > FEW:
                self._busy = beside, seconds / (tokens + OVERHEAD_TOKENS)

    def answered(self, seconds: float, tokens: int, before: int, lines: int, now: float) -> None:
        """Note that an interactive request was answered. ``before``: lines in flight at its start; ``lines``: lines in
        flight now."""
        most = max(before, lines)
        self.pace.learn(seconds, tokens, most, most + self.active)
        if most > FEW and not self._busy[0]:
            self._busy = most, seconds / (tokens + OVERHEAD_TOKENS)
        if not self.pace.idle:
            return
        ratio = seconds / (self.pace.idle * (tokens + OVERHEAD_TOKENS))
        self._smoothed = ratio if not self._smoothed else self._smoothed + LEARN * (ratio - self._smoothed)
        self._seen.append(ratio)
        limit, target = self._limit, self.target
        if limit is None or target is None or not self.pace.certain:
            return
        self._calm = self._calm + 1 if ratio < COMFORT * target else 0
        if not limit:
            self._limit = self._first()
            self._changed = now
        elif ratio > (TAIL_FAR if self._is_tail else FAR) * target:
            if most > limit * OVER or now - self._changed < seconds / 2:
                return  # it was slow because of lines that started before the limit
            self._limit = max(1.0, min(limit, max(lines, 1)) * max(LOWER, AIM * target / ratio))
            self._changed = now
        elif ratio > AIM * target:
            if most <= limit * OVER:
                self._limit = max(1.0, limit * (1 - self._lower))
        elif most >= COMFORT * limit:
            self.reason = ""
            if self._calm >= self._patience:
                self._limit = limit * RAISE + 0.5
                self._calm = 0
            else:
                self._limit = limit * (1 + self._raise)

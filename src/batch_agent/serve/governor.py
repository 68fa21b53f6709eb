"""How many lines may be in flight while people use the same engines. Pure: no await, no clock.

A step of an engine takes longer the more requests are in its batch. So the latency of an interactive request grows with
the lines in flight, even if it never waits. The target is a multiple of the latency on an idle engine. Requests differ
in length; so the latency of one is compared with that of an idle engine for as many tokens.

While people are there, an answer that took longer than the target lowers the limit in proportion, and answers well
below it raise the limit. When no request has come for a while there is no limit; the one that met the target last is
where it begins when people return.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

QUIET_SECONDS = 5.0  # without an interactive request after which lines fill the engine again
FEW = 2  # requests in flight that leave an engine almost idle
LEARN = 0.2  # the weight of the latest answer
COMFORT = 0.8  # part of the target below which more lines are tried
RAISE = 1.08
LOWER = 0.5  # the limit is never lowered more than this by one answer
FIRST_PART = 0.25  # of the lines in flight, when people come for the first time
OVERHEAD_TOKENS = 8.0  # the time before the first token, in tokens


@dataclass(slots=True)
class TokenPace:
    """Seconds per token of an answer. ``idle`` is that of an almost idle engine."""

    idle: float = 0.0
    certain: bool = False  # measured on an idle engine, and not only the best of a busy one

    def learn(self, seconds: float, tokens: float, beside: int) -> None:
        pace = seconds / (tokens + OVERHEAD_TOKENS)
        if beside <= FEW:
            self.idle = pace if not self.certain else self.idle + LEARN * (pace - self.idle)
            self.certain = True
        elif not self.certain and (not self.idle or pace < self.idle):
            self.idle = pace


class Governor:
    """``target`` is the multiple of the idle latency; None for no limit."""

    def __init__(self, target: float | None) -> None:
        self.target = target
        self.pace = TokenPace()
        self.waiting = 0  # interactive requests that wait for a slot, or for the engine to begin
        self.active = 0  # interactive requests that have not ended
        self.ratio = 0.0  # latency over that of an idle engine, smoothed
        self.reason = ""  # why the target is given up, for people
        self._limit: float | None = None
        self._kept = 0.0  # the limit when people were there last
        self._asked = -inf
        self._changed = -inf

    @property
    def waits(self) -> bool:
        """Return whether an interactive request waits for admission."""
        return self.waiting > 0

    def people_there(self, now: float) -> bool:
        return self.active > 0 or now - self._asked < QUIET_SECONDS

    def limit(self, now: float) -> int | None:
        """Return how many lines may be in flight; None: any number."""
        if self.target is None:
            return None
        if not self.people_there(now):
            if self._limit is not None:
                self._kept, self._limit, self.reason = self._limit, None, ""
            return None
        return None if self._limit is None else max(1, round(self._limit))

    def give_up(self, reason: str) -> None:
        self.reason = f"the latency target is given up: {reason}"

    def began(self, now: float, lines: int) -> None:
        """An interactive request came while ``lines`` were in flight."""
        self.waiting += 1
        self.active += 1
        if self.target is not None and self._limit is None:
            self._limit = self._kept or max(1.0, lines * FIRST_PART)
            self._changed = now
        self._asked = now

    def admitted(self) -> None:
        """The engine has begun with an interactive request."""
        self.waiting -= 1

    def ended(self, now: float) -> None:
        self.active -= 1
        self._asked = now

    def learn_line(self, seconds: float, tokens: int, beside: int) -> None:
        """A line was answered, with ``beside`` other requests in flight."""
        if not self.pace.certain and tokens:
            self.pace.learn(seconds, tokens, beside)

    def answered(self, seconds: float, tokens: int, lines: int, now: float) -> None:
        """An interactive request was answered, with ``lines`` in flight."""
        self.pace.learn(seconds, tokens, lines + self.active - 1)
        if not self.pace.idle:
            return
        ratio = seconds / (self.pace.idle * (tokens + OVERHEAD_TOKENS))
        self.ratio = ratio if not self.ratio else self.ratio + LEARN * (ratio - self.ratio)
        limit, target = self._limit, self.target
        if limit is None or target is None:
            return
        if ratio > target and now - self._changed >= seconds / 2:  # else it still pays for the limit before
            self._limit = max(1.0, min(limit, max(lines, 1)) * max(LOWER, target / ratio))
            self._changed = now
        elif ratio < COMFORT * target and lines >= COMFORT * limit:
            self._limit = limit * RAISE + 0.5
            self.reason = ""

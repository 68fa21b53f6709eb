"""How many tokens an engine's KV cache holds, as far as its reports and our own answers show it. Pure.

An engine that reports its size is believed. Its gauges are up to 2 s late, and 18 s after a cold start, so no gauge is
evidence about the size. Two things are, because they cannot be late:

- Cached tokens of our answers. A context that was evicted although it fitted shows that other clients use a part. A
  context that was found although the contexts of answers since its last turn exceed the size shows that the cache is
  larger than reported: a store behind the engine, such as LMCache, is in no metric.
- The engine's count of finished requests. If it counts less than half of ours over a span that is longer than its lag,
  the report is that of one of several replicas behind one address. Then it is unknown where a context is. A count that
  has not moved yet may be that of a cold start, whose lag is longer.

Without a report, the size is learnt from evictions.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from batch_agent.scheduler.engine_load import Load
from batch_agent.scheduler.numbers import N


class _Mark(NamedTuple):
    """Counts at the time of a reading. ``ours``: number of our requests that were answered. ``counted``: number of
    requests that had finished by the engine's count."""

    at: float
    ours: int
    in_flight: int
    counted: int


class CacheSize:
    """``capacity`` in tokens; None if unknown. ``margin``: the part of it that our contexts may use."""

    def __init__(self) -> None:
        self.reported: int | None = None  # by the engine
        self.learnt: int | None = None  # from evictions
        self.margin = 1.0
        self.tells_cached = False  # its answers say how many tokens were cached
        self.is_one_of_several = False  # the report is that of one replica
        self.queue = 0  # requests in the engine's queue at the last reading
        self._larger = 0  # contexts that were found although they exceed the reported size
        self._marks: deque[_Mark] = deque()
        self._preemptions: int | None = None

    @property
    def is_believed(self) -> bool:
        """Whether the reported size is used."""
        return self.reported is not None and not self.is_one_of_several and self._larger < N.several

    @property
    def capacity(self) -> int | None:
        if self.is_one_of_several:
            return None
        return self.reported if self.is_believed else self.learnt

    @property
    def conclusion(self) -> tuple[str, str]:
        """Return the name of the rule that decides the size, and its evidence; two empty texts while nothing is
        known."""
        if self.is_one_of_several:
            return "the report is that of one of several replicas", "the engine counts less than half of our requests"
        if self.reported is not None and self._larger >= N.several:
            return (
                "the cache is larger than reported",
                f"{self._larger} contexts beyond {self.reported} tokens were cached",
            )
        if self.reported is not None:
            return "the engine's report is believed", f"{self.reported} tokens"
        return ("", "") if self.learnt is None else ("the size is learnt from evictions", f"{self.learnt} tokens")

    def read(self, load: Load, answers: int, in_flight: int, now: float) -> None:
        """Learn from a reading. ``answers``: the server's answers to our requests so far."""
        self.queue = load.waiting
        # A memory behind the cache, of unknown size, keeps what the cache evicts.
        self._report(None if load.offloads else load.kv_tokens or None)
        if self._preemptions is not None and load.preemptions is not None and load.preemptions > self._preemptions:
            self._shrink()
        self._preemptions = load.preemptions
        if load.finished is not None:
            self._compare(_Mark(now, answers, in_flight, load.finished))

    def unread(self) -> None:
        """Forget the reported size: the engine does not report any more."""
        self._report(None)

    def _report(self, tokens: int | None) -> None:
        if tokens is None and self.reported is not None:
            self.learnt, self.margin = None, 1.0
        self.reported = tokens

    def _compare(self, latest: _Mark) -> None:
        """Compare the engine's count of requests with ours, over a span that is longer than its lag."""
        marks = self._marks
        if marks and latest.counted < marks[-1].counted:  # it has restarted
            marks.clear()
        marks.append(latest)
        while len(marks) > 2 and marks[1].at <= latest.at - 3 * N.longest_lag:
            marks.popleft()
        first = marks[0]
        lag = N.usual_lag if latest.counted > first.counted else N.longest_lag
        # What was answered before the lag began, and sent after the span began, must be counted.
        settled = next((mark for mark in reversed(marks) if mark.at <= latest.at - lag), first)
        certain = settled.ours - first.ours - first.in_flight
        if certain >= N.learnt:
            self.is_one_of_several = latest.counted - first.counted < N.mostly * certain

    def found(self, distance: int, certain: int) -> None:
        """Learn that a context was still in the cache. ``distance``: tokens of all contexts used since its last turn,
        its own included. ``certain``: the part of these that belongs to complete answers."""
        self.margin = min(1.0, self.margin + N.margin_gain)
        if self.reported is not None:
            self._larger += certain > N.beyond * self.reported
        elif self.learnt is not None and distance > N.full * self.learnt:
            self.learnt = max(distance, round(N.learnt_gain * self.learnt))

    def evicted(self, distance: int) -> None:
        """Learn that a context was no longer in the cache."""
        if self.is_believed:
            if distance < N.full * self.margin * (self.reported or 0):
                self._shrink()
        else:
            least = 0 if self.learnt is None else round(N.learnt_loss * self.learnt)
            self.learnt = distance if self.learnt is None else max(min(self.learnt, distance), least)

    def _shrink(self) -> None:
        self.margin = max(N.small, self.margin * N.margin_loss)

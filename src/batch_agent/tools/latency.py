"""What a tool's calls came to: counts, and latencies in constant memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

# Each bucket is 2 % wider than the one before, so a quantile is off by at most 1 %.
_LOG_STEP = math.log(1.02)
_SHORTEST = 1e-6
# Identical calls of an undeclared tool are recognised among this many different ones; a bound on memory, not on truth:
# beyond it the number of calls that could have been saved is a lower bound.
_REMEMBERED = 100_000
# Reasons that are kept at once, and how much of each. The least frequent gives way to a new one, so what fails often
# stays, and its count may miss what came while it was not among them.
REASONS = 16
REASON_CHARACTERS = 200


class Latency:
    """A histogram of seconds."""

    __slots__ = ("_buckets", "_count")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, _SHORTEST)) / _LOG_STEP)] += 1
        self._count += 1

    def quantile(self, share: float) -> float | None:
        """The time within which ``share`` of the calls were done; None without any."""
        wanted = max(1, math.ceil(share * self._count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return math.exp(bucket * _LOG_STEP)
        return None


@dataclass(frozen=True, slots=True)
class ToolStatistics:
    """One tool in one run. Latencies are of real runs, in seconds, without waiting for a rate limit or a thread."""

    name: str
    calls: int  # asked for by models
    runs: int  # really begun
    shared: int  # answered by a run another agent had begun
    cache_hits: int
    failures: int  # runs that failed, and calls whose arguments did not fit
    failure_reasons: tuple[tuple[str, int], ...]  # the most frequent words of failures, and how often; most often first
    p50: float | None
    p75: float | None
    p99: float | None
    saveable: int  # runs that declaring an undeclared tool would have saved
    prewarmed: int = 0  # runs begun because an earlier run made the same call
    prewarm_hits: int = 0  # of those, the ones that a model then asked for
    prewarm_misses: int = 0  # calls of a cacheable tool that had to run, because nothing had been begun or kept

    @property
    def advice(self) -> str:
        """A sentence for the run's summary, or nothing."""
        if not self.saveable:
            return ""
        return (
            f"{self.name} ran {self.saveable} times more than needed: identical calls. If it only reads, say so with "
            f"Tool.define(cacheable=True), or effect='read' when answers go stale."
        )


class Tally:
    """The running count behind ToolStatistics."""

    __slots__ = (
        "_reasons",
        "_seen",
        "cache_hits",
        "calls",
        "failures",
        "latency",
        "prewarm_hits",
        "prewarm_misses",
        "prewarmed",
        "runs",
        "saveable",
        "shared",
    )

    def __init__(self) -> None:
        self.calls = self.runs = self.shared = self.cache_hits = self.failures = self.saveable = 0
        self.prewarmed = self.prewarm_hits = self.prewarm_misses = 0
        self.latency = Latency()
        self._seen: set[int] = set()
        self._reasons: Counter[str] = Counter()

    def fail(self, reason: str) -> None:
        self.failures += 1
        reason = " ".join(reason[: 2 * REASON_CHARACTERS].split())[:REASON_CHARACTERS]
        if reason not in self._reasons and len(self._reasons) == REASONS:
            del self._reasons[min(self._reasons, key=self._reasons.__getitem__)]
        self._reasons[reason] += 1

    def compare(self, key: str) -> None:
        """Notes a call that runs only because its tool is undeclared."""
        mark = hash(key)
        if mark in self._seen:
            self.saveable += 1
        elif len(self._seen) < _REMEMBERED:
            self._seen.add(mark)

    def statistics(self, name: str) -> ToolStatistics:
        return ToolStatistics(
            name=name,
            calls=self.calls,
            runs=self.runs,
            shared=self.shared,
            cache_hits=self.cache_hits,
            failures=self.failures,
            failure_reasons=tuple(self._reasons.most_common()),
            p50=self.latency.quantile(0.50),
            p75=self.latency.quantile(0.75),
            p99=self.latency.quantile(0.99),
            saveable=self.saveable,
            prewarmed=self.prewarmed,
            prewarm_hits=self.prewarm_hits,
            prewarm_misses=self.prewarm_misses,
        )

"""Statistics of a tool's calls: counts, and latencies in constant memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

# Each bucket is 2 % wider than the one before, so the error of a quantile is at most 1 %.
_LOG_STEP = math.log(1.02)
_SHORTEST = 1e-6
# Different calls of an undeclared tool that are remembered to recognise identical ones. This limits memory: with more
# calls, the number of calls that could have been saved is a lower bound.
_REMEMBERED = 100_000
# Reasons that are kept, and characters of each. A new reason replaces the least frequent one. Frequent reasons stay,
# but their counts may be too low.
REASONS = 16
REASON_CHARACTERS = 200


class Latency:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, _SHORTEST)) / _LOG_STEP)] += 1
        self._count += 1

    def quantile(self, share: float) -> float | None:
        """Return the time within which ``share`` of the calls ended; None without calls."""
        wanted = max(1, math.ceil(share * self._count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return math.exp(bucket * _LOG_STEP)
        return None


@dataclass(frozen=True, slots=True)
class ToolStatistics:
    """Statistics of one tool in one run. Latencies are seconds of runs, without waits for a rate limit or a thread."""

    name: str
    calls: int  # calls of models
    runs: int  # runs that were started
    shared: int  # calls answered by a run that another agent had started
    cache_hits: int
    failures: int  # failed runs, and calls with invalid arguments
    failure_reasons: tuple[tuple[str, int], ...]  # the most frequent messages of failures, with their counts
    p50: float | None
    p75: float | None
    p99: float | None
    saveable: int  # runs that declaring an undeclared tool would have saved
    prewarmed: int = 0  # runs started because an earlier run made the same call
    prewarm_hits: int = 0  # prewarmed runs whose call a model then made
    prewarm_misses: int = 0  # calls of a cacheable tool that were neither prewarmed nor cached

    @property
    def advice(self) -> str:
        """Return a sentence for the run's summary, or ""."""
        if not self.saveable:
            return ""
        times = "once" if self.saveable == 1 else f"{self.saveable:,} times"
        return (
            f"{self.name} ran {times} with arguments that it had run with before. If it only reads, declare it "
            f"with Tool.define(cacheable=True), or with effect='read' if its results change."
        )


class ToolTally:
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
        """Count a call that runs only because its tool is undeclared."""
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

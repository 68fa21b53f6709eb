"""Two runs on the same gold rows: what changed, and whether chance explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batch_agent.trust.intervals import LEVEL, Interval, binomial_tail


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of this result if chance alone changed rows: ``better`` rows became right and
    ``worse`` rows became wrong."""
    changed = better + worse
    return min(1.0, 2 * binomial_tail(max(better, worse), changed, 0.5))


def difference(better: int, worse: int, rows: int) -> Interval:
    """Return the two-sided interval of the difference of two accuracies on the same rows (Tango's score interval;
    approximate)."""
    if not rows:
        return Interval(-1.0, 1.0)
    return Interval(-_upper(worse, better, rows), _upper(better, worse, rows))


def _upper(better: int, worse: int, rows: int) -> float:
    """Return the largest difference that the score test does not reject, by bisection: the test is monotonic."""
    critical = 1.959963984540054  # of the normal distribution, two-sided at 95 %
    low, high = (better - worse) / rows, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _score(better, worse, rows, middle) > -critical:
            low = middle
        else:
            high = middle
    return low if high < 1.0 or low < 1 - 1e-12 else 1.0


def _score(better: int, worse: int, rows: int, delta: float) -> float:
    """Return the score statistic of a difference: (estimate - ``delta``) / standard error at ``delta``."""
    a = 2 * rows
    b = -better - worse + (2 * rows - better + worse) * delta
    c = -worse * delta * (1 - delta)
    share_worse = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = rows * (2 * share_worse + delta * (1 - delta))
    gap = better - worse - rows * delta
    return gap / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, gap)


def holm(values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number (Holm), in the given order."""
    corrected, largest = [1.0] * len(values), 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = largest
    return corrected


def smallest_visible(changed: int, rows: int, tests: int = 1) -> float | None:
    """Return the smallest difference that the exact test can show with this number of changed rows, or with the fewest
    changed rows that can show one. None if no difference of these rows can be shown."""
    level = (1 - LEVEL) / tests
    fewest = next(count for count in range(1, 200) if mcnemar(count, 0) <= level)
    changed = max(changed, fewest)
    if changed > rows:
        return None
    for better in range((changed + 1) // 2, changed + 1):
        if mcnemar(better, changed - better) <= level:
            return (2 * better - changed) / rows
    return None

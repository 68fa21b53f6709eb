"""Totals of a table from a random sample of its rows, such as cost and time: bootstrap-t intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from batch_agent.trust.intervals import LEVEL, Interval, t_quantile

DRAWS = 2_000
MOST_DRAWN = 2_000_000  # values drawn in all: larger samples are drawn less often
LARGE = 5_000  # from this size on, Student's t interval is as good
SEED = 20_261  # a fixed one, so that the same rows give the same interval


class Total(NamedTuple):
    """``value``: the estimate for the whole table. ``interval``: two-sided; ``at_most``: one-sided. Both are
    approximate."""

    value: float
    interval: Interval
    at_most: float


def total(values: Sequence[float], population: int) -> Total:
    """Return the total over a table of ``population`` rows, from a random sample of at least two of them. The interval
    cannot take rare rows into account that were not drawn, even if they are much dearer."""
    count, seen = len(values), math.fsum(values)
    if count >= population:
        return Total(seen, Interval(seen, seen), seen)
    mean, spread = _moments(values)
    estimate = population * mean
    if count < 2:
        return Total(estimate, Interval(seen, math.inf), math.inf)
    error = population * spread / math.sqrt(count) * math.sqrt(1 - count / population)
    tail = (1 - LEVEL) / 2
    if count >= LARGE:
        two, one = t_quantile(1 - tail, count - 1), t_quantile(LEVEL, count - 1)
        low = -two
        high = two
        most = one
    else:
        draws = _studentized(values, mean)
        # The quantiles change sides: a draw far below the truth means that the truth is far above.
        low = -_quantile(draws, 1 - tail)
        high = -_quantile(draws, tail)
        most = -_quantile(draws, 1 - LEVEL)
    # The rows that were seen are known, and no row costs less than nothing.
    floor = seen if min(values) >= 0 else -math.inf
    return Total(
        estimate,
        Interval(max(floor, estimate + low * error), max(floor, estimate + high * error)),
        max(floor, estimate + most * error),
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _studentized(values: Sequence[float], mean: float) -> list[float]:
    """Return the t statistics of samples drawn from the sample, in order."""
    draw, count = random.Random(SEED), len(values)
    statistics = []
    for _ in range(max(200, min(DRAWS, MOST_DRAWN // count))):
        found, spread = _moments(draw.choices(values, k=count))
        if spread > 0:
            statistics.append((found - mean) / (spread / math.sqrt(count)))
        elif found != mean:
            statistics.append(math.copysign(math.inf, found - mean))
        else:
            statistics.append(0.0)
    return sorted(statistics)


def _quantile(ordered: Sequence[float], level: float) -> float:
    return ordered[min(len(ordered) - 1, int(level * len(ordered)))]

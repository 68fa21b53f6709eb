"""Exact intervals and bounds of shares, on ``math.lgamma`` and bisection.

An interval is two-sided at 95 %. A bound is one-sided at 95 %: ``at_least`` and ``at_most``. Both are exact: they cover
the truth with at least that probability, whatever the truth is (Clopper and Pearson; for a sample of a finite table,
the same with the hypergeometric distribution). The exceptions say "approximate".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

LEVEL = 0.95
FEWEST_GROUPS = 20  # below this number the intervals for groups cover too little
_TINY = 1e-300


class Interval(NamedTuple):
    low: float
    high: float


class Share(NamedTuple):
    """``right`` of ``rows``, with the two-sided interval of the true share and its one-sided bounds."""

    right: int
    rows: int
    interval: Interval
    at_least: float
    at_most: float


def clopper_pearson(right: float, rows: float, level: float = LEVEL) -> Interval:
    """Return the exact two-sided interval of a share. ``rows`` may be a fraction: for grouped rows it is their
    effective number."""
    tail = (1 - level) / 2
    return Interval(_low(right, rows, tail), 1 - _low(rows - right, rows, tail))


def at_least(right: float, rows: float, level: float = LEVEL) -> float:
    """Return the exact one-sided lower bound of a share."""
    return _low(right, rows, 1 - level)


def at_most(right: float, rows: float, level: float = LEVEL) -> float:
    """Return the exact one-sided upper bound of a share."""
    return 1 - _low(rows - right, rows, 1 - level)


def share(right: int, rows: int, population: int | None = None) -> Share:
    """Return a share with its interval and bounds. ``population``: number of rows of the table from which these rows
    were drawn at random; the interval is then that of the share in the table."""
    if population is None:
        return Share(right, rows, clopper_pearson(right, rows), at_least(right, rows), at_most(right, rows))
    bounds = finite(right, rows, population, 2 * LEVEL - 1)  # each end of it is a one-sided bound
    return Share(right, rows, finite(right, rows, population), bounds.low, bounds.high)


def finite(right: int, rows: int, population: int, level: float = LEVEL) -> Interval:
    """Return the exact two-sided interval of the share in a table of ``population`` rows, of which ``rows`` were drawn
    without replacement."""
    tail = (1 - level) / 2
    if not population:
        return Interval(0.0, 1.0)
    fewest_wrong = _fewest(rows - right, rows, population, tail)
    return Interval(_fewest(right, rows, population, tail) / population, (population - fewest_wrong) / population)


def f1_of(jaccard: float) -> float:
    """Return F1 from J, the share of true positives among the rows that have the class or got it: F1 = 2J/(1+J)."""
    return 2 * jaccard / (1 + jaccard)


def grouped(groups: Iterable[tuple[int, int]]) -> Share | None:
    """Return the share of rows that were collected by groups, each given as (right, rows). None below 20 groups.

    Korn and Graubard: the effective number of rows follows from the variance between groups; Clopper and Pearson is
    then applied to it. If all rows are right or all are wrong, the variance says nothing, and the effective number of
    rows is the number of groups.
    """
    counts = [each for each in groups if each[1]]
    if (number := len(counts)) < FEWEST_GROUPS:
        return None
    right = sum(each[0] for each in counts)
    rows = sum(each[1] for each in counts)

    def effective(level: float) -> float:
        if right in (0, rows):
            return float(number)
        accuracy = right / rows
        spread = sum((good - accuracy * size) ** 2 for good, size in counts)
        variance = number / (number - 1) * spread / rows**2
        if variance == 0:
            return float(rows)
        ratio = t_quantile(level, rows - 1) / t_quantile(level, number - 1)
        return min(float(rows), accuracy * (1 - accuracy) / variance * ratio**2)

    two, one = effective(1 - (1 - LEVEL) / 2), effective(LEVEL)
    part = right / rows
    return Share(right, rows, clopper_pearson(part * two, two), at_least(part * one, one), at_most(part * one, one))


class Median(NamedTuple):
    """A median, with the two-sided interval and the one-sided upper bound of the true median."""

    value: float
    interval: Interval
    at_most: float


def median(values: Sequence[float]) -> Median:
    """Return the median with exact bounds from order statistics. Values may be infinite, and none is negative."""
    ordered, count = sorted(values), len(values)
    if not count:
        return Median(math.nan, Interval(0.0, math.inf), math.inf)
    middle = ordered[count // 2] if count % 2 else _between(ordered[count // 2 - 1], ordered[count // 2])
    two, one = _depth(count, (1 - LEVEL) / 2), _depth(count, 1 - LEVEL)
    low = ordered[two - 1] if two else 0.0
    return Median(
        middle, Interval(low, ordered[count - two] if two else math.inf), ordered[count - one] if one else math.inf
    )


def _between(low: float, high: float) -> float:
    return high if math.isinf(high) else (low + high) / 2


def _depth(count: int, tail: float) -> int:
    """Return the largest rank r with P(binomial(count, 1/2) < r) <= tail; 0 if there is none."""
    low, high = 0, count // 2 + 1
    while high - low > 1:
        middle = (low + high) // 2
        # P(X <= middle - 1) = I_(1/2)(count - middle + 1, middle)
        if _beta(0.5, count - middle + 1, middle) <= tail:
            low = middle
        else:
            high = middle
    return low


def binomial_tail(least: int, count: int, probability: float) -> float:
    """Return P(X >= least) for X ~ binomial(count, probability)."""
    if least <= 0:
        return 1.0
    return 0.0 if least > count else _beta(probability, least, count - least + 1)


def t_quantile(level: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, for a level of at least a half."""

    def below(value: float) -> float:
        return 1 - _beta(freedom / (freedom + value * value), freedom / 2, 0.5) / 2

    high = 1.0
    while below(high) < level:
        high *= 2
    return _bisect(lambda value: below(value) >= level, 0.0, high)


@lru_cache(4096)
def _low(right: float, rows: float, tail: float) -> float:
    """Return the smallest share with P(at least ``right`` of ``rows``) >= tail."""
    if right <= 0:
        return 0.0
    other = rows - right + 1
    return _bisect(lambda value: _beta(value, right, other) >= tail, 0.0, 1.0)


def _bisect(reached: Callable[[float], bool], low: float, high: float) -> float:
    """Return the point between ``low`` and ``high`` from which on a monotonic condition is true."""
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return middle
        if reached(middle):
            high = middle
        else:
            low = middle
        if high - low <= 1e-13 * high:
            return low


def _beta(value: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_value(a, b), by its continued fraction (Lentz)."""
    if value <= 0:
        return 0.0
    if value >= 1:
        return 1.0
    if value > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - value, b, a)
    scale = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(value) + b * math.log1p(-value)
    )
    c, d = 1.0, 1 - (a + b) * value / (a + 1)
    d = 1 / (d if abs(d) > _TINY else _TINY)
    fraction = d
    for step in range(1, 100_000):
        for factor in (
            step * (b - step) * value / ((a + 2 * step - 1) * (a + 2 * step)),
            -(a + step) * (a + b + step) * value / ((a + 2 * step) * (a + 2 * step + 1)),
        ):
            d = 1 + factor * d
            d = 1 / (d if abs(d) > _TINY else _TINY)
            c = 1 + factor / (c if abs(c) > _TINY else _TINY)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return scale * fraction / a


@lru_cache(4096)
def _fewest(right: int, rows: int, population: int, tail: float) -> int:
    """Return the smallest number of right rows in the table with P(at least ``right`` of ``rows``) > tail."""
    low, high = right - 1, population - (rows - right)  # the answer is above ``low``, and at most ``high``
    while high - low > 1:
        middle = (low + high) // 2
        if hypergeometric_tail(right, rows, middle, population) > tail:
            high = middle
        else:
            low = middle
    return max(high, 0)


def hypergeometric_tail(least: int, rows: int, good: int, population: int) -> float:
    """Return P(X >= least) for the number of good rows among ``rows`` drawn from a table with ``good`` good ones."""
    smallest, largest = max(0, rows - (population - good)), min(rows, good)
    if least <= smallest:
        return 1.0
    if least > largest:
        return 0.0
    if least * population < rows * good:  # below the mean: the other tail is shorter, and exact enough
        return 1 - _sum_down(least - 1, rows, good, population, smallest)
    total = 0.0
    term = _hypergeometric(least, rows, good, population)
    found = least
    while found <= largest:
        total += term
        if term <= total * 1e-17:
            break
        term *= (good - found) * (rows - found) / ((found + 1) * (population - good - rows + found + 1))
        found += 1
    return min(total, 1.0)


def _sum_down(most: int, rows: int, good: int, population: int, smallest: int) -> float:
    total = 0.0
    term = _hypergeometric(most, rows, good, population)
    found = most
    while found >= smallest:
        total += term
        if term <= total * 1e-17 or found == smallest:
            break
        term *= found * (population - good - rows + found) / ((good - found + 1) * (rows - found + 1))
        found -= 1
    return min(total, 1.0)


def _hypergeometric(found: int, rows: int, good: int, population: int) -> float:
    return math.exp(_choose(good, found) + _choose(population - good, rows - found) - _choose(population, rows))


def _choose(count: int, chosen: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)

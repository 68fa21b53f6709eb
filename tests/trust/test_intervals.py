"""Exact intervals, against scipy and against their own promise: the coverage, computed and not sampled."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from batch_agent.trust.intervals import (
    Interval,
    Share,
    at_least,
    at_most,
    binomial_tail,
    clopper_pearson,
    finite,
    grouped,
    hypergeometric_tail,
    median,
    share,
    t_quantile,
)


def test_what_fifty_rows_show() -> None:
    assert at_most(0, 50) == pytest.approx(0.058, abs=5e-4)
    assert clopper_pearson(0, 50).high == pytest.approx(0.071, abs=5e-4)
    assert clopper_pearson(46, 50).low == pytest.approx(0.808, abs=5e-4)
    assert at_least(46, 50) == pytest.approx(0.826, abs=5e-4)


@pytest.mark.parametrize(
    ("right", "rows"), [(0, 1), (1, 1), (3, 7), (46, 50), (500, 1000), (999_999, 1_000_000), (123_456, 1_000_000)]
)
def test_the_interval_of_a_share_is_that_of_scipy(stats: Any, right: int, rows: int) -> None:
    found = clopper_pearson(right, rows)
    low = stats.beta.ppf(0.025, right, rows - right + 1) if right else 0.0
    high = stats.beta.ppf(0.975, right + 1, rows - right) if right < rows else 1.0
    assert found == pytest.approx((low, high), abs=1e-11)


def test_tails_are_those_of_scipy(stats: Any) -> None:
    draw = random.Random(1)
    for _ in range(300):
        population = draw.randint(1, 300)
        good, rows = draw.randint(0, population), draw.randint(0, population)
        least = draw.randint(0, rows + 1)
        expected = stats.hypergeom.sf(least - 1, population, good, rows)
        assert hypergeometric_tail(least, rows, good, population) == pytest.approx(expected, abs=1e-10)
        part = draw.random()
        assert binomial_tail(least, rows, part) == pytest.approx(stats.binom.sf(least - 1, rows, part), abs=1e-10)
    assert t_quantile(0.975, 19) == pytest.approx(stats.t.ppf(0.975, 19))
    assert t_quantile(0.95, 1) == pytest.approx(stats.t.ppf(0.95, 1))


@pytest.mark.parametrize("rows", [1, 20, 50, 200])
@pytest.mark.parametrize("truth", [0.5, 0.8, 0.98, 0.999])
def test_the_interval_covers_the_truth_with_95_percent(stats: Any, rows: int, truth: float) -> None:
    chances = [stats.binom.pmf(right, rows, truth) for right in range(rows + 1)]
    both = [clopper_pearson(right, rows) for right in range(rows + 1)]
    assert math.fsum(p for p, each in zip(chances, both, strict=True) if each.low <= truth <= each.high) >= 0.95
    assert math.fsum(p for right, p in enumerate(chances) if at_least(right, rows) <= truth) >= 0.95
    assert math.fsum(p for right, p in enumerate(chances) if at_most(right, rows) >= truth) >= 0.95


@pytest.mark.parametrize("good", [0, 1, 37, 90, 99, 100])
def test_the_interval_of_a_finite_table_covers_it_and_ends_with_the_count(stats: Any, good: int) -> None:
    chances = [stats.hypergeom.pmf(right, 100, good, 40) for right in range(41)]
    both = [finite(right, 40, 100) for right in range(41)]
    covered = [p for p, each in zip(chances, both, strict=True) if each.low <= good / 100 <= each.high]
    assert math.fsum(covered) >= 0.95
    assert finite(good, 100, 100) == Interval(good / 100, good / 100)


def test_a_finite_table_of_a_million_rows_is_like_an_endless_one() -> None:
    assert finite(900, 1000, 1_000_000) == pytest.approx(clopper_pearson(900, 1000), abs=2e-5)


def test_no_rows_show_nothing() -> None:
    assert share(0, 0) == Share(0, 0, Interval(0.0, 1.0), 0.0, 1.0)
    assert share(0, 0, 10) == Share(0, 0, Interval(0.0, 1.0), 0.0, 1.0)


def test_groups_widen_the_interval_and_few_of_them_have_none() -> None:
    alike = [(10, 10)] * 15 + [(0, 10)] * 5
    found = grouped(alike)
    assert found is not None and (found.right, found.rows) == (150, 200)
    naive = clopper_pearson(150, 200)
    assert found.interval.low < naive.low - 0.1 and found.interval.high > naive.high + 0.1
    assert grouped(alike[:19]) is None
    all_right = grouped([(10, 10)] * 20)
    assert all_right is not None and all_right.at_least == pytest.approx(at_least(20, 20))


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 50, 101])
def test_the_bounds_of_a_median_cover_it(stats: Any, rows: int) -> None:
    """The truth is the median of a uniform distribution; the number of values below it is binomial."""
    found = median([float(place) for place in range(1, rows + 1)])
    low, high = found.interval
    ranks = range(rows + 1)  # of values below the true median
    covered = [below for below in ranks if (low == 0 or below >= low) and (math.isinf(high) or below < high)]
    assert math.fsum(stats.binom.pmf(below, rows, 0.5) for below in covered) >= 0.95
    above = [below for below in ranks if math.isinf(found.at_most) or below < found.at_most]
    assert math.fsum(stats.binom.pmf(below, rows, 0.5) for below in above) >= 0.95


def test_a_failed_row_has_an_infinite_error_in_the_median() -> None:
    assert median([1.0, math.inf, math.inf]).value == math.inf
    assert median([1.0, 2.0]).value == 1.5
    assert median([1.0, math.inf]).value == math.inf

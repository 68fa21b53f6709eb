"""Totals of a table from a random sample of it."""

from __future__ import annotations

import math
import random

from batch_agent.trust.totals import total


def test_the_interval_of_a_total_covers_a_skewed_one() -> None:
    draw, covered, times = random.Random(7), 0, 100
    for _ in range(times):
        table = [draw.lognormvariate(0, 1) for _ in range(2_000)]
        low, high = total(table[:50], len(table)).interval
        covered += low <= math.fsum(table) <= high
    assert covered / times > 0.90  # 0.94 expected; Student's t has 0.89


def test_a_table_that_was_seen_whole_is_summed() -> None:
    assert total([1.0, 2.0, 3.5], 3) == (6.5, (6.5, 6.5), 6.5)


def test_what_was_seen_is_the_least() -> None:
    found = total([0.0] * 49 + [100.0], 51)
    assert found.interval.low >= 100.0
    assert total([3.0], 10).interval == (3.0, math.inf)


def test_rows_that_cost_the_same_have_no_width() -> None:
    assert total([2.0] * 50, 1_000) == (2_000.0, (2_000.0, 2_000.0), 2_000.0)


def test_the_same_rows_give_the_same_interval() -> None:
    values = [random.Random(3).expovariate(1) for _ in range(40)]
    assert total(values, 400) == total(values, 400)

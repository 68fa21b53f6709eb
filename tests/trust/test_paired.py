"""Two runs on the same rows."""

from __future__ import annotations

from typing import Any

import pytest

from batch_agent.trust.paired import difference, holm, mcnemar, smallest_visible


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (6, 0), (9, 1), (30, 30), (400, 350)])
def test_mcnemars_test_is_the_exact_sign_test_of_the_rows_that_changed(stats: Any, better: int, worse: int) -> None:
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert mcnemar(better, worse) == pytest.approx(expected)


def test_the_paired_interval_is_symmetric_and_never_without_width() -> None:
    low, high = difference(9, 1, 100)
    assert (low, high) == pytest.approx((0.0226, 0.1541), abs=2e-4)
    assert difference(1, 9, 100) == pytest.approx((-high, -low))
    assert difference(0, 0, 100) == pytest.approx((-0.0370, 0.0370), abs=2e-4)
    assert difference(10, 0, 10).high == 1.0
    assert difference(0, 0, 0) == (-1.0, 1.0)


@pytest.mark.parametrize(("up", "down"), [(0.02, 0.02), (0.1, 0.04), (0.2, 0.05)])
def test_the_paired_interval_covers_the_true_difference(stats: Any, up: float, down: float) -> None:
    rows, covered = 50, 0.0
    for better in range(rows + 1):
        for worse in range(rows + 1 - better):
            chance = stats.multinomial.pmf([better, worse, rows - better - worse], rows, [up, down, 1 - up - down])
            if chance > 1e-9:
                low, high = difference(better, worse, rows)
                covered += chance * (low <= up - down <= high)
    assert covered > 0.93  # approximate, and said to be


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_the_smallest_difference_needs_six_rows_that_changed_the_same_way() -> None:
    assert smallest_visible(0, 5) is None
    assert smallest_visible(0, 100) == 0.06
    assert smallest_visible(10, 100) == 0.08  # nine against one
    assert smallest_visible(10, 100, tests=3) == 0.1

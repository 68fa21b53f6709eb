"""The bound that holds at every look, against exact sums over all ways in which rows can be drawn."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from batch_agent.trust.anytime import at_most, log_ratio, prior_b, refuted, rows_until


def chance_of_refuting(rows: int, bad: int, b: float, error: float) -> float:
    """Return the exact probability that a table with ``bad`` wrong rows is refuted at any look."""
    ways, refuted_ways = {0: 1.0}, 0.0  # by the number of wrong rows drawn so far
    for drawn in range(1, rows + 1):
        after: dict[int, float] = {}
        for wrong, chance in ways.items():
            left, bad_left = rows - drawn + 1, bad - wrong
            for found, part in ((wrong + 1, bad_left / left), (wrong, 1 - bad_left / left)):
                if part > 0:
                    after[found] = after.get(found, 0.0) + chance * part
        ways = {}
        for wrong, chance in after.items():
            if refuted(bad, wrong, drawn, rows, b, error):
                refuted_ways += chance
            else:
                ways[wrong] = chance
    return refuted_ways


def beta_binomial(count: int, n: int, a: int, b: int) -> Fraction:
    def beta(x: int, y: int) -> Fraction:
        return Fraction(math.factorial(x - 1) * math.factorial(y - 1), math.factorial(x + y - 1))

    return math.comb(n, count) * beta(count + a, n - count + b) / beta(a, b)


@pytest.mark.parametrize(("rows", "bad"), [(40, 3), (120, 6), (120, 30), (300, 13)])
def test_a_true_number_of_wrong_rows_is_refuted_at_any_look_with_at_most_the_promised_probability(
    rows: int, bad: int
) -> None:
    for b in (1, 10, 50):
        assert chance_of_refuting(rows, bad, b, 0.05) <= 0.05


def test_the_ratio_is_that_of_the_prior_and_the_posterior_of_the_number_of_wrong_rows() -> None:
    rows, b = 30, 10
    for drawn, wrong in ((0, 0), (5, 0), (12, 3), (29, 4)):
        for bad in range(wrong, rows - (drawn - wrong) + 1):
            prior = beta_binomial(bad, rows, 1, b)
            posterior = beta_binomial(bad - wrong, rows - drawn, 1 + wrong, b + drawn - wrong)
            assert log_ratio(bad, wrong, drawn, rows, b) == pytest.approx(math.log(prior / posterior), abs=1e-9)


def test_a_number_that_cannot_be_is_refuted_and_the_bound_is_the_last_one_that_is_not() -> None:
    assert log_ratio(2, 3, 10, 100, 50) == math.inf
    assert log_ratio(98, 3, 10, 100, 50) == math.inf
    for drawn, wrong in ((10, 0), (50, 2), (90, 9), (100, 7)):
        most = at_most(wrong, drawn, 100, 50)
        assert not refuted(most, wrong, drawn, 100, 50)
        assert all(refuted(bad, wrong, drawn, 100, 50) for bad in range(most + 1, 101))
    assert at_most(7, 100, 100, 50) == 7  # all rows were drawn


def test_three_thousand_rows_without_a_wrong_one_show_four_percent_after_98_rows() -> None:
    assert prior_b(0.96) == pytest.approx(50)
    assert rows_until(121, 0.0, 0, 0, 3_000, 50) == 98
    assert not refuted(121, 0, 97, 3_000, 50)


def test_rows_until_a_bound_holds_grow_with_the_share_of_wrong_rows_up_to_the_whole_table() -> None:
    found = [rows_until(121, share, 0, 0, 3_000, 50) for share in (0.0, 0.005, 0.01, 0.02, 0.03, 0.05)]
    assert found == sorted(found)
    assert found[-1] == 3_000
    assert rows_until(121, 0.02, 0, 150, 3_000, 50) == 150

"""A bound on the wrong rows of a finite table that holds at every look: a person may stop after any row.

Rows are drawn at random without replacement, and the table has an unknown number of wrong ones. The ratio of prior and
posterior of that number is a martingale for the true one: with a beta-binomial prior of ``a`` and ``b`` it exceeds
``1 / error`` at any look with at most the probability ``error`` (Ville's inequality). A number of wrong rows whose
ratio has reached ``1 / error`` is refuted for good. The prior is chosen before the first row is drawn, and named.
"""

from __future__ import annotations

import math

ERROR = 0.05
PRIOR_A = 1.0


def prior_b(share: float) -> float:
    """Return ``b`` of the prior for a promise that this share of the rows is right."""
    return 2 / (1 - share)


def log_ratio(bad: float, wrong: float, drawn: float, rows: int, b: float) -> float:
    """Return the logarithm of the ratio for a table of ``rows`` rows with ``bad`` wrong ones, of which ``drawn`` were
    drawn and ``wrong`` were wrong. Infinite if that table cannot have given these rows."""
    if bad < wrong or rows - bad < drawn - wrong:
        return math.inf
    a = PRIOR_A
    good = drawn - wrong
    log = math.lgamma
    expected = log(a + wrong) + log(b + good) - log(a + b + drawn) - log(a) - log(b) + log(a + b)
    # The probability of these rows in this order, without replacement.
    if drawn == rows:
        likely = log(bad + 1) + log(rows - bad + 1) - log(rows + 1)
    else:
        likely = (log(bad + 1) - log(bad - wrong + 1)) + (log(rows - bad + 1) - log(rows - bad - good + 1))
        likely -= log(rows + 1) - log(rows - drawn + 1)
    return expected - likely


def refuted(bad: float, wrong: float, drawn: float, rows: int, b: float, error: float = ERROR) -> bool:
    """Return whether every table with at least ``bad`` wrong rows is refuted. Testing ``bad`` alone is enough: above
    the likeliest number of wrong rows, the ratio grows with that number."""
    if bad > rows:
        return True
    return (bad + 1) * drawn >= wrong * (rows + 1) and log_ratio(bad, wrong, drawn, rows, b) >= -math.log(error)


def at_most(wrong: int, drawn: int, rows: int, b: float, error: float = ERROR) -> int:
    """Return the largest number of wrong rows of the table that this look does not refute."""
    low, high = wrong, rows + 1  # a table with ``high`` wrong rows is refuted
    while high - low > 1:
        middle = (low + high) // 2
        if refuted(middle, wrong, drawn, rows, b, error):
            high = middle
        else:
            low = middle
    return low


def rows_until(bad: float, share: float, wrong: int, drawn: int, rows: int, b: float, error: float = ERROR) -> int:
    """Return the total number of rows to draw until ``bad`` wrong rows are refuted, if ``share`` of the rows drawn from
    now on are wrong. At most all rows of the table."""

    def reached(count: int) -> bool:
        return refuted(bad, wrong + share * (count - drawn), count, rows, b, error)

    if reached(drawn):
        return drawn
    step, low = max(1, drawn // 8), drawn
    while low + step < rows and not reached(low + step):
        low, step = low + step, 2 * step
    high = min(rows, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high

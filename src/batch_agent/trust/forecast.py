"""What a promise still costs: the rows that people must judge until it holds, with an 80 % interval.

``plan`` decides what people do next. It compares, for each threshold that has not passed, the rows of the audit until
it would pass with the repairs that it would save. It decides only when the audit stops, and the proof holds at every
look: a bad decision costs work and no confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from batch_agent.trust.anytime import rows_until
from batch_agent.trust.promise import Walk

DRAWS = 120
FEW = 50  # rows of the audit, below which little is known
HOPE = 0.6  # standard errors by which a share may be smaller than measured: 0, 1 and 1.5 cost people more rows
LEVEL = 0.8
WIDEST = 10.0  # an interval with a larger ratio of its ends says nothing


class Workload(NamedTuple):
    """The work until a promise holds. ``threshold``: the place of the threshold to reach, None if no table can keep the
    promise. ``audit``: further rows to audit until then. ``repair``: rows that are sent to people at that threshold and
    that no person has judged."""

    threshold: int | None
    audit: int
    repair: int

    @property
    def left(self) -> int:
        return self.audit + self.repair


def rates(walk: Walk) -> list[float]:
    """Return, for each threshold, the share of all rows that keep a wrong answer, as the audit shows it. It is
    estimated a little low, because an audit that takes too long costs less than one that stops too early."""
    means = [a / (a + b) for a, b in (_belief(walk, wrong) for wrong in walk.wrong)]
    return [max(0.3 * mean, mean - HOPE * math.sqrt(mean * (1 - mean) / (walk.drawn + 1))) for mean in means]


def _belief(walk: Walk, wrong: int) -> tuple[float, float]:
    """Return the parameters of the beta distribution of a share. Before enough rows were seen, its mean is half of what
    the promise allows."""
    few = max(0, FEW - walk.drawn)
    return wrong + 0.5 + few * walk.tables.allowed / 2, walk.drawn - wrong + 0.5 + few * (1 - walk.tables.allowed / 2)


def plan(
    walk: Walk, done: Sequence[int], shares: Sequence[float] | None = None, *, first: int = 0, repairs: bool = True
) -> Workload:
    """Return the cheapest way to a promise that holds. ``done``: number of rows in each band that people have judged.
    ``shares``: expected share of wrong rows among further rows, for each threshold. ``first``: rows of the audit's
    first step. ``repairs``: False if rows that are sent on cost people nothing."""
    tables = walk.tables
    shares = shares or rates(walk)
    rest = walk.drawn_from - walk.drawn
    judged, behind = sum(done), [0] * len(walk.most)
    for place in range(len(behind)):
        judged -= done[place]
        behind[place] = judged  # rows that are sent on and judged
    least = max(0, min(first, walk.drawn_from) - walk.drawn)

    def cost(place: int, audit: int) -> Workload:
        open_rows = max(0, tables.sent[place] - behind[place]) if repairs else 0
        met = audit * open_rows / rest if rest > 0 else open_rows  # rows that are audited need no repair
        return Workload(place, audit, max(0, round(open_rows - met)))

    best = cost(walk.passed, least) if walk.passed is not None else None
    audit = least
    for place in range(len(walk.most) if walk.next is None else walk.next, len(walk.most)):
        most = walk.most[place]
        if most < 0:
            continue
        until = rows_until(
            most + 1, shares[place], walk.wrong[place], walk.drawn, walk.drawn_from, tables.promise.prior_b, walk.error
        )
        if until >= walk.drawn_from and walk.wrong[place] + shares[place] * rest > most:
            break  # it does not keep the promise, and neither do those that keep more rows
        audit = max(audit, until - walk.drawn)
        found = cost(place, audit)
        if best is None or found.left < best.left:
            best = found
    return Workload(None, 0, 0) if best is None else best


def possible(walk: Walk, done: Sequence[int], judgements: float, *, repairs: bool = True) -> bool:
    """Return whether the promise can still hold after this number of judgements, if none of them finds a wrong row."""
    found = plan(walk, done, [0.0] * len(walk.most), repairs=repairs)
    return found.threshold is not None and found.left <= judgements


def interval(
    walk: Walk, done: Sequence[int], *, first: int = 0, repairs: bool = True, draws: int = DRAWS
) -> tuple[int, int]:
    """Return the 80 % interval of the judgements that are left, from plans for many quantiles of the shares of wrong
    rows (beta-binomial). In one plan all thresholds have the same quantile, because they share their rows."""
    middle = plan(walk, done, first=first, repairs=repairs)
    ahead = max(20, middle.audit)
    found = []
    for step in range(draws):
        lucky = (step + 0.5) / draws
        shares = [_share(lucky, *_belief(walk, wrong), ahead) for wrong in walk.wrong]
        found.append(plan(walk, done, shares, first=first, repairs=repairs).left)
    found.sort()
    tail = (1 - LEVEL) / 2
    return found[int(tail * draws)], found[min(draws - 1, math.ceil((1 - tail) * draws))]


def _share(lucky: float, a: float, b: float, ahead: int) -> float:
    """Return a quantile of the wrong share of the next ``ahead`` rows (beta-binomial, by its first two moments)."""
    mean = a / (a + b)
    variance = mean * (1 - mean) / ahead * (1 + (ahead - 1) / (a + b + 1))
    shape = mean * mean / variance  # a gamma distribution with this mean and variance: it is skewed as shares are
    return min(1.0, _gamma_quantile(shape, lucky) * variance / mean)


def _gamma_quantile(shape: float, level: float) -> float:
    """Return a quantile of the gamma distribution (Wilson and Hilferty), good enough for shapes above 0.2."""
    normal = NormalDist().inv_cdf(level)
    term = 1 - 1 / (9 * shape) + normal / (3 * math.sqrt(shape))
    return shape * max(0.0, term) ** 3

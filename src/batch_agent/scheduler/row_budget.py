"""How many rows a budget can finish: what a row costs, and what the rows that have started will still cost.

A row starts if the budget pays for it to its end, beside the rows that have started before it. Its cost is known from
the rows that have ended; before the first has ended, from an estimate of its requests, and then the rows that start
may take only a part of the budget (``UNKNOWN``). The stages of a pipeline are one chain: a row of the first stage
starts if the budget pays for it to the end of the last stage.

All amounts are parts of the whole budget, so that one number serves for tokens and for money: of several limits, the
one that is nearest counts. This module has no clock and no await; ``dispatch.spending`` feeds it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

UNKNOWN = 0.25  # part of the budget for the rows that start before one has ended
SAME = 1 + 1e-9  # costs whose ratio is less are equal
EPSILON = 1e-9
FAR = 0.5  # part of the budget that is far from the limit
KEPT = 2048  # latest rows that ended, of which the costs are kept
GROWS = 0.5  # a row that has cost more than all others is expected to cost this part of it again
FORGETS = 4  # the largest surplus of a reservation falls by one part in this many with each smaller one
TRUSTED = 6.0  # rows that the estimate counts as while most rows run
UNSURE = 0.5  # standard deviation of the mean, as a part of it, after the first row


class StageRows:
    """The rows of one stage. ``guess`` is the expected cost of a row before any row has ended. ``waiting`` returns the
    number of rows that earlier stages have made for this one and that have not started. ``patient``: answers take
    hours, so that the rows of a wave cannot wait until the cost of other rows is known."""

    def __init__(self) -> None:
        self.guess = 0.0
        self.patient = False
        self.waiting: Callable[[], int] = lambda: 0
        self.gated = False  # a row waits until the budget lets it start
        self.moving = 0  # rows that have just ended, whose outputs are on their way to the next stage
        self.started = self.ended = 0
        self._live: dict[int, float] = {}  # what each running row has cost so far
        self._sum = self._squares = 0.0
        self.elsewhere = (0.0, 0.0, 0.0)  # ended rows of other workers, the sum of what they cost and of its square
        self._dearest = 0.0  # the most that a running or ended row has cost
        self._latest: deque[float] = deque()
        self._costs: list[float] = []  # the same, sorted
        self._curve: _Curve | None = None

    @property
    def live(self) -> int:
        return len(self._live)

    def begin(self, row: int, before: float) -> None:
        """Record that a row has started. ``before`` is its cost in earlier sessions."""
        self.started += row not in self._live
        self._live[row] = max(before, self._live.get(row, 0.0))
        self._curve = None

    def pay(self, row: int, part: float) -> None:
        if row in self._live:
            self._live[row] = spent = self._live[row] + part
            self._dearest = max(self._dearest, spent)
            self._curve = None

    def end(self, row: int, *, counts: bool) -> None:
        """Record that a row has ended. ``counts``: it ended regularly, so that others may be expected to cost as
        much."""
        cost, self._curve = self._live.pop(row, None), None
        if cost is None or not counts:
            return
        self.ended += 1
        self._sum += cost
        self._squares += cost * cost
        self._latest.append(cost)
        insort(self._costs, cost)
        if len(self._latest) > KEPT:
            del self._costs[bisect_left(self._costs, self._latest.popleft())]

    @property
    def curve(self) -> _Curve:
        if self._curve is None:
            self._curve = _Curve(self._costs, sorted(self._live.values()))
        return self._curve

    @property
    def costs(self) -> tuple[float, float, float]:
        """Three numbers about the rows that ended here: how many, the sum of their costs, and the sum of the squares of
        their costs."""
        return float(self.ended), self._sum, self._squares

    def learn(self, costs: Iterable[tuple[float, float, float]]) -> None:
        """Learn the costs of rows of other workers. The costs from a worker that has left are kept until others report
        more rows."""
        known = list(costs)
        ended, total, squares = (sum(each[place] for each in known) for place in range(3))
        if ended >= self.elsewhere[0]:
            self.elsewhere = ended, total, squares

    @property
    def known(self) -> float:
        """The number of rows that have ended, here and at other workers."""
        return self.ended + self.elsewhere[0]

    @property
    def mean(self) -> float:
        """The expected cost of a row."""
        if not self.known:
            return max(self.guess, 2 * self._dearest)
        own = self.curve.mean * self._caution * self.ended if self.ended else 0.0
        return (own + self.elsewhere[1]) / self.known

    @property
    def _caution(self) -> float:
        """A factor for the costs of the rows that ended. The estimate made before the first row raises it while most
        rows still run."""
        mean, weight = self.curve.mean, TRUSTED * len(self._live) / (len(self._live) + self.ended)
        return 1 + max(0.0, self.guess / mean - 1) * weight / (self.ended + weight) if mean else 1.0

    @property
    def variance(self) -> float:
        """The variance of the cost of a row."""
        if not self.known:
            return 0.0
        mean = (self._sum + self.elsewhere[1]) / self.known
        return max(0.0, (self._squares + self.elsewhere[2]) / self.known - mean * mean)

    @property
    def doubt(self) -> float:
        """The error of the expected cost, over all rows together."""
        if not self.known:
            return 0.0
        return math.sqrt(self.variance / self.known + (UNSURE * self.mean / self.known) ** 2)

    def rest(self, spent: float) -> float:
        """Return what a row that has cost ``spent`` is expected to cost until its end."""
        return self.curve.rest(spent) if self.ended else max(self.mean - spent, GROWS * spent)

    @property
    def needed(self) -> float:
        """The expected cost of the running rows until their ends."""
        return sum(map(self.rest, self._live.values())) * (self._caution if self.ended else 1.0)

    @property
    def most(self) -> float:
        """An upper estimate of the cost of a row, which is fast to compute."""
        return 2 * max(self._dearest, self.guess, self._sum / self.ended if self.ended else 0.0)


class _Curve:
    """The probability that a row costs more than an amount (the Kaplan-Meier estimate). The first rows that end are the
    cheapest ones, so running rows count with what they have cost so far. If a running row has cost more than all rows
    that ended, it is assumed that rows end at the mean rate of all from there on."""

    def __init__(self, ended: Sequence[float], live: Sequence[float]) -> None:
        self._costs: list[float] = []
        survives: list[float] = []
        left, place, at_risk = 1.0, 0, 0
        while place < len(ended):
            cost, many = ended[place], 0
            while place < len(ended) and ended[place] <= cost * SAME:
                place, many = place + 1, many + 1
            at_risk = len(ended) - place + many + len(live) - bisect_left(live, cost)
            left *= 1 - many / at_risk
            self._costs.append(cost)
            survives.append(left)
        self._survives, exposure = survives, sum(ended) + sum(live)
        self._tail = exposure / len(ended) if left > EPSILON else 0.0  # expected beyond the dearest row that ended
        # Sums of what is expected from each cost on.
        self._beyond = beyond = [left * self._tail]
        for higher, lower, alive in zip(self._costs[:0:-1], self._costs[-2::-1], survives[-2::-1], strict=True):
            beyond.append(beyond[-1] + alive * (higher - lower))
        beyond.reverse()
        self.mean = self._costs[0] + beyond[0]

    def rest(self, spent: float) -> float:
        place = bisect_right(self._costs, spent * SAME) - 1  # the last cost that the row has reached
        if place < 0:
            return self.mean - spent
        alive = self._survives[place]
        if alive <= EPSILON:
            return max(self._tail, GROWS * spent)
        if place + 1 == len(self._costs):
            return self._tail
        return max(self._beyond[place] / alive - (spent - self._costs[place]), 0.0)


class RowBudget:
    """``spent``: the part of the budget that all workers and sessions have spent."""

    def __init__(self) -> None:
        self._stages: dict[str, StageRows] = {}  # in the order of the pipeline; "" is a plain run
        self._runs: dict[str, StageRows] = {}  # by id of the run
        # What the reservation of a call that is sent alone exceeds its cost by: it must fit too.
        self._surplus = self._latest_surplus = 0.0
        self.allowance: float | None = None  # what the rows of this worker may still cost; None: there is no other one
        self.decided = False  # this worker has what is left, and no other one holds any
        self._claimed = 0  # rows that had started when an allowance was last claimed
        self._asked = False  # and whether a row waited for it while none ran

    def stage(self, name: str, run: str = "") -> StageRows:
        """Return the rows of a stage. From now on they are the rows of ``run``."""
        stage = self._stages.setdefault(name, StageRows())
        if run:
            self._runs[run] = stage
        return stage

    def stage_of(self, run: str) -> StageRows:
        """Return the rows of a run. A run that contains the stages has no rows of its own."""
        if run not in self._runs and self._stages:
            return StageRows()
        return self._runs.get(run) or self.stage("", run)

    def pay(self, run: str, row: int, part: float, surplus: float) -> None:
        """Record that a call of a row cost a part of the budget. The reservation of the call, if it had been sent
        alone, would have exceeded that by ``surplus``."""
        if (stage := self._runs.get(run)) is not None:
            stage.pay(row, part)
        self._latest_surplus = surplus
        self._surplus = max(surplus, self._surplus - (self._surplus - surplus) / FORGETS)

    @property
    def live(self) -> int:
        return sum(stage.live for stage in self._stages.values())

    def is_last(self, stage: StageRows) -> bool:
        return next(reversed(self._stages.values())) is stage

    def is_idle(self, stage: StageRows) -> bool:
        """Return whether no row runs in any stage, and none is about to start in a later stage."""
        stages = list(self._stages.values())
        later = stages[stages.index(stage) + 1 :]
        moving = any(each.live or each.moving for each in stages)
        return not moving and not any(each.gated or each.waiting() for each in later)

    def cost(self, stage: StageRows) -> float:
        """Return the expected cost of a row from the beginning of this stage to the end of the last one."""
        means, _ = self._to_the_end(stage)
        return means[0]

    def _to_the_end(self, stage: StageRows) -> tuple[list[float], list[float]]:
        """Return two lists over this stage and each later one: the expected cost of a row from the beginning of the
        stage to the end of the pipeline, and the error of that cost."""
        stages = list(self._stages.values())
        later = stages[stages.index(stage) :]
        means, doubts = [later[-1].mean], [later[-1].doubt]
        for each, following in zip(later[-2::-1], later[:0:-1], strict=True):
            arrived = following.started + following.waiting() + following.gated + each.moving
            passed = (1 + arrived) / (1 + each.ended)
            means.append(each.mean + passed * means[-1])
            doubts.append(each.doubt + passed * doubts[-1])
        return means[::-1], doubts[::-1]

    def fits(self, stage: StageRows, spent: float, before: float = 0.0) -> bool:
        """Return whether the budget pays for another row of the stage until its end, in addition to the rows that have
        started. ``spent``: the part of the budget that is spent; with an allowance, what was spent since the allowance
        was claimed. ``before``: the cost of the row in earlier sessions."""
        shared = self.allowance is not None
        most, live = self.limit(stage) if self.allowance is None else self.allowance, self.live
        if shared and stage is not self._first:
            return True  # the feeder holds what it costs
        upper = spent + (live + 2 + math.sqrt(live + 1)) * stage.most + self._surplus
        if len(self._stages) == 1 and upper <= FAR * most:
            return True  # nothing is summed up
        if not self.is_known(stage) and self.is_idle(stage):
            return self.decided if shared else spent < 1.0  # one row shows what a row costs
        committed, margin, to_the_end = self._committed(stage)
        own = (stage.rest(before) if before else stage.mean) + to_the_end - stage.mean
        return spent + committed + own + margin <= most + 1e-9

    def is_known(self, stage: StageRows) -> bool:
        """Return whether a row has gone from this stage to the end of the last one."""
        stages = list(self._stages.values())
        return all(each.known for each in stages[stages.index(stage) :])

    def limit(self, stage: StageRows) -> float:
        """Return the part of the budget that all rows together may use."""
        return 1.0 if stage.patient or self.is_known(stage) else UNKNOWN

    def _committed(self, stage: StageRows) -> tuple[float, float, float]:
        """Return three amounts: what the rows that have started are expected to cost until their ends; a margin for the
        error of that and of one more row of the stage; and the expected cost of that row to the end of the last
        stage."""
        stages = list(self._stages.values())
        means, doubts = self._to_the_end(stage)
        committed, variance, doubt = sum(each.needed for each in stages), stage.variance, 0.0
        for place, each in enumerate(stages[stages.index(stage) :]):
            here = each.waiting() + each.gated if place else 0  # rows that have begun in an earlier stage
            after, doubt_after = means[place] - each.mean, doubts[place] - each.doubt
            committed += here * means[place] + (each.live + each.moving) * after
            variance += each.live * each.variance
            doubt += (here + each.live) * doubts[place] + each.moving * doubt_after
        margin = math.sqrt(variance) + doubt + self._surplus if self.live else self._latest_surplus
        return committed, margin, means[0]

    # Shares of the budget, if several processes work on the run

    @property
    def _first(self) -> StageRows:
        return next(iter(self._stages.values()))

    @property
    def stages(self) -> Mapping[str, StageRows]:
        return self._stages

    def claim(self, spent: float) -> tuple[float, float, float, float]:
        """Return four amounts: the limit for what the rows of all workers may still cost, the part of it that this
        worker holds, the part that it wants, and the smallest useful part."""
        if not self._stages:  # it has not begun
            return 1.0 - spent, 0.0, 0.0, 0.0
        first = self._first
        committed, margin, cost = self._committed(first)
        committed += margin if self.live else 0.0
        limit, wants = self.limit(first) - spent, first.gated or first.started != self._claimed
        self._claimed, self._asked = first.started, first.gated and self.is_idle(first)
        if not wants:
            return limit, committed, committed, 0.0
        return limit, max(committed, self.allowance or 0.0), limit, committed + cost + (0.0 if self.live else margin)

    def granted(self, allowance: float) -> None:
        """Set what the rows of this worker may still cost."""
        self.allowance, self.decided = allowance, False

    def decide(self, *, others_hold: bool) -> None:
        """Decide about a row that waits: no more will be granted to it, unless ``others_hold``, because other workers
        may return some."""
        self.decided = self._asked and not others_hold

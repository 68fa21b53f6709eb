"""The agents whose contexts are in one engine's KV cache at the same time, and whether another one fits.

The projection uses the mean context after each turn of earlier agents, and the probability from the turn forecast that
an agent continues. The part that all agents share is counted once. An agent that waits long for its tool counts less
and less, because others could use its memory meanwhile.
"""

from __future__ import annotations

from math import inf

from batch_agent.scheduler.forecast import FIRST_GUESS, Progress, TurnForecast
from batch_agent.scheduler.residency import FULL, LearntCapacity, Residency

MOST_AGENTS = 1 << 30
FARTHEST = 64  # number of turns to look ahead
NEAR = 2  # number of turns to look ahead before a member must be admitted again
LONG_WAIT = 5.0  # times the mean seconds of a turn: after such a tool wait a context counts half, after two a quarter
SPAN_SECONDS, SPAN_TURNS = 1.0, 3.0  # minimum span for counting prompt tokens per second, in seconds and in turns
QUICK, STEP = 0.1, 0.05  # the part of turns that are quick, and the learning rate of their seconds
WORTH = 1.15  # agents are held back only if the turns per second grow by this factor
LESS, MORE, LEAST = 0.95, 0.002, 0.6  # factor of the margin after an eviction, what a hit adds to it, and its minimum


class ContextGrowth:
    """Mean tokens of an agent's context after each turn."""

    def __init__(self) -> None:
        self.shared = 0  # tokens that all agents share; they are in the cache once
        self.largest = 0  # tokens of the largest context so far
        self._mean = [0.0]  # by turns taken
        self._count = [0]
        self._step = 0.0  # mean growth per turn, for turns that no agent has taken yet

    @property
    def is_known(self) -> bool:
        return len(self._mean) > 1

    def learn(self, turns: int, tokens: int) -> None:
        """Learn that an agent's context had ``tokens`` after ``turns`` turns."""
        if tokens > self.largest:
            self.largest = tokens
        if turns > FARTHEST:
            return
        while turns >= len(self._mean):
            self._mean.append(self._mean[-1] + self._step)
            self._count.append(0)
        self._count[turns] += 1
        self._mean[turns] += (tokens - self._mean[turns]) / self._count[turns]
        last = len(self._mean) - 1
        if last > 1:
            self._step = (self._mean[last] - self._mean[1]) / (last - 1)

    def expect(self, turns: int, more: int) -> bool:
        """Learn that the next prompt of an agent that has taken ``turns`` is longer by ``more`` tokens. Returns whether
        that is more than expected. An answer replaces it."""
        if not turns or turns + 1 < len(self._mean) or more <= self._step:
            return False
        self._step = float(more)
        return True

    def after(self, turns: int) -> float:
        last = len(self._mean) - 1
        return self._mean[turns] if turns <= last else self._mean[last] + (turns - last) * self._step


class EnginePace:
    """The speed of an engine: the most prompt tokens per second that it was seen to compute, and the seconds of a turn
    while it is not overloaded."""

    def __init__(self) -> None:
        self._early = self._late = 0.0  # tokens per second in short spans, and in long ones
        self.quick = 0.0  # seconds; one turn in ten is faster
        self._began = self._heard = -inf  # of the span in which the engine always had a request of this run
        self._tokens = 0

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """Learn from an answer that took ``seconds``; ``tokens`` of its prompt were not cached."""
        span = max(SPAN_SECONDS, SPAN_TURNS * seconds)  # tokens computed before its start must not count much
        if now - seconds > self._heard:
            self._began, self._tokens = now - seconds, 0
        elif now - self._began > 2 * span:
            self._began, self._tokens = self._heard, 0
        self._heard = now
        self._tokens += tokens
        self.quick += STEP * self.quick * (QUICK - (seconds < self.quick)) if self.quick else seconds
        if now - self._began >= SPAN_SECONDS:
            rate = self._tokens / (now - self._began)
            self._early = max(self._early, rate)
            if now - self._began >= span:
                self._late = max(self._late, rate)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if unknown."""
        return self._late or self._early


class WorkingSet:
    """The admitted agents of one endpoint, with their turns taken and the tokens of their contexts."""

    def __init__(self, growth: ContextGrowth, forecast: TurnForecast) -> None:
        self._growth, self._forecast = growth, forecast
        self.reported: int | None = None  # capacity of the cache in tokens, reported by the engine; None: not reported
        self.ample = 0  # number of members that fit with contexts of any size, computed at the last answer
        self.queue = 0  # requests in the engine's queue at the last reading
        self._preemptions: int | None = None  # at the last reading
        self.learnt = LearntCapacity()
        self.residency = Residency()
        self.pace = EnginePace()
        self.margin = 1.0  # the part of the capacity that is used
        self.members: dict[Progress, tuple[int, int]] = {}

    @property
    def capacity(self) -> int | None:
        """Capacity of the cache in tokens, reported by the engine or inferred from evictions; None: unknown."""
        return self.learnt.tokens if self.reported is None else self.reported

    @property
    def room(self) -> float:
        """Tokens of the cache for contexts, without the part that agents share."""
        capacity = self.capacity
        return inf if capacity is None else capacity * self.margin - self._growth.shared

    @property
    def _remembered(self) -> float:
        """Tokens of the contexts to remember: twice the room while the capacity is inferred."""
        return self.room if self.reported is not None else 2 * self.room

    def look_up(self, progress: Progress, tokens: int) -> None:
        """Record that a turn of the agent is sent, with a prompt of about ``tokens``."""
        residency = self.residency
        progress.distance = None
        if progress.turns and (self.reported is None or residency.is_tight(self.room)):
            progress.distance = residency.distance(progress)
        tokens = tokens if progress.turns else round(self._growth.after(1))
        residency.sent(progress, max(0, tokens - self._growth.shared), self._remembered)

    def answered(self, progress: Progress, tokens: int, evicted: bool) -> bool:
        """Record an answer, with the context's ``tokens``. Returns whether the capacity changed."""
        distance, changed = progress.distance, False
        if distance is None:
            pass
        elif self.reported is None:
            changed = self.learnt.learn(distance + self._growth.shared, evicted=evicted)
        elif not evicted:
            self.margin = min(1.0, self.margin + MORE)
        elif distance < FULL * self.room:  # the cache holds less than the engine reports: others use the rest
            self.shrink()
        self.use(progress, tokens)
        self.ample = self._count_ample()
        return changed

    def use(self, progress: Progress, tokens: int) -> None:
        """Record that the agent's context is in the cache, and has ``tokens``."""
        self.residency.answered(progress, max(0, tokens - self._growth.shared), self._remembered)

    def shrink(self) -> None:
        self.margin = max(LEAST, self.margin * LESS)

    def preempted(self, total: int | None) -> None:
        """Shrink the margin if the engine preempted requests: they need more memory than it has."""
        if self._preemptions is not None and total is not None and total > self._preemptions:
            self.shrink()
        self._preemptions = total

    def _count_ample(self) -> int:
        """Return how many contexts of the largest size fit. With fewer members, no projection is needed."""
        growth, room = self._growth, self.room
        most = max(growth.largest, growth.after(2 * self._forecast.furthest + FIRST_GUESS)) - growth.shared
        return MOST_AGENTS if room == inf else int(room / max(1.0, most))

    def keeps(self, progress: Progress, now: float) -> bool:
        """Return whether a member may continue: the contexts in the cache fit for the next turns, or another member
        with a cached context is less advanced."""
        if self.fits(now, horizon=NEAR, among=self.residency):
            return True
        here = [turns for member, (turns, _) in self.members.items() if member in self.residency]
        return progress in self.residency and progress.turns > min(here)

    def fits(
        self,
        now: float,
        turns: int | None = None,
        tokens: int = 0,
        *,
        horizon: int = FARTHEST,
        among: Residency | None = None,
    ) -> bool:
        """Return whether the members' contexts fit for the turns ahead. ``among``: only those members. ``turns``: with
        one more agent that has taken that many turns."""
        if len(self.members) < self.ample or self.capacity is None or not self._growth.is_known:
            return True
        half = LONG_WAIT * self._forecast.seconds_per_turn
        shared, after, goes_on = self._growth.shared, self._growth.after, self._forecast.goes_on
        groups: dict[int, list[float]] = {} if turns is None else {turns: [1.0, float(tokens)]}
        for progress, (taken, size) in self.members.items():
            if among is not None and progress not in among:
                continue
            waited = 0.0 if progress.answered_at is None else now - progress.answered_at
            weight = 2.0 ** (1.0 - waited / half) if waited > half > 0.0 else 1.0
            group = groups.setdefault(taken, [0.0, 0.0])
            group[0] += weight
            group[1] += weight * size
        room = self.room
        for ahead in range(horizon):
            needed = alive = 0.0
            for taken, group in groups.items():
                if ahead and group[0]:
                    chance = goes_on(taken + ahead - 1)
                    group[0] *= chance
                    group[1] = group[1] * chance + group[0] * (after(taken + ahead) - after(taken + ahead - 1))
                alive += group[0]
                needed += group[1] - (group[0] * shared if taken + ahead else 0.0)
            if needed > room:
                return False
            if alive < 0.01:
                break
        return True

    def pays(self, agents: float) -> bool:
        """Return whether the members alone take more turns per second than all ``agents`` would, whose contexts would
        be evicted and recomputed."""
        pace, shared = self.pace, self._growth.shared
        cycle, rate = self._forecast.seconds_between_turns + pace.quick, pace.rate
        if self.capacity is None or not cycle or not rate:
            return False
        turns = contexts = last = 0.0
        chance = 1.0
        for taken in range(FARTHEST):
            chance *= self._forecast.goes_on(taken)
            if chance < 0.01:
                break
            last = self._growth.after(taken + 1) - shared
            turns += chance
            contexts += chance * last
        if not contexts or not last:
            return True
        fitting = self.room * turns / contexts
        few = min(min(fitting, agents) / cycle, rate * turns / last)
        many = min(agents / cycle, rate * turns / contexts)
        return few >= WORTH * many

"""Which agents may have their contexts in an engine's KV cache at the same time.

An agent that waits for a tool leaves its context in the cache. If the contexts of all live agents do not fit, the
engine evicts some of them, and the next turn of those agents computes its whole history again. So an agent is admitted
to an endpoint only if, for every turn ahead, the projected sum of the admitted agents' contexts stays within the
capacity. An agent that does not fit waits at a turn boundary.

The projection takes the mean context after each turn from the agents that were there already, and the chance that an
agent goes on from the turn forecast. What all agents share is counted once. An agent that waits long for its tool
counts less and less, because others could use its memory meanwhile.

Nothing is held back if the capacity is unknown, if all contexts fit, or if the engine would stand idle: agents that
wait 20 seconds for their tools need more agents beside them, and computing their contexts again costs less.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf, log2
from typing import TYPE_CHECKING, Generic, TypeVar

from batch_agent.messages import Usage
from batch_agent.scheduler.engine_load import Reading
from batch_agent.scheduler.forecast import Progress, TurnForecast

if TYPE_CHECKING:
    from batch_agent.scheduler.endpoint import Endpoint
    from batch_agent.scheduler.server import Server

FARTHEST = 64  # turns that are looked ahead
LONG_WAIT = 5.0  # times the mean seconds of a turn: after such a tool wait a context counts half, after two a quarter
GONE = 0.5  # with less weight than this an agent has to be admitted again
SPAN_SECONDS = 1.0, 5.0  # the shortest and the longest span in which prompt tokens per second are counted
WORTH = 1.15  # times the turns per second, for which agents are held back
NEAR = 2  # turns that are looked ahead before an admitted agent is held back
RECHECK_SECONDS = 1.0  # between two looks at the weights of contexts while an agent is held back
EVICTED = 0.5  # of an agent's own context: if the cache had less of it, the context was evicted
LESS, MORE, LEAST = 1.0, 0.002, 0.6  # the margin after an eviction, what an answer without one adds, and the smallest

Waiting = TypeVar("Waiting", bound=Hashable)


def kv_tokens_left(load: Reading, server: Server) -> int | None:
    """Tokens of an engine's KV cache that one dispatcher may use; None if the engine does not report its size.

    What the requests of other clients hold is left out: their part of the running requests, of the part in use.
    """
    if not load.kv_tokens:
        return None
    others = max(0, load.running - server.inflight) / load.running if load.running else 0.0
    return round(load.kv_tokens * (1.0 - others * (load.kv_usage or 0.0)) / max(1, len(server.endpoints)))


class ContextGrowth:
    """Mean tokens of an agent's context after each turn."""

    __slots__ = ("_count", "_mean", "_step", "shared")

    def __init__(self) -> None:
        self.shared = 0  # tokens that all agents share; they are in the cache once
        self._mean = [0.0]  # by turns taken
        self._count = [0]
        self._step = 0.0  # mean growth per turn, for turns that no agent has taken yet

    @property
    def is_known(self) -> bool:
        return len(self._mean) > 1

    def learn(self, turns: int, tokens: int) -> None:
        """After ``turns`` turns an agent's context had this size."""
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

    def expect(self, turns: int, more: int) -> None:
        """The next prompt of an agent that has taken ``turns`` is longer by this. An answer replaces it."""
        if turns and turns + 1 >= len(self._mean):
            self._step = max(self._step, float(more))

    def after(self, turns: int) -> float:
        last = len(self._mean) - 1
        return self._mean[turns] if turns <= last else self._mean[last] + (turns - last) * self._step


class PrefillPace:
    """The most prompt tokens per second that an engine was seen to compute."""

    __slots__ = ("_began", "_heard", "_tokens", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._began = self._heard = -inf  # of the span in which the engine was never without a request of ours
        self._tokens = 0

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """An answer took some seconds, and these tokens of its prompt were not cached."""
        if now - seconds > self._heard or now - self._began > SPAN_SECONDS[1]:
            self._began, self._tokens = min(now - seconds, now) if now - seconds > self._heard else self._heard, 0
        self._heard = now
        self._tokens += tokens
        if now - self._began >= SPAN_SECONDS[0]:
            self.rate = max(self.rate, self._tokens / (now - self._began))


class WorkingSet:
    """The admitted agents of one endpoint, with the turns they took and the tokens of their contexts."""

    __slots__ = ("_forecast", "_growth", "capacity", "margin", "members", "pace")

    def __init__(self, growth: ContextGrowth, forecast: TurnForecast) -> None:
        self._growth, self._forecast = growth, forecast
        self.capacity: int | None = None  # tokens that the cache holds; None: unknown
        self.pace = PrefillPace()
        self.margin = 1.0  # the part of the capacity that is used
        self.members: dict[Progress, tuple[int, int]] = {}

    def weight(self, progress: Progress, now: float) -> float:
        """How much an agent's context counts, by how long it has waited for its tool."""
        turn = self._forecast.seconds_per_turn
        if progress.answered_at is None or not turn:
            return 1.0
        return float(min(1.0, 2.0 ** (1.0 - (now - progress.answered_at) / (LONG_WAIT * turn))))

    def fits(self, now: float, turns: int | None = None, tokens: int = 0, *, horizon: int = FARTHEST) -> bool:
        """Whether the members' contexts fit for the turns ahead, with one more agent that has taken ``turns`` if that
        is given."""
        if self.capacity is None or not self._growth.is_known:
            return True
        shared, after, goes_on = self._growth.shared, self._growth.after, self._forecast.goes_on
        groups: dict[int, list[float]] = {} if turns is None else {turns: [1.0, float(tokens)]}
        for progress, (taken, size) in self.members.items():
            weight = self.weight(progress, now)
            group = groups.setdefault(taken, [0.0, 0.0])
            group[0] += weight
            group[1] += weight * size
        room = self.capacity * self.margin - shared
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
        """Whether more turns per second are taken with the members alone than with all ``agents``, whose contexts would
        be evicted and computed again."""
        cycle, rate, shared = self._forecast.seconds_per_cycle, self.pace.rate, self._growth.shared
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
        fitting = (self.capacity * self.margin - shared) * turns / contexts
        few = min(min(fitting, agents) / cycle, rate * turns / last)
        many = min(agents / cycle, rate * turns / contexts)
        return few >= WORTH * many


class Admission(Generic[Waiting]):
    """The working sets of all endpoints, and the turns that wait until their agent's context fits."""

    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self._growth = ContextGrowth()
        self._sets: dict[Endpoint, WorkingSet] = {}
        self._home: dict[Progress, WorkingSet] = {}
        self._recheck = inf
        self.held: dict[Waiting, None] = {}
        self.enabled = False  # somebody reads the load of the engines
        self.holds = True  # agents that do not fit are held back
        self.is_on = False  # the capacity of some endpoint is known
        self.recomputed = 0  # tokens that had to be computed again because they were evicted

    def read(self, endpoint: Endpoint, load: Reading) -> None:
        """The engine reported its load."""
        if self.enabled:
            self.set_capacity(endpoint, kv_tokens_left(load, endpoint.server))

    def set_capacity(self, endpoint: Endpoint, tokens: int | None) -> None:
        working_set = self._set_of(endpoint)
        if working_set.capacity != tokens:
            working_set.capacity = tokens
            self.is_on = any(each.capacity is not None for each in self._sets.values())
            self._recheck = -inf

    def drop(self, endpoint: Endpoint) -> None:
        """The endpoint is gone."""
        gone = self._sets.pop(endpoint, None)
        if gone is not None:
            self._home = {progress: home for progress, home in self._home.items() if home is not gone}
            self.is_on = any(each.capacity is not None for each in self._sets.values())
            self._recheck = -inf

    def _set_of(self, endpoint: Endpoint) -> WorkingSet:
        found = self._sets.get(endpoint)
        if found is None:
            found = self._sets[endpoint] = WorkingSet(self._growth, self._forecast)
        return found

    def has_room(self, now: float) -> bool:
        """Whether a new agent's context fits somewhere."""
        if not self.is_on:
            return True
        return not self.held and any(self._takes(each, now, 0, 0) for each in self._sets.values())

    def _takes(self, working_set: WorkingSet, now: float, turns: int, tokens: int) -> bool:
        if not self.holds or not working_set.members or working_set.fits(now, turns, tokens):
            return True
        rows = self._forecast.rows
        return not working_set.pays(inf if rows is None else (self._forecast.live + rows) / len(self._sets))

    def admit(self, waiting: Waiting, progress: Progress, endpoint: Endpoint, now: float) -> bool:
        """Whether the agent's turn may go to the endpoint. If not, it is kept in ``held``."""
        working_set = self._set_of(endpoint)
        home = self._home.get(progress)
        tokens = max(progress.expected, progress.tokens)
        if home is not working_set and progress.live:
            if not self._takes(working_set, now, progress.turns, tokens if progress.turns else 0):
                self.held[waiting] = None
                self._recheck = now + RECHECK_SECONDS
                return False
            if home is not None:
                home.members.pop(progress, None)
            self._home[progress] = working_set
        if progress.live:
            working_set.members[progress] = progress.turns, tokens if progress.turns else 0
        return True

    def go_on(self, progress: Progress, waited: float, now: float) -> None:
        """An agent is ready for its next turn, after a tool wait of some seconds. It has to be admitted again if its
        context is no longer expected in the cache, or if it is the least advanced one and the contexts do not fit."""
        self._growth.expect(progress.turns, progress.expected - progress.tokens)
        home = self._home.get(progress)
        if home is None:
            return
        home.members[progress] = progress.turns, max(progress.expected, progress.tokens)
        turn = self._forecast.seconds_per_turn
        gone = waited > (1 - log2(GONE)) * LONG_WAIT * turn > 0
        if gone or (
            not home.fits(now, horizon=NEAR) and progress.turns <= min(turns for turns, _ in home.members.values())
        ):
            del home.members[progress], self._home[progress]

    def answered(self, progress: Progress, endpoint: Endpoint, usage: Usage, seconds: float, now: float) -> None:
        """Learn from the tokens of an answer."""
        tokens, cached, before = usage.prompt_tokens + usage.completion_tokens, usage.cached_tokens, progress.tokens
        growth, home = self._growth, self._home.get(progress)
        if not usage.prompt_tokens:
            return
        working_set = self._set_of(endpoint)
        working_set.pace.learn(usage.prompt_tokens - cached, seconds, now)
        if progress.turns == 0 and cached:
            growth.shared = min(growth.shared, cached) if growth.shared else cached
        elif progress.turns and cached and before:
            self.recomputed += max(0, before - cached)
            if home is not None:
                evicted = cached - growth.shared < EVICTED * (before - growth.shared)
                home.margin = max(LEAST, home.margin * LESS) if evicted else min(1.0, home.margin + MORE)
        progress.tokens = tokens
        growth.learn(progress.turns + 1, tokens)
        if not progress.live:
            return
        if home is None:
            home = self._home[progress] = working_set
        home.members[progress] = progress.turns + 1, tokens

    def end(self, progress: Progress) -> None:
        """The agent has ended, and its context is no longer needed."""
        progress.live = False
        home = self._home.pop(progress, None)
        if home is not None:
            home.members.pop(progress, None)
            self._recheck = -inf

    @property
    def due(self) -> float:
        """When the agents that are held back are looked at again; never, if there are none."""
        return self._recheck if self.held else inf

    def release(self, now: float) -> list[Waiting]:
        """The turns to look at again, which are no longer held back."""
        if not self.held or now < self._recheck:
            return []
        held = list(self.held)
        self.held.clear()
        self._recheck = inf
        return held

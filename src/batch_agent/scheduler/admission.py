"""Decides which agents may have their contexts in an engine's KV cache at the same time.

An agent that waits for a tool leaves its context in the cache. If the contexts of all live agents do not fit, the
engine evicts some of them, and the next turn of those agents computes its whole history again. So an agent is admitted
to an endpoint only if, for every turn ahead, the projected sum of the admitted agents' contexts stays within the
capacity. An agent that does not fit waits at a turn boundary.

No agent is held back if the capacity is unknown, if all contexts fit, or if the engine would be idle. With tool waits
of 20 seconds, for example, more agents keep the engine busy, and recomputing their contexts costs less than an idle
engine.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from batch_agent.messages import Usage
from batch_agent.scheduler.cache_size import CacheSize
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import FIRST_GUESS, AgentForecast, TurnForecast
from batch_agent.scheduler.residency import Residency

if TYPE_CHECKING:
    from batch_agent.scheduler.server import Endpoint
    from batch_agent.scheduler.server_state import ServerState

MOST_AGENTS = 1 << 30
FARTHEST = 64  # number of turns to look ahead
NEAR = 2  # number of turns to look ahead before a member must be admitted again
LONG_WAIT = 5.0  # times the mean seconds of a turn: after such a tool wait a context counts half, after two a quarter
QUICK = 0.1  # the part of turns that are quick
WORTH = 1.15  # agents are held back only if the turns per second grow by this factor
# A projection is computed again when one member in this number has changed, and each second, because contexts of
# waiting agents count less and less.
MEMBERS_A_CHANGE = 32


class ContextGrowth:
    """The mean number of tokens in an agent's context after each turn."""

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
        """Learn that the next prompt of an agent that has taken ``turns`` turns is longer by ``more`` tokens. Returns
        whether that is more than expected. The next answer replaces what was learnt."""
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
        span = max(N.refresh, N.several * seconds)  # tokens computed before its start must not count much
        if now - seconds > self._heard:
            self._began, self._tokens = now - seconds, 0
        elif now - self._began > 2 * span:
            self._began, self._tokens = self._heard, 0
        self._heard = now
        self._tokens += tokens
        self.quick += N.weight * self.quick * (QUICK - (seconds < self.quick)) if self.quick else seconds
        if now - self._began >= N.refresh:
            rate = self._tokens / (now - self._began)
            self._early = max(self._early, rate)
            if now - self._began >= span:
                self._late = max(self._late, rate)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if unknown."""
        return self._late or self._early


def _context(progress: AgentForecast) -> tuple[int, int]:
    """Return the turns that an agent has taken, and the tokens of its context."""
    if progress.answered_at is not None:
        return progress.turns + 1, progress.tokens
    return progress.turns, max(progress.expected, progress.tokens) if progress.turns else 0


class _Projection:
    """The tokens that the members need for each turn ahead. It is computed again when enough members have changed."""

    def __init__(self) -> None:
        self.needed: list[float] = []
        self.fresh: list[float] = []  # the same for one agent that has not started
        self.ages: list[int] = []  # number of members by turns taken
        self.least_turns = 0  # the fewest turns of a member that was counted
        self.at = -inf
        self.changes = 0  # of the members until then


class _Life(NamedTuple):
    """What an agent is expected to need: the turns after which it continues, the sum of its contexts over them, the
    last context, and the sum over all turns."""

    turns: float
    contexts: float
    last: float
    whole: float


class WorkingSet:
    """The admitted agents of one endpoint: those whose contexts are in the engine's KV cache at the same time, and
    whether another one fits.

    The projection uses the mean context after each turn of earlier agents, and the probability from the turn forecast
    that an agent continues. The part that all agents share is counted once. An agent that waits long for its tool
    counts less and less, because others could use its memory meanwhile.
    """

    def __init__(self, server: ServerState, growth: ContextGrowth, forecast: TurnForecast) -> None:
        self._server, self._growth, self._forecast = server, growth, forecast
        self.ample = MOST_AGENTS  # number of members that fit with contexts of any size (``measure``)
        self._measured_for = 0  # tokens of the largest context then
        self.unmeasured = 0  # answers since then
        self.uncounted = 0  # prompt tokens that were computed since then
        self.residency = Residency()
        self.tracks = False  # the order in which contexts are used is followed; not needed while they fit by far
        self.pace = EnginePace()
        self.members: dict[AgentForecast, None] = {}  # in the order of admission
        self.changes = 0  # turns that began or ended, and agents that joined or left
        self._all, self._near = _Projection(), _Projection()

    @property
    def memory(self) -> CacheSize:
        return self._server.memory

    @property
    def capacity(self) -> int | None:
        """Tokens of the cache that one dispatcher may use; None: unknown."""
        capacity = self.memory.capacity
        return None if capacity is None else capacity // max(1, len(self._server.endpoints))

    @property
    def room(self) -> float:
        """Tokens of the cache for contexts, without the part that agents share."""
        capacity = self.capacity
        return inf if capacity is None else capacity * self.memory.margin - self._growth.shared

    @property
    def is_wide(self) -> bool:
        """Whether twice as many contexts would fit, as far as that is known. Then answers teach little."""
        return not self.tracks and 2 * len(self.members) <= self.ample

    def leave(self, progress: AgentForecast) -> None:
        self.members.pop(progress, None)
        self.changes += 1

    def is_cached(self, progress: AgentForecast) -> bool:
        """Return whether the agent's context is probably in the cache."""
        return not self.tracks or self.residency.holds(progress, self.room)

    def look_up(self, progress: AgentForecast, tokens: int) -> None:
        """Record that a turn of the agent is sent, with a prompt of about ``tokens``."""
        self.changes += 1
        progress.distance = None
        if not self.tracks:
            if 2 * len(self.members) <= self.ample or not self.memory.is_believed:
                return
            self._track()
        residency = self.residency
        if progress.turns and (not self.memory.is_believed or residency.is_tight(self.room)):
            progress.distance = residency.distance(progress)
            progress.certain_distance = residency.certain_distance(progress)
        tokens = tokens if progress.turns else round(self._growth.after(1))
        residency.sent(progress, max(0, tokens - self._growth.shared))

    def _track(self) -> None:
        """Begin to follow the order of use, with the members in the order of their last answers."""
        self.tracks = True
        for progress in sorted(self.members, key=lambda each: each.answered_at or inf):
            own = max(0, _context(progress)[1] - self._growth.shared)
            (self.residency.sent if progress.answered_at is None else self.residency.answered)(progress, own)

    def learn(self, turns: int, tokens: int, seconds: float, now: float) -> None:
        """Learn from an answer that took ``seconds``: the context of its agent has ``tokens`` after ``turns``."""
        computed, self.uncounted = self.uncounted, 0
        self.pace.learn(computed, seconds, now)
        self._growth.learn(turns, tokens)

    def answered(self, progress: AgentForecast, tokens: int, evicted: bool) -> bool:
        """Record an answer, with the context's ``tokens``. Returns whether the capacity changed."""
        self.changes += 1
        if evicted and not self.tracks:
            self._track()
        if progress.distance is None:
            self.use(progress, tokens)
            if tokens > self._measured_for or self.unmeasured >= N.enough or 2 * len(self.members) > self.ample:
                self.measure()
            return False
        before, shared = self.capacity, self._growth.shared
        if evicted:
            self.memory.evicted(progress.distance + shared)
        else:
            self.memory.found(progress.distance + shared, progress.certain_distance + shared)
        self.use(progress, tokens)
        self.measure()
        return self.capacity != before

    def use(self, progress: AgentForecast, tokens: int) -> None:
        """Record that the agent's context is in the cache, and has ``tokens``."""
        if self.tracks:
            self.residency.answered(progress, max(0, tokens - self._growth.shared))

    def measure(self) -> None:
        """Compute how many contexts of the largest size fit. With fewer members, no projection is needed."""
        growth, capacity = self._growth, self.capacity
        self._measured_for, self.unmeasured = growth.largest, 0
        if capacity is None or not growth.is_known:
            self.ample = MOST_AGENTS
            return
        room = capacity * self.memory.margin - growth.shared
        most = max(growth.largest, growth.after(2 * self._forecast.furthest + FIRST_GUESS)) - growth.shared
        self.ample = int(room / max(1.0, most))

    def keeps(self, progress: AgentForecast, now: float) -> bool:
        """Return whether a member may continue: the contexts in the cache fit for the next turns, or another member
        with a cached context is less advanced."""
        if self._fits_anyway:
            return True
        near = self._projected(self._near, now, NEAR)
        if max(near.needed, default=0.0) <= self.room:
            return True
        return self.is_cached(progress) and progress.turns > near.least_turns

    def _is_bunched(self, ages: list[int]) -> bool:
        """Return whether the agents are bunched: within the first turns, for some number of turns, there are as many as
        would be there if agents started at a steady pace and filled the cache. Agents that start together reach their
        longest contexts together; at a steady pace half as many again fit."""
        whole = self._life().whole
        if not whole:
            return False
        pace, young = self.room / whole, 0  # agents that may start per turn
        for taken, number in enumerate(ages):
            young += number
            if young >= max(1.0, pace * (taken + 1)):
                return True
        return False

    def _life(self) -> _Life:
        turns = contexts = last = whole = 0.0
        chance = 1.0
        for taken in range(FARTHEST):
            last = self._growth.after(taken + 1) - self._growth.shared
            whole += chance * last
            chance *= self._forecast.goes_on(taken)
            if chance < 0.01:
                break
            turns += chance
            contexts += chance * last
        return _Life(turns, contexts, last, whole)

    def fits(self, now: float, turns: int, tokens: int = 0) -> bool:
        """Return whether the members' contexts fit for the turns ahead, with one more agent that has taken
        ``turns``."""
        if self._fits_anyway:
            return True
        projection, room = self._projected(self._all, now, FARTHEST), self.room
        if not turns and self._is_bunched(projection.ages):
            return False
        more = projection.fresh if not turns and not tokens else self._project({turns: [1.0, float(tokens)]}, FARTHEST)
        needed = projection.needed
        for ahead in range(max(len(needed), len(more))):
            both = (needed[ahead] if ahead < len(needed) else 0.0) + (more[ahead] if ahead < len(more) else 0.0)
            if both > room:
                return False
        return True

    @property
    def _fits_anyway(self) -> bool:
        return len(self.members) < self.ample or self.capacity is None or not self._growth.is_known

    def _projected(self, projection: _Projection, now: float, horizon: int) -> _Projection:
        """Return the projection of the members; with ``NEAR``, only of those whose context is cached."""
        few = self.changes - projection.changes <= len(self.members) // MEMBERS_A_CHANGE
        if few and now - projection.at < N.refresh:
            return projection
        half = LONG_WAIT * self._forecast.seconds_per_turn
        groups: dict[int, list[float]] = {}
        cached = self.residency.cached(self.room) if horizon == NEAR and self.tracks else None
        least = MOST_AGENTS
        ages = [0] * (FARTHEST + 1)
        for progress in self.members:
            if cached is not None and progress not in cached:
                continue
            taken, size = _context(progress)
            waited = 0.0 if progress.answered_at is None else now - progress.answered_at
            weight = 2.0 ** (1.0 - waited / half) if waited > half > 0.0 else 1.0
            group = groups.setdefault(taken, [0.0, 0.0])
            group[0] += weight
            group[1] += weight * size
            least = min(least, taken)
            ages[min(taken, FARTHEST)] += 1
        projection.needed, projection.least_turns = self._project(groups, horizon), least
        projection.fresh = self._project({0: [1.0, 0.0]}, horizon)
        projection.ages = ages
        projection.at, projection.changes = now, self.changes
        return projection

    def _project(self, groups: dict[int, list[float]], horizon: int) -> list[float]:
        """Return the tokens that agents need for each turn ahead. A group has its number and its tokens, by turns."""
        shared, after, goes_on = self._growth.shared, self._growth.after, self._forecast.goes_on
        found: list[float] = []
        for ahead in range(horizon):
            needed = alive = 0.0
            for taken, group in groups.items():
                if ahead and group[0]:
                    chance = goes_on(taken + ahead - 1)
                    group[0] *= chance
                    group[1] = group[1] * chance + group[0] * (after(taken + ahead) - after(taken + ahead - 1))
                alive += group[0]
                needed += group[1] - (group[0] * shared if taken + ahead else 0.0)
            found.append(needed)
            if alive < 0.01:
                break
        return found

    def pays(self, agents: float) -> bool:
        """Return whether the members alone take more turns per second than all ``agents`` would, whose contexts would
        be evicted and recomputed."""
        pace = self.pace
        cycle, rate = self._forecast.seconds_between_turns + pace.quick, pace.rate
        if self.capacity is None or not cycle or not rate:
            return False
        turns, contexts, last, _ = self._life()
        if not contexts or not last:
            return True
        fitting = self.room * turns / contexts
        few = min(min(fitting, agents) / cycle, rate * turns / last)
        many = min(agents / cycle, rate * turns / contexts)
        return few >= WORTH * many


RETRIED = 64  # turns that are checked again at a time

Waiting = TypeVar("Waiting", bound=Hashable)


@dataclass(slots=True)
class KvCounts:
    """Totals about the engine's KV cache."""

    recomputed: int = 0  # tokens that were computed again after an eviction
    recompute_seconds: float = 0.0  # engine time spent on that
    held_seconds: float = 0.0  # total time that agents were held back
    touches: int = 0  # contexts that were touched while their agents waited for tools
    touched_tokens: int = 0  # tokens computed by these
    kept_alive: int = 0  # number of times that the shared prefix was touched


class Admission(Generic[Waiting]):
    """The working sets of all endpoints, and the turns that wait until their agent's context fits."""

    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self._growth = ContextGrowth()
        self._sets: dict[Endpoint, WorkingSet] = {}
        self._home: dict[AgentForecast, WorkingSet] = {}
        self._recheck = inf
        self.holding = False  # an agent did not fit when it was last asked for
        self.held: dict[Waiting, float] = {}  # waiting turn → time since when
        self._lines: dict[int, dict[Waiting, None]] = {}  # the same by turns taken; may have turns that are not held
        self._retried: set[Waiting] = set()  # turns that are checked again, and not decided yet
        self.enabled = False  # the load of the engines is read
        self.holds = True  # agents that do not fit are held back
        self.is_on = False  # the capacity of at least one endpoint is known
        self.counts = KvCounts()

    def read(self, endpoint: Endpoint) -> None:
        """Apply what is known of the server's memory, after a reading or after readings have stopped."""
        if self.enabled:
            working_set = self._set_of(endpoint)
            before = working_set.ample
            working_set.measure()
            if working_set.ample != before or not self.is_on:
                self._capacity_changed()

    def _capacity_changed(self) -> None:
        self.is_on = any(each.capacity is not None for each in self._sets.values())
        self._recheck = -inf

    @property
    def capacity(self) -> int | None:
        """Total tokens that the caches hold; None if no capacity is known."""
        return sum(each.capacity or 0 for each in self._sets.values()) or None

    @property
    def contexts(self) -> int:
        """Tokens of the contexts of all admitted agents."""
        return sum(_context(member)[1] for each in self._sets.values() for member in each.members)

    def drop(self, endpoint: Endpoint) -> None:
        gone = self._sets.pop(endpoint, None)
        if gone is not None:
            self._home = {progress: home for progress, home in self._home.items() if home is not gone}
            self._capacity_changed()

    def _set_of(self, endpoint: Endpoint) -> WorkingSet:
        found = self._sets.get(endpoint)
        if found is None:
            found = self._sets[endpoint] = WorkingSet(endpoint.server, self._growth, self._forecast)
        return found

    def has_room(self, now: float) -> bool:
        """Return whether a new agent's context fits at some endpoint."""
        if not self.is_on:
            return True
        if not self.held:
            for each in self._sets.values():
                if len(each.members) < each.ample or self._takes(each, now, 0, 0):
                    self.holding = False
                    return True
        self.holding = True
        return False

    def _takes(self, working_set: WorkingSet, now: float, turns: int, tokens: int) -> bool:
        if not self.holds or not working_set.members:
            return True
        if working_set.fits(now, turns, tokens):
            return True
        rows = self._forecast.rows
        return not working_set.pays(inf if rows is None else (self._forecast.live + rows) / len(self._sets))

    def admit(self, waiting: Waiting, progress: AgentForecast, endpoint: Endpoint, now: float) -> bool:
        """Return whether the agent's turn may go to the endpoint. If not, the turn is added to ``held``."""
        if not progress.live:
            return True
        working_set = self._sets.get(endpoint) or self._set_of(endpoint)
        home = self._home.get(progress)
        crowded = len(working_set.members) >= working_set.ample
        if crowded and home is working_set and progress.turns and self.holds and not working_set.keeps(progress, now):
            working_set.leave(progress)
            del self._home[progress]
            home = None
        retried = waiting in self._retried
        if retried:
            self._retried.remove(waiting)
        if home is not working_set:
            if crowded and not self._takes(working_set, now, progress.turns, _context(progress)[1]):
                self.held[waiting] = now
                self._lines.setdefault(progress.turns, {})[waiting] = None
                self._recheck = now + N.refresh
                return False
            if home is not None:
                home.leave(progress)
            self._home[progress] = working_set
            working_set.members[progress] = None
        if retried and self.held:
            self._recheck = -inf  # more may fit
        if not working_set.is_wide:
            working_set.look_up(progress, max(progress.expected, progress.tokens))
        return True

    def is_evicted(self, progress: AgentForecast) -> bool:
        """Return whether the agent's context has probably been evicted."""
        if not progress.tokens or not self.is_on:
            return False
        sets, where = self._sets, progress.home
        home = next(iter(sets.values())) if len(sets) == 1 else None if where is None else sets.get(where)
        return home is not None and not home.is_cached(progress)

    def may_touch(self, progress: AgentForecast, waiting: int) -> bool:
        """Return whether to send a request that recomputes the agent's context while its tool runs. True if the context
        was evicted, no turn waits here or in the engine, and no other agent's context would be evicted for it."""
        home = self._home.get(progress)
        if home is None or waiting or home.memory.queue or self.held or not self.is_evicted(progress):
            return False
        shared = self._growth.shared
        others = sum(max(0, _context(each)[1] - shared) for each in home.members if home.is_cached(each))
        return others + progress.tokens <= N.full * home.room

    def seconds_to_compute(self, progress: AgentForecast) -> float:
        """Return the seconds that the engine needs to compute the agent's context, plus those of a turn."""
        home = self._home.get(progress)
        return 0.0 if home is None or not home.pace.rate else progress.tokens / home.pace.rate + home.pace.quick

    def touched(self, progress: AgentForecast, endpoint: Endpoint, usage: Usage) -> None:
        """Record that the agent's context was computed again and is in the cache."""
        self.counts.touches += 1
        self.counts.touched_tokens += usage.prompt_tokens - usage.cached_tokens
        if progress.live:
            self._set_of(endpoint).use(progress, usage.prompt_tokens)

    def go_on(self, progress: AgentForecast, waited: float) -> None:
        """Record that an agent is ready for its next turn after ``waited`` seconds at a tool. It must be admitted again
        if its context is no longer expected in the cache."""
        if self._growth.expect(progress.turns, progress.expected - progress.tokens):
            for each in self._sets.values():
                each.measure()
        home = self._home.get(progress)
        if home is None or not home.tracks:  # then its context is expected there
            return
        turn = self._forecast.seconds_per_turn
        gone = waited > 2 * LONG_WAIT * turn > 0  # it counts less than half
        if gone and not home.is_cached(progress):
            home.leave(progress)
            del self._home[progress]

    def answered(self, progress: AgentForecast, endpoint: Endpoint, usage: Usage, seconds: float, now: float) -> None:
        """Learn from the token counts of an answer."""
        prompt, cached, before, growth = usage.prompt_tokens, usage.cached_tokens, progress.tokens, self._growth
        if not prompt:
            return
        working_set, evicted = self._sets.get(endpoint) or self._set_of(endpoint), False
        memory, wide = working_set.memory, working_set.is_wide
        if cached:
            memory.tells_cached = True
            if not progress.turns:
                growth.shared = min(growth.shared, cached) if growth.shared else cached
        if progress.turns and memory.tells_cached and before:
            if (again := min(before, prompt) - cached) > 0:
                self.counts.recomputed += again
                if rate := working_set.pace.rate:
                    self.counts.recompute_seconds += again / rate
            evicted = cached - growth.shared < N.mostly * (before - growth.shared)
        progress.tokens = tokens = prompt + usage.completion_tokens
        working_set.uncounted += prompt - cached
        working_set.unmeasured += 1
        if wide and not evicted and working_set.unmeasured < N.enough and tokens <= growth.largest:
            return  # while the contexts fit by far, one answer in ``N.enough`` is enough to learn from
        working_set.learn(progress.turns + 1, tokens, seconds, now)
        if not progress.live:
            return
        if working_set.answered(progress, tokens, evicted):
            self._capacity_changed()
        if progress not in self._home:
            self._home[progress] = working_set
            working_set.members[progress] = None

    def end(self, progress: AgentForecast) -> None:
        """Record that the agent has ended; its context is no longer needed."""
        progress.live = False
        home = self._home.pop(progress, None)
        if home is not None:
            home.leave(progress)
            home.residency.end(progress)
            self._recheck = -inf

    @property
    def due(self) -> float:
        """When to check the held agents again; infinite if there are none."""
        return self._recheck if self.held else inf

    def release(self, now: float) -> list[Waiting]:
        """Return a few held turns to check again, the most advanced first. They are no longer held. If they fit, the
        next call returns more."""
        if not self.held or now < self._recheck:
            return []
        self._recheck = inf
        released: list[Waiting] = []
        while self._lines and len(released) < RETRIED:
            turns = max(self._lines)
            line = self._lines[turns]
            waiting = next(iter(line))
            del line[waiting]
            if not line:
                del self._lines[turns]
            if (since := self.held.pop(waiting, None)) is not None:
                self.counts.held_seconds += now - since
                released.append(waiting)
        self._retried.update(released)
        return released

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
from math import inf, log2
from typing import TYPE_CHECKING, Generic, TypeVar

from batch_agent.messages import Usage
from batch_agent.scheduler.engine_load import Load
from batch_agent.scheduler.forecast import AgentProgress, TurnForecast
from batch_agent.scheduler.residency import FULL
from batch_agent.scheduler.working_set import LONG_WAIT, ContextGrowth, WorkingSet

if TYPE_CHECKING:
    from batch_agent.scheduler.endpoint import Endpoint
    from batch_agent.scheduler.server import Server

GONE = 0.5  # an agent whose context has less weight than this must be admitted again
RECHECK_SECONDS = 1.0  # between two checks of the context weights while an agent is held back
MANY, COVERED = 8, 0.5  # requests in flight, and the part of them that a reading must show to be about the whole server
RETRIED = 64  # turns that are checked again at a time
EVICTED = 0.5  # part of an agent's own context: if less of it was cached, the context was evicted

Waiting = TypeVar("Waiting", bound=Hashable)


def kv_tokens_left(load: Load, server: Server) -> int | None:
    """Return the tokens of an engine's KV cache that one dispatcher may use. None if the engine does not report its
    size, or keeps evicted blocks in a larger memory.

    The part that requests of other clients hold is subtracted: their share of the running requests, times the part in
    use.
    """
    if not load.kv_tokens or load.offloads:
        return None
    others = max(0, load.running - server.inflight) / load.running if load.running else 0.0
    return round(load.kv_tokens * (1.0 - others * (load.kv_usage or 0.0)) / max(1, len(server.endpoints)))


def is_partial(load: Load, inflight: int, tokens: int) -> bool:
    """Return whether a reading is not about the whole server: it shows far fewer requests than ``inflight``, or its
    cache holds fewer tokens than the ``tokens`` of these requests, which are in it now."""
    if inflight >= MANY and load.running + load.waiting < COVERED * inflight:
        return True
    held = (load.kv_usage or 0.0) * (load.kv_tokens or 0)
    return held > 0 and load.running >= inflight and not load.waiting and held < COVERED * tokens


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
        self._home: dict[AgentProgress, WorkingSet] = {}
        self._recheck = inf
        self._holding = False  # an agent did not fit when it was last asked for
        self.held: dict[Waiting, float] = {}  # waiting turn → time since when
        self._lines: dict[int, dict[Waiting, None]] = {}  # the same by turns taken; may have turns that are not held
        self._retried: set[Waiting] = set()  # turns that are checked again, and not decided yet
        self.enabled = False  # the load of the engines is read
        self.holds = True  # agents that do not fit are held back
        self.is_on = False  # the capacity of at least one endpoint is known
        self.counts = KvCounts()

    def read(self, endpoint: Endpoint, load: Load) -> None:
        """Update the working set from the engine's load report."""
        if self.enabled:
            self.set_capacity(endpoint, kv_tokens_left(load, endpoint.server))
            working_set = self._sets[endpoint]
            working_set.queue = load.waiting
            working_set.preempted(load.preemptions)
            if is_partial(load, endpoint.server.inflight, working_set.tokens_in_flight):
                working_set.contradict()
                self._capacity_changed()

    def set_capacity(self, endpoint: Endpoint, tokens: int | None) -> None:
        working_set = self._set_of(endpoint)
        if working_set.reported != tokens:
            working_set.report(tokens)
            self._capacity_changed()

    def unread(self, endpoint: Endpoint) -> None:
        """Forget what the engine reported: it does not report any more."""
        if self.enabled and endpoint in self._sets:
            self.set_capacity(endpoint, None)

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
        return sum(tokens for each in self._sets.values() for _, tokens in each.members.values())

    def drop(self, endpoint: Endpoint) -> None:
        gone = self._sets.pop(endpoint, None)
        if gone is not None:
            self._home = {progress: home for progress, home in self._home.items() if home is not gone}
            self._capacity_changed()

    def _set_of(self, endpoint: Endpoint) -> WorkingSet:
        found = self._sets.get(endpoint)
        if found is None:
            found = self._sets[endpoint] = WorkingSet(self._growth, self._forecast)
        return found

    def has_room(self, now: float) -> bool:
        """Return whether a new agent's context fits at some endpoint."""
        if not self.is_on:
            return True
        room = not self.held and any(self._takes(each, now, 0, 0) for each in self._sets.values())
        self._holding = not room
        return room

    def _takes(self, working_set: WorkingSet, now: float, turns: int, tokens: int) -> bool:
        if not self.holds or not working_set.watch.helps or not working_set.members:
            return True
        if working_set.fits(now, turns, tokens):
            return True
        rows = self._forecast.rows
        return not working_set.pays(inf if rows is None else (self._forecast.live + rows) / len(self._sets))

    def admit(self, waiting: Waiting, progress: AgentProgress, endpoint: Endpoint, now: float) -> bool:
        """Return whether the agent's turn may go to the endpoint. If not, the turn is added to ``held``."""
        if not progress.live:
            return True
        working_set = self._set_of(endpoint)
        home = self._home.get(progress)
        tokens = max(progress.expected, progress.tokens)
        crowded = len(working_set.members) >= working_set.ample
        if crowded and home is working_set and progress.turns and self.holds and not working_set.keeps(progress, now):
            working_set.leave(progress)
            del self._home[progress]
            home = None
        retried = waiting in self._retried
        if retried:
            self._retried.remove(waiting)
        if home is not working_set:
            if not self._takes(working_set, now, progress.turns, tokens if progress.turns else 0):
                self.held[waiting] = now
                self._lines.setdefault(progress.turns, {})[waiting] = None
                self._recheck = now + RECHECK_SECONDS
                return False
            if home is not None:
                home.leave(progress)
            self._home[progress] = working_set
        if retried and self.held:
            self._recheck = -inf  # more may fit
        working_set.put(progress, progress.turns, tokens if progress.turns else 0)
        working_set.look_up(progress, tokens)
        return True

    def is_evicted(self, progress: AgentProgress) -> bool:
        """Return whether the agent's context has probably been evicted."""
        if not progress.tokens or not self.is_on:
            return False
        sets, where = self._sets, progress.home
        home = next(iter(sets.values())) if len(sets) == 1 else None if where is None else sets.get(where)
        return home is not None and not home.is_cached(progress)

    def may_touch(self, progress: AgentProgress, waiting: int) -> bool:
        """Return whether to send a request that recomputes the agent's context while its tool runs. True if the context
        was evicted, no turn waits here or in the engine, and no other agent's context would be evicted for it."""
        home = self._home.get(progress)
        if home is None or waiting or home.queue or self.held or not self.is_evicted(progress):
            return False
        others = sum(
            max(0, tokens - self._growth.shared)
            for member, (_, tokens) in home.members.items()
            if home.is_cached(member)
        )
        return others + progress.tokens <= FULL * home.room

    def seconds_to_compute(self, progress: AgentProgress) -> float:
        """Return the seconds that the engine needs to compute the agent's context, plus those of a turn."""
        home = self._home.get(progress)
        return 0.0 if home is None or not home.pace.rate else progress.tokens / home.pace.rate + home.pace.quick

    def touched(self, progress: AgentProgress, endpoint: Endpoint, usage: Usage) -> None:
        """Record that the agent's context was computed again and is in the cache."""
        self.counts.touches += 1
        self.counts.touched_tokens += usage.prompt_tokens - usage.cached_tokens
        if progress.live:
            self._set_of(endpoint).use(progress, usage.prompt_tokens)

    def go_on(self, progress: AgentProgress, waited: float) -> None:
        """Record that an agent is ready for its next turn after ``waited`` seconds at a tool. It must be admitted again
        if its context is no longer expected in the cache."""
        if self._growth.expect(progress.turns, progress.expected - progress.tokens):
            for each in self._sets.values():
                each.measure()
        home = self._home.get(progress)
        if home is None:
            return
        home.put(progress, progress.turns, max(progress.expected, progress.tokens))
        turn = self._forecast.seconds_per_turn
        gone = waited > (1 - log2(GONE)) * LONG_WAIT * turn > 0
        if gone and not home.is_cached(progress):
            home.leave(progress)
            del self._home[progress]

    def answered(self, progress: AgentProgress, endpoint: Endpoint, usage: Usage, seconds: float, now: float) -> None:
        """Learn from the token counts of an answer."""
        tokens, cached, before = usage.prompt_tokens + usage.completion_tokens, usage.cached_tokens, progress.tokens
        growth, home = self._growth, self._home.get(progress)
        if not usage.prompt_tokens:
            return
        working_set, evicted = self._set_of(endpoint), False
        working_set.pace.learn(usage.prompt_tokens - cached, seconds, now)
        watch = working_set.watch
        watch.tells = watch.tells or cached > 0
        if progress.turns == 0 and cached:
            growth.shared = min(growth.shared, cached) if growth.shared else cached
        elif progress.turns and watch.tells and before:
            again = max(0, min(before, usage.prompt_tokens) - cached)
            self.counts.recomputed += again
            if rate := working_set.pace.rate:
                self.counts.recompute_seconds += again / rate
            evicted = cached - growth.shared < EVICTED * (before - growth.shared)
            watch.saw(evicted=evicted, held=self._holding)
        progress.tokens = tokens
        growth.learn(progress.turns + 1, tokens)
        if not progress.live:
            return
        if working_set.answered(progress, tokens, evicted):
            self._capacity_changed()
        if home is None:
            home = self._home[progress] = working_set
        home.put(progress, progress.turns + 1, tokens)

    def end(self, progress: AgentProgress) -> None:
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
        """Return a few turns to check again, the most advanced first. They are no longer held. If they fit, the next
        call returns more."""
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

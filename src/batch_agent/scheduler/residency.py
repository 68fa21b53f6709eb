"""Estimates which agents' contexts are still in the KV cache of one endpoint.

Engines evict the least recently used blocks. So an agent's context is still cached if it fits the cache together with
all contexts used since its last turn. The part that all agents share is counted once. The tokens used since a turn are
a sum over the end of a list, which two trees of partial sums answer in logarithmic time.
"""

from __future__ import annotations

from collections.abc import Iterable

from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import AgentForecast

MOST = 4_096  # number of contexts that are remembered
PLACES = 2 * MOST  # in the order of use, before they are numbered again


class _Sums:
    """Sums of numbers by position (a Fenwick tree)."""

    def __init__(self) -> None:
        self.total = 0
        self._tree = [0] * (PLACES + 1)

    def add(self, place: int, number: int) -> None:
        self.total += number
        tree, place = self._tree, place + 1
        while place <= PLACES:
            tree[place] += number
            place += place & -place

    def before(self, place: int) -> int:
        """Return the sum of all places before this one."""
        total, tree = 0, self._tree
        while place:
            total += tree[place]
            place &= place - 1
        return total


class Residency:
    """Contexts ordered by their last use. Sizes are tokens of the agent's own part."""

    def __init__(self) -> None:
        self._contexts: dict[AgentForecast, tuple[int, int]] = {}  # place and size, in the order of use
        self._flying: set[AgentForecast] = set()  # with a turn in flight: their contexts are in use until the answer
        self._next = 0
        self._sizes, self._in_flight = _Sums(), _Sums()

    def is_tight(self, room: float) -> bool:
        """Return whether contexts are being evicted, or soon will be. ``room`` is the capacity in tokens."""
        return self._sizes.total > N.full * room

    def sent(self, progress: AgentForecast, tokens: int) -> None:
        """Record that a turn of the agent is sent; ``tokens`` is the agent's own part of the prompt."""
        self._forget(progress)
        self._flying.add(progress)
        self._use(progress, tokens)

    def answered(self, progress: AgentForecast, tokens: int) -> None:
        self._forget(progress)
        self._flying.discard(progress)
        self._use(progress, tokens)

    def end(self, progress: AgentForecast) -> None:
        """Record that the agent has ended. Its context stays until others need the memory."""
        if progress in self._flying:
            self._flying.discard(progress)
            if (context := self._contexts.get(progress)) is not None:
                self._in_flight.add(context[0], -context[1])

    def holds(self, progress: AgentForecast, room: float) -> bool:
        """Return whether the agent's context is probably in a cache with this many tokens."""
        if progress in self._flying:
            return True
        distance = self.distance(progress)
        return distance is not None and distance <= room

    def cached(self, room: float) -> set[AgentForecast]:
        """Return all agents whose contexts are probably in a cache with this many tokens."""
        found, used = set(self._flying), self._in_flight.total
        for progress, (_, tokens) in reversed(self._contexts.items()):
            if progress in self._flying:
                continue
            used += tokens
            if used > room:
                break
            found.add(progress)
        return found

    def distance(self, progress: AgentForecast) -> int | None:
        """Return the tokens of all contexts used since the agent's last turn, with its own; None if it is unknown."""
        context = self._contexts.get(progress)
        if context is None:
            return None
        place = context[0]
        return self._sizes.total - self._sizes.before(place) + self._in_flight.before(place)

    def certain_distance(self, progress: AgentForecast) -> int:
        """Return the ``distance`` that is certain: without the contexts of requests in flight, which may still wait in
        the engine's queue."""
        context = self._contexts.get(progress)
        if context is None:
            return 0
        place = context[0]
        later = self._sizes.total - self._sizes.before(place)
        return later - (self._in_flight.total - self._in_flight.before(place))

    def _forget(self, progress: AgentForecast) -> None:
        context = self._contexts.pop(progress, None)
        if context is not None:
            self._sizes.add(context[0], -context[1])
            if progress in self._flying:
                self._in_flight.add(context[0], -context[1])

    def _use(self, progress: AgentForecast, tokens: int) -> None:
        if self._next == PLACES:
            self._number_again(self._contexts.items())
        self._put(progress, tokens)
        if len(self._contexts) > MOST:
            oldest = next((each for each in self._contexts if each not in self._flying), None)
            if oldest is not None:
                self._forget(oldest)

    def _put(self, progress: AgentForecast, tokens: int) -> None:
        place = self._next
        self._contexts[progress] = place, tokens
        self._next += 1
        self._sizes.add(place, tokens)
        if progress in self._flying:
            self._in_flight.add(place, tokens)

    def _number_again(self, contexts: Iterable[tuple[AgentForecast, tuple[int, int]]]) -> None:
        kept = list(contexts)[-MOST:]
        self._contexts, self._next = {}, 0
        self._sizes, self._in_flight = _Sums(), _Sums()
        for progress, (_, tokens) in kept:
            self._put(progress, tokens)

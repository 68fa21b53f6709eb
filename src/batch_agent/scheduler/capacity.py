"""How many calls a backend can take right now: additive increase, multiplicative decrease.

The user's ``max_inflight`` is the ceiling. A refusal for load (429, 503) halves what is in flight, once per generation
of requests: those that were already on their way when the limit fell say nothing about the new limit. Every ``limit``
good answers raise it by one until the ceiling is reached again.
"""

from __future__ import annotations


class Capacity:
    __slots__ = ("_good", "ceiling", "generation", "limit")

    def __init__(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.limit = ceiling
        self.generation = 0  # note it when a request leaves, hand it back with how the request ended
        self._good = 0

    def resize(self, ceiling: int | None) -> None:
        """The user changed the ceiling: start from it again."""
        self.ceiling = self.limit = ceiling
        self.generation += 1
        self._good = 0

    def overloaded(self, generation: int, inflight: int) -> bool:
        """A request of ``generation`` was refused for load. True when the limit fell."""
        if generation != self.generation:
            return False
        self.generation += 1
        self._good = 0
        limit = inflight if self.limit is None else min(self.limit, inflight)
        self.limit = max(1, limit // 2)
        return True

    def succeeded(self) -> bool:
        """A good answer came. True when the limit rose."""
        limit = self.limit
        if limit is None or limit == self.ceiling:
            return False
        self._good += 1
        if self._good < limit:
            return False
        self._good = 0
        self.limit = limit + 1
        return True

"""How many calls an endpoint can take right now.

The user's ``max_inflight`` is the ceiling. A refusal for load (429, 503) halves what is in flight, once per generation
of requests: those that were already on their way when the limit fell say nothing about the new limit. Every good answer
then raises the limit by one, so that it doubles with each round of answers, up to ``_known``, just below where it was
refused; from there on every ``limit`` good answers raise it by one until the ceiling is reached. After an outage it
begins at one and comes back, in the same way, to where the last good answer found it.
"""

from __future__ import annotations


class Capacity:
    __slots__ = ("_good", "_known", "_proven", "ceiling", "generation", "limit")

    def __init__(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.limit = ceiling
        self.generation = 0  # note it when a request leaves, hand it back with how the request ended
        self._known: int | None = None  # up to here the limit may grow fast; None: no limit was ever met
        self._proven: int | None = ceiling  # where the limit was when answers were good, growing back aside
        self._good = 0

    def resize(self, ceiling: int | None) -> None:
        """The user changed the ceiling: start from it again."""
        self.ceiling = self.limit = self._proven = ceiling
        self._known = None
        self._begin()

    def overloaded(self, generation: int, inflight: int) -> bool:
        """A request of ``generation`` was refused for load. True when the limit fell."""
        if generation != self.generation:
            return False
        refused_at = inflight if self.limit is None else min(self.limit, inflight)
        self.limit = max(1, refused_at // 2)
        self._known = max(self.limit, refused_at - max(1, refused_at // 16))
        self._begin()
        return True

    def restart(self, most_in_flight: int) -> None:
        """The endpoint is down: it will be filled again step by step. Refusals for load since its last good answer
        were part of that, and say nothing of what it can take."""
        self._known = max(self._proven or most_in_flight, 1)
        self.limit = 1
        self._begin()

    def succeeded(self) -> bool:
        """A good answer came. True when the limit rose."""
        limit, regained = self.limit, self._known or 1
        if limit is None or limit >= regained:
            self._proven = limit
        if limit is None or limit == self.ceiling:
            return False
        self._good += 1
        if limit >= regained and self._good < limit:
            return False
        self._good = 0
        self.limit = limit + 1
        return True

    def _begin(self) -> None:
        self.generation += 1
        self._good = 0

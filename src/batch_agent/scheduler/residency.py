"""Estimates which agents' contexts are still in the KV cache of one endpoint.

Engines evict the least recently used blocks. So an agent's context is still cached if it fits the cache together with
all contexts used since its last turn. The part that all agents share is counted once.

``LearntCapacity`` reverses this for an engine that does not report the size of its cache: an agent whose context was
evicted, or was not, gives an upper or a lower bound of the capacity.
"""

from __future__ import annotations

from collections import OrderedDict

from batch_agent.scheduler.forecast import Progress

MOST = 4_096  # number of contexts that are remembered
FARTHEST = 512  # number of contexts to look back over
FULL = 0.9  # part of the capacity; below it nothing is evicted
SMALLER, LARGER = 0.8, 1.01  # largest change of the estimate after one eviction, and after one hit near the capacity


class Residency:
    """Contexts ordered by their last use. Those that do not fit the cache any more are dropped."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[Progress, int] = OrderedDict()
        self._flying: set[Progress] = set()  # with a turn in flight: their contexts are in use until the answer
        self._total = 0

    def __contains__(self, progress: Progress) -> bool:
        return progress in self._contexts

    def is_tight(self, room: float) -> bool:
        """Return whether contexts are being evicted, or soon will be. ``room`` is the capacity in tokens."""
        return self._total > FULL * room

    def sent(self, progress: Progress, tokens: int, room: float) -> None:
        """Record that a turn of the agent is sent; ``tokens`` is the agent's own part of the prompt."""
        self._flying.add(progress)
        self._use(progress, tokens, room)

    def answered(self, progress: Progress, tokens: int, room: float) -> None:
        self._flying.discard(progress)
        self._use(progress, tokens, room)

    def end(self, progress: Progress) -> None:
        """Record that the agent has ended. Its context stays until others need the memory."""
        self._flying.discard(progress)

    def _use(self, progress: Progress, tokens: int, room: float) -> None:
        contexts = self._contexts
        self._total += tokens - contexts.pop(progress, 0)
        contexts[progress] = tokens
        while self._total > room or len(contexts) > MOST:
            oldest = next(iter(contexts))
            if oldest is progress:
                return
            if oldest in self._flying:
                contexts.move_to_end(oldest)
            else:
                self._total -= contexts.pop(oldest)

    def distance(self, progress: Progress) -> int | None:
        """Return the tokens of all contexts used since the agent's last turn; None if that is too long ago."""
        if progress not in self._contexts:
            return None
        tokens, flying = 0, len(self._flying)
        passed = False
        for count, (other, size) in enumerate(reversed(self._contexts.items())):
            is_flying = other in self._flying
            tokens += size if is_flying or not passed else 0
            flying -= is_flying
            passed = passed or other is progress
            if passed and flying <= 0:
                return tokens
            if count == FARTHEST:
                break
        return tokens if passed else None


class LearntCapacity:
    """The capacity inferred from evictions; None before the first."""

    def __init__(self) -> None:
        self.tokens: int | None = None

    def learn(self, distance: int, *, evicted: bool) -> bool:
        """Learn from a context that was looked up at this distance. Returns whether the capacity changed."""
        before = self.tokens
        if evicted:
            self.tokens = distance if before is None else max(min(before, distance), round(SMALLER * before))
        elif before is not None and distance > FULL * before:
            self.tokens = max(distance, round(LARGER * before))
        return self.tokens != before

"""How many calls an endpoint can take right now.

The user's ``max_inflight`` is the ceiling, and where the limit begins; where none was given a
``LimitSearch`` looks for the number, and what the engine tells of its queue (``LoadGuide``) moves it too.

A refusal for load (429, 503) halves what is in flight, once per generation of requests: those that were already on
their way when the limit fell say nothing about the new limit. Every good answer then raises the limit by one, so that
it doubles with each round of answers, up to ``_known``, just below where it was refused. From there on it is probed: a
whole round of good answers raises it by a step, and the steps grow. A refusal while probing says that what was known is
all there is: the limit falls a little, and the next probe waits twice as many rounds. After an outage the limit begins
at one and comes back, in the same way, to where the last good answer found it.
"""

from __future__ import annotations

from batch_agent.scheduler.engine_load import LoadGuide, Reading
from batch_agent.scheduler.limit_search import LimitSearch

SURE = 3  # refusals of probes in a row, after which nobody else is taken to be there
MOST_PATIENCE = 32  # rounds between two probes then
PROBES_COST = 10  # of the time at most one part is spent waiting as the server asks when it refuses a probe
PROBE_SHARE = 16  # of the limit: a probe's step is no more
SHARE_GIVEN = 16  # of the limit, given up where it was refused


class Capacity:
    """Methods that may change the limit return why it did; an empty text when it did not."""

    __slots__ = (
        "_alone",
        "_calm_until",
        "_good",
        "_guide",
        "_held",
        "_known",
        "_patience",
        "_proven",
        "_refused_at",
        "_step",
        "ceiling",
        "filled",
        "generation",
        "limit",
        "search",
    )

    def __init__(self, ceiling: int | None, search: LimitSearch | None = None) -> None:
        self.generation = -1  # note it when a request leaves, hand it back with how the request ended
        self._good = 0  # answers since the limit was last looked at
        self._guide = LoadGuide()
        self.resize(ceiling)
        if search is not None:
            self.start_search(search)

    def resize(self, ceiling: int | None) -> None:
        """The user changed the ceiling: start from it again."""
        self.ceiling = self.limit = ceiling
        self.search: LimitSearch | None = None  # while the number is looked for
        self._proven: int | None = ceiling  # where the limit was when answers were good, growing back aside
        self._known: int | None = None  # up to here the limit may grow fast; None: no limit was ever met
        self._held: int | None = ceiling  # the latest limit that a whole round of answers was good at
        self._refused_at = 0  # the latest time
        self._alone = 0  # refusals of probes, since one that was none
        self._patience = self._step = 1  # rounds before the next probe, and how far it goes
        self._calm_until = 0.0  # nor is there one before that
        self.filled = False  # since the limit changed, or it was last asked: all of it was in use
        self._begin()

    def start_search(self, search: LimitSearch) -> None:
        """Look for the number from here on, below the ceiling."""
        if self.ceiling is not None:
            search.bound(self.ceiling)
        self.search = search
        self.limit = self._proven = self._held = search.limit

    def overloaded(self, generation: int, inflight: int, wait: float = 0.0, now: float = 0.0) -> str:
        """A request of ``generation`` was refused for load, with so many seconds to wait for all."""
        if generation != self.generation:
            return ""
        refused_at = inflight if self.limit is None else min(self.limit, inflight)
        if self._known is not None and refused_at > self._known:
            held = min(refused_at - 1, self._held or refused_at)
            self._alone += 1
            # While others may be there a share is given up, so that all come to equal parts: the larger gives more.
            self._known = max(1, held - (0 if self._alone > SURE else held // SHARE_GIVEN))
            self.limit = max(1, self._known - self._known // 8)
            self._patience = min(MOST_PATIENCE, max(1, self.limit // 2), 2 ** max(0, self._alone - SURE))
            self._calm_until = now + PROBES_COST * wait
        else:
            given = SHARE_GIVEN if self._known is None else SHARE_GIVEN // 2
            self.limit = max(1, refused_at // 2)
            self._known = max(self.limit, refused_at - max(1, refused_at // given))
            self._alone, self._patience = 0, 1
        self._step = 1
        self._refused_at = refused_at
        self.search = None  # the server has said itself what it takes
        self._begin()
        return "the server is overloaded"

    def restart(self, most_in_flight: int) -> None:
        """The endpoint is down: it will be filled again step by step. Refusals for load since its last good answer
        were part of that, and say nothing of what it can take."""
        self._known = max(self._proven or most_in_flight, 1)
        self.limit = 1
        if self.search is not None:
            self.search.forget()
        self._begin()

    def succeeded(self, sent_at: float, seconds: float, tokens: int, now: float) -> str:
        """A good answer, after so many seconds, to a request that left at ``sent_at``."""
        limit, known = self.limit, self._known
        if known is not None and limit is not None and limit < known:
            self.limit = limit + 1
            if self.search is not None and self.limit == known:
                self._known = None  # back from an outage; nothing was refused
            return "answers are good"
        self._proven = limit
        if self.search is not None:
            return self._follow(self.search.answered(sent_at, seconds, tokens, self.filled, now))
        if limit is None or limit == self.ceiling:
            return ""
        self._good += 1
        if self._good < limit * self._patience or now < self._calm_until or not self.filled:
            return ""  # ... or nobody wants more
        if limit >= self._refused_at:  # where it never was
            self._patience, self._step = 1, min(2 * self._step, max(1, limit // PROBE_SHARE))
        self._good, self._held, self.filled = 0, limit, False
        self.limit = limit + self._step if self.ceiling is None else min(limit + self._step, self.ceiling)
        return "answers are good"

    def ramp(self, inflight: int, now: float) -> str:
        """Time has passed."""
        return "" if self.search is None else self._follow(self.search.ramp(inflight, now))

    def _follow(self, reason: str) -> str:
        if reason and self.search is not None:
            self.limit, self.filled = self.search.limit, False
        return reason

    def loaded(self, load: Reading, inflight: int) -> str:
        """The engine told how busy it is."""
        limit = self.limit
        if limit is None:
            return ""
        most = self.ceiling if self._known is None else max(limit, self._known)
        change = self._guide.read(load, limit if self.filled else inflight, limit, most)
        self.filled = False
        if self.search is not None:
            self.search.guided = True
        if change is None:
            return ""
        self.limit, reason = change
        if self.search is not None:
            self.search.move(self.limit)
        return reason

    @property
    def knee(self) -> int | None:
        """The number that was looked for, once it is found."""
        return None if self.search is None else self.search.knee

    def unread(self) -> None:
        """The engine can no longer be asked: the answers alone have to tell."""
        if self.search is not None:
            self.search.guided = False

    def _begin(self) -> None:
        self.generation += 1
        self._good = 0

"""How many calls an endpoint can take right now.

The user's ``max_inflight`` is the ceiling, and where the limit begins. Without one, a ``LimitSearch`` looks for the
number. What an engine reports about its queue (``LoadGuide``) moves the limit too.

A refusal for load (429, 503) halves what is in flight, once per generation of requests: requests that were already on
their way when the limit fell say nothing about the new limit. The way back has three parts:

- Every good answer adds one, so the limit doubles with each round of answers (a round: as many answers as the limit).
  This ends at ``_known``, an eighth and one below the refusal.
- Then the limit climbs slowly: the first slot takes a few rounds, and the pace doubles every two rounds. The pace does
  not depend on the limit, and the part given up does. That brings processes that share a server to equal shares: all
  gain equally, and the largest gives up most.
- One below the refusal, the limit stays for some rounds before the refused number is tried again.

After an outage the limit starts at one and doubles with each round, up to where it last was good.
"""

from __future__ import annotations

from math import sqrt

from batch_agent.scheduler.engine_load import LoadGuide, Reading
from batch_agent.scheduler.limit_search import LimitSearch

GIVEN_UP = 1 / 8  # share of the limit that is left to others after a refusal
PACE, DOUBLING = 1 / 5, 2  # slots per round at the start of the climb; rounds until the pace is twice that
PAUSE = 6  # rounds before a number that was refused is tried again
WAITS, MOST_WAITS = 3, 20  # Retry-Afters that the pause lasts: so many times the root of the limit, and at most


class Capacity:
    """Methods that may change the limit return the reason, or "" if it did not change."""

    __slots__ = (
        "_answered",
        "_gain",
        "_guide",
        "_known",
        "_pace",
        "_pause",
        "_probe_at",
        "_proven",
        "_refused_at",
        "ceiling",
        "filled",
        "generation",
        "limit",
        "search",
    )

    _gain: float  # of the next slot
    _pace: float  # slots per round

    def __init__(self, ceiling: int | None, search: LimitSearch | None = None) -> None:
        self.generation = -1  # a request keeps the number it left with, and hands it to ``overloaded``
        self._guide = LoadGuide()
        self.resize(ceiling)
        if search is not None:
            self.start_search(search)

    def resize(self, ceiling: int | None) -> None:
        """Start again from a new ceiling."""
        self.ceiling = self.limit = ceiling
        self.search: LimitSearch | None = None  # while the number is looked for
        self.filled = False  # all slots were in use at some time since the limit changed or the engine was read
        self._proven: int | None = ceiling  # the last limit with good answers, except while it grows back
        self._known: int | None = None  # the limit doubles up to here; None: nothing was refused
        self._refused_at = 0  # the limit of the last refusal
        self._answered = False  # since the last refusal
        self._pause = 0.0  # rounds still to wait before ``_refused_at`` is tried again
        self._probe_at = 0.0  # and not before this time
        self._climb_from(0.0)

    def start_search(self, search: LimitSearch) -> None:
        """Look for the number from here on, below the ceiling."""
        if self.ceiling is not None:
            search.bound(self.ceiling)
        self.search = search
        self.limit = self._proven = search.limit

    def overloaded(self, generation: int, inflight: int, wait: float = 0.0, now: float = 0.0) -> str:
        """A request of ``generation`` was refused for load, with ``wait`` seconds of Retry-After."""
        if generation != self.generation:
            return ""
        refused_at = inflight if self.limit is None else min(self.limit, inflight)
        gain = 0.0
        if self._answered or self._known is None:  # else the server is still full, which says nothing new
            # One slot is tried as two sooner than the rest of the rule says: it has the least.
            known = max(1.5, refused_at * (1 - GIVEN_UP) - 1)
            self._known, self._refused_at = int(known), refused_at
            gain = known - self._known
            self._pause = PAUSE
            # All slots stand idle during a Retry-After, so it must be rare. A small share has less to lose, and tries
            # again sooner, so that it does not always meet a large one at its highest.
            self._probe_at = now + wait * min(MOST_WAITS, WAITS * sqrt(refused_at))
        self.limit = max(1, refused_at // 2)
        self.search = None  # the server has said itself what it takes
        self._answered = False
        self._climb_from(gain)
        return "the server is overloaded"

    def restart(self, most_in_flight: int) -> None:
        """The endpoint is down: fill it again step by step, up to where its last good answer was. Refusals since
        then were part of the outage."""
        self._known = max(self._proven or most_in_flight, 1)
        self.limit = 1
        if self.search is not None:
            self.search.forget()
        self._climb_from(0.0)

    def succeeded(self, sent_at: float, seconds: float, tokens: int, now: float) -> str:
        """A request that left at ``sent_at`` was answered well after ``seconds``."""
        self._answered = True
        limit, known = self.limit, self._known
        if known is not None and limit is not None and limit < known:
            self.limit = limit + 1
            if self.search is not None and self.limit == known:
                self._known = None  # back from an outage; nothing was refused
            return "answers are good"
        self._proven = limit
        if self.search is not None:
            return self._follow(self.search.answered(sent_at, seconds, tokens, self.filled, now))
        if limit is None or known is None or limit == self.ceiling or not self.filled:
            return ""
        return self._climb(limit, now)

    def _climb(self, limit: int, now: float) -> str:
        """One more good answer, with all slots in use."""
        part = 1 / limit  # of a round
        pace = min(limit, self._pace * 2 ** (part / DOUBLING))
        gain = self._gain + pace * part
        if gain >= 1 and limit + 1 >= self._refused_at and (self._pause > 0 or now < self._probe_at):
            self._pause -= part
            return ""
        self._pace, self._gain = pace, gain
        if gain < 1:
            return ""
        self._gain = gain - 1
        self.limit, self.filled = limit + 1, False
        return "answers are good"

    def ramp(self, inflight: int, now: float) -> str:
        """Time has passed."""
        return "" if self.search is None else self._follow(self.search.ramp(inflight, now))

    def _follow(self, reason: str) -> str:
        if reason and self.search is not None:
            self.limit, self.filled = self.search.limit, False
        return reason

    def loaded(self, load: Reading, inflight: int) -> str:
        """The engine reported how busy it is."""
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
        """The number the search has found, or None."""
        return None if self.search is None else self.search.knee

    def unread(self) -> None:
        """The engine can no longer be read: only answers tell from here on."""
        if self.search is not None:
            self.search.guided = False
        elif self._known is None:
            self._known = self.ceiling

    def _climb_from(self, gain: float) -> None:
        self.generation += 1
        self._gain, self._pace = gain, PACE

"""Computes how many calls an endpoint may have in flight now.

The user's ``max_inflight`` is the ceiling and the initial limit. Without it, a ``LimitSearch`` finds the number. The
engine's reports about its queue (``LoadGuide``) change the limit too.

A refusal (429, 503) may follow the load or come by chance, as from a proxy that refuses one request in fifty. Only
refusals that follow the load lower the limit (``_is_tolerable``):

- Until the server has shown its limit, refusals of up to a tenth of the requests are tolerated. A server that is full
  refuses more than that, or soon will, because the limit grows.
- After that, each refusal counts. But if refusals have lowered the limit far below what the server took
  before, they do not follow the load. From then on refusals of up to a tenth are tolerated again, except at the limit
  where the server was full.

A refusal that counts lowers the limit to half of the requests in flight, once per generation: requests sent before the
limit fell give no evidence about the new limit. The limit grows back in three steps:

- Every good answer adds one, so the limit doubles with each round of answers. A round has as many answers as the limit.
  This ends at ``_known``: the refused number minus an eighth of it, minus one.
- Then the limit grows slowly: the first slot takes a few rounds, and the pace doubles every two rounds. The pace does
  not depend on the limit, but the reduction does. So processes that share a server converge to equal shares: all
  gain equally, and the largest loses most.
- One below the refused number, the limit stays for some rounds before that number is tried again.

After an outage the limit starts at one and doubles with each round, up to the last limit with good answers.

If several processes work on one run, the searched number is that of all of them together. One of them searches
(``leads``), and the others adopt its number. Answers count only while the processes hold as many slots as the number.
"""

from __future__ import annotations

from bisect import insort
from math import inf, sqrt

from batch_agent.scheduler.engine_load import Load, LoadGuide
from batch_agent.scheduler.limit_search import RAMP_SECONDS, LimitSearch, Progress

GIVEN_UP = 1 / 8  # part of the limit that is left to others after a refusal
LEFT_TO_OTHERS = 1 / 4  # the same if the server took more before: others use it now, or it has become smaller
ALIKE = 1 / 16  # two numbers differ by less than this part
PACE, DOUBLING = 1 / 5, 2  # slots per round at the start of slow growth; rounds until the pace doubles
GROWN = 1 / 2  # part of the limit by which it grows per round at a server that takes more than before
LONG = 1 / 8  # part of the time limit of a request: an answer that takes longer may have waited in a queue
WAITED = 1.8  # an answer that took this many times the seconds of fast ones has waited
LEAST_FIRST, MOST_FIRST = 8, 64  # number of first answers that show how long a fast one takes
FORGET = 0.995  # factor of the highest rate of answers with each answer
IN_TIME = 1 / 2  # part of the time limit within which the server should answer
PAUSE = 3  # rounds before a refused number is tried again
TOLERATED = 1 / 10  # part of the requests that a server may refuse before its limit is known
LEAST_REFUSALS = 2  # ... and this many in any case
WINDOW = 512  # answers, at least: after that, older answers and refusals count half
FALLEN = 1 / 8  # of the requests that the server took: if refusals lower the limit below this, they come by chance
WAITS, MOST_WAITS = 3, 20  # the pause in Retry-Afters: WAITS times the square root of the limit, at most MOST_WAITS


class Capacity:
    """Methods that may change the limit return the reason, or "" if it did not change."""

    _gain: float  # progress towards the next slot
    _pace: float  # slots per round
    _answers: float  # since the limit changed; old ones count less
    _refused: float
    _crowd: int  # most requests in flight when one was refused

    def __init__(self, ceiling: int | None, search: LimitSearch | None = None) -> None:
        self.generation = -1  # a request stores the generation in which it was sent, and passes it to ``overloaded``
        self._guide = LoadGuide()
        self.leads = True  # this process searches, and no other one of its run
        self.others = 0  # slots that other processes of the run hold, while the number is searched
        self.uneven = False  # they have not all adopted the latest number yet
        self.patience = inf  # time limit of a request in seconds
        self.resize(ceiling)
        if search is not None:
            self.start_search(search)

    def resize(self, ceiling: int | None) -> None:
        self.ceiling = self.limit = ceiling
        self.search: LimitSearch | None = None  # while the number is searched
        self.others = 0
        self.filled = False  # all slots were in use at some time since the limit changed or the engine was read
        self._proven: int | None = ceiling  # the last limit with good answers, except while it grows back
        self._known: int | None = None  # the limit doubles up to this; None: nothing was refused
        self._refused_at = 0  # the limit at the last refusal
        self._raised_at = -inf  # when slow growth last raised the limit
        self._answered = False  # a good answer came since the last refusal
        self._pause = 0.0  # rounds left before ``_refused_at`` is tried again
        self._probe_at = 0.0  # and the earliest time for that
        self.tolerates = False  # the last refusal did not count: the server takes other requests meanwhile
        self._tolerated = True  # a tenth of the requests may be refused
        self._by_chance = False  # refusals lowered the limit too far
        self._first: list[float] = []  # seconds of the first answers, sorted
        self._rate = 0.0  # answers per second, while they take long
        self._taken = 0  # most requests that the server took when it refused one
        self._count_anew()
        self._climb_from(0.0)

    def start_search(self, search: LimitSearch) -> None:
        """Start a search for the number, up to the ceiling."""
        if self.ceiling is not None:
            search.bound(self.ceiling)
        self.search = search
        self.limit = self._proven = search.limit

    def overloaded(self, generation: int, inflight: int, wait: float = 0.0, now: float = 0.0) -> str:
        """Lower the limit if a refusal follows the load: a request of ``generation`` was refused. ``wait``: the
        Retry-After."""
        self.tolerates = False
        if generation != self.generation:
            self._taken -= generation == self.generation - 1
            return ""
        self._refused += 1
        refused_at = inflight if self.limit is None else min(self.limit, inflight)
        refused_at = self._crowd = max(self._crowd, refused_at)  # those that were refused before have left
        if self._known is not None and self._answered and refused_at < FALLEN * self._taken:
            self._tolerated = self._by_chance = True
        self.tolerates = self._tolerated and inflight > 1 and self._is_tolerable(refused_at, inflight)
        return "" if self.tolerates else self._lower(refused_at, wait, now)

    def _is_tolerable(self, refused_at: int, inflight: int) -> bool:
        if self._known is not None and refused_at >= self._refused_at - 1:  # the server was full at this number
            return self._refused <= 1
        return self._refused <= LEAST_REFUSALS + TOLERATED * (self._answers + inflight)

    def _lower(self, refused_at: int, wait: float, now: float) -> str:
        gain = 0.0
        if self._answered or self._known is None:  # else the server is still full, which is no new evidence
            # A limit of one tries two sooner than the rule says, because it is the smallest.
            fewer = refused_at < (1 - ALIKE) * self._refused_at
            given_up = LEFT_TO_OTHERS if fewer else GIVEN_UP
            self._taken = self._taken if fewer else refused_at - int(self._refused)
            known = max(1.5, refused_at * (1 - given_up) - 1)
            self._known, self._refused_at = int(known), refused_at
            gain = known - self._known
            self._pause = PAUSE
            # All slots are idle during a Retry-After, so it must be rare. A small share loses less and retries sooner,
            # so that it does not always compete with a large share at its maximum.
            self._probe_at = now + wait * min(MOST_WAITS, WAITS * sqrt(refused_at))
        self.limit = max(1, refused_at // 2)
        self.search, self.others = None, 0  # the server itself reported its limit
        self._answered = False
        self._tolerated = self._by_chance
        self._climb_from(gain)
        return "the server is overloaded"

    def timed_out(self, meanwhile: int, seconds: float) -> str:
        """Lower the limit after a request that waited in the server's queue timed out after ``seconds``.
        ``meanwhile``: number of answers that arrived in this time."""
        self._rate = max(meanwhile / seconds, self._rate * FORGET)
        return self._shorten_queue(seconds)

    def _has_waited(self, seconds: float) -> bool:
        """Return whether an answer that took so long has waited in the server's queue: it took much longer than the
        fast quarter of the first answers. Fewer than ``LEAST_FIRST`` do not show how much answers differ."""
        first = self._first
        return len(first) >= LEAST_FIRST and seconds > WAITED * first[len(first) // 4]

    def _shorten_queue(self, patience: float) -> str:
        """Lower the limit to the number of requests that the server answers within a part of the time limit."""
        most = max(1, int(self._rate * patience * IN_TIME))
        if self.limit is None or most >= self.limit:
            return ""
        self.limit = most
        if self.search is not None:
            self.search.move(most)
        else:
            self._known, self._refused_at = most, max(most + 1, self._refused_at)
        self._climb_from(0.0)
        return "answers would arrive too late"

    def restart(self, most_in_flight: int) -> None:
        """Reset the limit because the endpoint is down: it grows step by step, up to the limit of the last good answer.
        Refusals since then were part of the outage."""
        self._known = max(self._proven or most_in_flight, 1)
        self.limit = 1
        if self.search is not None:
            self.search.forget()
        self._climb_from(0.0)

    def succeeded(self, sent_at: float, seconds: float, tokens: int, now: float, meanwhile: int = 0) -> str:
        """Raise the limit, if possible, after a good answer to a request sent at ``sent_at`` that took ``seconds``.
        ``meanwhile``: number of answers that arrived in this time, with this one."""
        if len(self._first) < MOST_FIRST:
            insort(self._first, seconds)
        if seconds > LONG * self.patience:
            self._rate = max(meanwhile / seconds, self._rate * FORGET)
            if self._has_waited(seconds) and (reason := self._shorten_queue(self.patience)):
                return reason
        self._answered = True
        self._answers += 1
        if self._answers >= WINDOW and self._answers >= 4 * (self.limit or 0):
            self._answers, self._refused, self._crowd = self._answers / 2, self._refused / 2, 0
        limit, known = self.limit, self._known
        if known is not None and limit is not None and limit < known:
            self.limit = limit + 1
            if self.search is not None and self.limit == known:
                self._known = None  # the outage is over, and nothing was refused
            return "answers are good"
        self._proven = limit
        if self.search is not None:
            if self.uneven or not self.leads:
                return ""
            return self._follow(self.search.answered(sent_at, seconds, tokens, self.filled, now))
        if limit is None or known is None or limit == self.ceiling:
            return ""
        # A request sent before the last raise was in flight while all slots were in use. The new slot may not be yet.
        if not (self.filled or sent_at < self._raised_at):
            return ""
        return self._climb(limit, now)

    def _climb(self, limit: int, now: float) -> str:
        """Count one more good answer with all slots in use."""
        part = 1 / limit  # of a round
        pace = min(limit, self._pace * 2 ** (part / DOUBLING))
        if limit > self._refused_at * (1 + GIVEN_UP) + 1:  # the server takes more than before
            pace = max(pace, limit * GROWN)
        gain = self._gain + pace * part
        if gain >= 1 and limit + 1 >= self._refused_at and (self._pause > 0 or now < self._probe_at):
            self._pause -= part
            return ""
        self._pace, self._gain = pace, gain
        if gain < 1:
            return ""
        self._gain = gain - 1
        self._count_anew()
        self.limit, self.filled, self._raised_at = limit + 1, False, now
        return "answers are good"

    def ramp(self, inflight: int, now: float) -> str:
        """Let the search raise the limit by the clock."""
        if self.search is None or not self.leads:
            return ""
        if self.uneven:
            if self.search.ramp_at is not None:
                self.search.ramp_at = max(self.search.ramp_at, now + RAMP_SECONDS)
            return ""
        # A refused request holds no slot while it waits, but it wants one.
        used = self.limit if self.filled and self.limit is not None else inflight + self.others
        return self._follow(self.search.ramp(used, now))

    def _follow(self, reason: str) -> str:
        if reason and self.search is not None:
            self.limit, self.filled = self.search.limit, False
            self.uneven = self.others > 0
            self._count_anew()
        return reason

    def lead(self, held: int, others: int, even: bool) -> None:
        """Search for all processes of the run. This one holds ``held`` slots, and ``others`` are held by the others.
        ``even``: together they hold as many as the limit, or as they want."""
        if self.search is None:
            return
        self.search.share = held / (held + others) if held else 1.0
        even = even or not others
        if even and (self.uneven or not self.leads):
            self.search.forget()
            self.filled = False
        self.leads, self.others, self.uneven = True, others, not even

    def follow(self, progress: Progress) -> str:
        """Adopt the search of another process."""
        if self.search is None:
            return ""
        self.leads, self.others = False, 0
        self.search.adopt(progress)
        if self._known is not None or self.limit == self.search.limit:
            return ""
        self.limit = self._proven = self.search.limit
        return "another worker found it"

    def loaded(self, load: Load, inflight: int) -> str:
        """Change the limit after a load report of the engine."""
        limit = self.limit
        if self.search is not None:
            self.search.guided = True
            if self.uneven or not self.leads:
                return ""
        if limit is None:
            return ""
        most = self.ceiling if self._known is None else max(limit, self._known)
        change = self._guide.read(load, limit if self.filled else inflight + self.others, limit, most)
        self.filled = False
        if change is None:
            return ""
        self.limit, reason = change
        if self.search is not None:
            self.search.move(self.limit)
            self.uneven = self.others > 0
        return reason

    @property
    def knee(self) -> int | None:
        """The number that the search has found, or None."""
        return None if self.search is None else self.search.knee

    def unread(self) -> None:
        """Continue without load reports: only answers decide from now on."""
        if self.search is not None:
            self.search.guided = False
        elif self._known is None:
            self._known = self.ceiling

    def _count_anew(self) -> None:
        self._answers, self._refused, self._crowd = 0.0, 0.0, 0

    def _climb_from(self, gain: float) -> None:
        self.generation += 1
        self._count_anew()
        self._gain, self._pace = gain, PACE

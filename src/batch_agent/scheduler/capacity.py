"""Computes how many calls an endpoint may have in flight now.

The user's ``max_inflight`` is the ceiling and the initial limit. Without it, a ``LimitSearch`` finds the number. The
engine's reports about its queue (``LoadGuide``) change the limit too.

A refusal (429, 503) may follow the load or come by chance, as from a proxy that refuses one request in fifty. Only
refusals that follow the load lower the limit (``_is_tolerable``):

- Until the server has shown its limit, refusals of up to a tenth of the requests are tolerated, and what chance may
  add to that (``is_chance``) as long as no row is refused twice. A server that is full refuses more than that, or soon
  will, because the limit grows.
- After that, each refusal counts at the number where the server was full. At a clearly smaller number one per round is
  tolerated, once for a row: a full server refuses the row again as soon as it is sent again.

A refusal that counts lowers the limit to half of the requests in flight, once per generation: requests sent before the
limit fell give no evidence about the new limit. The limit grows back in three steps:

- Every good answer adds one, so the limit doubles with each round of answers. A round has as many answers as the limit.
  This ends at ``_known``: the refused number minus an eighth of it, minus one.
- Then the limit grows slowly: the first slot takes a few rounds, and the pace doubles every two rounds. The pace does
  not depend on the limit, but the reduction does. So processes that share a server converge to equal shares: all
  gain equally, and the largest loses most.
- One below the refused number, the limit stays for some rounds before that number is tried again.

A server may also take a number of requests per minute. Then refusals do not end when few are in flight. After
several of them one request is sent at a time (``_dry_up``), and answers to older requests do not raise the limit.

A refusal may also concern its row alone. If the same row is refused again although the server took other requests in
between, the limit returns to where it was (``pardon``). If its next attempt is answered, the refusal stays a sign of
load (``confirm``).

After an outage the limit starts at one and doubles with each round, up to the last limit with good answers.

If several processes work on one run, the searched number is that of all of them together. One of them searches
(``leads``), and the others adopt its number. Answers count only while the processes hold as many slots as the number.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from math import ceil, inf, sqrt

from batch_agent.scheduler.engine_load import Load, LoadGuide
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.retry import FIRST

START = 64  # calls in flight
TOOLS_START = 16  # the same for agents with tools: the first answers are quick, and their tools run during the others
FLEET_START = 40  # the same at each server of a fleet, where only answers raise it
RAMPED = 256  # where the first steps end; a small server then has all of them in its queue
BLIND = 128  # ... before the first answer
MOST = 1024  # upper end of the search
RAMP_SECONDS = 0.2  # long enough for a refusal to arrive; each step waits twice as long as the one before
GAIN = 1.05  # throughput gain that more must bring; fewer must keep it
STEEP = 4  # growth per round of an endpoint in a fleet, up to ``START``
QUEUED = 1.6  # if even the fast ones of the later answers take this many times as long, they waited in a queue
FLEET_PROBE_SECONDS = 15.0  # in a fleet a wrong number costs more, because the rows could go elsewhere

Progress = tuple[int, bool, int, float]  # the limit, whether it still climbs, the best limit so far, and its throughput


class LimitSearch:
    """Finds the number of calls in flight if the user gave none: the largest that still increases the throughput.
    ``limit`` is the present number. Methods that may change it return the reason, or "" if they did not change it.

    The number is raised in stages. A stage measures what one slot delivers per second (tokens if the server counts
    them, else answers) over the requests sent in it. Multiplied by the slots, that is the throughput of the stage.
    While a larger stage delivers clearly more, the next one is larger again. The first stage that does not ends the
    climb, and the number before it is kept. From time to time 50% more or a third fewer are tried, because servers and
    rows change.

    The start of the climb depends on ``by_clock``:

    - One server (True): it starts at 64, with tools at 16, and doubles by the clock while nothing is refused, up to
      128, and to 256 when a quick answer has come. A batch of quick rows would be over before the first answers are
      measured.
    - One of a fleet (False): other servers can take the rows, so an endpoint gets only what it has proved to handle.
      It starts small and grows with whole rounds of answers, four times per round up to 64, then twice. Answers
      that took much longer than the fastest ones waited in the server's queue: then the number shrinks to what the
      server computes at once.
    """

    def __init__(
        self,
        start: int = START,
        ramp_to: int = RAMPED,
        most: int = MOST,
        *,
        settled: bool = False,
        by_clock: bool = True,
    ) -> None:
        """``settled``: ``start`` was found before. ``by_clock``: the search starts in steps by the clock; False for an
        endpoint of a fleet."""
        self.limit = min(start, most)
        self.guided = False  # the engine reports its queue, which decides after the climb
        self.share = 1.0  # part of the slots that this process has; the other processes of its run have the rest
        self.ramp_at: float | None = None if by_clock and not settled else inf  # when the next step by the clock is due
        self._by_clock = by_clock
        self._pause = 0.0  # seconds before the next step by the clock
        self._ramp_to = ramp_to
        self._most = most
        self._climbing = not settled
        self._best, self._best_rate = self.limit if settled else 0, 0.0
        self._probe_at = 0.0  # 0: nothing was measured yet at the number that was found
        self._down = not by_clock  # whether the last probe used fewer
        self._queued = False  # the endpoint of a fleet has shown a queue
        self._fast = (inf, inf)  # seconds, and seconds per token, of fast answers in the last stage without a queue
        self._heard = False  # the server has answered
        self._blind = False  # the next step by the clock waits for the first answer
        self._skip = 0  # number of answers to ignore
        self.forget()

    @property
    def knee(self) -> int | None:
        """The number once it is found, or None."""
        return None if self._climbing else (self.limit if self.guided else self._best) or None

    @property
    def progress(self) -> Progress:
        """What another process needs in order to continue this search."""
        return self.limit, self._climbing, self._best, self._best_rate

    def adopt(self, progress: Progress) -> None:
        """Continue at the point that the search of another process has reached."""
        self.limit, self._climbing, self._best, self._best_rate = progress
        self.ramp_at = inf
        self._probe_at = 0.0
        self.forget()

    @property
    def _round(self) -> int:
        """The number of answers in which each slot answers once. It is doubled if other processes have slots too: all
        first requests of this process may have been ahead of theirs in the server's queue."""
        return max(1, round(self.limit * min(1.0, 2 * self._stage_share)))

    def bound(self, most: int) -> None:
        """Limit the search to at most ``most``."""
        self._most = min(self._most, most)
        self.limit = min(self.limit, self._most)

    def forget(self) -> None:
        """Start the present stage again with the next answer."""
        self._since, self._count, self._work, self._seconds = inf, 0, 0, 0.0
        self._stage_share = self.share
        self._answers: list[tuple[float, int]] = []  # seconds, tokens; for an endpoint of a fleet that may have a queue

    def move(self, limit: int) -> None:
        """Set the limit to the number that the engine's queue suggests."""
        self._blind = False
        self._climbing = self._climbing and limit > self.limit
        self.limit = limit
        self.ramp_at = inf
        self.forget()

    def ramp(self, inflight: int, now: float) -> str:
        """Take the next step by the clock if it is due."""
        if self.ramp_at is None:
            self.ramp_at, self._pause = now + RAMP_SECONDS, RAMP_SECONDS
            return ""
        if now < self.ramp_at:
            return ""
        most = min(self._ramp_to, self._most)
        self._blind = not self._heard and self.limit == BLIND < most and inflight >= BLIND
        if self._best or inflight < self.limit or self.limit >= most or self._blind:
            self.ramp_at = inf  # answers are better evidence, or no more slots are wanted
            return ""
        self._pause *= 2
        self.ramp_at = now + self._pause
        self.limit = min(2 * self.limit, most)  # all these steps belong to the first stage
        return "nothing is refused"

    def answered(self, sent_at: float, seconds: float, tokens: int, filled: bool, now: float) -> str:
        """Count one good answer. ``filled``: all slots were in use at some time of this stage."""
        self._heard = True
        if self._blind and filled and seconds < N.busy:
            self._blind = False
            self.limit = min(2 * self.limit, self._ramp_to, self._most)  # the next step by the clock was waiting for it
            return "answers arrive"
        if self._since > now:
            self._since = now if self._best else 0.0
        if self._skip or sent_at < self._since:
            self._skip = max(0, self._skip - 1)
            return ""
        self._count += 1
        self._work += tokens or 1
        self._seconds += seconds
        if not self._by_clock and (self._climbing or not (self._best or self.guided)):
            self._answers.append((seconds or N.instant, tokens or 1))
            first = not self._best and not self._queued  # judged early, so that fewer rows are sent to a full server
            if first and filled and self._count == max(N.enough, self._round) // 2 and (reason := self._shrink()):
                return reason
        # An endpoint of a fleet is judged by whole rounds: all answers of half a round may be from its first wave.
        if self._count < N.enough or (2 if self._by_clock else 1) * self._count < self._round:
            return ""
        rate = self.limit * self._work / self._seconds if self._seconds > 0 else inf
        if filled and self._answers and (reason := self._shrink()):
            return reason
        self.forget()
        if not filled:
            return ""  # no more slots are wanted
        return self._climb(rate, now) if self._climbing else self._probe(rate, now)

    def _shrink(self) -> str:
        """Lower the limit by the requests that wait in the server's queue, if the answers show a queue."""
        answers, fast = self._answers, self._fast
        if not self._queued:  # else the queue may be equally long for all answers
            fast = _low(s for s, _ in answers), _low(s / tokens for s, tokens in answers)
            answers = answers[len(answers) // 2 :]
        # Longer answers take longer, but not always in proportion. An answer that is slow by both measures has waited.
        slowdown = _low(min(s / fast[0], s / tokens / fast[1]) for s, tokens in answers)
        if slowdown < QUEUED or self.limit == 1:
            self._fast = fast
            return ""
        self._fast = min(fast, self._fast)
        self._skip = self._round  # answers that were in its queue, or that leave before the queue is shorter
        self._queued, self._climbing, self._best = True, False, 0
        self.limit = ceil(self.limit / slowdown)
        self.forget()
        return "answers wait in the server's queue"

    def _climb(self, rate: float, now: float) -> str:
        if self._best and rate < GAIN * self._best_rate:
            self._climbing = False
            return "" if self.guided else self._go(self._best, "more requests do not increase the throughput", now)
        self._best, self._best_rate = self.limit, rate
        if self.limit >= self._most:
            self._climbing = False
            return ""
        steep = not self._by_clock and self.limit < START
        more = min(STEEP * self.limit, max(START, 2 * self.limit)) if steep else 2 * self.limit
        return self._go(min(more, self._most), "more requests increase the throughput", now)

    def _probe(self, rate: float, now: float) -> str:
        if self.guided:
            return ""
        if not self._best:  # the first stage without a queue: test at once whether more increase the throughput
            self._best, self._down, self._probe_at = self.limit, True, now
        if self.limit == self._best:
            self._best_rate = rate  # the current rate
            pause = N.minute if self._by_clock else FLEET_PROBE_SECONDS
            self._probe_at = self._probe_at or now + pause
            if now < self._probe_at:
                return ""
            self._probe_at = now + pause
            self._down = not self._down
            other = (
                max(1, self._best * 2 // 3) if self._down else min(self._most, max(self._best + 1, self._best * 3 // 2))
            )
            return self._go(other, "trying fewer" if self._down else "trying more", now)
        if rate < self._best_rate * (1.0 if self.limit < self._best else GAIN):
            return self._go(self._best, "the throughput fell", now)
        if not self._by_clock and self.limit > self._best:  # the right number may be much larger
            self._climbing, self._queued = True, False
        self._best, self._best_rate = self.limit, rate
        return ""

    def _go(self, limit: int, reason: str, now: float) -> str:
        if limit == self.limit:
            return ""
        self.limit = limit
        self._since = now
        return reason


def _low(values: Iterable[float]) -> float:
    """Return the 1/8 quantile. The very fastest answers may come from a cache."""
    ordered = sorted(values)
    return ordered[len(ordered) // 8]


# Part of the limit that is left to others after a refusal, if the server took more before: others use it now, or it has
# become smaller.
LEFT_TO_OTHERS = 1 / 4
PACE, DOUBLING = 1 / 5, 2  # slots per round at the start of slow growth; rounds until the pace doubles
GROWN = 1 / 2  # part of the limit by which it grows per round at a server that takes more than before
TOLERATED = 1 / 10  # part of the requests that a server may refuse before its limit is known
DEVIATIONS = 2.5  # ... and what chance may add to it, in standard deviations
Before = tuple[int | None, int | None, int, int, bool, LimitSearch | None]  # what ``pardon`` restores


class Capacity:
    """The limit of requests in flight at one server. Methods that may change it return the reason, or "" if they did
    not change it."""

    _gain: float  # progress towards the next slot
    _pace: float  # slots per round
    _answers: float  # since the limit changed; old ones count less
    _refused: float
    _twice: int  # of these, rows that had been refused before
    _crowd: int  # most requests in flight when one was refused
    # Refused rows: the generation of the refusal, whether it lowered the limit, and when the first one came.
    causes: dict[Hashable, tuple[int, bool, float]]
    _before: Before | None  # before the first of them lowered the limit
    _known: int | None  # the limit doubles up to this; None: nothing was refused

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
        self._known = None
        self._refused_at = 0  # the limit at the last refusal
        self._raised_at = -inf  # when slow growth last raised the limit
        self._answered = False  # a good answer came since the last refusal
        self._last_refused = -inf  # when it came
        self._lowered_at = -inf  # when a refusal last lowered the limit
        self._old = 0  # requests that have been in flight since then
        self._takes = True  # a request that was sent since then was answered
        self._vain = 0  # refusals since then, although few are in flight, and none of them was sent since
        self._dry = False  # these were several
        self._pause = 0.0  # rounds left before ``_refused_at`` is tried again
        self._probe_at = 0.0  # and the earliest time for that
        self.tolerates = False  # the last refusal did not count: the server takes other requests meanwhile
        self._tolerated = True  # a tenth of the requests may be refused
        # The requests in flight when it fell: their generation, their number, and how many of them were refused.
        self._wave, self._wave_crowd, self._wave_refused = -1, 0, 0
        self._first: list[float] = []  # seconds of the first answers, sorted
        self._rate = 0.0  # answers per second, while they take long
        self._taken = 0  # most requests that the server took when it refused one
        self._forget_causes()
        self._count_anew()
        self._climb_from(0.0)

    def start_search(self, search: LimitSearch) -> None:
        """Start this search for the limit, up to the ceiling."""
        if self.ceiling is not None:
            search.bound(self.ceiling)
        self.search = search
        self.limit = self._proven = search.limit

    def overloaded(
        self, generation: int, inflight: int, wait: float = 0.0, now: float = 0.0, cause: Hashable = None
    ) -> str:
        """Lower the limit if a refusal of a request of ``generation`` follows the load. ``wait``: the seconds of
        Retry-After. ``cause``: its row; the row's next attempt shows whether the refusal concerned only this row."""
        self.tolerates, self._last_refused = False, now
        self._old -= generation != self.generation
        if self._known is not None and not self._takes and inflight - 1 <= self._old and inflight <= self._taken / 2:
            self._vain += 1
            if self._vain >= N.several:
                return self._dry_up(now)
        if generation != self.generation:
            self._taken -= generation == self.generation - 1
            self._wave_refused += generation == self._wave
            return ""
        self._refused += 1
        self._twice += cause in self.causes
        refused_at = inflight if self.limit is None else min(self.limit, inflight)
        refused_at = self._crowd = max(self._crowd, refused_at)  # those that were refused before have left
        self.tolerates = inflight > 1 and self._is_tolerable(refused_at, inflight)
        if cause is not None:
            first = self.causes[cause][2] if cause in self.causes else now
            self.causes[cause] = self.generation, not self.tolerates, first
        if self.tolerates:
            return ""
        return self._lower(refused_at, inflight, wait, now)

    def _is_tolerable(self, refused_at: int, inflight: int) -> bool:
        if self._known is not None and refused_at >= (1 - N.small) * self._refused_at - 1:  # it was full at this number
            return self._tolerated and self._refused <= 1
        if not self._tolerated:
            return self._answered and not self._twice and self._refused <= 1 + self._answers / inflight
        requests = self._answers + inflight
        return self._refused <= N.twice + TOLERATED * requests or (
            not self._twice and is_chance(self._refused, requests)
        )

    def was_full_with(self, inflight: int) -> bool:
        """Return whether the server has refused a request while at most ``inflight`` others were in flight."""
        return 0 < self._taken <= inflight

    def pardon(self, cause: Hashable, answered: float) -> str:
        """Undo what a refusal of this row did to the limit, because the row is refused again while others are accepted.
        ``answered``: when the newest answered request was sent.

        Answers to requests that were sent before the refusal may have been the last that the server accepts in a
        minute, and do not count. If most requests that were in flight together were refused, the server is full, and a
        row that was refused twice was only unlucky.
        """
        if cause in self.causes and answered < self.causes[cause][2]:
            return ""
        if self._before is not None and self._wave_refused > max(N.enough, self._wave_crowd / 2):
            return ""
        generation, lowered, _ = self.causes.pop(cause, (-1, False, 0.0))
        if generation == self.generation:
            self._refused = max(0.0, self._refused - 1)
        if not lowered or self._before is None or self._before[0] == self.limit:
            return ""
        self.limit, self._known, self._refused_at, self._taken, self._tolerated, self.search = self._before
        if self.search is not None:
            self.search.forget()
        if not any(lowered for _, lowered, _ in self.causes.values()):
            self._before = None
        self._climb_from(0.0)
        return "the refusals concern single rows"

    def confirm(self, cause: Hashable) -> None:
        """Let a refusal of this row count: the row is answered now, so that the refusal did not concern the row
        alone."""
        if self.causes.pop(cause, (-1, False, 0.0))[1]:
            self._forget_causes()

    def _forget_causes(self) -> None:
        self.causes, self._before = {}, None

    def _dry_up(self, now: float) -> str:
        """Send one request at a time. Few requests are in flight, and all that were sent since the limit fell are
        refused: the problem is not too many at once, but too many per minute."""
        self.generation += 1
        was, self.limit, self._lowered_at, self._dry = self.limit, 1, now, True
        return "the server is overloaded" if was != 1 else ""

    def _lower(self, refused_at: int, inflight: int, wait: float, now: float) -> str:
        if self._before is None:
            before = self.limit, self._known, self._refused_at, self._taken, self._tolerated, self.search
            self._before = before
            self._wave, self._wave_crowd, self._wave_refused = self.generation, refused_at, int(self._refused)
        gain = 0.0
        if self._answered or self._known is None:  # else the server is still full, which is no new evidence
            # A limit of one tries two sooner than the rule says, because it is the smallest.
            fewer = refused_at < (1 - N.small) * self._refused_at
            given_up = LEFT_TO_OTHERS if fewer else N.small
            self._taken = self._taken if fewer else refused_at - int(self._refused)
            known = max(1.5, refused_at * (1 - given_up) - 1)
            self._known, self._refused_at = int(known), refused_at
            gain = known - self._known
            self._pause = N.several  # rounds
            # All slots are idle during a Retry-After, so it must be rare.
            self._probe_at = now + (max(wait, N.busy) if wait else 0.0)
        self.limit = max(1, refused_at // 2)
        self.search, self.others = None, 0  # the server itself reported its limit
        self._answered = self._takes = False
        self._lowered_at, self._old = now, inflight - 1
        self._tolerated = False
        self._climb_from(gain)
        return "the server is overloaded"

    def timed_out(self, meanwhile: int, seconds: float) -> str:
        """Lower the limit after a request that waited in the server's queue timed out after ``seconds``.
        ``meanwhile``: number of answers that arrived in this time."""
        self._rate = max(meanwhile / seconds, self._rate * N.forget)
        return self._shorten_queue(seconds)

    def _has_waited(self, seconds: float) -> bool:
        """Return whether a request that took ``seconds`` has waited in the server's queue: it took much longer than the
        fast quarter of the first answers. Fewer than ``LEAST_FIRST`` answers do not show how much answers differ."""
        first = self._first
        return len(first) >= N.few and seconds > QUEUED * first[len(first) // 4]

    def _shorten_queue(self, patience: float) -> str:
        """Lower the limit to the number of requests that the server answers within a part of the time limit."""
        most = max(1, int(self._rate * patience * N.mostly))
        if self.limit is None or most >= self.limit:
            return ""
        self.limit = most
        self._forget_causes()
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
        self._takes, self._dry, self._vain = True, False, 0
        self._forget_causes()
        if self.search is not None:
            self.search.forget()
        self._climb_from(0.0)

    def succeeded(self, sent_at: float, seconds: float, tokens: int, now: float, meanwhile: int = 0) -> str:
        """Raise the limit, if possible, after a good answer to a request sent at ``sent_at`` that took ``seconds``.
        ``meanwhile``: number of answers that arrived in this time, with this one."""
        if len(self._first) < START:
            insort(self._first, seconds)
        if seconds > N.small * self.patience:
            self._rate = max(meanwhile / seconds, self._rate * N.forget)
            if self._has_waited(seconds) and (reason := self._shorten_queue(self.patience)):
                return reason
        self._answered = True
        if sent_at >= self._lowered_at:
            self._takes, self._dry, self._vain = True, False, 0
        else:
            self._old -= 1
            if self._dry:
                return ""
        self._answers += 1
        if self._answers >= 4 * max(self.limit or 0, BLIND):  # older answers and refusals count half
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
        """Count one more good answer while all slots were in use."""
        part = 1 / limit  # of a round
        pace = min(limit, self._pace * 2 ** (part / DOUBLING))
        if limit > self._refused_at * (1 + N.small) + 1:  # the server takes more than before
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
        if (
            now < self._last_refused + FIRST and self.search.ramp_at is not None
        ):  # it may be full: see what its retry does
            self.search.ramp_at = max(self.search.ramp_at, self._last_refused + FIRST)
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
        """Search on behalf of all processes of the run. This process holds ``held`` slots, the others hold ``others``.
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
        """Adopt the result of the search of another process."""
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
        self._answers, self._refused, self._crowd, self._twice = 0.0, 0.0, 0, 0

    def _climb_from(self, gain: float) -> None:
        self.generation += 1
        self._count_anew()
        self._gain, self._pace = gain, PACE


def is_chance(refused: float, requests: float) -> bool:
    """Return whether that many refusals may come from a server that refuses a tenth of all requests by chance."""
    tolerated = TOLERATED * requests
    return refused <= max(N.twice, tolerated + DEVIATIONS * sqrt(tolerated))

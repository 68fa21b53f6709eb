"""The state of one server: its capacity, rate limits, health and speed.

There is one object per server and process. The backend or fleet owns it and lends it to every dispatcher that uses the
server, so that two runs at one server share one rate limit and see one outage. Each dispatcher uses it through an
``Endpoint`` of its own.

Slots are not reserved: a dispatcher takes the next free one, but no more than an even share while another dispatcher
waits for one. When the last dispatcher leaves, everything learnt is dropped except stated rate limits, because the next
dispatcher may come an hour later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from random import random
from typing import TYPE_CHECKING, Literal, NamedTuple

from batch_agent.scheduler.blame import SEVERAL, EndpointHistory, RowHistory
from batch_agent.scheduler.capacity import MOST, Capacity, LimitSearch
from batch_agent.scheduler.rates import LEAST_DROUGHT, LONGEST_DROUGHT, MINUTE, LearntRate, Rates

if TYPE_CHECKING:
    from batch_agent.scheduler.core import Slot

# The health of one endpoint over time: healthy, suspect, down, on trial.
#
#     healthy ──── failure ───▶ suspect ──── several rows failed, or unreachable ───▶ down
#        ▲                         │                                                │  ▲
#        ├────── good answer ──────┘                                     pause over │  │ failed
#        │                                                                          ▼  │
#        └──────────────────────────────── answered ───────────────────────────── on trial
#
# A suspect endpoint is in doubt while a control request finds out whether it or its rows are bad. It gets nothing
# else meanwhile.
#
# ``blame`` decides the transitions; this module owns their timing. A down endpoint gets one real request at a time,
# its trial. The pause between two trials grows with the outage, so that the time lost after the server's return stays
# a small share of the outage. A trial that is not answered in the usual time may be lost, or the server may have
# become slow. One such request continues beside the next trials, each time with twice the time limit.
#
# An endpoint is silent if it sends nothing at all for much longer than its slowest answer took.

State = Literal["healthy", "suspect", "down", "on trial"]

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two trials
PAUSE_SHARE = 1 / 300  # of the outage so far
DENIED_SHARE = 1 / 20  # the same if it denies every row
LIMITED_SHARE = 1 / 3  # the same if it refuses every request: a limit per minute may be used up
JITTER = 0.3  # random part of a pause
LEARNT = 10  # good answers before the slowest of them is used
SHORTEST_SILENCE, SILENCE_FACTOR = 5.0, 6  # seconds, and factor over the slowest answer
MOST_DOUBLED = 6  # times that the wait between two looks at a silent endpoint is doubled
FRESH = LONGEST_PAUSE  # seconds for which an answer or a good probe counts as evidence that it is up
SHORTEST_GRACE = 1.0  # seconds
SHORTEST_TRIAL = 2.0  # seconds a trial may take
SHORTEST_CONTROL = 10.0  # seconds a control request may take: it may wait in the server's queue
FIRST_ANSWER = 60.0  # the same while the server has answered nothing: it may load a model
FIRST_CONTROLS = (10.0, 20.0, 30.0)  # the same before it is down: each may be lost, so another one follows
TRIAL_SHARE = 1 / 240  # of the outage so far: a server that starts cold answers more slowly than before


class Health:
    """``chance`` returns random numbers from 0 to 1."""

    def __init__(self, chance: Callable[[], float] = random) -> None:
        self._chance = chance
        self._become("healthy")
        self.is_denied = False  # it is down because it denies every row
        self.is_limited = False  # it is down because it refuses every request for its rate limit
        self.in_doubt = False  # nothing but a control request is sent
        self.patient = False  # answers may take hours: silence is no evidence
        self.answered = False  # at least once
        self.reached = False  # it has answered something, even if only an error
        self.down_since = 0.0
        self.next_trial = 0.0
        self.probing = False  # a probe replaces the trial, or precedes it
        self.ready = False  # the probe is done, and a row may be the trial before the next probe
        self.trials = 0  # number in this outage
        self.trial_ends = 0.0  # when the latest trial times out
        self.reason = ""  # text of the latest failure
        self.heard = 0.0  # when the last request was sent or answered
        self.up_at = -inf  # when an answer or a probe last showed that it is up; -inf after evidence that it is down
        self._silent = False  # it is down because it was silent
        self._patience = 0.0  # seconds that a trial was waited for
        self._good = 0
        self.slowest = 0.0  # seconds of the slowest answer
        self.slowest_control = 0.0  # the same for control requests
        self._unanswered = 0  # control requests before the first answer that were followed by another one
        self.sounded = False  # a request was recalled to find out how long a row takes
        self._looks = 0  # times that its silence was looked into since its last answer
        self._looked_at = 0.0

    def _become(self, state: State) -> None:
        self.state = state
        self.is_down = state in ("down", "on trial")

    def answer(self, seconds: float, sent_at: float, now: float) -> bool:
        """Record an answer, or a refusal that only a working server can send. Returns True if it ends an outage. With 0
        ``seconds`` it says nothing about the time that others take."""
        self.heard = self.up_at = now
        self.answered = True
        if seconds:
            self._looks = 0
            self._good += 1
        if seconds > self.slowest:
            self.slowest = seconds
        if self.state == "healthy":
            return False
        was_down = self.is_down
        if was_down and sent_at < self.down_since and not self._silent:
            return False  # it finishes old requests, and may accept no new ones
        self._become("healthy")
        self.in_doubt = self.is_denied = self.is_limited = False
        return was_down

    def recover(self) -> None:
        """End the outage because of a probe."""
        self._become("healthy")

    def fail(self, reason: str, now: float) -> None:
        self.heard, self.up_at = now, -inf
        self.reason = reason
        if self.state == "healthy":
            self._become("suspect")

    def doubt(self, reason: str, now: float) -> None:
        self.fail(reason, now)
        self.in_doubt = True

    def go_down(self, now: float, *, silent: bool = False) -> None:
        self._become("down")
        self.in_doubt = self.is_denied = self.is_limited = False
        self.up_at, self.ready = -inf, False
        self._silent = silent
        self.down_since = now
        self.trials = 0
        self._patience = 0.0
        self.next_trial = now + self.pause(now)

    @property
    def is_learnt(self) -> bool:
        """Whether enough answers are known to tell how long one takes."""
        return self._good >= LEARNT

    def is_silent(self, in_flight: int, now: float) -> bool:
        """Return whether it is silent for certain: many answers have shown how long one takes."""
        return not self.is_down and in_flight >= SEVERAL and self.is_learnt and now >= self.silent_at

    @property
    def silent_at(self) -> float:
        """When its silence is looked into: the second time after twice as long, and so on."""
        if self.patient:
            return inf
        wait = max(SHORTEST_SILENCE, SILENCE_FACTOR * self.slowest)
        return max(self.heard, self._looked_at) + wait * 2.0 ** min(self._looks, MOST_DOUBLED)

    def look(self, now: float) -> int:
        """Record that its silence is looked into, and return how often it was before."""
        self._looks += 1
        self._looked_at = now
        return self._looks - 1

    def is_sound(self, now: float) -> bool:
        """Return whether it has recently proved to be up."""
        return now - self.up_at <= FRESH

    @property
    def grace(self) -> float:
        """Seconds that requests from before an outage still get after its end."""
        return max(SHORTEST_GRACE, 2 * self.slowest)

    # Trials

    def try_now(self, now: float, *, probing: bool = False) -> None:
        """Record that a trial is sent, or a probe in its place."""
        self._become("on trial")
        self.probing, self.ready = probing, False
        self.trials += not probing
        self.next_trial = now + self.pause(now)
        self.trial_ends = now + (self.trial_seconds(now) or inf)

    def pause(self, now: float, since: float | None = None) -> float:
        """Return the seconds until the next trial, partly random so that many runs do not coincide."""
        lasted = now - (self.down_since if since is None else since)
        is_limited = self.is_limited and lasted < MINUTE  # a limit per minute lets requests through again by then
        share = LIMITED_SHARE if is_limited else DENIED_SHARE if self.is_denied else PAUSE_SHARE
        longest = min(LONGEST_PAUSE, FIRST_PAUSE + lasted * share)
        if is_limited:
            longest = min(longest, FIRST_PAUSE + MINUTE - lasted)
        return longest * (1 - JITTER * self._chance())

    def trial_seconds(self, now: float) -> float | None:
        """Return the time limit of a trial; None if the server has never answered."""
        if not self.answered or self.patient:
            return None
        return max(SHORTEST_TRIAL, 2 * self.slowest, (now - self.down_since) * TRIAL_SHARE)

    def control_seconds(self, now: float) -> float:
        """Return the time limit of a control request."""
        if not self.answered:
            return FIRST_ANSWER if self.is_down else FIRST_CONTROLS[self._unanswered]
        if self.is_learnt and self._looks and not self.is_down:  # it is silent
            return max(SHORTEST_TRIAL, 2 * self.slowest, 4 * self.slowest_control)
        return max(SHORTEST_CONTROL, 4 * self.slowest_control, self.trial_seconds(now) or 0.0)

    def asks_again(self) -> bool:
        """Return whether a control request that was not answered in time proves nothing, and another one is sent."""
        if self.answered or self._unanswered == len(FIRST_CONTROLS) - 1:
            return False
        self._unanswered += 1
        return True

    def patient_seconds(self, now: float) -> float:
        """Return the time limit of the one trial that continues beside the next ones."""
        self._patience = 2 * max(self._patience, self.trial_seconds(now) or 0.0)
        return self._patience

    def trial_over(self) -> None:
        """Record that the trial failed, or was withdrawn. It has no effect if the trial was answered."""
        if self.state == "on trial":
            self._become("down")
            self.up_at = -inf

    def what_was_tried(self, now: float, max_outage: float) -> str:
        """Return the reason why the endpoint is given up, as a message."""
        outage = f"{now - self.down_since:.0f} s and {self.trials} trials"
        if self.answered or self.reached:
            return f"the server was down for longer than max_outage, {max_outage:g} s: {outage}; {self.reason}"
        return f"the server never answered, in {outage}: {self.reason}"


# Decides whether a denial (401, 403, 404 and similar) concerns one row, or every row of the run.
#
# A wrong key concerns all rows. So does a path or a model that does not exist, if the server has never given a good
# answer. After good answers a denial is first confirmed, because a gateway may deny requests by mistake, or for the
# moment in which it loads its configuration. Only a request that was sent a while after the first denial arrived
# confirms it: requests that were in flight together are denied together, by one mistake. If there is no good answer
# in between, it concerns all rows. That is not the end: the endpoint counts as down, and is tried again
# (``dispatch.endpoints``).
#
# Anything else (a bad image, a prompt that a filter refuses) may concern only the row. It is unclear until a request
# sent at the same time or later gets a good answer, or until other rows are denied too. The same denial of several
# rows with no such answer between them concerns all rows, unless many more requests are in flight: a denial often
# arrives sooner than an answer. The same holds for a forbidden or missing thing where no control request can be sent:
# only such a request can tell, at the end of a batch, that the last row is at fault.

Scope = Literal["row", "confirm", "unclear", "all"]

WRONG_KEY = frozenset({401, 402, 429})  # the 429 of a spent quota; a 429 with a Retry-After is not a denial
WRONG_PLACE = frozenset({301, 302, 303, 307, 308, 404, 405})
FORBIDDEN = 403
CONFIRM_AFTER = 0.25  # seconds from the first denial until a request is sent that can confirm it
CONFIRMED = 2  # number of rows that were denied in such a request, while others are in flight
ALONE = 3  # denials of one row, while others were answered, that are the row's own fault
SEVERAL_ROWS = 10  # number of rows with a status that may concern all; a moderator may refuse a few in a row
FEW_ROWS = 3  # the same before any good answer, with few requests in flight
MANY_ROWS = 20  # number of rows with the same message and another status

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Denial(NamedTuple):
    """``number`` is how often the row was denied, this denial included."""

    sent_at: float
    arrived_at: float
    number: int = 1


class Refusals:
    def __init__(self) -> None:
        self._answered = False
        self._kind: tuple[int, str] | None = None  # of the unclear denials, which all have the same kind
        self._rows: dict[Hashable, float] = {}  # row → when its request was sent
        self._denied_at: float | None = None  # arrival of the first denial that no answer has disproved

    def answered(self, sent_at: float) -> None:
        """Record a good answer to a request sent at ``sent_at``."""
        self._answered = True
        if self._rows:
            unclear = {row: sent for row, sent in self._rows.items() if sent > sent_at}
            if len(unclear) < len(self._rows) or (self._denied_at is not None and sent_at > self._denied_at):
                self._denied_at = None
            self._rows = unclear

    @property
    def has_answered(self) -> bool:
        return self._answered

    def is_unclear(self, row: Hashable) -> bool:
        return row in self._rows

    def scope(
        self,
        row: Hashable,
        status: int | None,
        message: str,
        denial: Denial,
        left_in_flight: int,
        *,
        can_ask: bool = False,
    ) -> Scope:
        """Return which rows a denial concerns. ``confirm``: send the same request again, ``CONFIRM_AFTER`` later at the
        earliest. ``can_ask``: a control request can be sent."""
        if status is None:  # a filter stopped the answer; the request itself was accepted
            return "row"
        wrong_key = status in WRONG_KEY
        if (wrong_key or status in WRONG_PLACE) and not self._answered:
            return "all"
        by_status = wrong_key or status in WRONG_PLACE or status == FORBIDDEN
        kind = (status, "" if by_status else _VARIABLE.sub("…", message))
        if kind != self._kind:
            self._kind = kind
            self._rows.clear()
        confirms = wrong_key or (can_ask and by_status and self._answered)
        if confirms and denial.number >= ALONE and row not in self._rows:
            return "row"  # other rows were answered meanwhile
        if not self._rows or self._denied_at is None:
            self._denied_at = denial.arrived_at
        self._rows[row] = denial.sent_at
        if confirms:
            confirmed = sum(sent >= self._denied_at + CONFIRM_AFTER for sent in self._rows.values())
            if confirmed >= CONFIRMED or (confirmed and not left_in_flight):
                return "all"
            return "confirm" if denial.number < ALONE else "unclear"
        refused = len(self._rows)
        if by_status and not self._answered and refused >= FEW_ROWS and left_in_flight <= refused:
            return "all"
        return (
            "all"
            if refused >= (SEVERAL_ROWS if by_status else MANY_ROWS) and left_in_flight <= 2 * refused
            else "unclear"
        )


MOST_KNOWN = 10_000  # number of unused servers that are remembered
SAME_TIME = 1e-3  # seconds: two requests that were sent together
LEARN = 0.1  # the weight of the latest answer in the seconds per turn
LEARN_GAP = 0.05  # ... in the seconds between two answers
NUDGE = 1.05  # factor by which an answer raises or lowers the median


@dataclass(frozen=True, slots=True)
class Terms:
    """What a dispatcher knows about a server before its first request. ``start`` is where the search for the number of
    requests in flight begins; None if the number is known, and is ``ceiling``."""

    ceiling: int | None = None
    start: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    by_clock: bool = True  # the search may take its first steps before there are answers
    given: bool = False  # the user gave ``ceiling``, so the server's own number is ignored
    timeout: float | None = None  # time limit of a request in seconds


class Server:
    """``weight``: its share; ``models``: those it serves (None: unknown), ``stated`` by the user or listed by the
    server, which may serve others too; ``context``: in tokens."""

    def __init__(
        self,
        name: str = "",
        *,
        weight: float = 1.0,
        models: frozenset[str] | None = None,
        context: int | None = None,
        default_inflight: int | None = None,
    ) -> None:
        self.name = name
        self.weight, self.models, self.context = weight, models, context
        self.stated = False
        self.default_inflight = default_inflight  # requests in flight if the user gives no number; None: searched
        self.rates: Rates | None = None  # None while no rate limit is known
        self.endpoints: list[Endpoint] = []  # of the dispatchers that use it now
        self._terms: list[Terms] = []
        self._thread = 0  # thread of the dispatchers that use it now
        self._forget()

    def _forget(self) -> None:
        if self.rates is not None:
            self.rates.learnt = None
        self.capacity = Capacity(None)
        self.health = Health()
        self.history = EndpointHistory()
        self.refusals = Refusals()
        self.allotted: int | None = None  # slots that this process may use; None: all of them
        self.inflight = 0  # of all dispatchers
        self.most_in_flight = 0  # since the end of the last outage
        self.held_until = 0.0  # the server asked to wait until this time
        self.held_for = inf  # one refusal asked for that: the answer of a request sent no earlier than this ends it
        # The row that it asked for a long wait, and when; None if it has answered a request that was sent since.
        self.excessive: tuple[RowHistory, float] | None = None
        self.refused_since: float | None = None  # it has refused every request for load since then
        self.seconds = 0.0  # per turn; 0 until it has answered
        self.usual = 0.0  # half of its answers take longer
        self.controlled = False  # a control request waits for it or is in flight
        self.control_sent = -inf  # when the newest control request that it has answered was sent
        self.takes_controls = True  # it has not refused one
        self.unanswered = 0.0  # longest time that a request waited here in vain before the first answer
        self.gap = 0.0  # seconds between two answers
        self.answered_at = -inf  # time of its latest answer
        self.began_at = inf  # when the first request was sent
        self.answers = 0
        self.answered_sent = -inf  # when the newest of the requests that it has answered was sent

    def lent_to(self, thread: int) -> Server:
        """Return this server; if dispatchers of another thread use it now, a new object for the same server. A
        dispatcher can only be woken in its own thread."""
        if self.endpoints and self._thread != thread:
            weight, models, context, most = self.weight, self.models, self.context, self.default_inflight
            return Server(self.name, weight=weight, models=models, context=context, default_inflight=most)
        self._thread = thread
        return self

    def join(self, endpoint: Endpoint, terms: Terms) -> None:
        if not self.endpoints:
            self._forget()
        self.endpoints.append(endpoint)
        self._terms.append(terms)
        self._set_rates()
        self.capacity.patience = min(terms.timeout or inf for terms in self._terms)
        if len(self.endpoints) == 1 and terms.start is not None:
            most = MOST if terms.ceiling is None else min(MOST, terms.ceiling)
            self.capacity.resize(most)
            self.capacity.start_search(LimitSearch(terms.start, most=most, by_clock=terms.by_clock))
        else:
            self._set_ceiling()

    def leave(self, endpoint: Endpoint) -> None:
        place = self.endpoints.index(endpoint)
        del self.endpoints[place], self._terms[place]
        if self.endpoints:
            self._set_ceiling()

    def _set_ceiling(self) -> None:
        """Set the ceiling to the sum of all dispatchers: each bounds its own requests."""
        ceilings = [terms.ceiling for terms in self._terms]
        total = None if None in ceilings else sum(ceiling for ceiling in ceilings if ceiling is not None)
        if self.capacity.search is None and self.capacity.ceiling != total:
            self.capacity.resize(total)

    def _set_rates(self) -> None:
        """Apply the strictest limits of all dispatchers to all of them together."""
        rpm = min((terms.rpm for terms in self._terms if terms.rpm is not None), default=None)
        tpm = min((terms.tpm for terms in self._terms if terms.tpm is not None), default=None)
        if self.rates is None and (rpm is not None or tpm is not None):
            self.rates = Rates()
        if self.rates is not None:
            self.rates.limit(rpm, tpm)

    def learn(self, seconds: float, now: float) -> None:
        """Learn from an answer that took ``seconds``."""
        self.seconds += (LEARN if self.seconds else 1.0) * (seconds - self.seconds)
        self.usual = seconds if not self.answers else self.usual * (NUDGE if seconds > self.usual else 1 / NUDGE)
        self.answers += 1
        self.gap += max(LEARN_GAP, 1 / self.answers) * (min(seconds, now - self.answered_at) - self.gap)
        self.answered_at = now

    def is_queued(self, slot: Slot) -> bool:
        """Return whether a request that timed out was in the server's queue: requests sent before it were answered
        meanwhile, and none that was sent after it."""
        return self.answers > slot.answers_before and self.answered_sent <= slot.sent_at + SAME_TIME

    def share(self, endpoint: Endpoint) -> int | None:
        """Return the most requests that one dispatcher may have in flight now; None: no limit."""
        limit = self.capacity.limit
        if self.allotted is not None:
            limit = self.allotted if limit is None else min(limit, self.allotted)
        if limit is None or len(self.endpoints) == 1:
            return limit
        hungry = sum(other.is_hungry() for other in self.endpoints if other is not endpoint)
        fair = -(-limit // (1 + hungry))
        return min(fair, limit - self.inflight + endpoint.inflight)

    def dry_up(self, now: float, wait: float = 0.0) -> bool:
        """Record that the server refuses every request. ``wait``: for how long, if it says so. Returns whether its rate
        limit may be used up. The request that was refused is in flight."""
        if self.rates is None:
            self.rates = Rates()
        learnt = self.rates.learnt = self.rates.learnt or LearntRate()
        lasted = now - self.began_at
        taken = (self.answers + self.inflight - 1) * MINUTE / max(MINUTE, lasted)
        if not learnt.dry_up(round(taken), min(MINUTE, lasted), now):
            return False
        if LEAST_DROUGHT <= wait <= MINUTE:
            learnt.learn(now + wait)
        return True

    def flows_again(self, sent_at: float) -> None:
        """Learn the rate limit of a server that has refused every request, and has answered one of this time."""
        learnt = None if self.rates is None else self.rates.learnt
        if learnt is not None and LEAST_DROUGHT <= sent_at - self.health.down_since <= LONGEST_DROUGHT:
            learnt.learn(sent_at)

    def go_down(self) -> None:
        self.capacity.restart(self.most_in_flight)
        self.most_in_flight = 0


class KnownServers:
    """The servers that backends of this process have used."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str], Server] = {}

    def server(self, name: str, key: str | None) -> Server:
        """Return the state of the server with this name. Each API key is a separate account."""
        if len(self._servers) >= MOST_KNOWN:
            self._servers = {each: server for each, server in self._servers.items() if server.endpoints}
        place = name, "" if not key else blake2b(key.encode(), digest_size=8).hexdigest()
        return self._servers.setdefault(place, Server(name))


# One server as one dispatcher uses it: the dispatcher's requests in flight there, and whether it may send more.


def _never() -> bool:
    return False


class Endpoint:
    """``is_hungry`` returns whether its dispatcher waits for a slot. ``on_change`` is called when another dispatcher
    has changed the state of the server."""

    def __init__(self, server: Server | None = None, terms: Terms | None = None, name: str = "") -> None:
        self.server = Server() if server is None else server
        self.name = name  # the backend's name for it
        self.inflight = 0
        self.given_up = ""  # reason why it gets no more requests of this dispatcher
        self.leaving = False  # it gets no more requests, and is removed after its last answer
        self.is_hungry: Callable[[], bool] = _never
        self.on_change: Callable[[Endpoint], None] | None = None
        self.server.join(self, Terms() if terms is None else terms)
        self.capacity: Capacity = self.server.capacity
        self.health: Health = self.server.health

    def close(self) -> None:
        self.server.leave(self)

    def tell_others(self) -> None:
        """Notify the other dispatchers of the server about a change."""
        for other in tuple(self.server.endpoints):
            if other is not self and other.on_change is not None:
                other.on_change(other)

    def has_slot(self, now: float) -> bool:
        """Return whether a request may be sent to it now."""
        server = self.server
        if self.given_up or self.leaving or now < server.held_until:
            return False
        if server.rates is not None and server.rates.free_at(now) > now:
            return False
        state = self.health.state
        if state == "down":
            return self.health.ready or now >= self.health.next_trial
        share = server.share(self)
        return state != "on trial" and not self.health.in_doubt and (share is None or self.inflight < share)

    def takes_control(self, now: float) -> bool:
        """Return whether a control request may be sent to it now."""
        server, health = self.server, self.health
        if self.given_up or self.leaving or now < server.held_until or health.state == "on trial":
            return False
        if health.state == "down" and not (health.ready or now >= health.next_trial):
            return False
        return server.rates is None or server.rates.free_at(now) <= now

    @property
    def spare(self) -> float:
        """Number of slots that would stay idle. If the endpoint is down: 1, for the next trial."""
        health = self.health
        if self.given_up or self.leaving or self.server.held_until or health.state == "on trial" or health.in_doubt:
            return 0
        if health.state == "down":
            return 1
        share = self.server.share(self)
        if share is None:
            return inf
        return share - self.inflight if share > self.inflight else 0

    @property
    def slots(self) -> int | None:
        """Total slots while it is healthy; None means unlimited."""
        return 0 if self.given_up or self.leaving or self.health.is_down else self.server.share(self)

    @property
    def is_working(self) -> bool:
        return not (self.given_up or self.leaving or self.health.is_down)

    def take(self, now: float, backing_off: int = 0) -> bool:
        """Count a request that is sent. Returns True if it is a trial. ``backing_off``: requests that want a slot again
        after a refusal."""
        server = self.server
        self.inflight += 1
        server.inflight += 1
        if server.inflight > server.most_in_flight:
            server.most_in_flight = server.inflight
            server.began_at = min(server.began_at, now)
        limit = self.capacity.limit
        if limit is not None and server.inflight + self.capacity.others + backing_off >= limit:
            self.capacity.filled = True
        trial = self.health.state == "down"
        if trial:
            self.health.try_now(now)
        self.health.heard = now
        return trial

    def give_back(self) -> None:
        self.inflight -= 1
        self.server.inflight -= 1

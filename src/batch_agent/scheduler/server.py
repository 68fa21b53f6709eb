"""The state of one server: its capacity, rate limits, health and speed.

There is one object per server and process. The backend or fleet owns it and lends it to every dispatcher that uses the
server, so that two runs at one server share one rate limit and see one outage. Each dispatcher uses it through an
``Endpoint`` of its own.

Slots are not reserved: a dispatcher takes the next free one, but no more than an even share while another dispatcher
waits for one. When the last dispatcher leaves, everything learnt is dropped except the rate limits, because the next
dispatcher may come an hour later.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING

from batch_agent.scheduler.blame import EndpointHistory, RowHistory
from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.health import Health
from batch_agent.scheduler.limit_search import MOST, LimitSearch
from batch_agent.scheduler.rates import Rates
from batch_agent.scheduler.refusals import Refusals

if TYPE_CHECKING:
    from batch_agent.scheduler.core import Slot
    from batch_agent.scheduler.endpoint import Endpoint

MOST_KNOWN = 10_000  # number of unused servers that are remembered
SAME_TIME = 1e-3  # seconds: two requests that were sent together
LEARN = 0.1  # the weight of the latest answer in the seconds per turn
LEARN_GAP = 0.05  # ... in the seconds between two answers


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
        self.capacity = Capacity(None)
        self.health = Health()
        self.history = EndpointHistory()
        self.refusals = Refusals()
        self.allotted: int | None = None  # slots that this process may use; None: all of them
        self.inflight = 0  # of all dispatchers
        self.most_in_flight = 0  # since the end of the last outage
        self.held_until = 0.0  # the server asked to wait until this time
        # The row that it asked for a very long wait, and when; None if it has answered any request since.
        self.excessive: tuple[RowHistory, float] | None = None
        self.refused_since: float | None = None  # it has refused every request for load since then
        self.seconds = 0.0  # per turn; 0 until it has answered
        self.controlled = False  # a control request waits for it or is in flight
        self.takes_controls = True  # it has not refused one
        self.unanswered = 0.0  # longest time that a request waited here in vain before the first answer
        self.gap = 0.0  # seconds between two answers
        self.answered_at = -inf  # time of its latest answer
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

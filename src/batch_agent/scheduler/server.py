"""What is known of one server: how much it takes, its rate limits, its health, its speed.

There is one object per server and process. The backend or fleet owns it and lends it to every dispatcher that asks the
server, so that two runs at one server keep one rate limit and see one outage. Each dispatcher looks at it through an
``Endpoint`` of its own.

A slot belongs to nobody: whoever asks takes the next free one, but no more than an even share while another dispatcher
is waiting for one. When the last dispatcher leaves, what was learnt is dropped except the rate limits: the next one may
come an hour later.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING

from batch_agent.scheduler.blame import EndpointHistory
from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.health import Health
from batch_agent.scheduler.limit_search import MOST, LimitSearch
from batch_agent.scheduler.rates import Rates
from batch_agent.scheduler.refusals import Refusals

if TYPE_CHECKING:
    from batch_agent.scheduler.endpoint import Endpoint

MOST_KNOWN = 10_000  # servers that are remembered while nobody uses them
LEARN = 0.1  # the weight of the latest answer in the seconds per turn
LEARN_GAP = 0.05  # ... in the seconds between two answers


@dataclass(frozen=True, slots=True)
class Terms:
    """What a dispatcher knows of a server before it asks. ``start`` is where the search for the right number of
    requests in flight begins; None when the number is known, and is ``ceiling``."""

    ceiling: int | None = None
    start: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    by_clock: bool = True  # the search may raise its first steps before there are answers
    given: bool = False  # the user gave ``ceiling``, so a server's own number does not count


class Server:
    """``weight`` is its share among others, ``models`` those it serves (None: unknown), ``context`` in tokens."""

    __slots__ = (
        "__weakref__",
        "_answered_at",
        "_answers",
        "_terms",
        "_thread",
        "allotted",
        "capacity",
        "context",
        "default_inflight",
        "endpoints",
        "gap",
        "health",
        "held_until",
        "history",
        "inflight",
        "models",
        "most_in_flight",
        "name",
        "rates",
        "refusals",
        "refused_since",
        "seconds",
        "weight",
    )

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
        self.default_inflight = default_inflight  # requests in flight when the user gives no number; None: searched
        self.rates: Rates | None = None  # None while no rate limit is known
        self.endpoints: list[Endpoint] = []  # of the dispatchers that use it now
        self._terms: list[Terms] = []
        self._thread = 0  # of the dispatchers that use it now
        self.allotted: int | None = None  # slots that this process may use; None: all of them
        self._forget()

    def _forget(self) -> None:
        self.capacity = Capacity(None)
        self.health = Health()
        self.history = EndpointHistory()
        self.refusals = Refusals()
        self.inflight = 0  # of all dispatchers
        self.most_in_flight = 0  # since it last came back
        self.held_until = 0.0  # the server asked for no request before this time
        self.refused_since: float | None = None  # it has refused every request for load since then
        self.seconds = 0.0  # per turn; 0 until it has answered
        self.gap = 0.0  # seconds between two answers
        self._answered_at = -inf
        self._answers = 0

    def lent_to(self, thread: int) -> Server:
        """The server itself; if dispatchers of another thread use it now, another object for it: a dispatcher can be
        woken in its own thread only."""
        if self.endpoints and self._thread != thread:
            weight, models, context, most = self.weight, self.models, self.context, self.default_inflight
            return Server(self.name, weight=weight, models=models, context=context, default_inflight=most)
        self._thread = thread
        return self

    def join(self, endpoint: Endpoint, terms: Terms) -> None:
        """A dispatcher starts to use the server."""
        if not self.endpoints:
            self._forget()
        self.endpoints.append(endpoint)
        self._terms.append(terms)
        self._set_rates()
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
        """Each dispatcher bounds its own requests; the server takes those of all."""
        ceilings = [terms.ceiling for terms in self._terms]
        total = None if None in ceilings else sum(ceiling for ceiling in ceilings if ceiling is not None)
        if self.capacity.search is None and self.capacity.ceiling != total:
            self.capacity.resize(total)

    def _set_rates(self) -> None:
        """The strictest limits of all dispatchers hold for all of them together."""
        rpm = min((terms.rpm for terms in self._terms if terms.rpm is not None), default=None)
        tpm = min((terms.tpm for terms in self._terms if terms.tpm is not None), default=None)
        if self.rates is None and (rpm is not None or tpm is not None):
            self.rates = Rates()
        if self.rates is not None:
            self.rates.limit(rpm, tpm)

    def learn(self, seconds: float, now: float) -> None:
        """An answer took this long."""
        self.seconds += (LEARN if self.seconds else 1.0) * (seconds - self.seconds)
        self._answers += 1
        self.gap += max(LEARN_GAP, 1 / self._answers) * (min(seconds, now - self._answered_at) - self.gap)
        self._answered_at = now

    def share(self, endpoint: Endpoint) -> int | None:
        """The most that one dispatcher may have in flight now; None: no limit."""
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
    """The servers that backends of one process were opened for."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str], Server] = {}

    def server(self, name: str, key: str | None) -> Server:
        """What is known of the server of this name. Each key is an account of its own."""
        if len(self._servers) >= MOST_KNOWN:
            self._servers = {each: server for each, server in self._servers.items() if server.endpoints}
        place = name, "" if not key else blake2b(key.encode(), digest_size=8).hexdigest()
        return self._servers.setdefault(place, Server(name))

"""A server as one dispatcher uses it: its requests in flight there, and whether it may send more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

from batch_agent.compiler.prices import Prices
from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.health import Health
from batch_agent.scheduler.server_state import ServerState, Terms

MOST_KNOWN = 10_000  # number of unused servers that are remembered


class KnownServers:
    """The servers that backends of this process have used."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str], ServerState] = {}

    def server(self, name: str, key: str | None) -> ServerState:
        """Return the state of the server with this name. Each API key is a separate account."""
        if len(self._servers) >= MOST_KNOWN:
            self._servers = {each: server for each, server in self._servers.items() if server.endpoints}
        place = name, "" if not key else blake2b(key.encode(), digest_size=8).hexdigest()
        return self._servers.setdefault(place, ServerState(name))


@dataclass(frozen=True, slots=True)
class Standby:
    """A server that answers with its own ``model`` while no other server works. ``prices`` are those of this model;
    None if they are unknown."""

    model: str
    prices: Prices | None = None


class Endpoint:
    """One server as one dispatcher uses it. ``is_hungry`` returns whether the dispatcher waits for a slot.
    ``on_change`` is called when another dispatcher has changed the state of the server."""

    def __init__(
        self,
        server: ServerState | None = None,
        terms: Terms | None = None,
        name: str = "",
        standby: Standby | None = None,
    ) -> None:
        self.server = ServerState() if server is None else server
        self.name = name  # the backend's name for it
        self.inflight = 0
        self.allotted: int | None = None  # slots that this worker of the run may use; None: all of them
        self.given_up = ""  # reason why it gets no more requests of this dispatcher
        self.leaving = False  # it gets no more requests, and is removed after its last answer
        self.standby = standby
        self.is_idle = standby is not None  # a standby that gets no requests, because another endpoint works
        self.is_hungry: Callable[[], bool] = lambda: False
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
        """Return whether a request may be sent to the endpoint now."""
        if not self.takes_control(now):
            return False
        if self.health.is_down:
            return True
        share = self.server.share(self)
        return not self.health.in_doubt and (share is None or self.inflight < share)

    def takes_control(self, now: float) -> bool:
        """Return whether a control request may be sent to the endpoint now."""
        server, health = self.server, self.health
        if not self.is_usable or now < server.held_until or health.state == "on trial":
            return False
        if health.state == "down" and not (health.ready or now >= health.next_trial):
            return False
        return server.rates is None or server.rates.free_at(now) <= now

    @property
    def spare(self) -> float:
        """Number of slots that would stay idle. If the endpoint is down: 1, for the next trial."""
        health = self.health
        if not self.is_usable or self.server.held_until or health.state == "on trial" or health.in_doubt:
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
        return self.server.share(self) if self.is_working else 0

    @property
    def is_usable(self) -> bool:
        """Return whether it may get requests as soon as it is up."""
        return not (self.given_up or self.leaving or self.is_idle)

    @property
    def is_working(self) -> bool:
        return self.is_usable and not self.health.is_down

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

"""The endpoints of a proxy: the hostfile's lines as servers of a dispatcher, and the probes that check them.

The dispatcher marks endpoints as down and grants slots. Each endpoint is probed here every few seconds, more often
while it is down, or when it has requests and sends no byte. An endpoint counts as down until its first probe has
returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NoReturn

from batch_agent.backends.base import Probe
from batch_agent.backends.http.backend import Entries
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.fleet.hostfile import AgentEndpoint, Traits, changes, free_name
from batch_agent.fleet.probe import Prober
from batch_agent.messages import JsonObject
from batch_agent.scheduler.server import Endpoint, Server

logger = logging.getLogger("batch_agent")

LOOK_SECONDS = 10.0  # between two probes of an endpoint that is up
SILENCE_SECONDS = 3.0  # without a byte from an endpoint with requests, after which it is probed
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # between two probes of an endpoint that is down
FIRST_LOOK_SECONDS = 1.0  # for the first probes, before the first request is accepted
TICK_SECONDS = 0.5
MOST_PROBES = 256  # started in one tick
MISSES = 3  # probes without an answer after which an endpoint counts as down although it sends bytes


@dataclass(slots=True, eq=False)
class Upstream:
    """One endpoint, and its statistics."""

    host: AgentEndpoint
    endpoint: Endpoint
    models: Entries | None = None  # that it lists; None: unknown
    heard: float = 0.0  # when it last sent a byte, or got its first request
    probed: float = -inf  # when it was last probed
    misses: int = 0  # consecutive probes without an answer
    seen_up: bool | None = None  # as last logged; None: it was never up
    requests: int = 0
    failures: int = 0

    @property
    def address(self) -> str:
        return self.host.address

    def to_json(self) -> JsonObject:
        up = self.endpoint.is_working
        return {
            "endpoint": self.host.address,
            "tags": dict(self.host.tags),
            "up": up,
            "models": None if self.models is None else [*self.models],
            "in_flight": self.endpoint.inflight,
            "limit": self.endpoint.capacity.limit,
            "requests": self.requests,
            "failures": self.failures,
            "reason": "" if up else self.endpoint.health.reason,
        }


class Upstreams:
    """``max_inflight`` applies to each endpoint, times its weight."""

    def __init__(self, hosts: Sequence[AgentEndpoint], max_inflight: int, prober: Prober) -> None:
        self._max_inflight = max_inflight
        self._prober = prober
        self._known: dict[str, Upstream] = {}  # by endpoint name, including those that are leaving
        servers: dict[str, Server] = {}
        for host in hosts:
            servers[free_name(host.address, servers)] = self._server(host)
        self.dispatcher = Dispatcher(
            self, servers=servers, max_outage=inf, trust_probes=True, on_health=self._health_changed
        )
        for host, endpoint in zip(hosts, self.dispatcher.scheduler.endpoints, strict=True):
            self._begin(host, endpoint)

    @property
    def name(self) -> str:
        return "the fleet"

    @property
    def present(self) -> list[Upstream]:
        """Return the endpoints of the hostfile, in the order they were added."""
        return [upstream for upstream in self._known.values() if not upstream.endpoint.leaving]

    @property
    def up(self) -> int:
        return sum(upstream.endpoint.is_working for upstream in self._known.values())

    @property
    def models(self) -> list[JsonObject]:
        """Return the models of all endpoints that are up, without duplicates."""
        up = [upstream.models or {} for upstream in self.present if upstream.endpoint.is_working]
        return list({name: entry for models in up for name, entry in models.items()}.values())

    def __getitem__(self, name: str) -> Upstream:
        return self._known[name]

    # The hostfile

    def follow(self, hosts: Iterable[AgentEndpoint]) -> None:
        """Apply a new version. Running requests stay where they are."""
        kept, gone, new = changes(self.present, hosts)
        updated = [(upstream, host) for upstream, host in kept if upstream.host.tags != host.tags]
        for upstream, host in updated:
            upstream.host = host
            self._set_traits(upstream)
        for host in new:
            self._begin(host, self.dispatcher.add(free_name(host.address, self._known), self._server(host)))
        for upstream in gone:
            self.dispatcher.leave(upstream.endpoint)
        for name, upstream in tuple(self._known.items()):
            if upstream.endpoint.leaving and not upstream.endpoint.inflight:
                del self._known[name]
        if updated or new or gone:
            logger.warning("the hostfile has changed: %s endpoints", len(self.present))

    def _server(self, host: AgentEndpoint) -> Server:
        return Traits.read(host.tags).apply(Server(host.address), self._max_inflight, None)

    def _begin(self, host: AgentEndpoint, endpoint: Endpoint) -> None:
        self._known[endpoint.name] = Upstream(host, endpoint)
        endpoint.health.patient = True  # requests differ in kind: how long others took is no evidence
        self.dispatcher.endpoints.found(endpoint, Probe("down"))
        # Not an outage, after which it would be filled step by step.
        endpoint.capacity.resize(endpoint.capacity.ceiling)
        endpoint.health.reason = "no probe has been answered yet"

    def _set_traits(self, upstream: Upstream) -> None:
        """Apply what the hostfile's line and the server state about the endpoint."""
        found = None if upstream.models is None else frozenset(upstream.models)
        Traits.read(upstream.host.tags).apply(upstream.endpoint.server, self._max_inflight, found)
        self.dispatcher.retune(upstream.endpoint)

    # Probes

    async def watch(self) -> NoReturn:
        """Probe each endpoint when it is due."""
        while True:
            now = asyncio.get_running_loop().time()
            due = sorted((each for each in self.present if self._is_due(each, now)), key=lambda each: each.probed)
            for upstream in due[:MOST_PROBES]:
                self.dispatcher.endpoints.probe(upstream.endpoint)
            await asyncio.sleep(TICK_SECONDS)

    async def look(self) -> None:
        """Return when every endpoint was probed once, or its time for that is over."""
        first = [self.dispatcher.endpoints.probe(upstream.endpoint) for upstream in self.present[:MOST_PROBES]]
        await asyncio.wait([task for task in first if task is not None], timeout=FIRST_LOOK_SECONDS)

    def _is_due(self, upstream: Upstream, now: float) -> bool:
        health = upstream.endpoint.health
        if health.is_down:
            pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, (now - health.down_since) / 2))
        else:
            pause = SILENCE_SECONDS if upstream.misses or self._is_silent(upstream, now) else LOOK_SECONDS
        return now - upstream.probed >= pause

    def _is_silent(self, upstream: Upstream, now: float) -> bool:
        """Return whether it has requests and sends nothing, while another endpoint is up that could take them."""
        quiet = upstream.endpoint.inflight and now - upstream.heard >= SILENCE_SECONDS
        return bool(quiet) and self.dispatcher.scheduler.router.others_work(upstream.endpoint)

    async def probe(self, endpoint: str = "") -> Probe:
        """Return whether the endpoint is up. One that fails a probe while it sends bytes may just be busy."""
        upstream = self._known.get(endpoint)
        if upstream is None:
            return Probe("down", "it was removed from the hostfile")
        upstream.probed = asyncio.get_running_loop().time()
        found, models = await self._prober.probe(upstream.host)
        if found.state != "down":
            upstream.misses = 0
            upstream.models = models or None
            self._set_traits(upstream)
            return found
        upstream.misses += 1
        busy = upstream.endpoint.inflight and not self._is_silent(upstream, asyncio.get_running_loop().time())
        if busy and upstream.misses < MISSES and upstream.endpoint.is_working:
            return Probe("unknown", found.reason)
        return found

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        upstream, up = self._known.get(endpoint.name), endpoint.is_working
        if upstream is None or up == upstream.seen_up or (upstream.seen_up is None and not up):
            return
        if upstream.seen_up is not None:
            logger.warning("%s is %s", upstream.host.address, "up" if up else f"down: {endpoint.health.reason}")
        upstream.seen_up = up

    @property
    def outage(self) -> str:
        """Return the reason why no request can be answered."""
        present = self.present
        first = f"{present[0].host.place}: {present[0].endpoint.health.reason}"
        return f"none of the {len(present)} endpoints is up; the first of them: {first}"

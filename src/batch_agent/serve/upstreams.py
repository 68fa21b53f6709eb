"""What a server of batches knows of the servers behind it: which of them can answer; since when and why one cannot; and
what it needs.

People see it as status 503, supervisors at `/health`, and the operator in the log, at `/serve/status` and at
`/metrics`. The dispatcher decides whether a server is up. This module reads that state, and keeps it up to date without
traffic: idle servers are probed, and a server that is back gets a control request.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.door import RequestRefused
from batch_agent.messages import Conversation, JsonObject
from batch_agent.observe.exposition import Counter, Gauge
from batch_agent.scheduler.blame import DENIED
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_events import Reason
from batch_agent.serve.models import ServedModels

logger = logging.getLogger("batch_agent")

LOOK_SECONDS = 1.0  # between two looks at all servers
IDLE_SECONDS = 10.0  # without evidence after which a server without traffic is probed
READY_SECONDS = 2.0  # that a server which is back waits for a request, before it is asked a control request
LIST_SECONDS = 60.0  # between two readings of the list of models
LONGEST_RETRY = 60  # seconds that a client is asked to wait at most
ANY = "*"  # in `/health`: models whose names the servers have not told yet

# What each conclusion of ``ServerState`` asks of the operator.
NEEDS = {
    DENIED["key"]: "a key that the server accepts, and quota for it: check the account, and the key that this "
    "server was started with; a new key needs a restart",
    DENIED["place"]: "the right URL and model name; a router that restarts comes back by itself",
    DENIED["access"]: "the right to use this model for the key: ask the provider",
    "the server is unreachable": "a server that listens there: start it, or check the address and the network",
    "the server is silent": "a look at the server: it takes requests and does not answer; restart it if it hangs",
    "a probe failed": "a look at the server: start it, or wait until it has loaded its model",
    "every request is refused": "a higher limit at the server, or less load on it from others",
    "the server asks for a long wait": "a higher limit at the provider, or patience: it is tried from time to time",
    "the server asked to wait": "a higher limit at the provider, or patience: it is asked again after that time",
}
OTHER_NEED = "a look at the log of the server"
_ADDRESS = re.compile(r"(\b[A-Z]+ )?\b[a-z][a-z0-9+.-]*://[^\s,;)]*[^\s,;):.]")


def for_clients(message: str) -> str:
    """Return the message of an error without the addresses of the operator's servers."""
    return _ADDRESS.sub("the server of the model", message)


@dataclass(frozen=True, slots=True)
class Absence:
    """The reason why a server cannot answer now. ``since``: loop time; ``again_in``: seconds until the next attempt."""

    endpoint: str
    upstream: str
    why: str
    evidence: str
    since: float
    again_in: float

    @property
    def needs(self) -> str:
        return NEEDS.get(self.why, OTHER_NEED)

    def told(self, now: float) -> str:
        return f"{self.why}, for {now - self.since:.0f} s: {self.evidence}"


class ModelServers:
    """The servers of all models. ``now`` returns Unix seconds."""

    def __init__(self, models: ServedModels, dispatcher: Dispatcher, now: Callable[[], float]) -> None:
        self._models = models
        self.dispatcher = dispatcher
        self._now = now
        self._clock = asyncio.get_running_loop().time
        self._down: dict[str, Absence] = {}  # by endpoint, as of the latest look
        self._ready: dict[Endpoint, float] = {}  # since when an endpoint that is back waits for a request
        self._probed: dict[Endpoint, float] = {}  # when an endpoint without traffic was probed
        self._listed = 0.0  # loop time at which the models are listed again
        self.outages: dict[str, int] = {}  # that have begun, by endpoint

    @property
    def _endpoints(self) -> list[Endpoint]:
        return [each for each in self.dispatcher.scheduler.endpoints if not each.leaving]

    def outage(self, endpoint: Endpoint) -> Absence | None:
        """Return the reason why an endpoint cannot answer now; None if it can."""
        now = self._clock()
        server = endpoint.server
        health = endpoint.health
        held = server.held_until if server.held_until > now else 0.0
        hold = server.reasons.get("hold")
        if held and hold is not None and held - min(hold.since, server.refused_since or hold.since) <= N.busy:
            held = 0.0  # a rate limit at work, and no outage
        if endpoint.is_working and not held:
            return None
        about = server.reasons.get("health" if health.is_down else "hold")
        if about is None:
            about = Reason("health", "the server is down", health.reason or endpoint.given_up, health.down_since)
        again = max(health.next_trial if health.is_down else 0.0, held) - now
        upstream = server.name or name_of(endpoint)
        return Absence(name_of(endpoint), upstream, about.rule, about.evidence, about.since, max(0.0, again))

    def stopped(self, model: str) -> list[Absence]:
        """Return the outages of a model's endpoints if none of them can answer now; else []."""
        found: list[Absence] = []
        router = self.dispatcher.scheduler.router
        for endpoint in self._endpoints:
            if router.serves(endpoint, model):
                outage = self.outage(endpoint)
                if outage is None and not endpoint.health.in_doubt:
                    return []
                if outage is not None:
                    found.append(outage)
        return found

    def refusal(self, model: str) -> RequestRefused:
        """Return the error for a person whose request waited too long for a server."""
        now, outages = self._clock(), self.stopped(model)
        why = "; ".join(dict.fromkeys(for_clients(each.told(now)) for each in outages))
        again = min((each.again_in for each in outages), default=1.0)
        told = f"the model {model!r} cannot be answered now: {why or 'its server gives no answer'}"
        return RequestRefused(503, told, code="upstream_unavailable", headers=again_after(again))

    # For supervisors and the operator

    def health(self) -> tuple[int, JsonObject]:
        """Return status and document of `/health`: which models can be answered and which cannot. It contains no
        address, because it is public."""
        able: list[str] = []
        unable: list[str] = []
        for model in self._models.known or [ANY]:
            (unable if self.stopped("" if model == ANY else model) else able).append(model)
        status = "unavailable" if not able else "degraded" if unable else "ok"
        return 200 if able else 503, {"status": status, "models": [*able], "unavailable": [*unable]}

    def shown(self) -> list[JsonObject]:
        """Return the state of each endpoint, for the operator."""
        now, wall = self._clock(), self._now()
        found: list[JsonObject] = []
        for endpoint in self._endpoints:
            outage = self.outage(endpoint)
            row: JsonObject = {
                "endpoint": name_of(endpoint),
                "upstream": endpoint.server.name or name_of(endpoint),
                "up": outage is None,
                "in_flight": endpoint.inflight,
                "limit": endpoint.slots,
                "outages": self.outages.get(name_of(endpoint), 0),
                "reason": "",
            }
            if outage is not None:
                row |= {
                    "reason": outage.evidence,
                    "why": outage.why,
                    "since": round(wall - (now - outage.since)),
                    "down_seconds": round(now - outage.since),
                    "next_trial_seconds": round(outage.again_in, 1),
                    "needs": outage.needs,
                }
            found.append(row)
        return found

    def why(self) -> str:
        """Return the reason why lines wait for servers, or ""."""
        now = self._clock()
        outages = [self.outage(each) for each in self._endpoints]
        down = [each for each in outages if each is not None]
        if not down:
            return ""
        first = min(down, key=lambda each: each.since)
        return f"{len(down)} of {len(outages)} servers cannot answer: {first.told(now)}"

    def numbers(self) -> list[Gauge | Counter]:
        """Return the metrics of all endpoints."""
        name, now = "batch_agent_serve", self._clock()
        up = Gauge(f"{name}_endpoint_up", "Whether an endpoint is up.", ("endpoint",))
        told, labels = "Seconds for which an endpoint cannot answer, and why.", ("endpoint", "why")
        seconds = Gauge(f"{name}_endpoint_down_seconds", told, labels)
        begun = Counter(f"{name}_outages_total", "Outages that have begun.", ("endpoint",))
        for endpoint in self._endpoints:
            outage, label = self.outage(endpoint), name_of(endpoint)
            up.set(float(outage is None), label)
            if outage is not None:
                seconds.set(round(now - outage.since, 1), label, outage.why)
            begun.add(self.outages.get(label, 0), label)
        return [up, seconds, begun]

    # Keeping it true

    async def run(self) -> None:
        """Check all servers from time to time, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Log what has changed. Probe idle servers, and send control requests to those that are back and get no
        request."""
        now = self._clock()
        if now >= self._listed:
            self._listed = now + LIST_SECONDS
            if not await self._models.models():
                self._listed = now + IDLE_SECONDS
        monitor = self.dispatcher.endpoints
        for known in [known for known in (*self._probed, *self._ready) if known.leaving]:
            self._probed.pop(known, None)
            self._ready.pop(known, None)
        for endpoint in self._endpoints:
            self._log(endpoint, now)
            health = endpoint.health
            if not (health.patient or endpoint.inflight or endpoint.given_up):
                if not monitor.controls.is_like(endpoint) and (model := self._model_of(endpoint)):
                    shape = RequestShape(model=model)
                    monitor.controls.like(endpoint, ModelRequest(shape, Conversation([]), "control"))
                evidence = max(health.heard, health.up_at, self._probed.get(endpoint, 0.0))
                if not health.is_down and now - evidence >= IDLE_SECONDS:
                    self._probed[endpoint] = now
                    monitor.probe(endpoint)
            if health.state == "down" and health.ready:
                if now - self._ready.setdefault(endpoint, now) >= READY_SECONDS:
                    del self._ready[endpoint]
                    monitor.control(endpoint)
            else:
                self._ready.pop(endpoint, None)

    def _model_of(self, endpoint: Endpoint) -> str:
        """Return a model that an endpoint may serve, or ""."""
        router = self.dispatcher.scheduler.router
        return next((model for model in self._models.known if router.serves(endpoint, model)), "")

    def _log(self, endpoint: Endpoint, now: float) -> None:
        outage, name = self.outage(endpoint), name_of(endpoint)
        before = self._down.get(name)
        if outage is None:
            if before is not None:
                del self._down[name]
                logger.warning("%s answers again, after %.0f s", before.upstream, now - before.since)
        elif before is None or before.why != outage.why:
            self._down[name] = outage
            self.outages[name] = self.outages.get(name, 0) + (before is None)
            logger.warning("%s cannot answer: %s; it needs %s", outage.upstream, outage.told(now), outage.needs)


def name_of(endpoint: Endpoint) -> str:
    return endpoint.name.strip("|") or "backend"


def again_after(seconds: float) -> dict[str, str]:
    """Return the header that says after how many seconds a refused request may be sent again."""
    return {"Retry-After": str(max(1, min(LONGEST_RETRY, ceil(seconds))))}

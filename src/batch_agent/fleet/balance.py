"""Where each request of a proxy goes: the least busy endpoint that is up, and the same for what begins alike. Pure.

The router is the engine's (``scheduler.routing``), and so is what an endpoint can take. A new conversation begins at
the home of its key, the same in every proxy, unless another endpoint is less busy. It stays where it was answered,
unless that is clearly busier than another: one beginning which all requests share does not keep the others idle.

An endpoint is unknown until its first probe has come back. It gets requests only while no endpoint is up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from pydantic import JsonValue

from batch_agent.backends.http.probe import Entries
from batch_agent.fleet.following import changes
from batch_agent.fleet.hostfile import AgentEndpoint, Traits
from batch_agent.messages import JsonObject
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.routing import Router

FEW = 8  # requests in flight that never make an endpoint too busy for a conversation that it knows
BUSIER = 2.0  # times as busy as the least busy one is too busy
MOST_KEYS = 100_000  # of which the last place is remembered
BEGINNING_CHARS = 1024  # of a first message
SESSION_HEADER = "X-Session-Id"
KEY_FIELDS = ("prompt_cache_key", "user")


@dataclass(slots=True, eq=False)
class Place:
    """One endpoint, and what went through it."""

    host: AgentEndpoint
    endpoint: Endpoint
    models: Entries | None = None  # that it lists; None: not known
    unknown: bool = True
    heard: float = 0.0  # when it last sent a byte, or got a request while it had none
    requests: int = 0
    failures: int = 0

    @property
    def address(self) -> str:
        return self.host.address

    @property
    def is_up(self) -> bool:
        return not self.endpoint.health.is_down

    @property
    def has_slot(self) -> bool:
        limit = self.endpoint.capacity.limit
        return limit is None or self.endpoint.inflight < limit

    def to_json(self) -> JsonObject:
        return {
            "endpoint": self.host.address,
            "tags": dict(self.host.tags),
            "up": self.is_up,
            "models": None if self.models is None else [*self.models],
            "in_flight": self.endpoint.inflight,
            "limit": self.endpoint.capacity.limit,
            "requests": self.requests,
            "failures": self.failures,
            "reason": "" if self.is_up else self.endpoint.health.reason,
        }


@dataclass(frozen=True, slots=True)
class Followed:
    came: Sequence[Place]
    gone: Sequence[Place]
    updated: int


@dataclass(slots=True)
class Balance:
    """``max_inflight`` is each endpoint's, times its weight."""

    max_inflight: int
    places: list[Place] = field(default_factory=list)  # in the order they came
    router: Router = field(default_factory=Router)
    _by_endpoint: dict[Endpoint, Place] = field(default_factory=dict)
    _last: OrderedDict[str, Endpoint] = field(default_factory=OrderedDict)

    def follow(self, hosts: Iterable[AgentEndpoint], now: float = 0.0) -> Followed:
        """Applies a new content of the hostfile."""
        kept, gone, new = changes(self.places, hosts)
        updated = [(place, host) for place, host in kept if place.host.tags != host.tags]
        for place, host in updated:
            place.host = host
            self._set_traits(place)
        came = []
        for host in new:
            place = Place(host, Endpoint(host.address, self.max_inflight))
            place.endpoint.health.go_down(now)
            place.endpoint.health.reason = "no probe has been answered yet"
            self._by_endpoint[place.endpoint] = place
            self.router.add(place.endpoint)
            self._set_traits(place)
            came.append(place)
        self.places = [place for place, _ in kept] + came
        for place in gone:
            place.endpoint.leaving = True
            self.router.touch(place.endpoint)
            self._drop_idle(place)
        return Followed(came, gone, len(updated))

    def _set_traits(self, place: Place) -> None:
        """Sets what the hostfile's line says of the endpoint. Requests under way stay."""
        traits, endpoint = Traits.read(place.host.tags), place.endpoint
        limit = max(1, round(self.max_inflight * traits.weight))
        if endpoint.capacity.ceiling != limit:
            endpoint.capacity.resize(limit)
        endpoint.weight = traits.weight
        if traits.model is not None:
            endpoint.models = frozenset({traits.model})
        else:
            endpoint.models = None if place.models is None else frozenset(place.models)
        self.router.touch(endpoint)

    def _drop_idle(self, place: Place) -> None:
        if place.endpoint.leaving and not place.endpoint.inflight and place.endpoint in self._by_endpoint:
            del self._by_endpoint[place.endpoint]
            self.router.drop(place.endpoint)

    # Requests

    def choose(self, key: str, model: str, avoid: Place | None = None) -> Place | None:
        """Returns a place with a free slot, or None. The one to ``avoid`` is taken only if no other has one."""
        if not self.router.working:
            free = [place for place in self.places if place.unknown and place.has_slot]
            return min(free, key=lambda place: (place is avoid, _busy(place.endpoint)), default=None)
        router, shunned = self.router, avoid.endpoint if avoid is not None else None
        best = router.best(model, 0, shunned) or router.best(model)
        last = self._last.get(key) if key else None
        few, busier = FEW, BUSIER
        if key and (last is None or not router.works(last) or not router.serves(last, model)):
            last, few, busier = router.home(key, model), 0, 1.0  # it is nowhere yet
        if last is not None and last is not shunned and router.is_free(last) and best is not None:
            best = last if _busy(last) <= max(few, busier * _busy(best)) else best
        return None if best is None else self._by_endpoint[best]

    def take(self, place: Place, key: str, now: float) -> None:
        if not place.endpoint.inflight:
            place.heard = now
        place.endpoint.take(now)
        place.requests += 1
        self.router.touch(place.endpoint)
        if key:
            self._last[key] = place.endpoint
            self._last.move_to_end(key)
            if len(self._last) > MOST_KEYS:
                self._last.popitem(last=False)

    def release(self, place: Place) -> None:
        place.endpoint.inflight -= 1
        self.router.touch(place.endpoint)
        self._drop_idle(place)

    @property
    def is_hopeless(self) -> bool:
        """Whether every endpoint is known to be down."""
        return not self.router.working and not any(place.unknown for place in self.places)

    def answered(self, place: Place, seconds: float, now: float) -> None:
        if place.unknown:
            self.came_up(place, None, now)
        self.router.answered(place.endpoint, seconds)
        place.endpoint.capacity.succeeded(now - seconds, seconds, 0, now)

    def overloaded(self, place: Place, generation: int) -> None:
        place.endpoint.capacity.overloaded(generation, place.endpoint.inflight)

    # What probes and failures say

    def came_up(self, place: Place, models: Entries | None, now: float) -> None:
        place.models, place.unknown = models, False
        place.endpoint.health.answered_after(0.0, now, now)
        self._set_traits(place)

    def went_down(self, place: Place, reason: str, now: float) -> None:
        place.endpoint.health.reason, place.unknown = reason, False
        if place.is_up:
            place.endpoint.health.go_down(now)
            place.endpoint.go_down()
            self.router.touch(place.endpoint)

    @property
    def models(self) -> list[JsonObject]:
        """Those of all places that are up, each once."""
        known = {name: entry for place in self.places if place.is_up for name, entry in (place.models or {}).items()}
        return list(known.values())


def _busy(endpoint: Endpoint) -> float:
    """Requests in flight with one more, by weight."""
    return (endpoint.inflight + 1) / endpoint.weight


def read_ask(headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """Returns the key of requests that belong together, and the model; "" for what the request does not say."""
    try:
        document: JsonValue = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:  # images, forms
        document = None
    fields: Mapping[str, JsonValue] = document if isinstance(document, dict) else {}
    model = fields.get("model")
    given = [headers.get(SESSION_HEADER), *(fields.get(name) for name in KEY_FIELDS)]
    key = next((f"{value}" for value in given if value and isinstance(value, str)), "") or _beginning(fields)
    return key, model if isinstance(model, str) else ""


def _beginning(fields: Mapping[str, JsonValue]) -> str:
    """Returns what comes before the first user message and how that begins: the same in all turns of a conversation."""
    said = next((fields[name] for name in ("messages", "prompt", "input") if fields.get(name)), None)
    if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
        return _text(said)[:BEGINNING_CHARS]
    beginning = [_text(fields.get("system") or fields.get("instructions"))]
    for message in said:
        assert isinstance(message, dict)
        text = _text(message.get("content"))
        if message.get("role") == "user":
            beginning.append(text[:BEGINNING_CHARS])
            break
        beginning.append(text)
    return "\n".join(beginning)


def _text(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()

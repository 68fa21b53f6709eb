"""Where each request of a proxy goes: the least busy endpoint that works, and the same for what begins alike. Pure.

The router is the engine's (``scheduler.routing``), and so is what an endpoint can take. A new conversation begins at
the home of its key, the same in every proxy, unless another endpoint is less busy. It stays where it was answered,
unless that is clearly busier than another: one beginning which everybody shares does not keep the others idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from pydantic import JsonValue

from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import Card
from batch_agent.fleet.server import facts_of
from batch_agent.messages import JsonObject
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.routing import Router

FEW = 8  # requests in flight that never make an endpoint too busy for a conversation that it knows
BUSIER = 2.0  # times as busy as the least busy one: too busy
MOST_KEYS = 100_000  # whose last place is remembered
BEGINNING_CHARS = 1024  # of a first message
SESSION_HEADER = "X-Session-Id"
KEY_FIELDS = ("prompt_cache_key", "user")


@dataclass(slots=True, eq=False)
class Place:
    """One endpoint, and what went through it."""

    host: AgentEndpoint
    endpoint: Endpoint
    cards: Sequence[Card] | None = None  # the models it lists; None: nobody knows
    requests: int = 0
    failures: int = 0

    @property
    def is_up(self) -> bool:
        return not self.endpoint.health.is_down

    def to_json(self) -> JsonObject:
        return {
            "endpoint": self.host.address,
            "tags": dict(self.host.tags),
            "up": self.is_up,
            "models": None if self.cards is None else [card.name for card in self.cards],
            "in_flight": self.endpoint.inflight,
            "limit": self.endpoint.capacity.limit,
            "requests": self.requests,
            "failures": self.failures,
            "reason": "" if self.is_up else self.endpoint.health.reason,
        }


@dataclass(slots=True)
class Balance:
    """``max_inflight`` is each endpoint's, times its weight."""

    max_inflight: int
    places: dict[str, Place] = field(default_factory=dict)  # by line of the hostfile
    router: Router = field(default_factory=Router)
    _by_endpoint: dict[Endpoint, Place] = field(default_factory=dict)
    _last: OrderedDict[str, Endpoint] = field(default_factory=OrderedDict)

    def follow(self, hosts: Iterable[AgentEndpoint]) -> tuple[list[Place], list[Place]]:
        """What the hostfile says now: who came and who is going. A SpecError changes nothing."""
        wanted = {host.line: host for host in hosts}
        came = {line: self._place(host) for line, host in wanted.items() if line not in self.places}
        gone = [self.places.pop(line) for line in list(self.places) if line not in wanted]
        for line, place in came.items():
            self.places[line] = place
            self._by_endpoint[place.endpoint] = place
            self.router.add(place.endpoint)
        for place in gone:
            place.endpoint.leaving = True
            self.router.touch(place.endpoint)
            self._drop_idle(place)
        return list(came.values()), gone

    def _place(self, host: AgentEndpoint) -> Place:
        facts = cast(Any, facts_of(host.tags, host.address))
        weight = facts.get("weight", 1.0)
        model = facts.get("model")
        endpoint = Endpoint(
            host.address,
            max(1, round(self.max_inflight * weight)),
            weight=weight,
            models=None if model is None else frozenset({model}),
        )
        return Place(host, endpoint)

    def _drop_idle(self, place: Place) -> None:
        if place.endpoint.leaving and not place.endpoint.inflight and place.endpoint in self._by_endpoint:
            del self._by_endpoint[place.endpoint]
            self.router.drop(place.endpoint)

    # Requests

    def choose(self, key: str, model: str, avoid: Place | None = None) -> Place | None:
        """None: nobody has a slot. The one to ``avoid`` is taken only where no other has."""
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

    def answered(self, place: Place, seconds: float, now: float) -> None:
        self.router.answered(place.endpoint, seconds)
        place.endpoint.capacity.succeeded(now - seconds, seconds, 0, now)

    def overloaded(self, place: Place, generation: int) -> None:
        place.endpoint.capacity.overloaded(generation, place.endpoint.inflight)

    # What probes and failures say

    def came_up(self, place: Place, cards: Sequence[Card] | None, now: float) -> None:
        place.cards = cards
        if cards is not None and "model" not in place.host.tags:
            place.endpoint.models = frozenset(card.name for card in cards)
        place.endpoint.health.answered_after(0.0, now, now)
        self.router.touch(place.endpoint)

    def went_down(self, place: Place, reason: str, now: float) -> None:
        place.endpoint.health.reason = reason
        if place.is_up:
            place.endpoint.health.go_down(now)
            place.endpoint.go_down()
            self.router.touch(place.endpoint)

    @property
    def models(self) -> list[JsonObject]:
        """Of all that are up, each once."""
        known = [card for place in self.places.values() if place.is_up for card in place.cards or ()]
        return list({card.name: card.entry for card in known}.values())


def _busy(endpoint: Endpoint) -> float:
    """With one request more, for its weight."""
    return (endpoint.inflight + 1) / endpoint.weight


def read_ask(headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """What a request is to stay together with, and the model that it names; "" where it says neither."""
    try:
        document: JsonValue = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:  # pictures, forms
        document = None
    fields: Mapping[str, JsonValue] = document if isinstance(document, dict) else {}
    model = fields.get("model")
    given = [headers.get(SESSION_HEADER), *(fields.get(name) for name in KEY_FIELDS)]
    key = next((f"{value}" for value in given if value and isinstance(value, str)), "") or _beginning(fields)
    return key, model if isinstance(model, str) else ""


def _beginning(fields: Mapping[str, JsonValue]) -> str:
    """All that comes before the first user's message, and how that begins: the same for all turns of a conversation."""
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

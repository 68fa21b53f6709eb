"""Decides which requests of a proxy belong together, and where they are sent.

A new conversation starts at the home endpoint of its key, the same in every proxy, unless another one is less busy. It
stays at the endpoint that answered it, unless that one is clearly busier than another. So a prefix that all requests
share does not leave the other endpoints idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import orjson
from pydantic import JsonValue

from batch_agent.scheduler.routing import Router
from batch_agent.scheduler.server import Endpoint

FEW = 8  # with at most this many requests in flight an endpoint is never too busy for its conversations
BUSIER = 2.0  # an endpoint this many times as busy as the least busy one is too busy
MOST_KEYS = 100_000  # keys whose last endpoint is remembered
BEGINNING_CHARS = 1024  # used of a first message
SESSION_HEADER = "X-Session-Id"
KEY_FIELDS = ("prompt_cache_key", "user")


class Homes:
    """Remembers the endpoint to which each key was last sent."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._last: OrderedDict[str, Endpoint] = OrderedDict()

    def remember(self, key: str, endpoint: Endpoint) -> None:
        if key:
            self._last[key] = endpoint
            self._last.move_to_end(key)
            if len(self._last) > MOST_KEYS:
                self._last.popitem(last=False)

    def find(self, key: str, model: str) -> Endpoint | None:
        """Return the endpoint for a request, if it has a slot."""
        router = self._router
        best = router.best(model)
        if not key:
            return best
        last, few, busier = self._last.get(key), FEW, BUSIER
        if last is None or not router.works(last) or not router.serves(last, model):
            last, few, busier = router.home(key, model), 0, 1.0  # a new conversation
        if last is None or best is None:
            return last
        return last if _busy(last) <= max(few, busier * _busy(best)) else best


def _busy(endpoint: Endpoint) -> float:
    """Return the requests in flight with one more, divided by weight."""
    return (endpoint.inflight + 1) / endpoint.server.weight


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

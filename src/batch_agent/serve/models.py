"""The models that are served, and the backends that answer for them, as one backend.

With ``--backend`` alone every model of that backend is served under its own name. With named models each name has a
backend; the name that clients send is replaced by the name that the backend uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import parse_qsl, urlencode
from weakref import WeakKeyDictionary

from batch_agent.backends.address import Address
from batch_agent.backends.base import (
    Backend,
    Capabilities,
    Facts,
    Listener,
    Load,
    ModelRequest,
    OnToolCall,
    Probe,
    RequestShape,
    total_inflight,
)
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, SpecError, Unavailable
from batch_agent.messages import Reply
from batch_agent.scheduler.server_state import ServerState

LISTING_SECONDS = 5.0
BETWEEN = "|"  # the name of a model, and the name of an endpoint of its backend
EVERY = ""  # the name of a backend that answers for any model


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model. ``model`` is the backend's name for it; "" if clients use the backend's name."""

    backend: Backend
    model: str = ""


class ServedModels(Backend):
    """The models, by the name that clients use. The name "" stands for all models that its backend lists. ``url`` opens
    the same models in another process; "" if that would need a key or headers."""

    def __init__(self, models: Mapping[str, ServedModel], url: str = "") -> None:
        self.url = url
        if not models:
            raise SpecError("serve needs --backend URL, or --model NAME=URL for each model")
        self._models = dict(models)
        self._listed: dict[str, list[str]] = {}  # what the backend for all models listed last
        self._shapes: WeakKeyDictionary[RequestShape, RequestShape] = WeakKeyDictionary()
        self._extent = AsyncExitStack()
        self._users = 0

    @property
    def name(self) -> str:
        return f"models://{', '.join(dict.fromkeys(served.backend.name for served in self._models.values()))}"

    @property
    def capabilities(self) -> Capabilities:
        able = [served.backend.capabilities for served in self._models.values()]
        return Capabilities(
            images=True,
            default_inflight=total_inflight(self.servers.values()),
            reports_load=any(one.reports_load for one in able),
            reports_context=True,  # so that each run lets the backends learn about their servers
            patient=any(one.patient for one in able),
        )

    def of(self, model: str) -> ServedModel:
        """Return the ServedModel for a name. Raises Unavailable if there is none."""
        served = self._models.get(model) or self._models.get(EVERY)
        if served is None:
            raise Unavailable(f"no backend is configured for the model {model!r}", status=404)
        return served

    def knows(self, model: str) -> bool:
        """Return whether a model is served, according to what the backends have reported so far."""
        if model in self._models:
            return True
        listed = self._listed.get(EVERY)
        return EVERY in self._models and (not listed or model in listed)

    @property
    def known(self) -> list[str]:
        """Return the names that clients may use, according to what the backends have reported so far."""
        return list(dict.fromkeys([*filter(None, self._models), *self._listed.get(EVERY, ())]))

    async def models(self) -> list[str]:
        """Return the names that clients may use, and ask the backend for them."""
        if (served := self._models.get(EVERY)) is not None:
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(LISTING_SECONDS):
                    self._listed[EVERY] = await served.backend.models()
        return self.known

    # A Backend

    async def __aenter__(self) -> Self:
        if not self._users:
            for backend in {id(served.backend): served.backend for served in self._models.values()}.values():
                await self._extent.enter_async_context(backend)
        self._users += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._users -= 1
        if not self._users:
            await self._extent.aclose()
            self._extent = AsyncExitStack()

    @property
    def servers(self) -> Mapping[str, ServerState]:
        """Return the servers of all backends. A server that is used under several names is one server."""
        found: dict[str, ServerState] = {}
        names: dict[int, set[str]] = {}
        for name, served in self._models.items():
            for endpoint, server in served.backend.servers.items():
                if name == EVERY:
                    found[f"{name}{BETWEEN}{endpoint}"] = server
                elif server.models is None or id(server) in names or {served.model or name, name} & server.models:
                    if id(server) not in names:
                        found[f"{name}{BETWEEN}{endpoint}"] = server
                    names.setdefault(id(server), set()).add(name)
                    server.models = frozenset(names[id(server)])
                    server.stated = True
        return found

    def join(self, listener: Listener) -> None:
        for served in self._models.values():
            served.backend.join(listener)

    def leave(self, listener: Listener) -> None:
        for served in self._models.values():
            served.backend.leave(listener)

    async def locate(self, model: str) -> None:
        with suppress(Unavailable):
            served = self.of(model)
            await served.backend.locate(served.model or model)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        served = self.of(request.shape.model)
        shape = request.shape
        endpoint = request.endpoint
        if served.model and served.model != shape.model:
            request.shape = self._shapes.get(shape) or self._shapes.setdefault(
                shape, replace(shape, model=served.model)
            )
        request.endpoint = endpoint.partition(BETWEEN)[2]
        try:
            return await served.backend.infer(request, on_tool_call)
        finally:
            request.shape, request.endpoint = shape, endpoint

    async def facts(self, model: str) -> Facts:
        """Let each backend learn about its servers, such as whether they schedule by priority."""
        backends = {id(served.backend): (served, name) for name, served in self._models.items()}
        asked = [served.backend.facts(served.model or name or model) for served, name in backends.values()]
        await asyncio.gather(*asked, return_exceptions=True)  # one that is down is asked by the next batch
        return Facts()

    async def probe(self, endpoint: str = "") -> Probe:
        name, found, inner = endpoint.partition(BETWEEN)
        served = self._models.get(name)
        return Probe("unknown") if served is None or not found else await served.backend.probe(inner)

    async def load(self, endpoint: str = "") -> Load | None:
        name, found, inner = endpoint.partition(BETWEEN)
        served = self._models.get(name)
        if served is None or not found or not served.backend.capabilities.reports_load:
            return None
        return await served.backend.load(inner)


def open_models(backend: str | None, named: Mapping[str, str | Mapping[str, object]]) -> ServedModels:
    """Return the models of ``--backend`` and of ``--model NAME=URL`` or a configuration."""
    models: dict[str, ServedModel] = {}
    opened: dict[str, Backend] = {}
    for name, given in named.items():
        url = given if isinstance(given, str) else dict(given)
        inner = ""
        if isinstance(url, dict):
            inner = str(url.pop("model", ""))
        place = repr(url)
        if place not in opened:
            opened[place], _ = open_backend(url, model=inner or name)
        models[name] = ServedModel(opened[place], inner)
    if backend is not None:
        models[EVERY] = ServedModel(open_backend(backend)[0])
    return ServedModels(models, _url_of({**named, **({} if backend is None else {EVERY: backend})}))


def _url_of(named: Mapping[str, str | Mapping[str, object]]) -> str:
    """Return the URL of these models; "" if one of them has a password, a key or headers, which a record must not
    contain."""
    pairs: list[tuple[str, str]] = []
    for name, given in named.items():
        url = given if isinstance(given, str) else given.get("url")
        inner = "" if isinstance(given, str) else str(given.get("model", ""))
        beside = set() if isinstance(given, str) else {*given} - {"url", "model"}
        if beside or not isinstance(url, str) or "@" in url:
            return ""
        pairs.append((f"{name}={inner}" if inner else name, url))
    return f"models://?{urlencode(pairs)}"


def from_address(address: Address) -> ServedModels:
    """Return the models of a URL ``models://?NAME=URL&…``. A model without a name stands for all others."""
    named: dict[str, str | Mapping[str, object]] = {}
    for text, url in parse_qsl(address.url.query, keep_blank_values=True):
        name, _, inner = text.partition("=")
        named[name] = {"url": url, "model": inner} if inner else url
    every = named.pop(EVERY, None)
    return open_models(None if every is None else str(every), named)


def names_in(texts: Sequence[str]) -> dict[str, str | Mapping[str, object]]:
    """Read ``NAME=URL``. Raises SpecError."""
    named: dict[str, str | Mapping[str, object]] = {}
    for text in texts:
        name, sign, url = text.partition("=")
        if not sign or not name.strip() or "://" not in url:
            raise SpecError(f"--model {text!r}: write NAME=URL, such as small=vllm://gpu1:8000")
        named[name.strip()] = url.strip()
    return named

"""Probes servers: whether each is up, which models it serves, how busy it is. Many are probed at once.

A server is ready when ``/health`` does not say otherwise and ``/v1/models`` names a model: some are healthy long before
that. Sockets are bounded, and closed after each probe.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from batch_agent.backends.http.client import HttpClient
from batch_agent.backends.http.transport import Transport
from batch_agent.backends.openai.model_list import read_entries
from batch_agent.backends.schemes import KEY_VARIABLE
from batch_agent.errors import BackendError, BadResponse, Rejected, SpecError, Timeout, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.told import Told, read_told, tokens_per_second
from batch_agent.messages import JsonObject

PROBE_SECONDS = 5.0
MOST_SOCKETS = 1024
OTHER_FILES = 100  # open files of this process that are left for other uses
NO_SUCH_PAGE = (401, 403, 404, 405, 501)  # statuses of a server without /health
CLOSE = {"Connection": "close"}

Models = Mapping[str, JsonObject]  # a server's entries of its list, by name


@dataclass(frozen=True, slots=True)
class Look:
    """The state of one endpoint at one time. ``reason`` says why it is not up."""

    endpoint: AgentEndpoint
    up: bool
    models: tuple[str, ...] = ()
    told: Told | None = None
    at: float = 0.0  # when ``told`` was read
    tokens_per_second: float | None = None
    reason: str = ""


class Prober:
    """Entered while in use. Servers get the key of the environment."""

    def __init__(self, *, environ: Mapping[str, str] = os.environ) -> None:
        self._api_key = (environ.get(KEY_VARIABLE) or "").strip() or None
        self._inside, self._outside = Transport(proxies=False), Transport()
        self._sockets = asyncio.Semaphore(most_sockets())
        self._entered = AsyncExitStack()
        self._clients: dict[str, HttpClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clients.clear()
        await self._entered.aclose()

    async def ready(self, endpoint: AgentEndpoint) -> Models:
        """Returns the models that the server lists, one at least. A BackendError says why it is not ready."""
        async with self._sockets, _patience(endpoint):
            return await self._ready(endpoint, CLOSE)

    async def look(self, endpoint: AgentEndpoint) -> Look:
        """Returns the endpoint's state; one that is down is a state too, not an error."""
        try:
            async with self._sockets, _patience(endpoint):
                models = await self._ready(endpoint)
                told, at = await self._told(endpoint), _now()
        except (BackendError, SpecError) as error:
            return Look(endpoint, up=False, reason=why(endpoint, error))
        return Look(endpoint, up=True, models=tuple(models), told=told, at=at)

    async def look_at_all(self, endpoints: Iterable[AgentEndpoint]) -> list[Look]:
        return list(await asyncio.gather(*map(self.look, endpoints)))

    async def _ready(self, endpoint: AgentEndpoint, headers: Mapping[str, str] | None = None) -> Models:
        client = await self._client(endpoint)
        try:
            await client.send(client.route("GET", "/health", beside=True))
        except Rejected as error:
            if error.status not in NO_SUCH_PAGE:
                raise
        route = client.route("GET", "/models")
        models = read_entries(await client.send(route, headers=headers) or b"")
        if models is None:
            raise BadResponse(f"{route.faults.where} answered with no list of models")
        if not models:
            raise Unavailable(f"{route.faults.where} names no model: it is not ready yet")
        return models

    async def _told(self, endpoint: AgentEndpoint) -> Told | None:
        client = await self._client(endpoint)
        try:
            text = await client.send(client.route("GET", "/metrics", beside=True), headers=CLOSE) or b""
        except Rejected:  # a server without it
            return None
        return read_told(text.decode("utf-8", "replace"))

    async def _client(self, endpoint: AgentEndpoint) -> HttpClient:
        client = self._clients.get(endpoint.api)
        if client is None:
            transport = self._outside if endpoint.scheme == "https" else self._inside
            client = self._clients[endpoint.api] = HttpClient(endpoint.api, api_key=self._api_key, transport=transport)
            await self._entered.enter_async_context(client)
        return client


def why(endpoint: AgentEndpoint, error: Exception) -> str:
    """Returns the error's message without the endpoint's address, for a line that begins with it."""
    return re.sub(rf"\b(GET|POST) {re.escape(endpoint.url)}", "", str(error)).strip()


def most_sockets() -> int:
    """Returns how many sockets probes may use: the limit of this process, less what else it needs."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_SOCKETS // 2
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_SOCKETS if soft < 0 else max(16, min(MOST_SOCKETS, soft - OTHER_FILES))


@asynccontextmanager
async def _patience(endpoint: AgentEndpoint) -> AsyncIterator[None]:
    """Limits the time of one probe."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            yield
    except TimeoutError:
        raise Timeout(f"no answer in {PROBE_SECONDS:g} s", unreached=True) from None


def _now() -> float:
    return asyncio.get_running_loop().time()


def with_rates(looks: Iterable[Look], earlier: Mapping[AgentEndpoint, Look]) -> list[Look]:
    """Returns the looks with tokens per second, for those that have an earlier look."""
    rated = []
    for look in looks:
        before = earlier.get(look.endpoint)
        if look.told is not None and before is not None and before.told is not None:
            rate = tokens_per_second(before.told, look.told, look.at - before.at)
            look = replace(look, tokens_per_second=rate)
        rated.append(look)
    return rated

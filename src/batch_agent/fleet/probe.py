"""Probes many servers at once, with a limited number of sockets: state, models, load."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Self

from batch_agent.backends.base import Probe
from batch_agent.backends.http.backend import PROBE_SECONDS, Entries, HttpClient, probe_models
from batch_agent.backends.schemes import KEY_VARIABLE
from batch_agent.errors import BackendError, SpecError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.told import Told, read_told, tokens_per_second
from batch_agent.http.transport import Transport

MOST_SOCKETS = 1024
OTHER_FILES = 100  # open files of this process reserved for other uses


@dataclass(frozen=True, slots=True)
class Look:
    """The state of one endpoint at one time. ``reason``: why it is not up."""

    endpoint: AgentEndpoint
    up: bool
    models: tuple[str, ...] = ()
    told: Told | None = None
    at: float = 0.0  # when ``told`` was read
    tokens_per_second: float | None = None
    reason: str = ""


class Prober:
    """Probes servers with the key of the environment. Enter it before use."""

    def __init__(self, *, environ: Mapping[str, str] = os.environ) -> None:
        self._api_key = (environ.get(KEY_VARIABLE) or "").strip() or None
        sockets = most_sockets()
        self._inside = Transport(proxies=False, connections=sockets)
        self._outside = Transport(connections=sockets)
        self._turns = asyncio.Semaphore(sockets)
        self._entered = AsyncExitStack()
        self._clients: dict[str, HttpClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._clients.clear()
        await self._entered.aclose()

    async def probe(self, endpoint: AgentEndpoint) -> tuple[Probe, Entries]:
        """Return whether the server is up, and its list of models. The reason omits the endpoint's address."""
        async with self._turns:
            return await self._probe(endpoint)

    async def look(self, endpoint: AgentEndpoint) -> Look:
        """Return the endpoint's state, with what it reports at ``/metrics``."""
        async with self._turns:
            probe, _ = await self._probe(endpoint)
            if probe.state == "down":
                return Look(endpoint, up=False, reason=probe.reason)
            told, at = await self._told(endpoint), asyncio.get_running_loop().time()
        return Look(endpoint, up=True, models=probe.models or (), told=told, at=at)

    async def look_at_all(self, endpoints: Iterable[AgentEndpoint]) -> list[Look]:
        return list(await asyncio.gather(*map(self.look, endpoints)))

    async def _probe(self, endpoint: AgentEndpoint) -> tuple[Probe, Entries]:
        try:
            probe, entries = await probe_models(await self._client(endpoint))
        except SpecError as error:  # an unusable proxy in the environment
            return Probe("down", str(error)), {}
        return replace(probe, reason=without_address(probe.reason, endpoint)), entries

    async def _told(self, endpoint: AgentEndpoint) -> Told | None:
        client = await self._client(endpoint)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                text = await client.send(client.route("GET", "/metrics", beside=True)) or b""
        except (BackendError, TimeoutError):  # a server without metrics
            return None
        return read_told(text.decode("utf-8", "replace"))

    async def _client(self, endpoint: AgentEndpoint) -> HttpClient:
        client = self._clients.get(endpoint.api)
        if client is None:
            transport = self._outside if endpoint.scheme == "https" else self._inside
            client = self._clients[endpoint.api] = HttpClient(endpoint.api, api_key=self._api_key, transport=transport)
            await self._entered.enter_async_context(client)
        return client


def without_address(words: str, endpoint: AgentEndpoint) -> str:
    """Return an error's message without the endpoint's address, for a line that starts with it."""
    return re.sub(rf"\b(GET|POST) {re.escape(endpoint.url)}", "", words).strip()


def most_sockets() -> int:
    """Return how many sockets probes may use: the limit of this process, minus what else it needs."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_SOCKETS // 2
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_SOCKETS if soft < 0 else max(16, min(MOST_SOCKETS, soft - OTHER_FILES))


def with_rates(looks: Iterable[Look], earlier: Mapping[AgentEndpoint, Look]) -> list[Look]:
    """Return the looks with tokens per second, for those with an earlier look."""
    rated = []
    for look in looks:
        before = earlier.get(look.endpoint)
        if look.told is not None and before is not None and before.told is not None:
            rate = tokens_per_second(before.told, look.told, look.at - before.at)
            look = replace(look, tokens_per_second=rate)
        rated.append(look)
    return rated

"""The one probe of all HTTP servers: ``/health`` beside the API, then the list of models. Neither costs a token.

Engines are healthy long before they serve a model, and a stuck engine may list its models while ``/health`` fails, so
both are asked. Providers have no ``/health``, and some list no models: those are "unknown", unless they answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from batch_agent.backends.base import Probe
from batch_agent.backends.http.client import HttpClient
from batch_agent.backends.openai.model_list import read_entries
from batch_agent.errors import BackendError, RateLimited, Rejected
from batch_agent.messages import JsonObject

PROBE_SECONDS = 2.0  # for both questions together
NO_ACCESS = (401, 403)

Entries = Mapping[str, JsonObject]
"""The entries of a server's list of models, by name."""


async def probe_server(client: HttpClient) -> Probe:
    """Whether the server is up. Never raises a BackendError. The client must be entered."""
    probe, _ = await probe_models(client)
    return probe


async def probe_models(client: HttpClient) -> tuple[Probe, Entries]:
    """The same, with the entries of the models it lists."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _ask(client)
    except TimeoutError:
        return Probe("down", f"no answer in {PROBE_SECONDS:g} s"), {}
    except BackendError as error:
        return Probe("down", str(error)), {}


async def _ask(client: HttpClient) -> tuple[Probe, Entries]:
    """Raises the BackendError of a server that is down."""
    healthy = False
    try:
        await client.send(client.route("GET", "/health", beside=True))
        healthy = True
    except (Rejected, RateLimited):
        pass  # it answers, and has no such page for us
    models = client.route("GET", "/models")
    try:
        entries = read_entries(await client.send(models) or b"")
    except (Rejected, RateLimited) as error:
        answers = healthy or error.status in NO_ACCESS
        return Probe("up" if answers else "unknown", str(error)), {}
    if entries is None:
        raise models.faults.bad("the answer is no list of models")
    if not entries:
        return Probe("down", f"{models.faults.where} names no model: still loading", ()), {}
    return Probe("up", models=tuple(entries)), entries

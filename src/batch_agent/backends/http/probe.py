"""The probe for all HTTP servers: ``/health`` beside the API, then the list of models. Neither costs a token.

Engines are healthy long before they serve a model, and a stuck engine may list models while ``/health`` fails, so both
are requested. Providers have no ``/health``, and some list no models: those are "unknown", unless they answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from batch_agent.backends.base import Probe
from batch_agent.backends.http.client import HttpClient
from batch_agent.backends.openai.model_list import read_entries
from batch_agent.errors import BackendError, RateLimited, Rejected
from batch_agent.messages import JsonObject

PROBE_SECONDS = 2.0  # for both requests together
NO_ACCESS = (401, 403)

Entries = Mapping[str, JsonObject]
"""The entries of a server's list of models, by name."""


async def probe_server(client: HttpClient) -> Probe:
    """Return whether the server is up. Never raises BackendError. The client must be entered."""
    probe, _ = await probe_models(client)
    return probe


async def probe_models(client: HttpClient) -> tuple[Probe, Entries]:
    """Return the probe result, and the entries of the models that the server lists."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _ask(client)
    except TimeoutError:
        return Probe("down", f"no answer in {PROBE_SECONDS:g} s"), {}
    except BackendError as error:
        return Probe("down", str(error)), {}


async def _ask(client: HttpClient) -> tuple[Probe, Entries]:
    """Send both requests. Raises the BackendError of a server that is down."""
    healthy = False
    try:
        await client.send(client.route("GET", "/health", beside=True, once=True))
        healthy = True
    except (Rejected, RateLimited):
        pass  # the server is up, but has no such route for us
    models = client.route("GET", "/models", once=True)
    try:
        entries = read_entries(await client.send(models) or b"")
    except (Rejected, RateLimited) as error:
        answers = healthy or error.status in NO_ACCESS
        return Probe("up" if answers else "unknown", str(error)), {}
    if entries is None:
        raise models.faults.bad("the answer is not a list of models")
    if not entries:
        return Probe("down", f"{models.faults.where} lists no model: still loading", ()), {}
    return Probe("up", models=tuple(entries)), entries

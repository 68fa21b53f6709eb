"""Whether an endpoint is up, asked in place of a row's turn, which would have to wait for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from batch_agent.backends.base import Probe

PROBE_SECONDS = 3.0  # a probe has a shorter limit of its own

Knock = Callable[[str], Awaitable[Probe]]
"""``Backend.probe``."""


async def why_shut(knock: Knock, endpoint: str) -> str:
    """Reason the endpoint is down, or ""."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            probe = await knock(endpoint)
    except TimeoutError:
        return f"no answer in {PROBE_SECONDS:g} s"
    return probe.reason if probe.state == "down" else ""

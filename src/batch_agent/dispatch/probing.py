"""Probes of endpoints: a free request that tells whether a server is there, under a time limit."""

from __future__ import annotations

import asyncio
from typing import Protocol

from batch_agent.backends.base import Probe
from batch_agent.errors import BackendError
from batch_agent.foreign import describe

PROBE_SECONDS = 2.0


class Probed(Protocol):
    """What is asked about its endpoints: a Backend, or less."""

    @property
    def name(self) -> str: ...

    async def probe(self, endpoint: str = "") -> Probe: ...


async def probe(backend: Probed, endpoint: str) -> Probe:
    """The endpoint's state; never raises. No answer in time means that it is down."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await backend.probe(endpoint)
    except TimeoutError:
        return Probe("down", f"no answer to a probe in {PROBE_SECONDS:g} s")
    except BackendError as error:
        return Probe("down", str(error))
    except Exception as error:  # a backend of the user's own
        return Probe("unknown", describe(error))

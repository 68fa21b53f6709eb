"""Probes of endpoints: a free request that tells whether a server is there, under a time limit."""

from __future__ import annotations

import asyncio

from batch_agent.backends.base import Backend, Probe
from batch_agent.dispatch.deadlines import LATE
from batch_agent.errors import BackendError
from batch_agent.foreign import describe

PROBE_SECONDS = 2.0


async def probe(backend: Backend, endpoint: str) -> Probe:
    """The endpoint's state; never raises. No answer in time means that it is down, unless the event loop stalled: then
    the probe is made again."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await _probe(backend, endpoint)
    if found.state == "down" and loop.time() - began > PROBE_SECONDS + LATE:
        return await _probe(backend, endpoint)
    return found


async def _probe(backend: Backend, endpoint: str) -> Probe:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await backend.probe(endpoint)
    except TimeoutError:
        return Probe("down", f"no answer to a probe in {PROBE_SECONDS:g} s")
    except BackendError as error:
        return Probe("down", str(error))
    except Exception as error:  # a backend of the user's own
        return Probe("unknown", describe(error))

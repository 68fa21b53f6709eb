"""Probes: free requests with a time limit that show whether a server is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from batch_agent.backends.base import Probe
from batch_agent.errors import BackendError
from batch_agent.foreign import describe
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint

PROBE_SECONDS = 2.0


class Probed(Protocol):
    """The part of a Backend that probes need."""

    @property
    def name(self) -> str: ...

    async def probe(self, endpoint: str = "") -> Probe: ...


async def probe(backend: Probed, endpoint: str) -> Probe:
    """Return the state of the endpoint; never raises. Without an answer in time it is down. If the event loop was
    blocked meanwhile, the probe is repeated."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await _probe(backend, endpoint)
    if found.state == "down" and loop.time() - began > PROBE_SECONDS + N.moment:
        return await _probe(backend, endpoint)
    return found


async def _probe(backend: Probed, endpoint: str) -> Probe:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await backend.probe(endpoint)
    except TimeoutError:
        return Probe("down", f"no answer to a probe in {PROBE_SECONDS:g} s")
    except BackendError as error:
        return Probe("down", str(error))
    except Exception as error:  # a user's own backend may raise anything  # noqa: BLE001
        return Probe("unknown", describe(error))


class Probes:
    """The running probes of one dispatcher, at most one per endpoint. Calls ``found`` with each result. Without a
    ``backend`` there are none."""

    def __init__(self, backend: Probed | None, found: Callable[[Endpoint, Probe], None]) -> None:
        self._backend, self._found = backend, found
        self._tasks: dict[Endpoint, asyncio.Task[Probe]] = {}

    def __bool__(self) -> bool:
        """Return whether endpoints can be probed."""
        return self._backend is not None

    def start(self, endpoint: Endpoint) -> asyncio.Task[Probe] | None:
        """Return the running probe of this endpoint, or start one; None if the endpoint cannot be probed."""
        if endpoint not in self._tasks and self._backend is not None:
            self._tasks[endpoint] = asyncio.get_running_loop().create_task(self._probe(self._backend, endpoint))
        return self._tasks.get(endpoint)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _probe(self, backend: Probed, endpoint: Endpoint) -> Probe:
        try:
            found = await probe(backend, endpoint.name)
        except asyncio.CancelledError:
            if endpoint.health.probing:
                endpoint.health.trial_over()
                endpoint.tell_others()
            raise
        finally:
            del self._tasks[endpoint]
        self._found(endpoint, found)
        endpoint.tell_others()
        return found

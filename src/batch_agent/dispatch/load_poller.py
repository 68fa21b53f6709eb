"""Reads the load of the engines once a second and passes it to the capacity of each endpoint.

Readings are optional: one that fails or hangs is skipped, and after a few failures the capacity is learnt from answers
alone. Runs that share a dispatcher share the readings: one of them polls, and another takes over when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from batch_agent.backends.base import Backend, Load
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.errors import BackendError, Unavailable
from batch_agent.foreign import describe
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint

FIRST_SECONDS = 0.3  # before the first reading
ENDPOINTS_A_SECOND = 50  # in a large fleet each endpoint is read less often

Hold = Callable[[bool], None]
logger = logging.getLogger("batch_agent")


class LoadWatch(Protocol):
    @property
    def in_gaps(self) -> bool:
        """Whether engines are also read while nothing is in flight."""
        ...

    async def read(self, endpoint: Endpoint, load: Load) -> None:
        """An endpoint reported its load."""
        ...


@asynccontextmanager
async def poll_load(
    backend: Backend,
    dispatcher: Dispatcher,
    ceiling: int | None,
    hold: Hold,
    watch: LoadWatch | None = None,
) -> AsyncIterator[None]:
    """Poll the load. Calls ``hold`` with whether new agents must wait: more than ``ceiling`` requests are queued.
    ``watch`` gets each reading."""
    if not backend.capabilities.reports_load:
        if ceiling is not None:
            logger.warning("backpressure_ceiling: %s does not report the length of its queue", backend.name)
        yield
        return
    reading = asyncio.get_running_loop().create_task(LoadPoller(backend, dispatcher, ceiling, hold, watch).read_on())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.wait([reading], timeout=N.short_wait)


class LoadPoller:
    def __init__(
        self,
        backend: Backend,
        dispatcher: Dispatcher,
        ceiling: int | None,
        hold: Hold,
        watch: LoadWatch | None = None,
    ) -> None:
        self._backend, self._dispatcher = backend, dispatcher
        self._ceiling, self._hold, self._watch = ceiling, hold, watch
        self._failures: dict[str, int] = {}  # consecutive failures, by endpoint
        self._warned = False

    async def read_on(self) -> None:
        async with self._dispatcher.reading:
            await asyncio.sleep(FIRST_SECONDS)
            while True:
                endpoints = [each for each in self._dispatcher.scheduler.endpoints if not each.given_up]
                await asyncio.sleep(await self._read_all(endpoints))

    async def _read_all(self, endpoints: list[Endpoint]) -> float:
        """Read the load of all endpoints. Returns the seconds until the next reading."""
        # With a ceiling, read also while nothing is in flight: otherwise a hold would never end.
        always = self._ceiling is not None or (self._watch is not None and self._watch.in_gaps)
        asked = [each for each in endpoints if always or each.inflight]
        loads = await asyncio.gather(*map(self._read, asked))
        if self._ceiling is not None:
            # An endpoint without load metrics never counts as having a long queue.
            self._hold(bool(loads) and all(load is not None and load.waiting > self._ceiling for load in loads))
        return N.refresh * max(1.0, len(asked) / ENDPOINTS_A_SECOND)

    async def _read(self, endpoint: Endpoint) -> Load | None:
        try:
            async with asyncio.timeout(N.short_wait):
                load = await self._backend.load(endpoint.name)
                if load is None:
                    raise Unavailable("no load metrics")
        except (BackendError, OSError) as error:  # TimeoutError is one
            self._failed(endpoint, error)
            return None
        except Exception as error:  # noqa: BLE001  # by a user's backend, or our bug: with its traceback
            self._failed(endpoint, error, unexpected=True)
            return None
        self._failures[endpoint.name] = 0
        self._dispatcher.endpoints.loaded(endpoint, load)
        if self._watch is not None:
            await self._watch.read(endpoint, load)
        return load

    def _failed(self, endpoint: Endpoint, error: Exception, unexpected: bool = False) -> None:
        failures = self._failures[endpoint.name] = self._failures.get(endpoint.name, 0) + 1
        if failures < N.several:
            return
        self._dispatcher.endpoints.unread(endpoint)
        if not self._warned:
            self._warned = True
            cause = error if unexpected else None
            logger.warning("%s does not report its load: %s", self._backend.name, describe(error), exc_info=cause)

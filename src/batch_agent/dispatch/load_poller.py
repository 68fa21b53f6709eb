"""How busy the engines are, asked once a second and handed to the capacity of each endpoint.

Nothing depends on an answer: a reading that fails or hangs is one that did not come, and after a few of those the
answers of the rows alone have to tell. Runs that share a dispatcher share the readings: one of them reads, and the next
takes over when it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from batch_agent.backends.base import Backend, Load
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.errors import Unavailable
from batch_agent.foreign import describe
from batch_agent.scheduler.endpoint import Endpoint

FIRST_SECONDS, READ_SECONDS = 0.3, 1.0  # before the first reading, and between two
LONGEST_SECONDS = 2.0  # that one may take
ENDPOINTS_A_SECOND = 50  # of a large fleet each is read less often
FAILURES = 3  # in a row, after which an engine counts as one that does not tell

Hold = Callable[[bool], None]
logger = logging.getLogger("batch_agent")


class LoadWatch(Protocol):
    @property
    def in_gaps(self) -> bool:
        """Whether engines are read also while nothing is in flight."""
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
    """``hold`` is told whether new agents are to wait, because more than ``ceiling`` requests are in the queue.
    ``watch`` is given each reading."""
    if not backend.capabilities.reports_load:
        if ceiling is not None:
            logger.warning("backpressure_ceiling: %s does not tell how long its queue is", backend.name)
        yield
        return
    reading = asyncio.get_running_loop().create_task(LoadPoller(backend, dispatcher, ceiling, hold, watch).read_on())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.wait([reading], timeout=LONGEST_SECONDS)


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
        self._failures: dict[str, int] = {}  # in a row, by endpoint
        self._generated: dict[str, int] = {}  # tokens at the last reading, by endpoint
        self._warned = False

    async def read_on(self) -> None:
        async with self._dispatcher.reading:
            await asyncio.sleep(FIRST_SECONDS)
            while True:
                endpoints = [each for each in self._dispatcher.scheduler.endpoints if not each.given_up]
                await asyncio.sleep(await self._read_all(endpoints))

    async def _read_all(self, endpoints: list[Endpoint]) -> float:
        """Seconds until the next time."""
        # Where new agents may have to wait, also while there is nothing in flight: else nobody would ever end that.
        always = self._ceiling is not None or (self._watch is not None and self._watch.in_gaps)
        asked = [each for each in endpoints if always or each.inflight]
        loads = await asyncio.gather(*map(self._read, asked))
        if self._ceiling is not None:
            # Of an endpoint that does not tell nobody knows that its queue is long.
            self._hold(bool(loads) and all(load is not None and load.waiting > self._ceiling for load in loads))
        return READ_SECONDS * max(1.0, len(asked) / ENDPOINTS_A_SECOND)

    async def _read(self, endpoint: Endpoint) -> Load | None:
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                load = await self._backend.load(endpoint.name)
                if load is None:
                    raise Unavailable("it does not report its load")
        except Exception as error:
            self._failed(endpoint, error)
            return None
        self._failures[endpoint.name] = 0
        if load.generated is not None:
            # An engine with long prompts may complete no answer for long, and yet it works.
            if load.generated > self._generated.get(endpoint.name, load.generated):
                endpoint.health.heard = asyncio.get_running_loop().time()
            self._generated[endpoint.name] = load.generated
        self._dispatcher.endpoints.loaded(endpoint, load)
        if self._watch is not None:
            await self._watch.read(endpoint, load)
        return load

    def _failed(self, endpoint: Endpoint, error: Exception) -> None:
        failures = self._failures[endpoint.name] = self._failures.get(endpoint.name, 0) + 1
        if failures < FAILURES:
            return
        endpoint.capacity.unread()
        if not self._warned:
            self._warned = True
            logger.warning("%s does not tell how busy it is: %s", self._backend.name, describe(error))

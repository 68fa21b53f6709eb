"""``balance`` made awaitable: slots at endpoints that come, go, fail and return.

Each endpoint is probed now and then, and at once after a failure; one that is down is asked again until it is back. The
hostfile is read again and again. Whoever finds no free slot waits in line.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from batch_agent.errors import BackendError, Rejected, SpecError, Timeout
from batch_agent.fleet.balance import Balance, Place
from batch_agent.fleet.hostfile import AgentEndpoint, parse_hostfile
from batch_agent.fleet.probe import Card, Prober, why

logger = logging.getLogger("batch_agent")

LOOK_SECONDS = 10.0  # between two probes of an endpoint that is up
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # ... that is down
MISSES = 3  # probes without an answer after which an endpoint with requests under way is down all the same
WATCH_SECONDS = 2.0  # between two looks at the hostfile
FIRST_LOOK_SECONDS = 2.0  # that endpoints have to say what they serve before the first request is let in


class NobodyThere(Exception):
    """No endpoint is up."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    key: str
    model: str
    avoid: Place | None
    granted: asyncio.Future[Place]


class Slots:
    """Entered while it is used."""

    def __init__(
        self, hosts: Sequence[AgentEndpoint], max_inflight: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.balance = Balance(max_inflight)
        self._hosts = hosts
        self._prober = Prober(environ=environ)
        self._waiters: deque[Waiter] = deque()
        self._watches: dict[Place, asyncio.Task[None]] = {}
        self._doubts: dict[Place, asyncio.Event] = {}
        self._unanswered: dict[Place, set[asyncio.Timeout]] = {}
        self._unseen: set[Place] = set()  # not probed yet
        self._seen = asyncio.Event()  # all of them, once

    async def __aenter__(self) -> Self:
        """When all endpoints have been asked what they serve, or have had their time to say it."""
        await self._prober.__aenter__()
        self.follow(self._hosts)
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS):
                await self._seen.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await self._prober.__aexit__(kind, error, trace)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    # Slots

    async def take(self, key: str, model: str, avoid: Place | None = None) -> Place:
        """A slot, which ``release`` gives back. NobodyThere where no endpoint is up."""
        waiter = Waiter(key, model, avoid, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release(waiter.granted.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def release(self, place: Place) -> None:
        self.balance.release(place)
        if place.endpoint.leaving and not place.endpoint.inflight:
            self._forget(place)
        self._grant()

    def _grant(self) -> None:
        """To those in line, the first first; one that only others' slots would suit is passed over."""
        if not self.balance.router.working:
            self._dismiss()
            return
        for waiter in list(self._waiters):
            if self.balance.router.spare <= 0:
                return
            place = self.balance.choose(waiter.key, waiter.model, waiter.avoid)
            if place is not None and not waiter.granted.done():
                self._waiters.remove(waiter)
                self.balance.take(place, waiter.key, _now())
                waiter.granted.set_result(place)

    def _dismiss(self) -> None:
        places = list(self.balance.places.values())
        first = f"{places[0].host.place}: {places[0].endpoint.health.reason}"
        words = f"none of the {len(places)} endpoints is up; the first of them: {first}"
        for waiter in self._waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(NobodyThere(words))
        self._waiters.clear()

    # How requests fare

    @contextmanager
    def until_answered(self, place: Place, limit: asyncio.Timeout) -> Iterator[None]:
        """While nothing has come back: the time is up when the endpoint goes down."""
        unanswered = self._unanswered.setdefault(place, set())
        unanswered.add(limit)
        try:
            yield
        finally:
            unanswered.discard(limit)

    def failed(self, place: Place, words: str, *, unreached: bool) -> None:
        place.failures += 1
        if unreached:
            self._went_down(place, words)
        if place in self._doubts:
            self._doubts[place].set()

    def _came_up(self, place: Place, cards: Sequence[Card] | None) -> None:
        if not place.is_up:
            logger.warning("%s is up", place.host.address)
        self.balance.came_up(place, cards, _now())
        self._grant()

    def _went_down(self, place: Place, reason: str) -> None:
        if place.is_up and place.cards is not None:
            logger.warning("%s is down: %s", place.host.address, reason)
        self.balance.went_down(place, reason, _now())
        for limit in self._unanswered.get(place, ()):
            if not limit.expired():
                limit.reschedule(_now())
        self._grant()

    # Endpoints

    def follow(self, hosts: Sequence[AgentEndpoint]) -> None:
        self._hosts = hosts
        came, gone = self.balance.follow(hosts)
        for place in came:
            self._unseen.add(place)
            self._doubts[place] = asyncio.Event()
            self._watches[place] = asyncio.create_task(self._watch(place))
        for place in gone:
            self._watches.pop(place).cancel()
            if not place.endpoint.inflight:
                self._forget(place)
        if came or gone:
            self._grant()

    def _forget(self, place: Place) -> None:
        self._doubts.pop(place, None)
        self._unanswered.pop(place, None)
        self._unseen.discard(place)

    async def follow_file(self, path: Path) -> NoReturn:
        """As long as it is awaited. A file that cannot be read, or names nobody, changes nothing."""
        said = ""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                hosts = await asyncio.to_thread(parse_hostfile, path)
                if hosts and hosts != self._hosts:
                    self.follow(hosts)
                    logger.warning("the hostfile has changed: %s endpoints", len(hosts))
                said = ""
            except SpecError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s; the endpoints stay as they were", error)

    async def _watch(self, place: Place) -> None:
        """One that says nothing while it works on requests may just be busy."""
        doubt, misses, pause = self._doubts[place], 0, FIRST_PAUSE
        while True:
            doubt.clear()
            wait = LOOK_SECONDS
            try:
                cards = await self._prober.ready(place.host)
            except Rejected:  # it is there, and keeps its models to itself
                self._came_up(place, None)
                misses, pause = 0, FIRST_PAUSE
            except (BackendError, SpecError) as error:
                misses += 1
                if not (isinstance(error, Timeout) and place.endpoint.inflight) or misses >= MISSES:
                    self._went_down(place, why(place.host, error))
                wait, pause = pause, min(LONGEST_PAUSE, 2 * pause)
            else:
                self._came_up(place, cards)
                misses, pause = 0, FIRST_PAUSE
            self._unseen.discard(place)
            if not self._unseen:
                self._seen.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await doubt.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()

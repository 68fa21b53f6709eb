"""``balance`` made awaitable: slots at endpoints that come, go, fail and return.

Each endpoint is probed every few seconds, and at once after a failure or when it has requests and sends no byte. One
that is down is probed until it is back. A request that finds no free slot waits in line.
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

from batch_agent.backends.http.probe import Entries
from batch_agent.fleet.balance import Balance, Followed, Place
from batch_agent.fleet.following import Hostfile
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import Prober

logger = logging.getLogger("batch_agent")

LOOK_SECONDS = 10.0  # between two probes of an endpoint that is up
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # ... that is down
MISSES = 3  # probes without an answer after which an endpoint that sends bytes is down all the same
SILENCE_SECONDS = 3.0  # without a byte from an endpoint with requests, after which it is probed
FIRST_LOOK_SECONDS = 1.0  # for the first probes, before the first request is let in


class NobodyThere(Exception):
    """No endpoint is up."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One request at one place. ``limit`` ends it when the place goes down."""

    place: Place
    limit: asyncio.Timeout
    begun: bool = False  # the client has seen something of the answer
    heard: float = 0.0  # when the last byte came

    def end_at(self, when: float | None) -> None:
        if not self.limit.expired():
            self.limit.reschedule(when)


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    key: str
    model: str
    avoid: Place | None
    granted: asyncio.Future[Place]


class Slots:
    """Entered while in use."""

    def __init__(
        self, hosts: Sequence[AgentEndpoint], max_inflight: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.balance = Balance(max_inflight)
        self._hosts = hosts
        self._prober = Prober(environ=environ)
        self._waiters: deque[Waiter] = deque()
        self._watches: dict[Place, asyncio.Task[None]] = {}
        self._doubts: dict[Place, asyncio.Event] = {}
        self._transfers: dict[Place, set[Transfer]] = {}
        self._silences: dict[Place, asyncio.TimerHandle] = {}
        self._unseen: set[Place] = set()  # not probed yet
        self._seen = asyncio.Event()  # all of them, once

    async def __aenter__(self) -> Self:
        """Returns when every endpoint has been probed once, or has had its time for that."""
        await self._prober.__aenter__()
        self.follow(self._hosts)
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS):
                await self._seen.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._silences.values():
            timer.cancel()
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await self._prober.__aexit__(kind, error, trace)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    # Slots

    async def take(self, key: str, model: str, avoid: Place | None = None) -> Place:
        """Returns a place with one slot taken, which ``release`` gives back. NobodyThere if every endpoint is down."""
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
        """Gives free slots to those in line, in their order. A waiter whom no free slot suits is passed over."""
        if self.balance.is_hopeless:
            self._dismiss()
            return
        router = self.balance.router
        for waiter in list(self._waiters):
            if router.working and router.spare <= 0:
                return
            place = self.balance.choose(waiter.key, waiter.model, waiter.avoid)
            if place is not None and not waiter.granted.done():
                self._waiters.remove(waiter)
                self.balance.take(place, waiter.key, _now())
                self._listen(place, place.heard)
                waiter.granted.set_result(place)

    def _dismiss(self) -> None:
        places = self.balance.places
        first = f"{places[0].host.place}: {places[0].endpoint.health.reason}"
        words = f"none of the {len(places)} endpoints is up; the first of them: {first}"
        for waiter in self._waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(NobodyThere(words))
        self._waiters.clear()

    # How requests fare

    @contextmanager
    def transfer(self, place: Place, limit: asyncio.Timeout) -> Iterator[Transfer]:
        """One request at the place. Its time is up when the place goes down: at once while nothing of its answer has
        come, else when no byte has come for ``SILENCE_SECONDS``."""
        transfer = Transfer(place, limit)
        transfers = self._transfers.setdefault(place, set())
        transfers.add(transfer)
        try:
            yield transfer
        finally:
            transfers.discard(transfer)

    def heard(self, transfer: Transfer) -> None:
        """A byte of the answer has come."""
        place, now = transfer.place, _now()
        place.heard = transfer.heard = now
        if transfer.limit.when() is not None:
            transfer.end_at(now + SILENCE_SECONDS)

    def _listen(self, place: Place, since: float) -> None:
        """Has the place probed if it sends no byte for ``SILENCE_SECONDS`` while another endpoint is up."""
        if place not in self._silences:
            when = since + SILENCE_SECONDS
            self._silences[place] = asyncio.get_running_loop().call_at(when, self._check_silence, place)

    def _check_silence(self, place: Place) -> None:
        del self._silences[place]
        if place.endpoint.inflight and place.is_up:
            silent = self._is_silent(place)
            if silent:
                self._doubts[place].set()
            self._listen(place, _now() if silent else place.heard)

    def _is_silent(self, place: Place) -> bool:
        """Whether it has requests and sends nothing, while another endpoint is up that could take them."""
        router, quiet = self.balance.router, _now() - place.heard >= SILENCE_SECONDS
        return quiet and bool(place.endpoint.inflight) and router.working > router.works(place.endpoint)

    def failed(self, place: Place, words: str, *, unreached: bool) -> None:
        place.failures += 1
        if unreached:
            self._went_down(place, words)
        self._doubts[place].set()

    def _came_up(self, place: Place, models: Entries | None) -> None:
        if not place.is_up and not place.unknown:
            logger.warning("%s is up", place.host.address)
        self.balance.came_up(place, models, _now())
        for transfer in self._transfers.get(place, ()):
            transfer.end_at(None)
        self._grant()

    def _went_down(self, place: Place, reason: str) -> None:
        now = _now()
        if place.is_up:
            logger.warning("%s is down: %s", place.host.address, reason)
        self.balance.went_down(place, reason, now)
        for transfer in self._transfers.get(place, ()):
            transfer.end_at(max(now, transfer.heard + SILENCE_SECONDS) if transfer.begun else now)
        self._grant()

    # Endpoints

    def follow(self, hosts: Sequence[AgentEndpoint]) -> Followed:
        followed = self.balance.follow(hosts, _now())
        for place in followed.came:
            self._unseen.add(place)
            self._doubts[place] = asyncio.Event()
            self._watches[place] = asyncio.create_task(self._watch(place))
        for place in followed.gone:
            if not place.endpoint.inflight:
                self._forget(place)
        self._grant()
        return followed

    async def follow_file(self, path: Path) -> NoReturn:
        def apply(hosts: Sequence[AgentEndpoint]) -> None:
            followed = self.follow(hosts)
            if followed.came or followed.gone or followed.updated:
                logger.warning("the hostfile has changed: %s endpoints", len(hosts))

        await Hostfile(path).follow(apply)

    def _forget(self, place: Place) -> None:
        """Drops a place that has left the fleet and has answered its last request."""
        self._watches.pop(place).cancel()
        self._doubts.pop(place, None)
        self._transfers.pop(place, None)
        self._unseen.discard(place)

    async def _watch(self, place: Place) -> None:
        """Probes the place as long as it gets or has requests. One that fails a probe while it sends bytes may just be
        busy."""
        doubt, misses, pause = self._doubts[place], 0, FIRST_PAUSE
        while True:
            doubt.clear()
            probe, models = await self._prober.probe(place.host)
            if probe.state == "down":
                misses += 1
                if misses >= MISSES or not place.endpoint.inflight or self._is_silent(place):
                    self._went_down(place, probe.reason)
                wait, pause = pause, min(LONGEST_PAUSE, 2 * pause)
            else:
                self._came_up(place, models or None)
                misses, wait, pause = 0, LOOK_SECONDS, FIRST_PAUSE
            self._unseen.discard(place)
            if not self._unseen:
                self._seen.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await doubt.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Resolves host names: one lookup for all concurrent callers, cached for some seconds."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from aiohappyeyeballs import AddrInfoType

from batch_agent.blocking import in_thread
from batch_agent.http.failures import BadAddress

KEPT_SECONDS = 10.0


class Lookup:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[str, tuple[float, deque[AddrInfoType]]] = {}  # with the time at which they expire
        self._pending: dict[str, asyncio.Future[list[AddrInfoType]]] = {}

    async def find(self, host: str, port: int) -> list[AddrInfoType]:
        """Return the addresses of a host, rotated at each call: a name with several is often a load-balanced service.
        Raises OSError if there are none, BadAddress for an impossible host name."""
        try:
            return _addresses(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass  # a name, not an address
        place = f"{host}:{port}"
        until, found = self._known.get(place, (0.0, None))
        if found is None or self._loop.time() >= until:
            found = await self._look(place, host, port)
        found.rotate(-1)
        return [*found]

    def forget(self, host: str, port: int) -> None:
        """Forget the cached addresses: none could be reached, so the host may have moved."""
        self._known.pop(f"{host}:{port}", None)

    async def _look(self, place: str, host: str, port: int) -> deque[AddrInfoType]:
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = in_thread(lambda: _addresses(host, port))
            pending.add_done_callback(lambda done: self._looked(place, done))
        found = await asyncio.shield(pending)  # a cancelled caller leaves it to the others
        # Callers share the cached list, so that each starts with another address. Another caller may have deleted it.
        return self._known[place][1] if place in self._known else deque(found)

    def _looked(self, place: str, done: asyncio.Future[list[AddrInfoType]]) -> None:
        del self._pending[place]
        if not done.cancelled() and done.exception() is None:
            self._known[place] = (self._loop.time() + KEPT_SECONDS, deque(done.result()))


def _addresses(host: str, port: int, flags: int = 0) -> list[AddrInfoType]:
    try:
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
    except UnicodeError:
        raise BadAddress(f"{host!r} is not a valid host name") from None

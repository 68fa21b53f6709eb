"""The one aiohttp session under the HTTP clients: one connector, one TLS context, connections made when needed.

A client has a transport of its own unless it is given one; a thousand clients of one fleet share theirs. Streams are
counted here, because it is the one event loop that all of them wake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from batch_agent.errors import InternalError, SpecError

CONNECT_SECONDS = 30.0
# Below the five seconds after which common servers (uvicorn) drop an idle connection, so that a request is not sent
# into one that is just being closed.
KEEPALIVE_SECONDS = 4.0
STREAM_END_SECONDS = 0.25

# Few streams are read as their events come. Of many each would wake us for every token, so they are left alone between
# two beats of the clock, and read together.
FEW_STREAMS = 16
BEAT_SECONDS = 0.04

Receive = Callable[[bytes], bool]
"""Takes a chunk of a stream; True when the stream has said all it has to say."""


class Transport:
    """Entered as often as it has users; the first opens the session, the last closes it. ``proxies`` says whether those
    of the environment are used: between the nodes of a cluster they are not meant. ``connections`` is the most that are
    open at once; 0: no limit."""

    def __init__(self, *, proxies: bool = True, connections: int = 0) -> None:
        self._proxies = proxies
        self._connections = connections
        self._streams = 0  # being read now
        self._resting: list[asyncio.Transport] = []  # to be read at the next beat
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise InternalError("a server was asked before its backend was entered (async with backend)")
        return self._session

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._users and self._loop is not None and not self._loop.is_closed():
                raise SpecError("the backend is in use in another event loop: give each loop its own backend")
            self._users = 0
        if not self._users:
            self._session, self._loop, self._resting = self._open(), loop, []
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        # aiohttp's limit leaves out idle connections, so under a limit there are none.
        if self._connections:
            connector = aiohttp.TCPConnector(limit=self._connections, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            skip_auto_headers=("Accept",),
        )

    def proxy_for(self, url: URL) -> URL | None:
        """The environment's proxy, for a client to look up once: with ``trust_env`` aiohttp would ask two threads for
        every request."""
        proxies = getproxies() if self._proxies else {}
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(url.authority):
            return None
        try:
            found = URL(proxy if "://" in proxy else f"http://{proxy}")
        except ValueError:
            raise SpecError(
                f"the proxy that the environment names for {url.host} is not a URL that can be read"
            ) from None
        if found.scheme not in ("http", "https"):
            raise SpecError(
                f"the environment names a {found.scheme} proxy for {url.host}: only http and https proxies are "
                "supported; set NO_PROXY for this host to go without"
            )
        return found

    async def pump(self, response: aiohttp.ClientResponse, receive: Receive) -> None:
        """A stream to its end, chunk by chunk."""
        content = response.content
        self._streams += 1
        try:
            while chunk := await content.readany():
                if receive(chunk):
                    break
                if self._streams > FEW_STREAMS and response.connection is not None:
                    self._rest(response.connection.transport)
        finally:
            self._streams -= 1
        # Only a connection read to its end can be used again, and the end often comes just behind the last event.
        if not content.at_eof():
            with suppress(TimeoutError):
                async with asyncio.timeout(STREAM_END_SECONDS):
                    while await content.readany():
                        pass

    def _rest(self, transport: asyncio.Transport | None) -> None:
        """Leaves to the kernel what comes on this connection until the next beat. A transport that is closed by
        then, or has another stream, takes no harm from being told to go on."""
        if transport is None:
            return
        transport.pause_reading()
        self._resting.append(transport)
        if len(self._resting) == 1:
            loop = asyncio.get_running_loop()
            loop.call_at((loop.time() // BEAT_SECONDS + 1) * BEAT_SECONDS, self._go_on, self._resting)

    def _go_on(self, resting: list[asyncio.Transport]) -> None:
        self._resting = []
        for transport in resting:
            transport.resume_reading()

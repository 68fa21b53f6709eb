"""The connections of the HTTP clients: one pool, one TLS context, and the proxies of the environment.

A client has its own transport unless it is given one; the thousand clients of a fleet share one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Self
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from batch_agent.errors import InternalError, SpecError
from batch_agent.http.connection import WRITE_BYTES, OnHead
from batch_agent.http.failures import ClosedEarly
from batch_agent.http.opened import OpenResponse
from batch_agent.http.origin import Origin
from batch_agent.http.parser import ResponseParser
from batch_agent.http.pool import Pool
from batch_agent.http.request import with_length, write_head

CONNECT_SECONDS = 30.0


class Transport:
    """Entered once per user; the first opens the pool, the last closes it. ``proxies``: whether to use the
    environment's proxies, which are not meant for traffic inside a cluster. ``connections``: the maximum open at once;
    0: no limit."""

    def __init__(self, *, proxies: bool = True, connections: int = 0) -> None:
        self._proxies = proxies
        self._connections = connections
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._users and self._loop is not None and not self._loop.is_closed():
                raise SpecError("the backend is in use in another event loop: give each loop its own backend")
            self._users = 0
        if not self._users:
            self._pool, self._loop = Pool(loop, self._connections), loop
        self._users += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._users -= 1
        if self._users or self._pool is None:
            return
        pool, self._pool = self._pool, None
        await pool.close()

    async def exchange(
        self,
        origin: Origin,
        method: str,
        head: bytes,
        body: bytes | None,
        limit_bytes: int,
        *,
        on_head: OnHead | None = None,
        opened: OpenResponse | None = None,
        fresh: bool = False,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> ResponseParser:
        """Send a request and read its response: to the end, as far as the stream from ``on_head`` wants it, or, with
        ``opened``, only the head. Raises a TransportError, and whatever the stream raises. Cancelling closes the
        connection.

        A request is sent once. If the server closed a kept connection at that moment, the error is marked ``stale``,
        and the other kept connections to the server are closed. With ``fresh`` it uses a new connection.
        """
        pool = self._open_pool()
        connection = None if fresh else pool.take(origin)
        if connection is None:
            connection = await pool.connect(origin, connect_seconds, fresh=fresh)
        response = ResponseParser(method, limit_bytes, decode=opened is None)
        done = connection.ask(response, head, body or b"", on_head, pool.beat if opened is None else None)
        try:
            if body is not None and len(body) > WRITE_BYTES:
                await connection.upload(body)
            await (done if opened is None else opened.asked(connection, response, done))
            return response
        except ClosedEarly as error:
            error.stale = connection.stale
            if error.stale:
                pool.close_idle(origin)
            raise
        except BaseException:
            connection.abandon(response)
            if done.done() and not done.cancelled():
                done.exception()  # mark the error as retrieved: a cancelled upload has not read it
            raise

    def open(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        proxy: URL | None = None,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> OpenResponse:
        """Return a response to enter (``async with``) and read piece by piece. Only Host, Content-Length and a login
        for ``proxy`` are added to ``headers``."""
        head = with_length(write_head(method, url, headers, proxy), method, body)
        origin = Origin.of(url, proxy)

        async def send(opened: OpenResponse) -> None:
            await self.exchange(
                origin,
                method,
                head,
                body,
                sys.maxsize,
                on_head=opened.on_head,
                opened=opened,
                connect_seconds=connect_seconds,
            )

        return OpenResponse(send)

    def _open_pool(self) -> Pool:
        if self._pool is None:
            raise InternalError("a request was sent before its backend was entered (async with backend)")
        return self._pool

    def proxy_for(self, url: URL) -> URL | None:
        """Return the proxy that the environment sets for ``url``, or None."""
        proxies = getproxies() if self._proxies else {}
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(url.authority):
            return None
        try:
            found = URL(proxy if "://" in proxy else f"http://{proxy}")
        except ValueError:
            raise SpecError(f"the proxy set in the environment for {url.host} is not a valid URL") from None
        if found.scheme not in ("http", "https"):
            raise SpecError(
                f"the environment sets a {found.scheme} proxy for {url.host}: only http and https proxies are "
                "supported; set NO_PROXY for this host to connect directly"
            )
        return found

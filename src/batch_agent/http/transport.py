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
from batch_agent.http.connection import WRITE_BYTES
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
            pool = self.pool
            connection = pool.take(origin) or await pool.connect(origin, connect_seconds, fresh=False)
            response = ResponseParser(method, sys.maxsize, decode=False)
            done = connection.ask(response, head, body or b"", opened.on_head, None)
            try:
                if body is not None and len(body) > WRITE_BYTES:
                    await connection.upload(body)
                await opened.asked(connection, response, done)
            except BaseException as error:
                pool.failed(connection, response, done, error)
                raise

        return OpenResponse(send)

    @property
    def pool(self) -> Pool:
        """The pool of the event loop, while a user has entered."""
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

"""The connections of the HTTP clients: one pool, one TLS context, and the proxies of the environment.

A client has its own transport unless it is given one; the thousand clients of a fleet share one.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Self
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from batch_agent.blocking import clock_of
from batch_agent.errors import InternalError, SpecError
from batch_agent.http.connection import WRITE_BYTES, Beat, Connection, ResponseParser
from batch_agent.http.connector import Connector
from batch_agent.http.failures import ClosedEarly
from batch_agent.http.opened import OpenResponse
from batch_agent.http.origin import Origin, basic_authorization

_OWN = frozenset({"content-length", "host", "transfer-encoding"})  # these decide where a request goes and ends
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_TARGET = re.compile(r"[!-~]+")
_LINE_END = re.compile(r"[\r\n\0]")


def write_head(method: str, url: URL, headers: Mapping[str, str], proxy: URL | None) -> bytes:
    """Return the head of a request as bytes, except the length of the body and the empty line, which ``with_length``
    adds. ``proxy`` is the proxy in between; inside a tunnel (https) it sees nothing of the head."""
    to_proxy = proxy is not None and url.scheme == "http"
    target = str(url.with_user(None).with_fragment(None)) if to_proxy else url.raw_path_qs or "/"
    if not _TARGET.fullmatch(target):
        raise SpecError(f"{target!r} is not a valid request target: it has characters not allowed in a URL")
    start = f"{method} {target} HTTP/1.1\r\nHost: {headers.get('Host') or url.host_port_subcomponent}\r\n"
    login = basic_authorization(proxy) if to_proxy and proxy is not None else ""
    more = [("Proxy-Authorization", login)] if login else []
    return start.encode() + write_lines([*headers.items(), *more])


def write_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return header lines, without those that ``write_head`` and ``with_length`` write."""
    lines = ""
    for name, value in headers:
        line = f"{name}: {value}"
        if not line.isprintable() and _LINE_END.search(line):
            raise SpecError(f"the header {name!r} has a line break in it")
        if name.lower() not in _OWN:
            lines += f"{line}\r\n"
    return lines.encode("utf-8", "surrogateescape")


def with_length(head: bytes, method: str, body: bytes | None) -> bytes:
    """Return a complete head for this body."""
    if not body and method in _WITHOUT_BODY:
        return head + b"\r\n"
    return head + f"Content-Length: {len(body or b'')}\r\n\r\n".encode()


# Below the five seconds after which common servers (uvicorn) close an idle connection: a request sent while the server
# closes it would be lost.
KEEPALIVE_SECONDS = 4.0


class Pool:
    """The connections of one event loop. ``limit`` is the maximum open at once; 0: no limit."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit: int, keepalive_seconds: float = KEEPALIVE_SECONDS
    ) -> None:
        self._loop = loop
        self._limit = limit
        self._keepalive = keepalive_seconds
        self._clock = clock_of(loop)
        self.beat = Beat(loop)
        self._connector = Connector(loop)
        self._slots = asyncio.Semaphore(limit) if limit else None  # one per connection in use
        self._open: set[Connection] = set()
        self._opening = 0
        self._idle: dict[Origin, list[Connection]] = {}  # the most recently used at the end
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._emptied = asyncio.Event()

    def take(self, origin: Origin) -> Connection | None:
        """Return an idle connection, if there is one and no request waits before this one."""
        if self._slots is not None or not (idle := self._idle.get(origin)):
            return None
        return self._first_open(idle)

    async def connect(self, origin: Origin, limit_seconds: float, *, fresh: bool) -> Connection:
        """Return a new connection. If the limit is reached, wait until one is free; an idle connection is returned too,
        unless it must be ``fresh``."""
        if self._slots is None:
            return await self._connect(origin, limit_seconds)
        await self._slots.acquire()
        try:
            return (None if fresh else self._first_open(self._idle.get(origin, []))) or await self._connect(
                origin, limit_seconds
            )
        except BaseException:
            self._slots.release()
            raise

    def idle(self, connection: Connection) -> None:
        connection.idle_since = self._clock()
        idle = self._idle.get(connection.origin)
        if idle is None:
            self._idle[connection.origin] = [connection]
        else:
            idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._keepalive, self._close_old)
        if self._slots is not None:
            self._slots.release()

    def failed(
        self, connection: Connection, response: ResponseParser, done: asyncio.Future[None], error: BaseException
    ) -> None:
        """Handle the end of a request without an answer. If the server closed a kept connection at the moment of the
        request, the error is marked ``stale``, and the other kept connections to the server are closed."""
        if isinstance(error, ClosedEarly):
            error.stale = connection.stale
            if error.stale:
                self.close_idle(connection.origin)
            return
        connection.abandon(response)
        if done.done() and not done.cancelled():
            done.exception()  # mark the error as retrieved: a cancelled upload has not read it

    def lost(self, connection: Connection) -> None:
        if connection not in self._open:
            return
        self._open.discard(connection)
        if connection.idle_since is None:
            if self._slots is not None:
                self._slots.release()
        elif connection in (idle := self._idle.get(connection.origin, [])):
            idle.remove(connection)
        if not self._open:
            self._emptied.set()

    async def close(self) -> None:
        """Close all connections, also those in use, and wait until their sockets are closed."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._open:
            self._emptied.clear()
            for connection in self._open:
                connection.close()
            await self._emptied.wait()

    def close_idle(self, origin: Origin) -> None:
        """Close the idle connections to a server that has just closed one of them: it may have closed the others
        too."""
        for connection in self._idle.pop(origin, ()):
            connection.close()

    def _first_open(self, idle: list[Connection]) -> Connection | None:
        now = self._clock()
        while idle:
            connection = idle.pop()
            if now - (connection.idle_since or 0.0) < self._keepalive and not connection.transport.is_closing():
                connection.idle_since, connection.reused_at = None, now
                return connection
            connection.close()
        return None

    async def _connect(self, origin: Origin, limit_seconds: float) -> Connection:
        connection = Connection(origin, self, self._loop)
        self._opening += 1
        try:
            if self._limit and len(self._open) + self._opening > self._limit:
                self._close_oldest()
                await asyncio.sleep(0)  # its socket is closed in the next iteration of the loop
            await self._connector.connect(origin, connection, limit_seconds)
        finally:
            self._opening -= 1
        if self._closed:
            connection.close()
            raise ClosedEarly("the backend was closed while connecting")
        if connection.transport.is_closing():
            raise ClosedEarly  # closed as soon as it was accepted
        self._open.add(connection)
        return connection

    def _close_oldest(self) -> None:
        idle = [connections[0] for connections in self._idle.values() if connections]
        if idle:
            oldest = min(idle, key=_idle_since)
            self._idle[oldest.origin].remove(oldest)
            oldest.close()

    def _close_old(self) -> None:
        self._sweep = None
        now = self._clock()
        for origin, idle in [*self._idle.items()]:
            # The same comparison as the timer's, to the last bit.
            while idle and _idle_since(idle[0]) + self._keepalive <= now:
                idle.pop(0).close()
            if not idle:
                del self._idle[origin]
        if self._idle:
            oldest = min(_idle_since(idle[0]) for idle in self._idle.values())
            self._sweep = self._loop.call_at(oldest + self._keepalive, self._close_old)


def _idle_since(connection: Connection) -> float:
    return connection.idle_since or 0.0


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
            self._pool = Pool(loop, self._connections)
            self._loop = loop
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

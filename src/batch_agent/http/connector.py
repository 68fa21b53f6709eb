"""Opens connections: DNS lookup, TCP, the tunnel through a proxy, TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import cached_property
from typing import cast

from aiohappyeyeballs import start_connection
from yarl import URL

from batch_agent.http.connection import MAX_HEAD_BYTES, Connection, ResponseParser
from batch_agent.http.failures import (
    ConnectFailed,
    ConnectTimedOut,
    ProxyRefused,
    ProxyUnreachable,
    TransportError,
)
from batch_agent.http.lookup import Lookup
from batch_agent.http.origin import Origin, basic_authorization

NEXT_ADDRESS_SECONDS = 0.25  # after which the host's next address is tried in parallel
# A peer that is gone without a word (a host that lost its power, a firewall that forgot the connection) is noticed
# after 15 s without traffic and 30 s without an acknowledgement. Platforms name these options differently.
PEER_SECONDS, SILENT_SECONDS = 15, 30
PEER_OPTIONS = (
    ("TCP_KEEPIDLE", PEER_SECONDS),
    ("TCP_KEEPALIVE", PEER_SECONDS),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", SILENT_SECONDS // 5),
    ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),
)

Make = Callable[[], asyncio.Protocol]


class Connector:
    """Opens connections in one event loop. They share one TLS context, because loading the trust store is slow."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lookup = Lookup(loop)

    async def connect(self, origin: Origin, connection: Connection, limit_seconds: float) -> None:
        """Open ``connection`` to ``origin``. Raises a TransportError with ``unreached`` on failure."""
        try:
            async with asyncio.timeout(limit_seconds):
                if origin.proxy is None:
                    await self._open(lambda: connection, origin.host, origin.port, tls=origin.tls)
                elif not origin.tls:
                    await self._open_proxy(lambda: connection, origin.proxy)
                else:
                    connection.connection_made(await self._tunnel(connection, origin, origin.proxy))
        except TimeoutError:
            raise ConnectTimedOut from None
        except OSError as error:
            raise ConnectFailed(error) from None

    async def _open(self, make: Make, host: str, port: int, *, tls: bool) -> None:
        addresses = await self._lookup.find(host, port)
        try:
            opened = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS, loop=self._loop)
        except OSError:
            self._lookup.forget(host, port)
            raise
        watch_peer(opened)
        if tls:
            await self._loop.create_connection(make, sock=opened, ssl=self._tls, server_hostname=host.rstrip("."))
        else:
            await self._loop.create_connection(make, sock=opened)

    async def _open_proxy(self, make: Make, proxy: URL) -> None:
        try:
            await self._open(make, proxy.raw_host or "", proxy.port or 80, tls=proxy.scheme == "https")
        except TimeoutError:
            raise
        except OSError as error:
            raise ProxyUnreachable(error) from None

    async def _tunnel(self, connection: Connection, origin: Origin, proxy: URL) -> asyncio.Transport:
        """Return a TLS transport to the server at the other end of the proxy's tunnel."""
        handshake = Handshake(self._loop.create_future())
        await self._open_proxy(lambda: handshake, proxy)
        try:
            handshake.ask(origin, proxy)
            status = await handshake.answered
            if not 200 <= status < 300:
                raise ProxyRefused(status)
            transport = await self._loop.start_tls(
                handshake.transport, connection, self._tls, server_hostname=origin.host.rstrip(".")
            )
            if transport is None:
                raise ConnectionResetError("the proxy closed the tunnel")
            return transport
        except BaseException:
            handshake.transport.abort()
            raise

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context


def watch_peer(opened: socket.socket) -> None:
    """Let the system notice a peer that has disappeared."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PEER_OPTIONS:
        option: int | None = getattr(socket, name, None)
        if option is not None:
            opened.setsockopt(socket.IPPROTO_TCP, option, value)


class Handshake(asyncio.Protocol):
    """Requests a tunnel from a proxy; ``answered`` is the status of its answer."""

    def __init__(self, answered: asyncio.Future[int]) -> None:
        self.answered = answered
        self.transport: asyncio.Transport
        self._response = ResponseParser("CONNECT", MAX_HEAD_BYTES)

    def ask(self, origin: Origin, proxy: URL) -> None:
        head = f"CONNECT {origin.authority} HTTP/1.1\r\nHost: {origin.authority}\r\n"
        if login := basic_authorization(proxy):
            head += f"Proxy-Authorization: {login}\r\n"
        self.transport.write(f"{head}\r\n".encode())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._response.feed(data)
        except TransportError as error:
            self._fail(OSError(f"the proxy did not answer in HTTP: {error}"))
        if self._response.complete and not self.answered.done():
            self._response.close()
            self.answered.set_result(self._response.status)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError("the proxy closed the connection"))

    def _fail(self, error: OSError) -> None:
        if not self.answered.done():
            self.answered.set_exception(ProxyUnreachable(error))

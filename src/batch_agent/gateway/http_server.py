"""The HTTP server of the gateway and of the fleet's proxy: listening, limits, incomplete requests, clients that leave.

The handler interprets requests. It is cancelled when its client closes the connection.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Self

import orjson
from aiohttp import web

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

MAX_BODY_BYTES = 256 * 1024 * 1024
PATIENCE_SECONDS = 30.0  # without a byte of a request, after which its connection is closed

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class BodyRefused(Exception):
    """The body of a request is too large (``status`` 413) or stopped arriving (408)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """Listens while entered, and has a ``url``. A port in use raises SpecError. A request that sends no byte for
    ``patience`` seconds before its headers are complete is dropped."""

    def __init__(
        self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._handler, self._host, self._port, self._patience = handler, host, port, patience
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        # Compressed bodies pass unchanged. The timeout also applies to a request's headers.
        server = web.Server(
            self._handler,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=self._patience,
        )
        self._runner = runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        self.url = await listen(runner, self._host, self._port)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


async def listen(runner: web.BaseRunner, host: str, port: int) -> str:
    """Start to listen, and return the URL. Raises SpecError, and ends the runner, if that is impossible."""
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise SpecError(f"{host}:{port} is in use by another program: choose another port") from None
        raise SpecError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    place = f"[{host}]" if ":" in host else host
    return f"http://{place}:{runner.addresses[0][1]}"


async def read_body(request: web.BaseRequest, patience: float, most: int = MAX_BODY_BYTES) -> bytes:
    """Return the body. Raises BodyRefused above ``most`` bytes, or without any for ``patience`` seconds."""
    if not request.can_read_body:
        return b""
    too_large = BodyRefused(413, f"the body is larger than {most // 1024**2} MiB")
    if (request.content_length or 0) > most:
        raise too_large
    if request.content.is_eof():  # it came with the headers, as small bodies do
        return request.content.read_nowait()
    body, clock = bytearray(), asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(patience) as limit:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > most:
                    raise too_large
                limit.reschedule(clock() + patience)
    except TimeoutError:
        raise BodyRefused(408, f"no more of the body came for {patience:g} s") from None
    return bytes(body)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_loopback(request: web.BaseRequest) -> bool:
    """Return whether the Host header names this machine: a web page whose name resolves to it sends another name."""
    host = request.headers.get("Host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name in LOOPBACK or is_loopback(name)


async def answer_unread(request: web.BaseRequest, answer: web.Response) -> web.Response:
    """Answer a request that was not read completely. If no more of it arrives, the connection is closed at once."""
    if answer.status == 408:
        await answer.prepare(request)
        await answer.write_eof()
        if request.transport is not None:
            request.transport.close()
    return answer


def json_response(
    document: JsonObject | bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)

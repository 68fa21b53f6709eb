"""The door of every HTTP server of this package: listening, and the checks that a request passes before its handler.

Each server has one ``Door``. It checks that the ``Host`` header names this machine, so that a web page whose name
resolves to it gets nothing. It refuses requests that a web page of another origin sends. It asks for the key, if the
server has one. It limits head, body, nesting and time. If a request is refused, or its handler fails, the answer has
the format of the server's clients. docs/security.md has the table of all doors.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import platform
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, Self

import orjson
from aiohttp import web
from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import read_json

logger = logging.getLogger("batch_agent")

LOOPBACK = "127.0.0.1"
ALLOWED_HOSTS_VARIABLE = "BATCH_AGENT_ALLOWED_HOSTS"  # further names of this machine, with commas; * allows all
DOOR_KEY_VARIABLE = "BATCH_AGENT_DOOR_KEY"  # the key of a proxy or a tick server
MOST_BODY_BYTES = 256 * 1024 * 1024
MOST_HEAD_BYTES = 16 * 1024  # of the request line, and of each header
MOST_NESTING = 128  # levels of a JSON body; JSON encoders and our own code accept more
PATIENCE_SECONDS = 30.0  # without a byte of a request, after which its connection is closed
LEAST_BYTES_PER_SECOND = 1024  # of a body, on average, after the first PATIENCE_SECONDS

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class RequestRefused(Exception):
    """A request that gets an error ``status`` instead of an answer. ``param`` is the invalid field of the body,
    ``code`` a word for programs. ``kind`` is the type of the error, if it is not the usual one of the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = headers


Refuse = Callable[[web.BaseRequest, RequestRefused], web.Response]


class Door:
    """Listens while entered, and then has a ``url`` and a ``port``. An address that cannot be used raises SpecError.

    ``refuse`` writes an error in the format of the clients. With a ``key`` every path except those of ``keyless`` needs
    it, as a bearer token or as ``x-api-key``. A request that sends no byte for ``patience`` seconds before it is
    complete is dropped. ``cancels``: the handler is cancelled when its client closes the connection. ``unpacks``: a
    compressed body is decompressed; otherwise it stays unchanged.
    """

    def __init__(
        self,
        handler: Handler,
        refuse: Refuse,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        key: str = "",
        keyless: Collection[str] = (),
        patience: float = PATIENCE_SECONDS,
        cancels: bool = True,
        unpacks: bool = False,
    ) -> None:
        self._handler, self._refuse = handler, refuse
        self._host, self.port = host, port
        self._key, self._keyless = key, keyless
        self._patience = patience
        self._cancels = cancels
        self._unpacks = unpacks
        self._allowed = _allowed_names()
        self._runner: web.ServerRunner | None = None
        self._pending = 0  # requests that are not answered
        self._answered = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        quiet = logging.Logger("batch_agent.door")  # a client that breaks off must not fill the log
        quiet.addHandler(logging.NullHandler())
        # The timeout also applies to a request's headers.
        server = _Server(
            self._enter,
            self._refuse,
            self._cancels,
            auto_decompress=self._unpacks,
            access_log=None,
            logger=quiet,
            keepalive_timeout=self._patience,
            lingering_time=self._patience,  # for the rest of a body that is not read
            max_line_size=MOST_HEAD_BYTES,
            max_field_size=MOST_HEAD_BYTES,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host or None, self.port, backlog=1024).start()
        except (OSError, OverflowError) as error:
            await runner.cleanup()
            raise SpecError(cannot_listen(self._host, self.port, error)) from None
        self._runner = runner
        self.port = runner.addresses[0][1]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host or LOOPBACK}:{self.port}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def drain(self, seconds: float) -> None:
        """Accept no further connection, and wait until the requests that have arrived are answered, at most for
        ``seconds``."""
        if self._runner is not None:
            for site in tuple(self._runner.sites):
                await site.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._pending:
                    self._answered.clear()
                    await self._answered.wait()

    async def _enter(self, request: web.BaseRequest) -> web.StreamResponse:
        self._pending += 1
        try:
            return await self._respond(request)
        finally:
            self._pending -= 1
            self._answered.set()

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._check(request)
            return await self._handler(request)
        except RequestRefused as refused:
            return await self._answer_unread(request, refused)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            logger.exception("a request for %s failed", request.path)
            if request.writer.output_size:  # the answer has begun, so that only breaking it off tells the client
                raise
            return self._refuse(request, RequestRefused(500, "the server failed; its log has the reason"))

    def _check(self, request: web.BaseRequest) -> None:
        host = request.headers.get("Host", "")
        for named in (host, request.host):  # a request line may have a whole address
            if not self._is_ours(_name_in(named)):
                raise RequestRefused(
                    403,
                    f"the Host header names {_name_in(named)!r}, not this server. If it is a name of this server, set "
                    f"{ALLOWED_HOSTS_VARIABLE}",
                )
        origin = request.headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise RequestRefused(403, "requests from web pages of another origin are refused")
        site = request.headers.get("Sec-Fetch-Site", "")
        mode = request.headers.get("Sec-Fetch-Mode", "")
        if site in ("cross-site", "same-site") and mode != "navigate":
            raise RequestRefused(403, "requests from web pages of another origin are refused")
        if self._key and request.path not in self._keyless and not same_secret(given_key(request), self._key):
            raise RequestRefused(401, "the key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})

    def _is_ours(self, name: str) -> bool:
        if is_loopback(name) or (name and name == self._host) or name in self._allowed or "*" in self._allowed:
            return True
        if is_loopback(self._host):
            return False
        # On a network, clients use an address, or a name of this machine in some domain. An attacker's page has a name.
        return _is_address(name) or name.partition(".")[0] == platform.node().lower().partition(".")[0]

    async def _answer_unread(self, request: web.BaseRequest, refused: RequestRefused) -> web.StreamResponse:
        """Answer a refused request whose body was not read. If no more of the body arrives, the connection is closed at
        once."""
        answer = self._refuse(request, refused)
        if refused.headers:
            answer.headers.update(refused.headers)
        if refused.status == 408:
            await answer.prepare(request)
            await answer.write_eof()
            if request.transport is not None:
                request.transport.close()
        return answer


class _Connection(web.RequestHandler):
    """One connection. Bytes that are not HTTP get an error in the format of the clients."""

    __slots__ = ("_first", "_refuse")

    def __init__(self, *given: Any, refuse: Refuse, **options: Any) -> None:
        super().__init__(*given, **options)
        self._refuse, self._first = refuse, b""

    def data_received(self, data: bytes) -> None:
        self._first = self._first or data
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size:  # the answer has begun
            raise ConnectionError(message)
        why = (message or "").partition("\n")[0].strip(" :")[:200]
        refused = RequestRefused(
            status, f"the request is not valid HTTP: {why}" if status < 500 else "the server failed"
        )
        # The path is that of the first request of the connection, which says what API its client speaks.
        path = re.match(rb"[A-Z]+ (/[!-~]{0,200})", self._first)
        answer = self._refuse(request.clone(rel_url=path[1].decode()) if path else request, refused)
        answer.force_close()
        return answer


class _DoorRequest(web.BaseRequest):
    answer_headers: Mapping[str, str] = MappingProxyType({})

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers.update(self.answer_headers)


def add_to_answer(request: web.BaseRequest, headers: Mapping[str, str]) -> None:
    """Add these headers to the answer of a request, whichever code makes the answer."""
    if isinstance(request, _DoorRequest):
        request.answer_headers = headers


def added_to_answer(request: web.BaseRequest) -> Mapping[str, str]:
    return request.answer_headers if isinstance(request, _DoorRequest) else {}


def _made(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> _DoorRequest:
    return _DoorRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())


class _Server(web.Server):
    def __init__(self, handler: Handler, refuse: Refuse, cancels: bool, **options: Any) -> None:
        super().__init__(handler, request_factory=_made, handler_cancellation=cancels)
        self._connection = partial(_Connection, self, refuse=refuse, **options)

    def __call__(self) -> web.RequestHandler:
        return self._connection(loop=asyncio.get_running_loop())


# Listening


def cannot_listen(host: str, port: int, error: Exception) -> str:
    """Return the message for an address that cannot be used."""
    place = f"{host or 'all addresses'}:{port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"cannot listen on {place}: it is in use by another program; choose another port, or 0 for a free one"
    return f"cannot listen on {place}: {getattr(error, 'strerror', None) or error}"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _allowed_names() -> frozenset[str]:
    names = os.environ.get(ALLOWED_HOSTS_VARIABLE, "").split(",")
    return frozenset(name.strip().lower() for name in names if name.strip())


def _name_in(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        name, closed, port = host[1:].partition("]")
        return name.lower() if closed and port[:1] in ("", ":") else ""
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


# Requests


def routes(table: Mapping[str, Mapping[str, Handler]]) -> Handler:
    """Return a handler that looks up path and method in ``table``. A path that ends with ``/*`` matches below it."""
    below = {path[:-1]: methods for path, methods in table.items() if path.endswith("/*")}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        methods = table.get(path) or next((found for start, found in below.items() if path.startswith(start)), None)
        if methods is None:
            raise RequestRefused(404, f"{path} does not exist")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise RequestRefused(405, f"{path} accepts only {allowed}", headers={"Allow": allowed})
        return await handler(request)

    return handle


def given_key(request: web.BaseRequest) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return (token.strip() if scheme.lower() == "bearer" else "") or request.headers.get("x-api-key", "")


def same_secret(given: str, secret: str) -> bool:
    """Return whether the two are the same. The time that this takes says nothing about the secret."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode("utf-8", "surrogatepass"))


async def read_body(request: web.BaseRequest, patience: float, most: int = MOST_BODY_BYTES) -> bytes:
    """Return the body. Raises RequestRefused if it has more than ``most`` bytes, if no byte arrives for ``patience``
    seconds, or if bytes arrive so slowly that they only serve to hold the connection."""
    if not request.can_read_body:
        return b""
    too_large = RequestRefused(413, f"the body is larger than {most // 1024**2} MiB")
    if (request.content_length or 0) > most:
        raise too_large
    if request.content.is_eof():  # it came with the headers, as small bodies do
        return request.content.read_nowait()
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    body, clock = bytearray(), asyncio.get_running_loop().time
    began = clock()
    try:
        async with asyncio.timeout(patience) as limit:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > most:
                    raise too_large
                limit.reschedule(min(clock(), began + len(body) / LEAST_BYTES_PER_SECOND) + patience)
    except web.RequestPayloadError:  # broken chunks or compression
        raise RequestRefused(400, "the body cannot be decoded") from None
    except TimeoutError:
        raise RequestRefused(408, f"the body came too slowly: {len(body)} bytes in {clock() - began:.0f} s") from None
    return bytes(body)


def read_object(body: bytes, read: Callable[[bytes], JsonValue] = read_json) -> JsonObject:
    """Return the JSON object in a body. Raises RequestRefused."""
    try:
        document = read(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    check_nesting(document, body)
    return document


def check_nesting(document: JsonValue, body: bytes) -> None:
    """Raise RequestRefused for a document that is nested more deeply than encoders and our own code accept."""
    if body.count(b"[") + body.count(b"{") <= MOST_NESTING:
        return
    level = [document]
    for _ in range(MOST_NESTING):
        inner: list[JsonValue] = []
        for value in level:
            if isinstance(value, dict):
                inner += [item for item in value.values() if isinstance(item, dict | list)]
            elif isinstance(value, list):
                inner += [item for item in value if isinstance(item, dict | list)]
        if not inner:
            return
        level = inner
    raise RequestRefused(400, f"the body is nested more than {MOST_NESTING} levels deep")


def json_response(
    document: JsonObject | bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)

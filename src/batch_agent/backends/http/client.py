"""HTTP client of the backends: a server's address, headers and proxy, and bytes in and out.

The backend interprets the bytes, ``faults`` creates the errors, ``transport`` owns the connections. Nothing here waits
for a slot, retries or sets a time limit. Cancelling a call closes its connection, which tells the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Self

from multidict import CIMultiDict
from yarl import URL

from batch_agent.backends.http.faults import CHAT, Faults, Wording
from batch_agent.errors import SpecError
from batch_agent.http.connection import WRITE_BYTES, OnHead, Receive, ResponseParser
from batch_agent.http.failures import TransportError
from batch_agent.http.origin import Origin, basic_authorization
from batch_agent.http.request import with_length, write_head, write_lines
from batch_agent.http.transport import CONNECT_SECONDS, Transport

MAX_ANSWER_BYTES = 64 * 1024 * 1024
STREAM_ALLOWANCE = 4  # a stream has many more bytes than its tokens, and is not kept in memory

Sign = Callable[[str, URL, Mapping[str, str], bytes], Mapping[str, str]]
"""Takes method, URL, headers and body, and returns the authentication headers. For servers that want a signature of
each request instead of a key."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route of a server, with everything that is the same in each request."""

    method: str
    url: URL
    headers: CIMultiDict[str] = field(repr=False)
    faults: Faults
    head: bytes = field(repr=False)  # of a request, without its own headers and length
    max_bytes: int = MAX_ANSWER_BYTES  # of an answer; a stream may have STREAM_ALLOWANCE times as many
    once: bool = False  # sent over a new connection, so that no failure comes from a kept one
    sign: Sign | None = field(default=None, repr=False)


class HttpClient:
    """Entered once by each user; each also enters the transport, which is its own unless one is given.

    A server that wants its key in another header than ``Authorization`` gets it in ``headers``; one that wants signed
    requests, through ``sign``. ``wording`` says how the wire's servers describe errors.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        sign: Sign | None = None,
        wording: Wording = CHAT,
        transport: Transport | None = None,
    ) -> None:
        url, login = _without_login(base_url)
        if login and api_key:
            raise SpecError("give either a key or a user name in the URL, not both")
        own = {"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json", "User-Agent": "batch-agent"}
        if authorization := login or (f"Bearer {api_key}" if api_key else ""):
            own["Authorization"] = authorization
        self.base_url = str(url)
        self._base = url
        self._headers: CIMultiDict[str] = CIMultiDict(own)
        self._headers.update(headers or {})
        self._sends_traceparent = "traceparent" not in self._headers
        for name, value in self._headers.items():
            _check_header(name, value)
        values = [authorization, *(headers or {}).values()]
        password = URL(base_url).password or ""
        self._secrets = [password, *values, *(value.partition(" ")[2] for value in values)]
        self._sign = sign
        self._wording = wording
        self._transport = Transport() if transport is None else transport
        self._proxy: URL | None = None
        self._origin = Origin.of(url)

    def route(
        self, method: str, path: str, *, beside: bool = False, max_bytes: int = MAX_ANSWER_BYTES, once: bool = False
    ) -> Route:
        """Return a route. ``beside``: next to the ``/v1`` of the address, where engines have routes outside the API. An
        answer of more than ``max_bytes`` is a BadResponse. ``once``: each request uses a new connection, because it
        creates something, or because its failure is evidence about the server."""
        base = str(self._base)
        url = URL((base.removesuffix("/v1") if beside else base) + path, encoded=True)
        faults = Faults(f"{method} {url}", self._secrets, self._wording)
        head = write_head(method, url, self._headers, None)
        return Route(method, url, self._headers, faults, head, max_bytes, once, self._sign)

    async def __aenter__(self) -> Self:
        proxy = self._transport.proxy_for(self._base)
        await self._transport.__aenter__()
        self._proxy, self._origin = proxy, Origin.of(self._base, proxy)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._transport.__aexit__(*exception)

    async def send(
        self,
        route: Route,
        body: bytes | None = None,
        receive: Receive | None = None,
        headers: Mapping[str, str] | None = None,
        on_headers: Callable[[Mapping[str, str]], None] | None = None,
        traceparent: str = "",
    ) -> bytes | None:
        """Send a request once, and return the body of a good answer; None if ``receive`` consumed it as a stream.
        ``headers`` are added to this request, and ``traceparent``, unless the user set that header; ``on_headers`` gets
        the headers of a good answer before its body. Cancelling closes the connection."""
        pool, streamed = self._transport.pool, False
        head = self._head(route, headers, body)
        if traceparent and self._sends_traceparent:
            head += b"traceparent: %b\r\n" % traceparent.encode()
        on_head: OnHead | None = None
        if receive is not None:
            # The stream is consumed where its bytes arrive, in this task's context.
            run, taking = copy_context().run, receive

            def on_head(response: ResponseParser) -> Receive | None:
                nonlocal streamed
                if response.status >= 300 or _is_document(response):
                    return None
                if on_headers is not None:
                    on_headers(response.headers)
                streamed, response.limit_bytes = True, STREAM_ALLOWANCE * route.max_bytes
                return lambda chunk: run(taking, chunk)

        try:
            connection = None if route.once else pool.take(self._origin)
            if connection is None:
                connection = await pool.connect(self._origin, CONNECT_SECONDS, fresh=route.once)
            response = ResponseParser(route.method, route.max_bytes)
            done = connection.ask(response, with_length(head, route.method, body), body or b"", on_head, pool.beat)
            try:
                if body is not None and len(body) > WRITE_BYTES:
                    await connection.upload(body)
                await done
            except BaseException as error:
                pool.failed(connection, response, done, error)
                raise
            if streamed:
                return None
            answer = response.take()
        except (TransportError, OSError) as error:
            raise route.faults.raised(error) from None
        if response.status >= 300:
            raise route.faults.answered(response.status, response.headers, answer)
        if on_headers is not None:
            on_headers(response.headers)
        return answer

    def _head(self, route: Route, own: Mapping[str, str] | None, body: bytes | None) -> bytes:
        if route.sign is None and self._proxy is None:
            if not own:
                return route.head
            for name in own:
                if name in route.headers:
                    break
            else:
                return route.head + write_lines(own.items())
        headers = route.headers.copy()
        headers.update(own or {})
        if route.sign is not None:
            headers.update(route.sign(route.method, route.url, headers, body or b""))
        return write_head(route.method, route.url, headers, self._proxy)


def _is_document(response: ResponseParser) -> bool:
    return response.headers.get("Content-Type", "").startswith(("application/json", "text/html"))


def _without_login(base_url: str) -> tuple[URL, str]:
    """Return the URL without login, and its user and password as the value of an Authorization header."""
    try:
        url = URL(base_url)
        host = url.host
    except ValueError:
        raise SpecError("the backend's address is not a valid URL") from None
    if url.scheme not in ("http", "https") or not host:
        raise SpecError("the backend's address must be of the form http://host:port/path or https://…")
    bare = URL(str(url.with_user(None).with_query(None).with_fragment(None)).rstrip("/"), encoded=True)
    return bare, basic_authorization(url)


def _check_header(name: str, value: str) -> None:
    if not (name.isascii() and name.isprintable() and name and " " not in name and ":" not in name):
        raise SpecError(f"{name!r} is not a valid header name")
    if not (value.isascii() and value.isprintable()):
        raise SpecError(f"the value of the header {name} has invalid characters (a line break or non-ASCII?)")

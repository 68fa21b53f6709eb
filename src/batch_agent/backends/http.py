"""HTTP for the backends that speak it: the one aiohttp session, its headers and proxy, and bytes in and out.

What the bytes mean belongs to the backend, which errors to raise to ``faults``. Nothing here waits for a slot, retries
or limits an answer's time; cancelling a call closes its connection, which is how servers learn of it.
"""

from __future__ import annotations

import asyncio
import io
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.request import getproxies, proxy_bypass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from batch_agent.backends.faults import CHAT, Faults, Wording
from batch_agent.errors import InternalError, SpecError

CONNECT_SECONDS = 30.0
# Below the five seconds after which common servers (uvicorn) drop an idle connection, so that a request is not sent
# into one that is just being closed.
KEEPALIVE_SECONDS = 4.0
STREAM_END_SECONDS = 0.25
LARGE_BODY_BYTES = 1024 * 1024

# Few streams are read as their events come. Of many each would wake us for every token, so they are left alone between
# two beats of the clock, and read together.
FEW_STREAMS = 16
BEAT_SECONDS = 0.04

Receive = Callable[[bytes], bool]
"""Takes a chunk of a stream; True when the stream has said all it has to say."""

Sign = Callable[[str, URL, Mapping[str, str], bytes], Mapping[str, str]]
"""Of a method, URL, headers and body: the headers that show whose request it is. For servers that want no key in the
request but a signature of it."""


@dataclass(frozen=True, slots=True)
class Route:
    """One thing to ask of a server, with all that is the same in each request."""

    method: str
    url: URL
    headers: CIMultiDict[str] = field(repr=False)
    faults: Faults
    sign: Sign | None = field(default=None, repr=False)


class HttpClient:
    """Entered as often as there are users; the first opens the session, the last closes it.

    A server that wants its key elsewhere than in ``Authorization`` gets it in ``headers``; one that wants each request
    signed, by ``sign``. ``wording`` is how the wire's servers speak of errors.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        sign: Sign | None = None,
        wording: Wording = CHAT,
    ) -> None:
        url, login = _without_login(base_url)
        if login and api_key:
            raise SpecError("a key and a user name in the URL are two ways to log in: give one of them")
        own = {"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json", "User-Agent": "batch-agent"}
        if authorization := login or (f"Bearer {api_key}" if api_key else ""):
            own["Authorization"] = authorization
        self.base_url = str(url)
        self._base = url
        self._headers: CIMultiDict[str] = CIMultiDict(own)
        self._headers.update(headers or {})
        for name, value in self._headers.items():
            _check_header(name, value)
        values = [authorization, *(headers or {}).values()]
        password = URL(base_url).password or ""
        self._secrets = [password, *values, *(value.partition(" ")[2] for value in values)]
        self._sign = sign
        self._wording = wording
        self._streams = 0  # being read now
        self._resting: list[asyncio.Transport] = []  # to be read at the next beat
        self._session: aiohttp.ClientSession | None = None
        self._proxy: URL | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0

    def route(self, method: str, path: str, *, beside: bool = False) -> Route:
        """``beside``: next to the ``/v1`` that the address ends in, where engines have what is not of the API."""
        base = str(self._base)
        url = URL((base.removesuffix("/v1") if beside else base) + path, encoded=True)
        faults = Faults(f"{method} {url}", self._secrets, self._wording)
        return Route(method, url, self._headers, faults, self._sign)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._users and self._loop is not None and not self._loop.is_closed():
                raise SpecError(f"{self.base_url} is in use in another event loop: give each loop its own backend")
            self._users = 0
        if not self._users:
            self._proxy = _proxy_for(self._base)
            self._session, self._loop, self._resting = _open_session(), loop, []
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def send(
        self,
        route: Route,
        body: bytes | None = None,
        receive: Receive | None = None,
        headers: Mapping[str, str] | None = None,
        on_headers: Callable[[Mapping[str, str]], None] | None = None,
    ) -> bytes | None:
        """The body of a good answer; None when ``receive`` was given and took it as a stream, chunk by chunk.
        ``headers`` are this request's own; ``on_headers`` is shown those of a good answer before its body."""
        if self._session is None:
            raise InternalError(f"{self.base_url} was asked before it was entered (async with backend)")
        # aiohttp warns of large bodies given as bytes; a file object is written piece by piece.
        data = io.BytesIO(body) if body is not None and len(body) > LARGE_BODY_BYTES else body
        try:
            async with self._session.request(
                route.method,
                route.url,
                data=data,
                headers=_headers(route, headers, body),
                proxy=self._proxy,
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    raise route.faults.answered(response.status, response.headers, await response.read())
                if on_headers is not None:
                    on_headers(response.headers)
                if receive is None or _is_document(response):
                    return await response.read()
                await self._pump(response, receive)
                return None
        except (aiohttp.ClientError, OSError) as error:
            # Not chained: exceptions of the library hold the request's headers.
            raise route.faults.raised(error) from None

    async def _pump(self, response: aiohttp.ClientResponse, receive: Receive) -> None:
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


def _headers(route: Route, own: Mapping[str, str] | None, body: bytes | None) -> CIMultiDict[str]:
    if not own and route.sign is None:
        return route.headers
    headers = route.headers.copy()
    headers.update(own or {})
    if route.sign is not None:
        headers.update(route.sign(route.method, route.url, headers, body or b""))
    return headers


def _is_document(response: aiohttp.ClientResponse) -> bool:
    return response.headers.get("Content-Type", "").startswith(("application/json", "text/html"))


def _open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        skip_auto_headers=("Accept",),
    )


def _proxy_for(url: URL) -> URL | None:
    """The environment's proxy, looked up once: with ``trust_env`` aiohttp would ask two threads for every request."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(url.authority):
        return None
    try:
        found = URL(proxy if "://" in proxy else f"http://{proxy}")
    except ValueError:
        raise SpecError(f"the proxy that the environment names for {url.host} is not a URL that can be read") from None
    if found.scheme not in ("http", "https"):
        raise SpecError(
            f"the environment names a {found.scheme} proxy for {url.host}: only http and https proxies are supported; "
            "set NO_PROXY for this host to go without"
        )
    return found


def _without_login(base_url: str) -> tuple[URL, str]:
    """The URL bare, and its user and password as the value of an Authorization header."""
    try:
        url = URL(base_url)
        host = url.host
    except ValueError:
        raise SpecError("the backend's address is not a URL that can be read") from None
    if url.scheme not in ("http", "https") or not host:
        raise SpecError("the backend's address must be of the form http://host:port/path or https://…")
    bare = URL(str(url.with_user(None).with_query(None).with_fragment(None)).rstrip("/"), encoded=True)
    if url.user is None:
        return bare, ""
    return bare, "Basic " + b64encode(f"{url.user}:{url.password or ''}".encode()).decode()


def _check_header(name: str, value: str) -> None:
    if not (name.isascii() and name.isprintable() and name and " " not in name and ":" not in name):
        raise SpecError(f"{name!r} cannot be the name of a header")
    if not (value.isascii() and value.isprintable()):
        raise SpecError(f"the value of the header {name} has characters that cannot be sent (a line end? an accent?)")

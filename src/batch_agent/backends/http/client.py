"""HTTP for the backends that speak it: a server's address, its headers and proxy, and bytes in and out.

What the bytes mean belongs to the backend, which errors to raise to ``faults``, connections to ``transport``. Nothing
here waits for a slot, retries or limits an answer's time; cancelling a call closes its connection, which is how servers
learn of it.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from batch_agent.backends.http.faults import CHAT, Faults, Wording
from batch_agent.backends.http.transport import Receive, Transport
from batch_agent.errors import SpecError

LARGE_BODY_BYTES = 1024 * 1024

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
    """Entered as often as there are users, each of them a user of its transport, which is its own unless one is given.

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
        transport: Transport | None = None,
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
        self._transport = Transport() if transport is None else transport
        self._proxy: URL | None = None

    def route(self, method: str, path: str, *, beside: bool = False) -> Route:
        """``beside``: next to the ``/v1`` that the address ends in, where engines have what is not of the API."""
        base = str(self._base)
        url = URL((base.removesuffix("/v1") if beside else base) + path, encoded=True)
        faults = Faults(f"{method} {url}", self._secrets, self._wording)
        return Route(method, url, self._headers, faults, self._sign)

    async def __aenter__(self) -> Self:
        proxy = self._transport.proxy_for(self._base)
        await self._transport.__aenter__()
        self._proxy = proxy
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._transport.__aexit__(kind, error, trace)

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
        # aiohttp warns of large bodies given as bytes; a file object is written piece by piece.
        data = io.BytesIO(body) if body is not None and len(body) > LARGE_BODY_BYTES else body
        try:
            async with self._transport.session.request(
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
                await self._transport.pump(response, receive)
                return None
        except (aiohttp.ClientError, OSError) as error:
            # Not chained: exceptions of the library hold the request's headers.
            raise route.faults.raised(error) from None


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

"""http_get: fetches a page of the public web as text.

A model chooses the URL. So addresses are checked when the connection is made and on each redirect, proxies and cookies
are off, and a body never exceeds the size limit, compressed or not. Each call has its own session and closes its
connections.
"""

from __future__ import annotations

import codecs
import ipaddress
import socket
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.errors import SpecError, ToolError
from batch_agent.tools.base import Tool
from batch_agent.tools.schema import MAX_TOKENS

MAX_BYTES = MAX_TOKENS * BYTES_PER_TOKEN
REDIRECTS = 5
_CACHED_SECONDS = 300.0
_ERROR_CHARACTERS = 500
# No total: the pool enforces the tool's timeout. A silent server times out.
_PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
# Compressed bodies are also accepted; requesting none keeps the common case simple.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "batch-agent", "Accept": "text/*, application/json, */*;q=0.5"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# NAT64 (RFC 6052): the last 32 bits are an IPv4 address that the gateway will connect to.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_CHUNK_BYTES = 64 * 1024


def http_get(*, allow: Sequence[str] = (), max_bytes: int = MAX_BYTES) -> Tool[..., Coroutine[Any, Any, str]]:
    """Return the tool. It connects to public addresses and to the networks in ``allow`` ("10.1.2.3", "192.168.0.0/16",
    "::/0"…).

    Of a body longer than ``max_bytes``, the beginning is returned, with a note.
    """
    policy = AddressPolicy.allowing(allow)

    # max_tokens is None, because the body is already limited by ``max_bytes``, with a note.
    @Tool.define(name="http_get", cacheable=True, ttl=_CACHED_SECONDS, max_tokens=None)
    async def get(url: str) -> str:
        """Fetch a URL with GET and return its body as text. HTML is returned as it is.

        Args:
            url: An http or https URL on the public internet.
        """
        target = _parse(url)
        connector = aiohttp.TCPConnector(resolver=CheckedResolver(policy), use_dns_cache=False, force_close=True)
        jar = aiohttp.DummyCookieJar()
        try:
            async with aiohttp.ClientSession(
                connector=connector, cookie_jar=jar, headers=_HEADERS, timeout=_PATIENCE, auto_decompress=False
            ) as session:
                return await _fetch(session, target, policy, max_bytes)
        except (aiohttp.ClientError, OSError, ValueError, zlib.error) as error:
            reason = str(error) or type(error).__name__
            raise ToolError(f"{target.host} could not be fetched: {reason}") from None

    return get


async def _fetch(session: aiohttp.ClientSession, url: URL, policy: AddressPolicy, max_bytes: int) -> str:
    for _ in range(REDIRECTS + 1):
        policy.check_host(url.raw_host or "")
        async with session.get(url, allow_redirects=False) as response:
            location = response.headers.get("Location")
            if response.status in (301, 302, 303, 307, 308) and location is not None:
                url = _parse(str(url.join(URL(location))))
                continue
            return _text_of(url, response, await read_body(response, max_bytes + 1), max_bytes)
    raise ToolError(f"more than {REDIRECTS} redirects, the last one to {url.host}")


def _text_of(url: URL, response: aiohttp.ClientResponse, body: bytes, max_bytes: int) -> str:
    """Return the text of a page, cut with a note. Raises ToolError for an error status, and for what is not text."""
    where = f"{url.scheme}://{url.host}{url.path}"
    text = _decoded(body[:max_bytes], response.charset)
    if response.status >= 400:
        said = "" if text is None else text[:_ERROR_CHARACTERS]
        raise ToolError(f"{where} answered {response.status} {response.reason or ''}\n{said}".rstrip())
    if text is None:
        size = min(len(body), max_bytes)
        raise ToolError(f"{where} is not text but {response.content_type}, {size} bytes or more")
    if len(body) <= max_bytes:
        return text
    whole = None if "Content-Encoding" in response.headers else response.content_length
    end = "bytes, and there are more" if whole is None else f"of {whole} bytes"
    return f"{text}\n[cut: these are the first {max_bytes} {end}]"


def _decoded(body: bytes, charset: str | None) -> str | None:
    """Return the body as text; None if it is not text."""
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return body.decode("utf-16", errors="replace")
    try:
        text = body.decode(charset or "utf-8-sig", errors="replace")
    except (LookupError, ValueError):  # an unknown or invalid charset
        text = body.decode(errors="replace")
    return None if "\0" in text else text


def _parse(text: str) -> URL:
    try:
        url = URL(text.strip())
    except ValueError as error:
        raise ToolError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ToolError(f"{text!r} is not an http or https URL with a host")
    if url.user is not None or url.password is not None:
        raise ToolError("a URL with a user name or password is not fetched")
    return url


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Refuses every address that is not globally routable, unless it lies in one of the ``allowed`` networks."""

    allowed: tuple[Network, ...] = ()

    @classmethod
    def allowing(cls, networks: Sequence[str]) -> AddressPolicy:
        try:
            return cls(tuple(ipaddress.ip_network(network) for network in networks))
        except ValueError as error:
            raise SpecError(f'allow takes addresses and networks, as "10.1.2.3" or "10.0.0.0/8": {error}') from None

    def permits(self, address: Address) -> bool:
        address = _target(address)
        return any(address in network for network in self.allowed) or _is_public(address)

    def check_host(self, host: str) -> None:
        """Check a host that is an IP address: aiohttp connects to it without the resolver. Raises ToolError."""
        if ":" not in host and not host.replace(".", "").isdigit():
            return
        try:
            address = ipaddress.ip_address(host)
        except ValueError:  # 127.1 or 2130706433: the socket layer accepts these forms
            raise ToolError(f"{host} is not an address in its usual form") from None
        if not self.permits(address):
            raise refusal(host)


class CheckedResolver(AbstractResolver):
    """Resolver that returns only addresses that the policy permits, so that the checked address is the one used."""

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        permitted = [item for item in found if self._policy.permits(ipaddress.ip_address(item["host"]))]
        if not permitted:
            raise refusal(host)
        return permitted

    async def close(self) -> None:
        await self._resolver.close()


def refusal(host: str) -> ToolError:
    return ToolError(f"{host} is refused: only public addresses may be fetched, not local, private or reserved ones")


def _target(address: Address) -> Address:
    """Return the IPv4 address inside a mapped or NAT64 IPv6 address; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (
        # Old tunnels that contain an IPv4 address, and a private range that is_global does not exclude.
        address.sixtofour is not None or address.teredo is not None or address.is_site_local
    ):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


# The session must not decompress bodies (``auto_decompress=False``): this function does, with a limit.
async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return at most ``limit`` bytes of the decompressed body."""
    unpack = _unpacker(response.headers.get("Content-Encoding", ""))
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += unpack.decompress(chunk, limit - len(body)) if unpack is not None else chunk[: limit - len(body)]
        if len(body) >= limit:
            break
    return bytes(body)


def _unpacker(encoding: str) -> zlib._Decompress | None:
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip" | "deflate":
            return zlib.decompressobj(zlib.MAX_WBITS | 32)  # zlib or gzip, by its header
    raise ToolError(f"the server sent {encoding!r}, a compression that was not requested")

"""http_get: fetches a page of the public web as text.

A model chooses the URL. So addresses are checked when the connection is made and on each redirect, proxies and cookies
are off, and a body never exceeds the size limit, compressed or not. Each call has its own session and closes its
connections.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.errors import ToolError
from batch_agent.tools.base import Tool
from batch_agent.tools.builtin.addresses import AddressPolicy, CheckedResolver
from batch_agent.tools.builtin.body import read_body
from batch_agent.tools.schema import MAX_TOKENS

MAX_BYTES = MAX_TOKENS * BYTES_PER_TOKEN
REDIRECTS = 5
_CACHED_SECONDS = 300.0
_ERROR_CHARACTERS = 500
# No total: the pool enforces the tool's timeout. A silent server times out.
_PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
# Compressed bodies are also accepted; requesting none keeps the common case simple.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "batch-agent", "Accept": "text/*, application/json, */*;q=0.5"}


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
                return (await _fetch(session, target, policy, max_bytes)).text()
        except (aiohttp.ClientError, OSError, ValueError, zlib.error) as error:
            reason = str(error) or type(error).__name__
            raise ToolError(f"{target.host} could not be fetched: {reason}") from None

    return get


@dataclass(frozen=True, slots=True)
class _Page:
    url: URL
    status: int
    reason: str
    content_type: str
    charset: str | None
    body: bytes
    cut: bool
    size: int | None  # of the whole body, if the server reports it

    def text(self) -> str:
        where = f"{self.url.scheme}://{self.url.host}{self.url.path}"
        body = self._decoded()
        if self.status >= 400:
            said = "" if body is None else body[:_ERROR_CHARACTERS]
            raise ToolError(f"{where} answered {self.status} {self.reason}\n{said}".rstrip())
        if body is None:
            raise ToolError(f"{where} is not text but {self.content_type}, {len(self.body)} bytes or more")
        if not self.cut:
            return body
        end = "bytes, and there are more" if self.size is None else f"of {self.size} bytes"
        return f"{body}\n[cut: these are the first {len(self.body)} {end}]"

    def _decoded(self) -> str | None:
        """Return the body as text; None if it is not text."""
        if self.body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return self.body.decode("utf-16", errors="replace")
        try:
            text = self.body.decode(self.charset or "utf-8-sig", errors="replace")
        except (LookupError, ValueError):  # an unknown or invalid charset
            text = self.body.decode(errors="replace")
        return None if "\0" in text else text


async def _fetch(session: aiohttp.ClientSession, url: URL, policy: AddressPolicy, max_bytes: int) -> _Page:
    for _ in range(REDIRECTS + 1):
        policy.check_host(url.raw_host or "")
        async with session.get(url, allow_redirects=False) as response:
            location = response.headers.get("Location")
            if response.status in (301, 302, 303, 307, 308) and location is not None:
                url = _parse(str(url.join(URL(location))))
                continue
            body = await read_body(response, max_bytes + 1)
            return _Page(
                url,
                response.status,
                response.reason or "",
                response.content_type,
                response.charset,
                body[:max_bytes],
                cut=len(body) > max_bytes,
                size=None if "Content-Encoding" in response.headers else response.content_length,
            )
    raise ToolError(f"more than {REDIRECTS} redirects, the last one to {url.host}")


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

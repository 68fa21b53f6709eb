"""Transport of a session's messages over streamable HTTP.

The SDK ends the whole session when one request fails. Here a failed request gets its own error instead: ``NOT_SENT`` if
the server cannot have received it, ``BROKEN`` if it may have. Bodies have a size limit.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from batch_agent.foreign import describe
from batch_agent.tools.mcp.address import McpServer
from batch_agent.tools.mcp.stdio import MAX_MESSAGE_BYTES

# Codes of JSON-RPC errors that this module makes, outside the range of the protocol.
NOT_SENT, BROKEN, REFUSED = -31001, -31002, -31003
CONNECT_TIMEOUT = 30.0
SHOWN_BYTES = 300
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


@asynccontextmanager
async def http_transport(server: McpServer) -> AsyncIterator[Any]:
    # The pool limits the time and the number of calls.
    timeout = httpx2.Timeout(CONNECT_TIMEOUT, read=None, pool=None)
    limits = httpx2.Limits(max_connections=None)
    async with (
        _Client(headers=dict(server.headers), timeout=timeout, limits=limits) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _Client(httpx2.AsyncClient):
    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
        except _NEVER_SENT as error:
            return _failed(request, NOT_SENT, f"it is unreachable: {describe(error)}")
        except httpx2.TransportError as error:
            return _failed(request, BROKEN, f"the connection broke: {describe(error)}")
        kind = response.headers.get("content-type", "")
        if response.status_code >= 400 and response.status_code != 404 and not kind.startswith("application/json"):
            return await _refused(request, response)
        if isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _Bounded(response.stream, kind)
        return response


async def _refused(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    """Return an error for an HTTP error answer that is not JSON-RPC."""
    head = b""
    try:
        async for part in response.aiter_bytes():
            head += part
            if len(head) >= SHOWN_BYTES:
                break
    except httpx2.TransportError:
        pass
    finally:
        await response.aclose()
    words = " ".join(head[:SHOWN_BYTES].decode(errors="replace").split())
    code = BROKEN if response.status_code >= 500 else REFUSED
    return _failed(request, code, f"HTTP {response.status_code}{f': {words}' if words else ''}")


def _failed(request: httpx2.Request, code: int, why: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": why}}
    headers = {"content-type": "application/json"}
    return httpx2.Response(400, headers=headers, content=json.dumps(body).encode(), request=request)


class _Bounded(httpx2.AsyncByteStream):
    """A body with a size limit. If it is too long or incomplete, it raises StreamError, as the SDK expects."""

    def __init__(self, inner: httpx2.AsyncByteStream, kind: str) -> None:
        self._inner = inner
        # Each event has its own limit: a stream of events may stay open for any time.
        self._max_bytes = None if kind.startswith("text/event-stream") else MAX_MESSAGE_BYTES

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size_bytes = 0
        try:
            async for part in self._inner:
                size_bytes += len(part)
                if self._max_bytes is not None and size_bytes > self._max_bytes:
                    raise httpx2.StreamError(f"the server's answer is longer than {self._max_bytes:,} bytes")
                yield part
        except httpx2.TransportError as error:
            raise httpx2.StreamError(f"the connection broke: {describe(error)}") from None

    async def aclose(self) -> None:
        await self._inner.aclose()

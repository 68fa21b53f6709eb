"""Reading the body of an HTTP answer, compressed or not, up to a limit.

The session must not decompress bodies (``auto_decompress=False``): this module does, with a limit.
"""

from __future__ import annotations

import zlib

import aiohttp

from batch_agent.errors import ToolError

_CHUNK_BYTES = 64 * 1024


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

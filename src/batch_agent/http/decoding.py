"""Decompresses bodies as they arrive: gzip and deflate, the two encodings that requests offer."""

from __future__ import annotations

import zlib

from batch_agent.http.failures import BrokenOff, NotHttp, TooLarge

ZLIB_METHOD = 8  # low half of the first byte of a zlib header


def decoder_for(coding: str) -> Decoder | None:
    """Return the decoder for a Content-Encoding; None if there is none. Raises NotHttp for an encoding that was not
    offered."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise NotHttp(f"a body in the encoding {coding!r}, which was not offered")
    return Decoder(gzip=coding != "deflate")


class Decoder:
    __slots__ = ("_gzip", "_inflate", "_size")

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._inflate: zlib._Decompress | None = None
        self._size = 0  # bytes decompressed so far

    def feed(self, data: bytes, limit_bytes: int, *, last: bool) -> bytes:
        """Return these bytes decompressed. Raises TooLarge if the whole body exceeds the limit. ``last``: the body ends
        here, so the compressed data must be complete."""
        parts: list[bytes] = []
        try:
            while data:
                # gzip allows several members in a row.
                if self._inflate is None or (self._inflate.eof and self._gzip):
                    self._inflate = zlib.decompressobj(self._window_bits(data[0]))
                parts.append(self._inflate.decompress(data, limit_bytes - self._size + 1))
                self._size += len(parts[-1])
                if self._size > limit_bytes:
                    raise TooLarge(limit_bytes)
                data = self._inflate.unused_data
                if data and not self._gzip:
                    raise BrokenOff("extra bytes after the compressed body")
        except zlib.error as error:
            raise BrokenOff(f"the compressed body cannot be read: {error}") from None
        if last and self._inflate is not None and not self._inflate.eof:
            raise BrokenOff("the compressed body is not complete")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _window_bits(self, first_byte: int) -> int:
        if self._gzip:
            return zlib.MAX_WBITS | 16
        # Some servers omit the zlib header.
        return zlib.MAX_WBITS if first_byte & 0xF == ZLIB_METHOD else -zlib.MAX_WBITS

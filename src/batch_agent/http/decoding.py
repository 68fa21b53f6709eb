"""Decompresses bodies as they arrive: gzip and deflate, the two encodings that requests offer.

This runs in the event loop, so a body is bounded in three ways: by its size, by the ratio of unpacked to packed bytes,
and by the number of gzip members, each of which costs some time even if it is empty.
"""

from __future__ import annotations

import zlib

from batch_agent.http.failures import BrokenOff, NotHttp, TooLarge

ZLIB_METHOD = 8  # low half of the first byte of a zlib header
PIECE_BYTES = 64 * 1024  # fed at a time: the rest after a gzip member is copied
MOST_MEMBERS = 1000  # of gzip, and one more for each BYTES_PER_MEMBER
BYTES_PER_MEMBER = 256
# Text is compressed to a twentieth; zeros to a thousandth. The first FREE_BYTES may have any ratio.
MOST_RATIO, FREE_BYTES = 256, 1024 * 1024


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
    __slots__ = ("_fed", "_gzip", "_inflate", "_members", "_size")

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._inflate: zlib._Decompress | None = None
        self._fed = 0  # bytes so far
        self._size = 0  # bytes decompressed so far
        self._members = 0

    def feed(self, data: bytes, limit_bytes: int, *, last: bool) -> bytes:
        """Return these bytes decompressed. Raises TooLarge if the whole body exceeds the limit, and BrokenOff for a
        body that was made to take time or memory. ``last``: the body ends here, so the compressed data must be
        complete."""
        parts: list[bytes] = []
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                self._fed += len(piece)
                most = min(limit_bytes, FREE_BYTES + MOST_RATIO * self._fed)
                while piece:
                    inflate = self._member(piece[0])
                    parts.append(inflate.decompress(piece, most - self._size + 1))
                    self._size += len(parts[-1])
                    if self._size > limit_bytes:
                        raise TooLarge(limit_bytes)
                    if self._size > most:
                        raise BrokenOff(f"the compressed body unpacks to more than {MOST_RATIO} times its size")
                    piece = inflate.unused_data
                    if piece and not self._gzip:
                        raise BrokenOff("extra bytes after the compressed body")
        except zlib.error as error:
            raise BrokenOff(f"the compressed body cannot be read: {error}") from None
        if last and self._inflate is not None and not self._inflate.eof:
            raise BrokenOff("the compressed body is not complete")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _member(self, first_byte: int) -> zlib._Decompress:
        """Return the decompressor for the next bytes. gzip allows several members in a row."""
        if self._inflate is None or (self._inflate.eof and self._gzip):
            self._members += 1
            if self._members > MOST_MEMBERS + self._size // BYTES_PER_MEMBER:
                raise BrokenOff(f"the compressed body has {self._members:,} members for {self._size:,} bytes")
            self._inflate = zlib.decompressobj(self._window_bits(first_byte))
        return self._inflate

    def _window_bits(self, first_byte: int) -> int:
        if self._gzip:
            return zlib.MAX_WBITS | 16
        # Some servers omit the zlib header.
        return zlib.MAX_WBITS if first_byte & 0xF == ZLIB_METHOD else -zlib.MAX_WBITS

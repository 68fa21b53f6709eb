"""Parses one HTTP/1.1 response from bytes that may be split anywhere. Pure: no socket and no event loop.

httptools (llhttp) handles the syntax: status line, headers, chunks. This module stores the result, applies limits and
decides where a response ends.
"""

from __future__ import annotations

from collections.abc import Callable

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

from batch_agent.http.decoding import Decoder, decoder_for
from batch_agent.http.failures import BrokenOff, ClosedEarly, NotHttp, TooLarge, TransportError

MAX_HEAD_BYTES = 64 * 1024
SWITCHING_PROTOCOLS = 101


class ResponseParser:
    """``status`` is 0 until the whole head has arrived; ``complete`` is set by the last byte of the body.

    A parser serves one response, so that leftovers of one response cannot reach the next.
    """

    __slots__ = (
        "_bodyless",
        "_buffer",
        "_decode",
        "_decoder",
        "_fields",
        "_interim",
        "_parser",
        "_size",
        "complete",
        "headers",
        "limit_bytes",
        "on_body",
        "reason",
        "reusable",
        "status",
    )

    def __init__(self, method: str, limit_bytes: int, *, decode: bool = True) -> None:
        self._bodyless = method in ("HEAD", "CONNECT")
        self._buffer = bytearray()
        self._decode = decode
        self._decoder: Decoder | None = None
        self._fields: list[tuple[str, str]] = []
        self._interim = False  # a 1xx response is being read; the real one follows
        self.limit_bytes = limit_bytes
        self._size = 0  # bytes read so far
        self.complete = False
        self.headers: CIMultiDict[str] = CIMultiDict()
        # Called by httptools for every piece of the body: a C method is the cheapest.
        self.on_body: Callable[[bytes], None] = self._buffer.extend
        self.reason = ""
        self.reusable = False  # the connection can carry another request after this response
        self.status = 0
        self._parser: HttpResponseParser | None = None  # from the first byte to the last

    @property
    def begun(self) -> bool:
        """Return whether any byte of a response has arrived."""
        return self._size > 0

    def feed(self, data: bytes) -> None:
        """Process the next bytes. Raises a TransportError if they cannot be a response."""
        self._size += len(data)
        if self._parser is None:
            self._parser = HttpResponseParser(self)
            # Some servers send bare line feeds or blanks after a chunk size, and other clients accept that.
            self._parser.set_dangerous_leniencies(
                lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
            )
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            raise NotHttp("the server switched to another protocol") from None
        except HttpParserError as error:
            if not self.complete:
                raised = error.__context__  # raised by a method below
                raise raised if isinstance(raised, TransportError) else NotHttp(str(error)) from None
            self.reusable = False  # bytes follow the response that no request asked for
        if self._size > self.limit_bytes:
            raise TooLarge(self.limit_bytes)
        if not self.status and self._size > MAX_HEAD_BYTES:
            raise NotHttp(f"a head of more than {MAX_HEAD_BYTES:,} bytes")

    def feed_end(self) -> None:
        """Called when the connection has ended. Raises a TransportError unless this response may end that way."""
        if not self.status:
            raise BrokenOff("the connection was closed in the head") if self._size else ClosedEarly()
        coding = self.headers.get("Transfer-Encoding", "").lower()
        if "Content-Length" in self.headers or coding.rstrip().endswith("chunked"):
            raise BrokenOff("the connection was closed in the body")
        self.complete = True

    def take(self) -> bytes:
        """Return the bytes of the body since the last call, decompressed. Raises BrokenOff or TooLarge."""
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._decoder is None:
            return b"" if self._bodyless else data
        return self._decoder.feed(data, self.limit_bytes, last=self.complete)

    def close(self) -> None:
        """Free the parser, which refers to this object."""
        self._parser = None

    def discard(self) -> None:
        """Free the body of an unused response. Errors keep this object alive for a while."""
        self._buffer.clear()

    # Called by httptools

    def on_message_begin(self) -> None:
        if self.complete:
            raise NotHttp("a second response")

    def on_status(self, reason: bytes) -> None:
        self.reason += reason.decode("utf-8", "replace")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.decode("utf-8", "replace"), value.decode("utf-8", "replace")))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:  # also without the headers that belong to it
            raise NotHttp("the server switched to another protocol")
        if status < 200:
            self._interim, self.reason = True, ""
            self._fields.clear()
            return
        # Exact only where it matters: one read may contain much of the body.
        if (
            self._size > MAX_HEAD_BYTES
            and sum(len(name) + len(value) + 4 for name, value in self._fields) > MAX_HEAD_BYTES
        ):
            raise NotHttp(f"a head of more than {MAX_HEAD_BYTES:,} bytes")
        self.status = status
        self.headers = headers = CIMultiDict(self._fields)
        if self._bodyless:
            self.complete = True
        elif self._decode and "Content-Encoding" in headers:
            self._decoder = decoder_for(headers["Content-Encoding"])

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self.complete:
            assert self._parser is not None
            self.complete = True
            self.reusable = self._parser.should_keep_alive()

"""One connection to a server: one request at a time, its response and its events parsed as the bytes come.

A response is processed in ``data_received``; the waiting task is woken once, at the end. ``ResponseParser`` is pure: it
knows no socket. httptools (llhttp) handles the syntax: status line, headers, chunks. The pool (``transport``) keeps and
reuses connections.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

from batch_agent.http.decoding import Decoder, decoder_for
from batch_agent.http.failures import BrokenOff, ClosedEarly, NotHttp, TooLarge, TransportError

if TYPE_CHECKING:
    from batch_agent.http.origin import Origin

Event = tuple[str, bytes]

BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """One event exceeds the limit: a server that never ends a line must not fill the memory."""


class SSEParser:
    """Parses server-sent events incrementally: bytes in, ``(event name, data)`` out. Lines are split in bytes, so a
    chunk may end anywhere, even inside a UTF-8 sequence or between CR and LF. Data stay bytes: the JSON parser checks
    the encoding."""

    __slots__ = ("_after_cr", "_at_start", "_data", "_limit", "_line", "_name", "_size")

    def __init__(self, max_event_bytes: int = 16 * 1024 * 1024) -> None:
        self._limit = max_event_bytes
        self._line: list[bytes] = []  # pieces of an unfinished line
        self._data: list[bytes] = []  # data lines of an unfinished event
        self._size = 0  # bytes in both
        self._name = ""
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that this chunk completes."""
        if whole := self._whole_events(chunk):
            return whole
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = chunk.split(b"\n")
        events: list[Event] = []
        if lines:
            if self._line:
                self._line.append(lines[0])
                self._size -= sum(map(len, self._line[:-1]))
                lines[0] = b"".join(self._line)
                self._line.clear()
            for line in lines:
                self._take(line, events)
        if rest:
            self._line.append(rest)
            self._grow(len(rest))
        return events

    def _whole_events(self, chunk: bytes) -> list[Event]:
        """Fast path for nearly every chunk: complete events of one data line each. Returns [] for anything else."""
        if self._line or self._data or self._name or self._after_cr:
            return []
        if not chunk.startswith(b"data: ") or not chunk.endswith(b"\n\n") or len(chunk) > self._limit:
            return []
        events = chunk[6:-2].split(b"\n\ndata: ")
        if chunk.count(b"\n") != 2 * len(events) or b"\r" in chunk:
            return []
        self._at_start = False
        return [("", data) for data in events]

    def close(self) -> list[Event]:
        """Called at the end of the stream. A missing blank line or line break at the end is tolerated."""
        events = self.feed(b"\n") if self._line else []
        self._dispatch(events)
        return events

    def _take(self, line: bytes, events: list[Event]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BOM)
        if not line:
            self._dispatch(events)
        elif line.startswith(b"data:"):
            self._add_data(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            if field == b"event":
                self._name = value.removeprefix(b" ").decode("utf-8", "replace")
            elif field == b"data":
                self._add_data(b"")

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._grow(len(value) + 1)

    def _grow(self, count: int) -> None:
        self._size += count
        if self._size > self._limit:
            raise EventTooLarge(f"an event of more than {self._limit:,} bytes")

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            events.append((self._name, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)))
            self._data.clear()
        self._name = ""
        self._size = 0


FEW_STREAMS = 16
BEAT_SECONDS = 0.04


class Beat:
    """Limits how often streams are read. ``streams`` is the number of streams being read now; the connections update
    it."""

    __slots__ = ("_loop", "_resting", "streams")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._resting: list[asyncio.Transport] = []
        self.streams = 0

    def rest(self, transport: asyncio.Transport) -> None:
        """Stop reading from ``transport`` until the next beat, if there are many streams."""
        if self.streams <= FEW_STREAMS:
            return
        transport.pause_reading()
        self._resting.append(transport)
        if len(self._resting) == 1:
            now = self._loop.time()
            self._loop.call_at((now // BEAT_SECONDS + 1) * BEAT_SECONDS, self._go_on)

    def _go_on(self) -> None:
        resting, self._resting = self._resting, []
        for transport in resting:
            transport.resume_reading()  # no effect on a connection closed meanwhile


MAX_HEAD_BYTES = 64 * 1024
SWITCHING_PROTOCOLS = 101


class ResponseParser:
    """``status`` is 0 until the whole head has arrived; ``complete`` is set by the last byte of the body. ``names`` are
    the names of the headers in lower case.

    A parser serves one response, so that leftovers of one response cannot reach the next.
    """

    __slots__ = (
        "_bodyless",
        "_buffer",
        "_decode",
        "_decoder",
        "_fields",
        "_headers",
        "_interim",
        "_parser",
        "_size",
        "complete",
        "limit_bytes",
        "names",
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
        self._fields: list[tuple[bytes, bytes]] = []
        self._headers: CIMultiDict[str] | None = None  # made when they are read: most answers need only their names
        self._interim = False  # a 1xx response is being read; the real one follows
        self.limit_bytes = limit_bytes
        self._size = 0  # bytes read so far
        self.complete = False
        self.names = b""
        # Called by httptools for every piece of the body: a C method is the cheapest.
        self.on_body: Callable[[bytes], None] = self._buffer.extend
        self.reason = ""
        self.reusable = False  # the connection can carry another request after this response
        self.status = 0
        self._parser: HttpResponseParser | None = None  # from the first byte to the last

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers; empty until the whole head has arrived."""
        if not self.status:
            return CIMultiDict()
        if self._headers is None:
            self._headers = CIMultiDict(
                [(name.decode("utf-8", "replace"), value.decode("utf-8", "replace")) for name, value in self._fields]
            )
        return self._headers

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
        if not self.status:  # trailers are not used, and may have no end
            self._fields.append((name, value))

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
        self.names = names = b"\n".join([name for name, _ in self._fields]).lower()
        if self._bodyless:
            self.complete = True
        elif self._decode and b"content-encoding" in names:
            self._decoder = decoder_for(self.headers.get("Content-Encoding", ""))

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self.complete:
            assert self._parser is not None
            self.complete = True
            self.reusable = self._parser.should_keep_alive()


# Servers send the end of a stream's body right after the last event. Once it is read, the connection can be reused.
STREAM_END_SECONDS = 0.25
# A connection that the server closed while idle fails at once. If it closes later, the server may have started on the
# request.
STALE_SECONDS = 1.0
WRITE_BYTES = 256 * 1024
REST_BYTES = 64 * 1024

Receive = Callable[[bytes], bool]
"""Takes a chunk of a streamed body. Returns True when it needs no more."""

OnHead = Callable[[ResponseParser], Receive | None]
"""Takes a response whose head has arrived. Returns a consumer for its body as a stream, or None to collect it."""


class Owner(Protocol):
    """Receives what happens to a connection."""

    def idle(self, connection: Connection) -> None:
        """Called when the response is complete and the connection can take another request."""

    def lost(self, connection: Connection) -> None:
        """Called when the connection is closed."""


class Connection(asyncio.Protocol):
    """One connection. ``idle_since`` and ``reused_at`` belong to the pool."""

    __slots__ = (
        "_beat",
        "_done",
        "_loop",
        "_on_head",
        "_owner",
        "_receive",
        "_response",
        "_uploading",
        "_wake",
        "_writable",
        "idle_since",
        "origin",
        "reused_at",
        "transport",
    )

    def __init__(self, origin: Origin, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.idle_since: float | None = None  # None: in use
        self.reused_at: float | None = None  # when it was last taken from the pool; None: new
        self.transport: asyncio.Transport
        self._owner, self._loop = owner, loop
        self._response: ResponseParser | None = None  # of the request in flight
        self._done: asyncio.Future[None]  # of the last request
        self._on_head: OnHead | None = None
        self._receive: Receive | None = None
        self._beat: Beat | None = None
        self._uploading = False  # a part of the request is not written yet
        self._writable = True
        self._wake: asyncio.Future[None] | None = None  # wakes a writer that waits for buffer space

    @property
    def stale(self) -> bool:
        """Return whether the server had closed the connection while it was idle before the last request."""
        return self.reused_at is not None and self._loop.time() - self.reused_at < STALE_SECONDS

    def ask(
        self, response: ResponseParser, head: bytes, body: bytes, on_head: OnHead | None, beat: Beat | None
    ) -> asyncio.Future[None]:
        """Send a request. The future is done when ``response`` is complete, or when a stream needs no further bytes. A
        body of more than WRITE_BYTES is sent by ``upload``. ``beat`` decides when a stream is read."""
        self._response = response
        self._on_head = on_head
        self._beat = beat
        self._done = done = self._loop.create_future()
        self._uploading = len(body) > WRITE_BYTES
        self.transport.write(head if self._uploading else head + body)
        return done

    async def upload(self, body: bytes) -> None:
        """Send a large body as fast as the server accepts it, until it answers."""
        view, done = memoryview(body), self._done
        for start in range(0, len(body), WRITE_BYTES):
            while not self._writable and not done.done():
                self._wake = self._loop.create_future()
                await self._wake
            if done.done() or self.transport.is_closing():
                return
            self.transport.write(view[start : start + WRITE_BYTES])
        self._uploading = False

    def abandon(self, response: ResponseParser) -> None:
        """Close the connection at once if ``response`` is still being read."""
        if self._response is response:
            self._end()
            response.discard()
            self.transport.abort()

    def close(self) -> None:
        self.transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # no request was sent: these bytes cannot be an answer
            self.transport.abort()
            return
        try:
            response.feed(data)
            if self._on_head is not None or self._receive is not None:
                self._stream(response)
        except Exception as error:  # also from the code that consumes the stream  # noqa: BLE001
            self._fail(error)
            return
        if response.complete:
            self._complete(response)

    def eof_received(self) -> None:
        if self._response is not None:
            self._lose(self._response, None)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._response is not None:
            self._read_rest()
        if self._response is not None:
            self._lose(self._response, exc)
        self._owner.lost(self)

    def _read_rest(self) -> None:
        """Read what arrived before the connection broke. A server that refuses a large request may answer early and
        close; a write that fails then must not hide its answer."""
        socket = self.transport.get_extra_info("socket")
        if socket is None or self.transport.get_extra_info("ssl_object") is not None:
            return
        with suppress(OSError):
            while self._response is not None and (data := os.read(socket.fileno(), REST_BYTES)):
                self.data_received(data)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake_writer()

    # The end of a request

    def _stream(self, response: ResponseParser) -> None:
        if self._on_head is not None:
            if not response.status:
                return
            on_head, self._on_head = self._on_head, None
            self._receive = on_head(response)
            if self._receive is None:
                return
            if self._beat is not None:
                self._beat.streams += 1
        assert self._receive is not None
        chunk = response.take()
        if not chunk:
            return
        if self._done.done():  # only the end of the body is awaited
            return
        if self._receive(chunk):
            if not self._done.done():  # the request was not cancelled meanwhile
                self._done.set_result(None)
            if not response.complete:
                self._loop.call_later(STREAM_END_SECONDS, self.abandon, response)
        elif self._beat is not None and not response.complete:
            self._beat.rest(self.transport)

    def _complete(self, response: ResponseParser) -> None:
        # A server may answer before it has read the whole request.
        reusable = response.reusable and not self._uploading and not self.transport.is_closing()
        if self._receive is not None and reusable:
            self.transport.resume_reading()  # otherwise we would not notice that the server closes the idle connection
        done = self._end()
        if not done.done():
            done.set_result(None)
        if reusable:
            self._owner.idle(self)
        else:
            self.transport.abort()

    def _lose(self, response: ResponseParser, error: Exception | None) -> None:
        """Handle a connection that ended while a response was expected."""
        try:
            if error is not None:
                raise BrokenOff(str(error)) if response.begun else ClosedEarly(str(error))
            response.feed_end()
            if self._receive is not None:
                self._stream(response)
        except Exception as failure:  # noqa: BLE001
            self._fail(failure)
        else:
            self._complete(response)

    def _fail(self, error: Exception) -> None:
        if self._response is not None:
            self._response.discard()
        done = self._end()
        if not done.done():
            done.set_exception(error)
        self.transport.abort()

    def _end(self) -> asyncio.Future[None]:
        if self._response is not None:
            self._response.close()
        if self._receive is not None and self._beat is not None:
            self._beat.streams -= 1
        self._response = self._on_head = self._receive = self._beat = None
        if self._wake is not None:
            self._wake_writer()
        return self._done

    def _wake_writer(self) -> None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            if not wake.done():
                wake.set_result(None)

"""One connection to a server: one request at a time, its response parsed as the bytes come.

A response is processed in ``data_received``; the waiting task is woken once, at the end. The pool keeps and reuses
connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from batch_agent.http.failures import BrokenOff, ClosedEarly
from batch_agent.http.parser import ResponseParser

if TYPE_CHECKING:
    from batch_agent.http.beat import Beat
    from batch_agent.http.origin import Origin

# Servers send the end of a stream's body right after the last event. Once it is read, the connection can be reused.
STREAM_END_SECONDS = 0.25
# A connection that the server closed while idle fails at once. If it closes later, the server may have started on the
# request.
STALE_SECONDS = 1.0
WRITE_BYTES = 256 * 1024

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
    """``idle_since`` and ``reused_at`` belong to the pool."""

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
        """Send a request. The future is done when ``response`` is complete, or when the stream needs no more of it. A
        body of more than WRITE_BYTES is sent by ``upload``. ``beat`` decides when a stream is read."""
        self._response, self._on_head, self._beat = response, on_head, beat
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
            if done.done():
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
        except Exception as error:  # also from the code that consumes the stream
            self._fail(error)
            return
        if response.complete:
            self._complete(response)

    def eof_received(self) -> None:
        if self._response is not None:
            self._lose(self._response, None)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._response is not None:
            self._lose(self._response, exc)
        self._owner.lost(self)

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
        except Exception as failure:
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
        self._wake_writer()
        return self._done

    def _wake_writer(self) -> None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            if not wake.done():
                wake.set_result(None)

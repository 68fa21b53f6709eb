"""A response read piece by piece: first its head, then its body, at the pace of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Self

from multidict import CIMultiDict

from batch_agent.http.connection import Connection, Receive, ResponseParser

# With more than this in the buffer, reading pauses until the caller has taken it.
HIGH_WATER_BYTES = 256 * 1024


class OpenResponse:
    """After entering, the request is sent and ``status``, ``reason`` and ``headers`` are set. After leaving, the
    connection is idle or closed. The body is passed on unchanged: not decompressed, and without a size limit."""

    def __init__(self, send: Callable[[OpenResponse], Coroutine[object, object, None]]) -> None:
        self._send = send
        self._buffer = bytearray()
        self._connection: Connection
        self._response: ResponseParser
        self._begun: asyncio.Future[None]
        self._done: asyncio.Future[None]
        self._wake: asyncio.Future[None] | None = None
        self._paused = False

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def reason(self) -> str:
        return self._response.reason

    @property
    def headers(self) -> CIMultiDict[str]:
        return self._response.headers

    async def __aenter__(self) -> Self:
        await self._send(self)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._connection.abandon(self._response)
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # mark the error as retrieved: the caller may not have read so far

    async def read_some(self) -> bytes:
        """Return the next bytes of the body, b"" at its end. Raises a TransportError when it breaks off."""
        while not self._buffer:
            if self._done.done():
                self._done.result()
                return b""
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._paused:
            self._paused = False
            self._connection.transport.resume_reading()
        return data

    # Called by the transport

    def asked(
        self, connection: Connection, response: ResponseParser, done: asyncio.Future[None]
    ) -> asyncio.Future[None]:
        """Return a future that is done when the head has arrived, and fails when the request does."""
        self._connection = connection
        self._response = response
        self._done = done
        self._begun = done.get_loop().create_future()
        done.add_done_callback(partial(self._ended, self._begun))
        return self._begun

    def on_head(self, response: ResponseParser) -> Receive:
        if not self._begun.done():
            self._begun.set_result(None)
        return self._push

    def _push(self, chunk: bytes) -> bool:
        self._buffer += chunk
        if len(self._buffer) > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()
        self._wake_reader()
        return False

    def _ended(self, begun: asyncio.Future[None], done: asyncio.Future[None]) -> None:
        if not begun.done() and not done.cancelled() and (error := done.exception()) is not None:
            begun.set_exception(error)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

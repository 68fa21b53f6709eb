"""The response to a client whose answer takes long: events as they come, and keep-alive data.

If a server is down, the request waits, and the client must not time out meanwhile. After a few seconds the response
starts: a stream gets comments, a JSON document gets spaces before its first brace; every reader ignores both. An answer
that comes sooner gets its proper status.
"""

from __future__ import annotations

import asyncio
from typing import Self

from aiohttp import web

FIRST_SECONDS = 15.0  # before the response starts without an answer
EVERY_SECONDS = 10.0
COMMENT, SPACE = b": keep-alive\n\n", b" "


class Waiting:
    """Entered while the answer is pending. ``response`` is the one that was started, if any."""

    def __init__(self, request: web.BaseRequest, *, streamed: bool) -> None:
        self._request, self._streamed = request, streamed
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self.put, self._sign)
        return self

    async def __aexit__(self, kind: object, *exception: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        if self._task is not None:
            self._queue.put_nowait(None)
            if kind is not None:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _sign(self) -> bytes:
        return COMMENT if self._streamed else SPACE

    def put(self, data: bytes) -> None:
        """Write data, and start the response if it has not begun."""
        self._queue.put_nowait(data)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="batch-agent gateway response")

    async def _write(self) -> None:
        kind = "text/event-stream" if self._streamed else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        await response.prepare(self._request)
        self.response = response
        while True:
            try:
                async with asyncio.timeout(EVERY_SECONDS):
                    pieces = [await self._queue.get()]
            except TimeoutError:
                pieces = [self._sign]
            while not self._queue.empty():
                pieces.append(self._queue.get_nowait())
            if data := b"".join(filter(None, pieces)):
                await response.write(data)
            if pieces[-1] is None:
                return

"""Keep-alive data for a client whose answer takes long.

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
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._begin)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._over = True
        assert self._timer is not None
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_alive(), name="batch-agent gateway keep-alive")

    async def _keep_alive(self) -> None:
        kind = "text/event-stream" if self._streamed else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        await response.prepare(self._request)
        self.response = response
        while not self._over:
            await response.write(COMMENT if self._streamed else SPACE)
            await asyncio.sleep(EVERY_SECONDS)

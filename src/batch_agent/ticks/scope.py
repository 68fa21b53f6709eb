"""What a runtime has open in one event loop: its thoughts, their backends and threads.

One keeper task closes all of it on ``close``, or when it is cancelled, as ``asyncio.run`` does at its end. So a program
that does not stop its runtime leaves nothing open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from batch_agent.dispatch.cancellation import outlast
from batch_agent.fleet.one_loop import running_loop
from batch_agent.ticks.asking import Asking
from batch_agent.ticks.mind import Mind, Thought
from batch_agent.ticks.thinking import Thinker

GRACE = 5.0  # seconds that the user's coroutines get to end after a cancellation

logger = logging.getLogger("batch_agent")


class LoopScope:
    """Open from its creation."""

    def __init__(self, thinker: Thinker) -> None:
        self.loop = asyncio.get_running_loop()
        self.askings: dict[object, Asking] = {}  # by backend
        self._thinker = thinker
        self._thoughts: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] = self.loop.create_future()
        self._keeper = self.loop.create_task(self._keep(), name="batch-agent ticks")

    @property
    def is_open(self) -> bool:
        """Return whether it is open in the running event loop."""
        return running_loop() is self.loop and not self._closing.done()

    @property
    def is_open_elsewhere(self) -> bool:
        """Return whether it is open in another event loop, running or not."""
        return running_loop() is not self.loop and not self.loop.is_closed() and not self._keeper.done()

    def begin(self, mind: Mind, thought: Thought, asking: Callable[[], Asking]) -> None:
        thought.task = self.loop.create_task(self._thinker.think(mind, thought, asking))
        self._thoughts.add(thought.task)
        thought.task.add_done_callback(self._thoughts.discard)

    def close(self) -> None:
        """Start closing, from any thread. ``wait_closed`` waits for the end."""
        if running_loop() is self.loop:
            self._close_now()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._close_now)

    async def wait_closed(self) -> None:
        if running_loop() is self.loop:
            await outlast(self._keeper)

    def _close_now(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)

    async def _keep(self) -> None:
        try:
            await self._closing
        finally:
            self._closing.cancel()
            try:
                await self._close()
            except asyncio.CancelledError:  # the event loop ends: finish first
                await self._close()
                raise
            finally:
                self._thinker.close()

    async def _close(self) -> None:
        """Close everything. A user's coroutine that does not end is left behind."""
        for task in tuple(self._thoughts):
            task.cancel()
        if self._thoughts:
            await asyncio.wait(tuple(self._thoughts), timeout=GRACE)
        if self.askings:
            closing = [self.loop.create_task(asking.close()) for asking in self.askings.values()]
            done, left = await asyncio.wait(closing, timeout=GRACE)
            for task in left:
                task.cancel()
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.error("a backend could not be closed", exc_info=error)

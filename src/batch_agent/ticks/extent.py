"""What a runtime has open in one event loop: its thoughts, the backends they ask, the threads they use.

One keeper task holds all of it. It closes everything when it is told to, or when it is cancelled, as ``asyncio.run``
does at its end; so nothing is left open by a program that forgets to stop its runtime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batch_agent.dispatch.cancellation import outlast
from batch_agent.ticks.asking import Asking
from batch_agent.ticks.mind import Mind, Thought
from batch_agent.ticks.thinking import Thinker


class Extent:
    """Open from the moment it is made. ``on_close`` is called when all else is closed."""

    def __init__(self, thinker: Thinker, on_close: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.askings: dict[object, Asking] = {}  # by backend
        self._thinker, self._on_close = thinker, on_close
        self._thoughts: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] = self.loop.create_future()
        self._keeper = self.loop.create_task(self._keep(), name="batch-agent ticks")

    @property
    def is_open(self) -> bool:
        """In the event loop that runs now."""
        return _running_loop() is self.loop and not self._closing.done()

    def begin(self, mind: Mind, thought: Thought, asking: Callable[[], Asking]) -> None:
        thought.task = self.loop.create_task(self._thinker.think(mind, thought, asking))
        self._thoughts.add(thought.task)
        thought.task.add_done_callback(self._thoughts.discard)

    def close(self) -> None:
        """From any thread, and whether its event loop still runs or not. ``wait_closed`` waits for it."""
        if _running_loop() is self.loop:
            self._close_now()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._close_now)

    async def wait_closed(self) -> None:
        if _running_loop() is self.loop:
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
            except asyncio.CancelledError:  # the event loop ends, and would leave what is open behind
                await self._close()
                raise
            finally:
                self._thinker.close()
                self._on_close()

    async def _close(self) -> None:
        for task in tuple(self._thoughts):
            task.cancel()
        if self._thoughts:
            await asyncio.wait(tuple(self._thoughts))
        for asking in self.askings.values():
            await asking.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

"""An object that keeps sockets or tasks belongs to one event loop at a time: this is where that is checked."""

from __future__ import annotations

import asyncio
import threading

from batch_agent.errors import SpecError


class OneLoop:
    """The event loop that ``what`` is in use in."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # two threads may come at the same time

    def bind(self) -> bool:
        """Takes the running loop. SpecError if another one has it. True if the one that had it was closed: what it left
        is void."""
        loop = asyncio.get_running_loop()
        with self._lock:
            void = self._release_from(loop)
            self._loop = loop
            return void

    def check(self) -> bool:
        """The same without taking a loop; also where none is running."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        with self._lock:
            return self._release_from(running)

    def release(self) -> None:
        self._loop = None

    def _release_from(self, running: asyncio.AbstractEventLoop | None) -> bool:
        if self._loop is None or self._loop is running:
            return False
        if not self._loop.is_closed():
            raise SpecError(
                f"the {self._what} is in use in another event loop: close it there first, or make one for each loop"
            )
        self._loop = None
        return True

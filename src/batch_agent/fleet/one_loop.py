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
        """Takes the running loop. True if it was in use in one that is closed by now: what that one left is void."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop is loop:
                return False
            self._refuse_if_taken()
            was_open = self._loop is not None
            self._loop = loop
            return was_open

    def check(self) -> None:
        """SpecError if another loop has it; also where no loop is running."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if self._loop is not running:
            self._refuse_if_taken()

    def release(self) -> None:
        self._loop = None

    def _refuse_if_taken(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            raise SpecError(
                f"the {self._what} is in use in another event loop: close it there first, or make one for each loop"
            )

"""Checks that an object with sockets or tasks is used in one event loop at a time."""

from __future__ import annotations

import asyncio
import threading

from batch_agent.errors import SpecError


class OneLoop:
    """The event loop in which ``what`` is used."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # two threads may call at the same time

    def bind(self) -> bool:
        """Bind to the running loop. Raises SpecError if another uses it. True: the previous one was closed."""
        loop = asyncio.get_running_loop()
        with self._lock:
            void = self._release_from(loop)
            self._loop = loop
            return void

    def check(self) -> bool:
        """Check like ``bind`` without binding; also works when no loop is running."""
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

"""Checks that an object with sockets or tasks is used in one event loop at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from batch_agent.errors import SpecError


class OneLoop:
    """The event loop in which ``what`` is used. ``forget`` drops its state if that loop was closed."""

    def __init__(self, what: str, forget: Callable[[], None]) -> None:
        self._what, self._forget = what, forget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # two threads may call at the same time

    def bind(self) -> None:
        """Bind to the running loop. Raises SpecError if another uses it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._release_from(loop)
            self._loop = loop

    def check(self) -> bool:
        """Check like ``bind`` without binding, also without a running loop. Returns True if the state was dropped."""
        with self._lock:
            return self._release_from(running_loop())

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
        self._forget()
        return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

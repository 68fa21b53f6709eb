"""Calls that may wait for somebody else: a pipe that nobody fills or empties, a terminal that is stopped.

They run beside the event loop, so that agents go on meanwhile, and in threads that do not keep the process alive: after
a second Ctrl-C the command must end although a read from standard input never returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """What ``function`` returns or raises, once it has."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=call, daemon=True).start()
    return future

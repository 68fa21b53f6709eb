"""Runs calls that may block in threads: a read from a pipe, a write to a stopped terminal, a user's function.

The event loop continues meanwhile. The threads are daemons: after a second Ctrl-C the command ends even if a read from
standard input never returns.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class _DaemonThreads(concurrent.futures.Executor):
    """An executor with one thread per call. As it is an executor, an event loop with a virtual clock knows of the
    call."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only ignored

        def call() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=call, daemon=True).start()
        return future


THREADS = _DaemonThreads()


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call ``function``. Returns its result, or raises its exception."""
    return asyncio.get_running_loop().run_in_executor(THREADS, partial(function, *args, **kwargs))


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock of the loop, without the method around it if that is asyncio's own: a turn reads it often."""
    own = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
    return time.monotonic if own else loop.time


def on_this_loop(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that any thread may call and that runs ``function`` on the event loop of this thread."""
    loop, here = asyncio.get_running_loop(), threading.get_ident()

    def call() -> None:
        if threading.get_ident() == here:
            function()
        else:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function)

    return call

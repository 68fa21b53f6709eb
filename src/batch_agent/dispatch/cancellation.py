"""How to treat a CancelledError: decide who requested it, and when to apply it.

Foreign code may raise a CancelledError of its own, because something it awaited was cancelled. If we took that for
our own cancellation, the task would end silently and lose its work.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

from batch_agent.errors import JobError, StoreError, WorkerFailed
from batch_agent.foreign import describe, is_ctrl_c, place_of, traceback_of

T = TypeVar("T")


def cancelled_by_us() -> bool:
    """Return whether a CancelledError caught now was requested for the running task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class worker_boundary:  # noqa: N801
    """Convert whatever the user's code in this block raises to a WorkerFailed that begins with ``what``: it fails only
    its row. Errors of this package and cancellations of the running task are raised unchanged."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, JobError | StoreError | GeneratorExit) or is_ctrl_c(error):
            return
        if isinstance(error, asyncio.CancelledError) and cancelled_by_us():
            return
        failed = WorkerFailed(f"{self._what} {describe(error)}{place_of(error)}")
        failed.traceback = traceback_of(error)
        raise failed from error


async def outlast(task: asyncio.Task[None]) -> None:
    """Wait until the task is done. A cancellation that arrives meanwhile is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def shielded(call: asyncio.Future[T]) -> T:
    """Return the result of a call in a thread, or of another future that must not be cancelled. A cancellation does not
    end it. Its later error is then dropped: with ``asyncio.shield`` alone, Python would report it as never
    retrieved."""
    call.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(call)


async def wait_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most for some seconds. ``wait_for`` of Python 3.11 would ignore a cancellation
    that arrives in the step in which the event is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def first_error(error: BaseException) -> BaseException:
    """Return the first real error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

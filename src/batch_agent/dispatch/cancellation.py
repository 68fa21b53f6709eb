"""What to make of a cancellation: whose it is, and when it counts.

Foreign code may let a CancelledError of its own escape, from something it waited for that was cancelled. Taken for
ours, it would end a task in silence and lose what the task was doing.
"""

from __future__ import annotations

import asyncio


def cancelled_by_us() -> bool:
    """Whether a CancelledError caught now was meant for the running task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def outlast(task: asyncio.Task[None]) -> None:
    """Until it is done. A cancellation meanwhile is for afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def first_error(error: BaseException) -> BaseException:
    """The failure itself, out of the groups that task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

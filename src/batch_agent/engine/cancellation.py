"""Whose cancellation is this? Foreign code may let a CancelledError of its own escape, from something it waited for
that was cancelled. Taken for ours, it would end a task in silence and lose what the task was doing."""

from __future__ import annotations

import asyncio


def cancelled_by_us() -> bool:
    """Whether a CancelledError caught now was meant for the running task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0

"""The boundary to the user's code: whatever it raises affects only one agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from batch_agent.dispatch.cancellation import worker_boundary
from batch_agent.errors import JobError, WorkerFailed
from batch_agent.foreign import boundary
from batch_agent.tools.threads import Threads

T = TypeVar("T")


def guarded(name: str, function: Callable[[], T]) -> T:
    """Return what ``function`` returns. Exceptions become a WorkerFailed that says ``name`` raised it.

    A JobError passes unchanged, because it has a message of its own. So does Ctrl-C.
    """
    with boundary(lambda raised: WorkerFailed(f"{name} raised {raised}"), JobError):
        return function()


async def called(threads: Threads, name: str, method: Callable[[], object]) -> object:
    """Return what ``method`` returns, run in a thread unless it is async. What it raises is as for ``guarded``."""
    with worker_boundary(f"{name} raised"):
        if inspect.iscoroutinefunction(method):
            return await method()
        value = await threads.run(method)
        return await value if inspect.isawaitable(value) else value

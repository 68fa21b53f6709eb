"""The boundary to the user's code: whatever it raises costs one agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from batch_agent.errors import JobError, WorkerFailed
from batch_agent.foreign import describe

T = TypeVar("T")


def guarded(name: str, function: Callable[[], T]) -> T:
    """Return what ``function`` returns. What it raises becomes a WorkerFailed that says ``name`` raised it.

    A JobError passes as it is: it says what is wrong in words of its own. So does Ctrl-C.
    """
    try:
        return function()
    except (JobError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise WorkerFailed(f"{name} raised {describe(error)}") from error

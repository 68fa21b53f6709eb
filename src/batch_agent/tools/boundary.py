"""The boundary to foreign code: whatever a tool does, a value, a ToolError or our own cancellation leaves here."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from batch_agent.errors import ToolError, ToolFailed
from batch_agent.foreign import describe
from batch_agent.tools.threads import Threads

T = TypeVar("T")
Work = Callable[[], object]
Read = Callable[[object], T]


async def run_foreign(name: str, work: Work, read: Read[T], threads: Threads | None) -> T:
    """What ``work`` returns or, where that is awaitable, what it comes to, read; in a thread unless ``threads`` is
    None. ``name`` is the tool's, for what it failed with."""
    task = asyncio.current_task()
    try:
        if threads is None:
            return read(await cast(Awaitable[object], work()))
        return await _in_thread(name, work, read, threads)
    except ToolError:
        raise
    except BaseException as error:
        if task is None or _is_for(task, error):
            raise
        raise failed(name, error) from error


async def _in_thread(name: str, work: Work, read: Read[T], threads: Threads) -> T:
    def begin() -> tuple[T] | Awaitable[object]:
        try:
            value = work()
            # Reading a large result is work too, and may call the tool's own objects.
            return value if inspect.isawaitable(value) else (read(value),)
        except Exception:
            raise
        except BaseException as error:
            # A thread of the pool is nobody's to exit or interrupt; on the loop this would look meant for us.
            raise failed(name, error) from error

    result = await threads.run(begin)
    return result[0] if isinstance(result, tuple) else read(await result)


def failed(name: str, error: BaseException) -> ToolFailed:
    if isinstance(error, asyncio.CancelledError):
        return ToolFailed(f"{name} failed: something it waited for was cancelled")
    return ToolFailed(f"{name} failed: {describe(error)}")


def _is_for(task: asyncio.Task[object], error: BaseException) -> bool:
    """Whether an exception on the event loop is meant for the task that runs a tool, rather than the tool's own."""
    match error:
        case asyncio.CancelledError():
            return task.cancelling() > 0
        case GeneratorExit():  # ours when the coroutine is being closed, not run
            return asyncio.current_task(task.get_loop()) is not task
        case KeyboardInterrupt():
            return threading.current_thread() is threading.main_thread()
    return False

"""The boundary to the code of tools: it returns a value, raises ToolError, or passes on our own cancellation."""

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
    """Run ``work``, await its result if it is awaitable, and return it converted by ``read``. ``work`` runs in a thread
    unless ``threads`` is None. ``name`` is the tool's name in errors."""
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
            # Converting a large result takes time too, and may call the tool's own objects.
            return value if inspect.isawaitable(value) else (read(value),)
        except Exception:
            raise
        except BaseException as error:
            # SystemExit or KeyboardInterrupt of a tool must not look like our own on the event loop.
            raise failed(name, error) from error

    result = await threads.run(begin)
    return result[0] if isinstance(result, tuple) else read(await result)


def failed(name: str, error: BaseException) -> ToolFailed:
    if isinstance(error, asyncio.CancelledError):
        return ToolFailed(f"{name} failed: something it waited for was cancelled")
    return ToolFailed(f"{name} failed: {describe(error)}")


def _is_for(task: asyncio.Task[object], error: BaseException) -> bool:
    """Return whether an exception on the event loop is for the task that runs a tool, and not the tool's own error."""
    match error:
        case asyncio.CancelledError():
            return task.cancelling() > 0
        case GeneratorExit():  # for the task if its coroutine is being closed, not run
            return asyncio.current_task(task.get_loop()) is not task
        case KeyboardInterrupt():
            return threading.current_thread() is threading.main_thread()
    return False

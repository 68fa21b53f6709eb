"""Threads for tools that are not async.

All state is changed on the event loop's thread, so there are no locks. Threads are daemons and start on demand: unlike
with ``concurrent.futures``, a tool that never returns cannot keep the interpreter from exiting. A gate of the pool
limits concurrent calls. A cancelled call keeps its thread until it returns, but leaves the gate, so that stuck calls do
not block others. Too many stuck calls are an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from batch_agent.errors import ToolError

THREADS = 64  # concurrent calls
STUCK = 256

T = TypeVar("T")
Work = Callable[[], None]


class _Worker:
    """A thread and its queue of work; None ends it."""

    def __init__(self, name: str) -> None:
        self.inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (work := self.inbox.get()) is not None:
            work()
            del work  # frees its arguments before the next call


class Threads:
    def __init__(self, stuck_limit: int = STUCK) -> None:
        self._stuck_limit = stuck_limit
        self._stuck = 0
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of the function, run in a thread in the caller's context. Cancelling discards it."""
        if self._stuck >= self._stuck_limit:
            raise ToolError(f"not started: {self._stuck} earlier calls that were cancelled are still running")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Callable[[], T]] = loop.create_future()
        context = contextvars.copy_context()
        worker = self._idle.pop() if self._idle else self._start()

        def work() -> None:
            answer = _call(context, function)
            # The loop is closed if the run ended before this call.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, worker, future, answer)

        worker.inbox.put(work)
        try:
            answer = await future
        finally:
            if future.cancelled():
                self._stuck += 1
        return answer()

    def close(self) -> None:
        """End the idle threads now, and each busy thread when its call returns."""
        for worker in self._workers:
            worker.inbox.put(None)
        for worker in self._idle:
            worker.thread.join()
        self._workers.clear()
        self._idle.clear()

    def _start(self) -> _Worker:
        worker = _Worker(f"batch-agent-tool-{len(self._workers) + 1}")
        self._workers.append(worker)
        return worker

    def _finish(self, worker: _Worker, future: asyncio.Future[Callable[[], T]], answer: Callable[[], T]) -> None:
        if future.cancelled():
            self._stuck -= 1
        else:
            future.set_result(answer)
        self._idle.append(worker)


def _call(context: contextvars.Context, function: Callable[[], T]) -> Callable[[], T]:
    """Call the function. Returns a function that returns its result or raises its exception.

    The exception is not set on a future, because a future refuses StopIteration.
    """
    try:
        value = context.run(function)
    except BaseException as error:  # noqa: BLE001
        caught = error

        def again() -> T:
            raise caught

        return again
    return lambda: value

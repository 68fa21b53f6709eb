"""A virtual clock: an event loop whose time jumps to the next timer when nothing else can happen.

Sleeps, timeouts and latencies take no real time and always happen in the same order. When everybody waits and no timer
is set, nothing will ever happen again: that is a VirtualClockDeadlock that names who waits where.

Limits. Work handed to threads with ``run_in_executor`` or ``asyncio.to_thread`` is waited for in real time, and the
clock stands still meanwhile; threads started in other ways are unknown to the loop, and the clock may jump while they
work. Sockets between two ends in this process work. Another process (a subprocess, a remote server) lives in real time:
the clock will jump past the timeouts meant for it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar, TypeVarTuple

from batch_agent.errors import BatchAgentError

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

Ready = list[tuple[selectors.SelectorKey, int]]

RESOLUTION = time.get_clock_info("monotonic").resolution  # within which the event loop takes a timer to be due
SOCKET_GRACE = 0.002  # real seconds that the kernel gets to carry bytes from one of our sockets to another
LAST_GRACE = 0.25  # the same before a deadlock is declared, which on a busy machine must not be wrong


class VirtualClockDeadlock(BatchAgentError):
    """Every task waits and no timer is set."""


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """``asyncio.run`` on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def virtual_clock(function: Callable[P, Coroutine[object, object, T]]) -> Callable[P, T]:
    """Decorates an async test: it becomes a plain one that runs on a virtual clock."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(function(*args, **kwargs))

    return run


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        self._threads_at_work = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def stall(self, seconds: float) -> None:
        """Let time pass in which the loop does nothing, as a callback does that blocks it."""
        self._now += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._threads_at_work += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._threads_at_work += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads_at_work -= 1

    def _thread_done(self, _: asyncio.Future[T]) -> None:
        self._threads_at_work -= 1

    def _wait(self, select: Callable[[float | None], Ready], sockets: int, timeout: float | None) -> Ready:
        """Stands in for waiting ``timeout`` seconds: what is ready, or else a jump."""
        ready = select(0)
        if ready or timeout == 0:
            return ready
        if self._threads_at_work:
            ready = select(timeout)
        elif sockets > 1:  # more than the loop's own wake-up pipe
            ready = select(SOCKET_GRACE if timeout is not None else LAST_GRACE)
        if not ready:
            if timeout is None:
                raise VirtualClockDeadlock(self._who_waits())
            self._now += timeout
            if self._now + RESOLUTION == self._now:
                # After some weeks a float is coarser than the loop's tolerance, and a timer that is due would never be.
                self._now += 2 * math.ulp(self._now)
        return ready

    def _who_waits(self) -> str:
        lines = [f"every task waits and no timer is set, at virtual time {self._now:g}:"]
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            lines.append(f"  {task.get_name()}: {_where(task.get_coro())}")
        return "\n".join(lines)


def _where(waiting: object) -> str:
    """The chain of coroutines from the task's own to the one that waits, and the line it waits in."""
    chain, place = [], "?"
    while inspect.iscoroutine(waiting) and waiting.cr_frame is not None:
        code = waiting.cr_frame.f_code
        chain.append(code.co_qualname)
        place = f"{code.co_filename}:{waiting.cr_frame.f_lineno}"
        waiting = waiting.cr_await
    return f"{' > '.join(chain)} ({place})"


class _JumpingSelector(selectors.DefaultSelector):
    """A real selector that leaves it to the loop what waiting means."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Ready:
        return self._loop._wait(super().select, len(self.get_map()), timeout)

"""A virtual clock: an event loop whose time jumps to the next timer when nothing else can run.

Sleeps, timeouts and latencies take no real time and always happen in the same order. If every task waits and no timer
is set, nothing can ever happen again: this raises VirtualClockDeadlock, which lists the waiting tasks.

Limits: work in threads from ``run_in_executor`` or ``asyncio.to_thread`` takes real time, and the clock stands still
meanwhile. The loop does not know threads started in other ways, so the clock may jump while they work. Sockets between
two ends in this process work. Another process (a subprocess, a remote server) runs in real time: the clock will jump
past timeouts meant for it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import ParamSpec, TypeVar, TypeVarTuple

from batch_agent.errors import BatchAgentError

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

Ready = list[tuple[selectors.SelectorKey, int]]

SOCKET_GRACE = 0.002  # real seconds for the kernel to carry bytes between two of our sockets
LAST_GRACE = 0.25  # the same before a deadlock is reported, which must be right even on a busy machine


class VirtualClockDeadlock(BatchAgentError):
    """Every task waits and no timer is set."""


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """Run ``main`` like ``asyncio.run``, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def virtual_clock(function: Callable[P, Coroutine[object, object, T]]) -> Callable[P, T]:
    """Decorate an async test: it becomes a plain function that runs on a virtual clock."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(function(*args, **kwargs))

    return run


class VirtualClockLoop(asyncio.SelectorEventLoop):
    _clock_resolution: float  # tolerance within which the event loop treats a timer as due

    def __init__(self) -> None:
        self._now = 0.0
        self._threads_at_work = 0
        super().__init__(_JumpingSelector(self))
        self.stall(0.0)

    def time(self) -> float:
        return self._now

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        # A delay that is too small to change the time would never pass: who waits for it again and again waits forever.
        if delay > 0 and self._now + delay == self._now:
            return self.call_at(math.nextafter(self._now, math.inf), callback, *args, context=context)
        return super().call_later(delay, callback, *args, context=context)

    def stall(self, seconds: float) -> None:
        """Let time pass while the loop does nothing, as with a blocking callback."""
        self._now += seconds
        # A timer fires when its time has come, not earlier: code that found it early and set it again would do so for
        # ever, because no time passes meanwhile.
        self._clock_resolution = math.ulp(self._now)

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
        """Replace waiting ``timeout`` seconds: return what is ready, or else jump."""
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
            self.stall(timeout)
        return ready

    def _who_waits(self) -> str:
        lines = [f"every task waits and no timer is set, at virtual time {self._now:g}:"]
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            lines.append(f"  {task.get_name()}: {_where(task.get_coro())}")
        return "\n".join(lines)


def _where(waiting: object) -> str:
    """Return the chain of coroutines from the task's own to the waiting one, and the line it waits in."""
    chain, place = [], "?"
    while inspect.iscoroutine(waiting) and waiting.cr_frame is not None:
        code = waiting.cr_frame.f_code
        chain.append(code.co_qualname)
        place = f"{code.co_filename}:{waiting.cr_frame.f_lineno}"
        waiting = waiting.cr_await
    return f"{' > '.join(chain)} ({place})"


class _JumpingSelector(selectors.DefaultSelector):
    """A real selector that lets the loop decide how to wait."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Ready:
        return self._loop._wait(super().select, len(self.get_map()), timeout)

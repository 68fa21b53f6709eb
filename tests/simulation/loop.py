"""An event loop on a virtual clock whose threads are simulated too, so that a whole run is deterministic.

What the package hands to a thread (its journal, above all) runs on the loop instead: at a later virtual time, one thing
at a time for each executor, as a real thread would. ``Threads`` decides how long each takes, and is called before and
after it happens: there a disk is slow and a process is killed. A call that would wait in its thread raises ``NotYet``,
and is made again a little later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from batch_agent.testing import VirtualClockDeadlock, VirtualClockLoop
from batch_agent.testing.clock import Ready

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_TURNS = 100_000  # of the loop at one moment of its clock: more do nothing but spin


LOOK_AGAIN = 0.05  # seconds between two looks of a call that waits


class NotYet(BaseException):
    """What a call waits for is not there. It is made again until it has waited for ``SimulatedLoop.waited`` seconds."""


class Threads(Protocol):
    def seconds(self, now: float) -> float:
        """How long the next thing waits before it happens."""
        ...

    def before_call(self) -> None: ...

    def after_call(self) -> None: ...


class SimulatedLoop(VirtualClockLoop):
    def __init__(self) -> None:
        super().__init__()
        self.threads: Threads | None = None
        self._free_at: WeakKeyDictionary[Executor, float] = WeakKeyDictionary()
        self._turns, self._turned_at = 0, 0.0
        self.waited = 0.0  # seconds for which the call that is being made has waited

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        threads = self.threads
        if threads is None:
            return super().run_in_executor(executor, func, *args)
        future: asyncio.Future[T] = self.create_future()
        begin = self.time()
        if executor is not None:
            begin = max(begin, self._free_at.get(executor, 0.0))
        begin += threads.seconds(begin)
        end = begin + 0.0005
        if executor is not None:
            self._free_at[executor] = end

        def call() -> None:
            if future.cancelled():
                return
            if self.time() < begin + LOOK_AGAIN:
                threads.before_call()
            self.waited = self.time() - begin
            try:
                result = func(*args)
            except NotYet:
                self.call_later(LOOK_AGAIN, call)
                return
            except Exception as error:  # noqa: BLE001
                self.call_at(max(end, self.time()), fail, future, error)
            else:
                self.call_at(max(end, self.time()), answer, future, result)
            threads.after_call()

        self.call_at(begin, call)
        return future

    def _wait(self, select: Callable[[float | None], Ready], sockets: int, timeout: float | None) -> Ready:
        self._turns = self._turns + 1 if self._turned_at == self.time() else 0
        self._turned_at = self.time()
        if self._turns > MOST_TURNS:
            raise VirtualClockDeadlock(f"the loop spins: {self._who_waits()}")
        return super()._wait(select, 1, timeout)  # the only socket is a run's control socket, to which no one connects

    def who_waits(self) -> str:
        return self._who_waits()


def answer(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

"""Delivers results: first to the callback, then through a bounded queue to the consumer.

A result leaves memory when it is taken. If results are not taken, or callbacks are slow, ``on_backlog`` stops the start
of new agents. Running agents finish, so at most the window plus the live agents' results are held.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.job import AgentResult

if TYPE_CHECKING:
    from batch_agent.run.learning import AuditFirst
    from batch_agent.run.pilot import Pilot

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

WINDOW = 1024  # results that may wait to be taken; above that, no new agent starts
CALLBACKS = 64  # async callbacks that may run; above that, no new agent starts


class Delivery(Generic[T]):
    """Delivers results. ``pilot`` counts them; results of the pilot's rows may wait until the user asks for them."""

    learning: AuditFirst | None = None
    _taker: asyncio.Future[None] | None = None
    _consumer: Callable[[AgentResult[T]], None] | None = None  # gets each result while it waits
    _closed = False
    _failure: BaseException | None = None
    _reported = False
    _callbacks = 0
    _full = False

    def __init__(
        self,
        on_result: Callable[..., object] | None,
        on_backlog: Callable[[bool], None],
        pilot: Pilot | None = None,
    ) -> None:
        self._on_result = on_result
        self._on_backlog, self._pilot = on_backlog, pilot
        self._ready: deque[AgentResult[T]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, result: AgentResult[T]) -> None:
        """Call the user's callback, then queue the result, even if the callback fails. A callback that is a coroutine
        runs in a task of its own; the result is queued when it ends."""
        if self._on_result is None:
            self.put(result)
            return
        try:
            outcome = self._on_result(result)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            self._report(error, result)
            outcome = None
        if not inspect.isawaitable(outcome):
            self.put(result)
            return
        self._callbacks += 1
        self._say_backlog()
        task = asyncio.get_running_loop().create_task(self._await(outcome, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, outcome: Awaitable[object], result: AgentResult[T]) -> None:
        try:
            await outcome
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled_by_us():
                raise
            self._report(error, result)
        finally:
            self._callbacks -= 1
            self.put(result)

    def _report(self, error: BaseException, result: AgentResult[T]) -> None:
        if not self._reported:
            self._reported = True
            logger.error(
                "on_result raised for job %s; further exceptions are not logged", result.job_id, exc_info=error
            )

    async def settle(self) -> None:
        """Wait until all callbacks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel the callbacks that still run, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def put(self, result: AgentResult[T]) -> None:
        if self.learning is not None:
            self.learning.took(result)
        if self._pilot is not None:
            self._pilot.took(result)
        if self._consumer is None:
            self._ready.append(result)
            self._wake()
        else:
            try:
                self._consumer(result)
            except BaseException as error:  # the caller of ``pass_to`` gets it  # noqa: BLE001
                self._consumer = None
                if self._taker is not None and not self._taker.done():
                    self._taker.set_exception(error)
        self._say_backlog()

    def close(self, failure: BaseException | None = None) -> None:
        """End the results. The consumer gets the failure, if any, after the last one."""
        if not self._closed:
            self._closed, self._failure = True, failure
            if self._pilot is not None:
                self._pilot.close()
            self._wake()

    async def take(self) -> AgentResult[T] | None:
        """Return the next result; None when the run is over. Raises the exception with which the run failed."""
        while not self._ready:
            if self._is_over():
                return None
            await self._wait()
        result = self._ready.popleft()
        self._say_backlog()
        return result

    async def pass_to(self, consumer: Callable[[AgentResult[T]], None]) -> None:
        """Call ``consumer`` with each result as soon as it is there, until the run is over. Raises the exception that
        the run failed with, or that the consumer raised."""
        while True:
            while self._ready:
                consumer(self._ready.popleft())
                self._say_backlog()
            if self._is_over():
                return
            try:
                await self._wait(consumer)
            finally:
                self._consumer = None

    def _is_over(self) -> bool:
        """Return whether no more results come. Raises the exception that the run failed with, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._closed

    async def _wait(self, consumer: Callable[[AgentResult[T]], None] | None = None) -> None:
        """Wait until results are ready, or until the end. Meanwhile the consumer gets each one."""
        if self._taker is not None:
            raise RuntimeError("the results of this run are already being read; read them in one place")
        self._taker = asyncio.get_running_loop().create_future()
        self._consumer = consumer
        try:
            await self._taker
        finally:
            self._taker = None

    def _say_backlog(self) -> None:
        window = WINDOW if self._pilot is None else WINDOW + self._pilot.rows
        full = len(self._ready) >= window or self._callbacks >= CALLBACKS
        if full != self._full:
            self._full = full
            self._on_backlog(full)

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

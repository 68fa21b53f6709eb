"""Delivers results: first to the callback, then through a bounded queue to the consumer.

A result leaves memory when it is taken. If results are not taken, or callbacks are slow, ``on_backlog`` stops the start
of new agents. Running agents finish, so at most the window plus the live agents' results are held.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.job import AgentResult

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

WINDOW = 1024  # results that may wait to be taken; above that, no new agent starts
CALLBACKS = 64  # async callbacks that may run; above that, no new agent starts


class Delivery(Generic[T]):
    def __init__(self, on_result: Callable[..., object] | None, on_backlog: Callable[[bool], None]) -> None:
        self._on_result = on_result
        self._on_backlog = on_backlog
        self._ready: deque[AgentResult[T]] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._reported = False
        self._callbacks = 0
        self._full = False

    async def deliver(self, result: AgentResult[T]) -> None:
        """Call the user's callback, then queue the result, even if the callback fails."""
        try:
            if self._on_result is not None:
                outcome = self._on_result(result)
                if inspect.isawaitable(outcome):
                    self._callbacks += 1
                    self._say_backlog()
                    try:
                        await outcome
                    finally:
                        self._callbacks -= 1
                        self._say_backlog()
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled_by_us():
                raise
            if not self._reported:
                self._reported = True
                logger.exception("on_result raised for job %s; further exceptions are not logged", result.job_id)
        finally:
            self.put(result)

    def put(self, result: AgentResult[T]) -> None:
        self._ready.append(result)
        self._say_backlog()
        self._wake()

    def close(self, failure: BaseException | None = None) -> None:
        """End the results. The consumer gets the failure, if any, after the last one."""
        if not self._closed:
            self._closed, self._failure = True, failure
            self._wake()

    async def take(self) -> AgentResult[T] | None:
        """Return the next result; None when the run is over. Raises the exception that the run failed with."""
        while not self._ready:
            if self._closed:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                return None
            if self._taker is not None:
                raise RuntimeError("the results of this run are already being read; read them in one place")
            self._taker = asyncio.get_running_loop().create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        result = self._ready.popleft()
        self._say_backlog()
        return result

    def _say_backlog(self) -> None:
        full = len(self._ready) >= WINDOW or self._callbacks >= CALLBACKS
        if full != self._full:
            self._full = full
            self._on_backlog(full)

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

"""Runs identical tool calls and requests of all workers of a run only once.

The first worker that needs a call runs it. The others wait until it ends: the store reports finished calls, so they do
not poll. Once per second they ask again, because the worker that runs the call may be dead.
"""

from __future__ import annotations

import asyncio
from itertools import count

from batch_agent.backends.base import Found
from batch_agent.dispatch.cancellation import shielded
from batch_agent.errors import StoreError
from batch_agent.record.store import SharedCall, Store

LOOK_AGAIN = 1.0  # seconds
MOST_KEPT = 24 * 3600.0  # seconds


class SharedCalls:
    """``worker`` is the name under which this process is a member of the run."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store, self._worker = store, worker
        self._numbers = count()
        self._waiting: dict[str, asyncio.Future[None]] = {}  # by key, until the call ends or a second has passed
        self._listener: asyncio.Task[None] | None = None
        self._writes: set[asyncio.Future[None]] = set()  # reports of finished calls that are in flight

    async def begin(self, key: str) -> Found | str:
        token, seen = f"{self._worker}:{next(self._numbers)}", ""
        while True:
            call = await self._ask(key, token, seen)
            if call.state == "done":
                return Found(call.text, call.ok)
            if call.state == "mine":
                return call.token
            seen = call.token
            await self._until_ended(key, call.position)

    def end(self, key: str, token: str, found: Found | None, keep: float) -> None:
        text, ok = (None, False) if found is None else (found.text, found.ok)
        kept = min(keep, MOST_KEPT)
        write = self._store.end_call(key, token, text, ok, kept)
        self._writes.add(write)
        write.add_done_callback(self._written)

    async def close(self) -> None:
        """Wait until every finished call is reported."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        if self._writes:
            await asyncio.wait(list(self._writes))

    async def _ask(self, key: str, token: str, seen: str) -> SharedCall:
        asking = self._store.begin_call(self._worker, key, token, seen)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: self._abandon(key, asked))
            raise

    def _abandon(self, key: str, asked: asyncio.Future[SharedCall]) -> None:
        """Release a call that was granted after its caller was cancelled."""
        if not asked.cancelled() and asked.exception() is None and asked.result().state == "mine":
            self.end(key, asked.result().token, None, 0.0)

    def _written(self, write: asyncio.Future[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled():
            write.exception()  # others can run the call when this worker's membership expires

    async def _until_ended(self, key: str, position: str) -> None:
        waiter = self._waiting.get(key)
        if waiter is None:
            waiter = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(self._listen(position))
        await shielded(waiter)

    async def _listen(self, position: str) -> None:
        loop, asked_at = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while self._waiting:
            try:
                position, ended = await shielded(self._store.wait_calls(position, LOOK_AGAIN))
            except StoreError as error:
                for key in tuple(self._waiting):
                    self._wake(key, error)
                return
            if loop.time() - asked_at >= LOOK_AGAIN:
                asked_at, ended = loop.time(), set(self._waiting)
            for key in ended & self._waiting.keys():
                self._wake(key)

    def _wake(self, key: str, error: StoreError | None = None) -> None:
        waiter = self._waiting.pop(key)
        if not waiter.done():
            waiter.set_result(None) if error is None else waiter.set_exception(error)

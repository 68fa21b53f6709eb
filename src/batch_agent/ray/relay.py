"""Gives the workers of a Ray cluster access to the record in the driver's run directory.

Workers call an actor. The driver takes the calls from the actor, makes them on its own store, and returns the answers.
So the record stays in the driver's process and directory, even if the driver is not a node of the cluster (``ray://``).
Ray repeats the calls of an actor that was restarted. This is safe, because the store's calls can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, cast

from batch_agent.errors import BatchAgentError, StoreError
from batch_agent.record.lent import LentStore
from batch_agent.record.shared import RunStore

THREADS = 512  # most waiting calls: each worker has one that waits for rows
POLL_SECONDS = 5.0  # then the answer is empty, so that no call waits for a dead driver

Call = tuple[int, str, str, tuple[object, ...], dict[str, object]]  # number, store, method, arguments
Answer = tuple[int, object]  # number, and the value that the method returned or the error that it raised


class Relay:
    """The actor. ``call`` is for workers; ``calls`` and ``answer`` are for the driver."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[object]] = {}
        self._waiting: list[Call] = []
        self._came = asyncio.Event()
        self._number = 0

    async def call(self, store: str, method: str, arguments: tuple[object, ...], named: dict[str, object]) -> object:
        self._number += 1
        number = self._number
        self._open[number] = answer = asyncio.get_running_loop().create_future()
        self._waiting.append((number, store, method, arguments, named))
        self._came.set()
        try:
            return await answer
        finally:
            del self._open[number]

    async def calls(self) -> list[Call]:
        """Wait for calls and return them; an empty list after POLL_SECONDS."""
        try:
            await asyncio.wait_for(self._came.wait(), POLL_SECONDS)
        except TimeoutError:
            return []
        self._came.clear()
        calls, self._waiting = self._waiting, []
        return calls

    async def answer(self, answers: list[Answer]) -> None:
        for number, value in answers:
            call = self._open.get(number)
            if call is not None and not call.done():
                call.set_result(value)


class RelayedStore:
    """The worker's side: has every method of one of the driver's stores. Blocking and thread-safe."""

    def __init__(self, relay: Any, store: Literal["rows", "lent"]) -> None:
        self._relay, self._store = relay, store

    def __getattr__(self, method: str) -> Callable[..., object]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: object, **named: object) -> object:
            import ray

            try:
                answer = ray.get(self._relay.call.remote(self._store, method, arguments, named))
            except ray.exceptions.RayError as error:
                raise StoreError(f"the driver of this run is unreachable: {error}") from None
            if isinstance(answer, BatchAgentError):
                raise answer
            return answer

        return call

    def lent(self) -> RelayedStore:
        return RelayedStore(self._relay, "lent")

    def close(self) -> None:
        """Do nothing: the driver owns the store, and it stays open."""


def relayed(relay: Any) -> RunStore:
    """Return the store behind a relay, for a worker."""
    return cast(RunStore, RelayedStore(relay, "rows"))


class RelayServer:
    """The driver's side: makes the calls that arrive at ``relay``, until ``close``."""

    def __init__(self, relay: Any, store: RunStore) -> None:
        self._relay = relay
        self._stores: dict[str, RunStore | LentStore] = {"rows": store, "lent": store.lent()}
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS, "batch-agent-relay")
        self._stopping = False
        self._loops = [Thread(target=loop, daemon=True) for loop in (self._take_calls, self._send_answers)]
        for thread in self._loops:
            thread.start()

    def close(self) -> None:
        """End the relay. Blocks until no thread uses Ray, because Ray may be shut down next."""
        import ray

        self._stopping = True
        ray.kill(self._relay)
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._answers.put(None)
        for thread in self._loops:
            thread.join()

    def _take_calls(self) -> None:
        import ray

        while not self._stopping:
            try:
                calls = cast("list[Call]", ray.get(self._relay.calls.remote()))
            except ray.exceptions.RayError:
                continue  # the actor is being restarted, or was killed by ``close``
            for call in calls:
                if not self._stopping:
                    self._threads.submit(self._make, call)

    def _make(self, call: Call) -> None:
        number, store, method, arguments, named = call
        try:
            value = getattr(self._stores[store], method)(*arguments, **named)
        except BatchAgentError as error:
            value = error
        except Exception as error:  # a bug of this package; the worker must get an answer
            value = StoreError(f"{method} failed in the driver: {type(error).__name__}: {error}")
        self._answers.put((number, value))

    def _send_answers(self) -> None:
        """Send all answers that are ready in one call."""
        while (first := self._answers.get()) is not None:
            answers = [first]
            while not self._answers.empty():
                another = self._answers.get()
                if another is None:
                    return
                answers.append(another)
            if not self._stopping:
                self._relay.answer.remote(answers)

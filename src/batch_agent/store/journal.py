"""The journal as agents see it: steps are added without waiting, and waited for where the agent may not go on before.

Group commit. While one commit is on its way to the disk everything that is added gathers for the next one; a commit
costs the same for one record and for a thousand, so the disk never limits how many agents run. All bookkeeping is on
the event loop's thread; the store is used in one thread of its own, which runs one thing at a time and in order.

A disk that is slow, or kept busy by another process, is waited for. Meanwhile no request should be sent: its answer
could not be recorded soon. ``on_overdue`` says when that begins and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from batch_agent.errors import StoreError
from batch_agent.job import AgentResult
from batch_agent.store.base import Account, Entry, Identity, Progress, Store
from batch_agent.store.steps import Past

T = TypeVar("T")

GATHERING = 0.006  # seconds that a commit waits for company: nothing beside a model call, and a third of the commits
OVERDUE = 1.0  # seconds that a commit may take before no new request is sent
BACKLOG = 1024  # records and lines that may wait for the disk before no new agent starts
AT_ONCE = 64  # agents that go on in the same turn of the event loop after a commit


class Log(Protocol):
    """Where results are written for people. Runs in the journal's thread; raises StoreError."""

    def write(self, results: Sequence[AgentResult[object]]) -> None: ...


class NoAccount:
    """Of a session that spends nothing."""

    def so_far(self) -> tuple[int, float | None]:
        return 0, None

    def lease(self) -> tuple[int, float] | None:
        return None

    def learnt(self) -> tuple[int, ...] | None:
        return None

    def leased(self, error: StoreError | None = None) -> None:
        return


class Journal:
    """``account`` is what the session spends. ``on_backlog`` is told when more waits for the disk than new agents may
    add to, and when that is over; ``on_overdue`` when a commit takes too long, and when it is done."""

    def __init__(
        self,
        store: Store,
        log: Log,
        thread: ThreadPoolExecutor,
        *,
        next_agent: int = 1,
        account: Account | None = None,
        on_backlog: Callable[[bool], None] = lambda _: None,
        on_overdue: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._store, self._log, self._thread = store, log, thread
        self._loop = asyncio.get_running_loop()
        self._next_agent = next_agent
        self._account: Account = NoAccount() if account is None else account
        self._on_backlog, self._on_overdue = on_backlog, on_overdue
        self._alarm: asyncio.TimerHandle | None = None
        self._is_overdue = False
        self._touched = False  # a commit is wanted, whatever is in it
        self._backlogged = False
        self._entries: list[Entry] = []
        self._results: list[AgentResult[object]] = []
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._gathering = 1  # the number of the next commit
        self._durable = 0  # the number of the last that is on disk
        self._busy = False  # a commit is on its way, or about to be
        self._failure: StoreError | None = None
        self._ok = self._failed = self._resumed = 0
        self._on_its_way = self._recorded = Progress()

    @property
    def progress(self) -> Progress:
        """The rows that are on disk, and what the session has spent."""
        tokens, cost = self._account.so_far()
        return replace(self._recorded, tokens=tokens, cost=cost, lease=None, learnt=self._account.learnt())

    def new_agent(self) -> int:
        agent = self._next_agent
        self._next_agent += 1
        return agent

    def add(self, entry: Entry) -> int:
        """Take a step into the next commit, whose number this is: ``wait`` for that."""
        if self._failure is not None:
            raise self._failure
        self._entries.append(entry)
        self._wake()
        return self._gathering

    def publish(self, result: AgentResult[object]) -> int:
        """Write a result to the run's files, after everything that was added before it is on disk."""
        if self._failure is not None:
            raise self._failure
        self._results.append(result)
        if result.ok:
            self._ok += 1
        else:
            self._failed += 1
        self._resumed += result.resumed
        self._wake()
        return self._gathering

    def touch(self) -> None:
        """Commit soon, although nothing was added: what the session has spent, and its lease."""
        if self._failure is None:
            self._touched = True
            self._wake()

    async def wait(self, commit: int) -> None:
        """Until that commit is on disk. Raises StoreError when it never will be."""
        if self._failure is not None:
            raise self._failure
        if commit <= self._durable:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.setdefault(commit, []).append(waiter)
        await waiter

    async def claim(self, wanted: Sequence[Identity]) -> list[Past | None]:
        return await self.in_thread(lambda: self._store.claim(wanted))

    def flush(self) -> asyncio.Future[None]:
        """Done when everything added or published is on disk, or never will be."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self._failure is not None:
            waiter.set_exception(self._failure)
        elif self._busy:
            last = self._gathering if self._is_wanted else self._gathering - 1
            self._waiters.setdefault(last, []).append(waiter)
        else:
            waiter.set_result(None)
        return waiter

    def in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._thread, function)

    @property
    def _is_wanted(self) -> bool:
        """Whether there is something for another commit."""
        return bool(self._entries or self._results or self._touched)

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._loop.call_later(GATHERING, self._commit)
        elif not self._backlogged and len(self._entries) + len(self._results) >= BACKLOG:
            self._backlogged = True
            self._on_backlog(True)

    def _commit(self) -> None:
        entries, self._entries = self._entries, []
        results, self._results = self._results, []
        self._touched = False
        self._gathering += 1
        lease = self._account.lease()
        progress = self._on_its_way = Progress(
            self._ok, self._failed, self._resumed, *self._account.so_far(), lease, self._account.learnt()
        )
        self._alarm = self._loop.call_later(OVERDUE, self._set_overdue, True)
        self.in_thread(lambda: self._write(entries, results, progress)).add_done_callback(self._committed)

    def _write(self, entries: list[Entry], results: list[AgentResult[object]], progress: Progress) -> None:
        self._store.commit(entries, progress)
        if results:
            self._log.write(results)

    def _committed(self, commit: asyncio.Future[None]) -> None:
        number = self._gathering - 1
        error = asyncio.CancelledError() if commit.cancelled() else commit.exception()
        if self._alarm is not None:
            self._alarm.cancel()
        self._set_overdue(False)
        if error is None:
            self._durable = number
            self._recorded = self._on_its_way
            self._account.leased()
            self._release(self._waiters.pop(number, []))
        else:
            self._fail(error if isinstance(error, StoreError) else StoreError(f"the run cannot be recorded: {error!r}"))
        self._busy = self._is_wanted
        if self._busy:
            self._loop.call_later(GATHERING, self._commit)
        if self._backlogged and len(self._entries) < BACKLOG:
            self._backlogged = False
            self._on_backlog(False)

    def _set_overdue(self, overdue: bool) -> None:
        if overdue != self._is_overdue:
            self._is_overdue = overdue
            self._on_overdue(overdue)

    def _fail(self, error: StoreError) -> None:
        self._failure = error
        self._entries.clear()
        self._results.clear()
        self._touched = False
        self._account.leased(error)
        waiters, self._waiters = self._waiters, {}
        for waiting in waiters.values():
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_exception(error)

    def _release(self, waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters[:AT_ONCE]:
            if not waiter.done():
                waiter.set_result(None)
        if len(waiters) > AT_ONCE:
            self._loop.call_soon(self._release, waiters[AT_ONCE:])

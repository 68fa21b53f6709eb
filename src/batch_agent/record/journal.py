"""The journal as agents use it: adding a step does not block; an agent waits only before a step that needs the record.

Group commit: while one commit is being written, all new records are collected for the next one. A commit costs about
the same for one record and for a thousand, so the disk does not limit how many agents run. All bookkeeping is on the
event loop's thread. The store is used in its own thread, one operation at a time and in order.

A slow disk, or a file locked by another process, is waited for. Meanwhile no request should be sent, because its answer
could not be recorded soon. ``on_overdue`` reports when that begins and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from batch_agent.errors import StoreError
from batch_agent.job import AgentResult
from batch_agent.record.base import Account, Entry, Identity, Progress, Store
from batch_agent.record.steps import Past

T = TypeVar("T")

GATHERING = 0.006  # seconds that a commit waits for more records: little beside a model call, a third of the commits
OVERDUE = 1.0  # seconds that a commit may take before no new request is sent
BACKLOG = 1024  # records and lines that may wait for the disk; above that, no new agent starts
AT_ONCE = 64  # agents that are resumed in the same turn of the event loop after a commit


class Log(Protocol):
    """Writes results for people. Runs in the journal's thread; raises StoreError."""

    def write(self, results: Sequence[AgentResult[object]]) -> None: ...


class Journal:
    """``account`` reports what the session spends. ``on_backlog`` is called with True when too many records wait for
    the disk to start new agents, and with False when that ends. ``on_overdue`` is called with True when a commit takes
    too long, and with False when it is done."""

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
        self._account = Account() if account is None else account
        self._on_backlog, self._on_overdue = on_backlog, on_overdue
        self._alarm: asyncio.TimerHandle | None = None
        self._is_overdue = False
        self._touched = False  # a commit was requested, even without new records
        self._committing_since = self._gathering_since = 0.0  # when the oldest record that is not on disk was added
        self._backlogged = False
        self._entries: list[Entry] = []
        self._results: list[AgentResult[object]] = []
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._gathering = 1  # the number of the next commit
        self._durable = 0  # the number of the last commit on disk
        self._busy = False  # a commit is running or scheduled
        self._failure: StoreError | None = None
        self._ok = self._failed = self._resumed = 0
        self._on_its_way = self._recorded = Progress()

    @property
    def progress(self) -> Progress:
        """The rows that are on disk, and what the session has spent."""
        tokens, cost = self._account.so_far()
        return replace(self._recorded, tokens=tokens, cost=cost, lease=None, learnt=self._account.learnt())

    @property
    def lag(self) -> float:
        """Seconds since the oldest record that is not on disk was added; 0 if there is none."""
        if not self._busy:
            return 0.0
        return self._loop.time() - (self._committing_since or self._gathering_since)

    def new_agent(self) -> int:
        agent = self._next_agent
        self._next_agent += 1
        return agent

    def add(self, entry: Entry) -> int:
        """Add a step to the next commit. Returns the number of that commit, for ``wait``."""
        if self._failure is not None:
            raise self._failure
        self._entries.append(entry)
        self._wake()
        return self._gathering

    def publish(self, result: AgentResult[object]) -> int:
        """Write a result to the run's files after everything added before it is on disk. Returns the number of the
        commit."""
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
        """Commit soon even without new records, to write what the session has spent, and its lease."""
        if self._failure is None:
            self._touched = True
            self._wake()

    async def wait(self, commit: int) -> None:
        """Wait until that commit is on disk. Raises StoreError if the journal has failed."""
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
        """Return a future that is done when everything added or published is on disk. It raises StoreError if the
        journal has failed."""
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
        """Whether there is something to write in another commit."""
        return bool(self._entries or self._results or self._touched)

    def _wake(self) -> None:
        if not self._gathering_since:
            self._gathering_since = self._loop.time()
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
        self._committing_since, self._gathering_since = self._gathering_since, 0.0
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
        self._committing_since = 0.0
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

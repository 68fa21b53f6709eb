"""Time limits of many requests on one timer.

A deadline cancels the task that entered it, as ``asyncio.timeout`` does, and turns that cancellation into TimeoutError.
Unlike ``asyncio.timeout`` it knows when the event loop stalled: answers that arrived during a stall have not been read
yet, so a timer that fires late extends the deadline by the lateness. A deadline at the end of a stall is not late.
So each deadline expires one turn of the loop after its timer, once everything that has arrived was delivered.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from types import TracebackType
from typing import Self

LATE = 0.25  # seconds after which a timer counts as late
MOST_EXTENSIONS = 10  # of one deadline: a loop that is always late must not keep it open forever
FEW = 256  # entries: a smaller heap is never compacted


class Deadline:
    """A time limit: ``with deadline:`` around the slow part. Entered once, by the task that waits."""

    __slots__ = ("_cancelling", "_deadlines", "_extensions", "_task", "expired", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self._deadlines = deadlines
        self.when = when  # on the event loop's clock
        self.expired = False
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._extensions = 0

    def reschedule(self, when: float) -> None:
        if not self.expired and when != self.when:
            self.when = when
            if self._task is not None:
                self._deadlines._add(self)

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._deadlines._loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        if self.when < inf:
            self._deadlines._add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self.expired or task is None or task.uncancel() > self._cancelling or kind is None:
            return
        if issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def _expire(self) -> None:
        if self._task is not None:
            self.expired = True
            self._task.cancel()

    def _extend(self, seconds: float) -> bool:
        """Extend the deadline. Returns False if it was already extended too often."""
        self._extensions += 1
        self.when += seconds
        return self._extensions <= MOST_EXTENSIONS


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []  # entries of a moved or ended deadline are stale
        self._compact_at = FEW  # entries; without this, stale ones stay until their time, thousands a second
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def after(self, seconds: float | None) -> Deadline:
        """Return a deadline that many seconds from now. None means no limit until it is rescheduled."""
        return Deadline(self, inf if seconds is None else self._loop.time() + seconds)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()

    def _add(self, deadline: Deadline) -> None:
        self._number += 1
        heap = self._heap
        heappush(heap, (deadline.when, self._number, deadline))
        if len(heap) > self._compact_at:
            heap[:] = [entry for entry in heap if not _is_stale(entry)]
            heapify(heap)
            self._compact_at = max(FEW, 2 * len(heap))
        timer = self._timer
        if timer is None or deadline.when < timer.when():
            self._set_timer(deadline.when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        now, heap = self._loop.time(), self._heap
        assert self._timer is not None
        late = now - self._timer.when()
        self._timer = None
        while heap and (heap[0][0] <= now or _is_stale(heap[0])):
            when, _, deadline = heappop(heap)
            if deadline.when != when or deadline._task is None:
                continue
            if late > LATE and deadline._extend(late):
                self._number += 1
                heappush(heap, (deadline.when, self._number, deadline))
            else:
                self._loop.call_soon(deadline._expire)
        if heap:
            self._set_timer(heap[0][0])


def _is_stale(entry: tuple[float, int, Deadline]) -> bool:
    return entry[2].when != entry[0] or entry[2]._task is None

"""The scheduler's decisions made awaitable: requests wait here for a slot, feeds wait here for room.

All state that decides is in ``scheduler``; this file maps tickets to futures and time to ``loop.call_at``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from batch_agent.dispatch.feed import Feed
from batch_agent.errors import Interrupted, JobError
from batch_agent.scheduler.blame import SEVERAL
from batch_agent.scheduler.core import Scheduler, Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.forecast import Progress


class Watcher(Protocol):
    """Told what becomes of slots."""

    @property
    def deciding(self) -> int:
        """Rows whose request failed and of which it is not known whose fault that is."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a row waits for evidence."""
        ...

    def sent(self, ticket: Ticket) -> None:
        """The ticket has its slot."""
        ...

    def released(self, ticket: Ticket) -> None:
        """It has given it back."""
        ...

    def idle(self) -> None:
        """No row will be sent, as far as is known: only what is in flight can still decide something."""
        ...

    def spare(self) -> None:
        """At the end of the batch: every turn has its slot, and slots stay idle."""
        ...


class Slots:
    def __init__(self, scheduler: Scheduler, watcher: Watcher) -> None:
        self.scheduler = scheduler
        self._watcher = watcher
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._sleepers: dict[asyncio.Future[None], None] = {}
        self._feeds: list[Feed] = []
        self._fed = False  # there was a feed: what comes is known by it
        self._alarm: asyncio.TimerHandle | None = None  # for turns that have waited long enough for their endpoint
        self.stopped = False  # no request is sent any more, whoever holds a slot
        self.refusal = ""  # why no slot is granted any more
        self._paused_by: set[str] = set()  # why no slot is granted for now

    # Slots

    def claim(
        self, progress: Progress, turns: int, *, avoid: Endpoint | None = None, pinned: Endpoint | None = None
    ) -> Ticket:
        """Join the queue for a slot; it may be granted at once. Follow it with ``hold``, or ``release`` it."""
        ticket = self.scheduler.request(progress, turns, asyncio.get_running_loop().time(), pinned)
        if avoid is not None:
            ticket.avoid = frozenset({avoid})
        self.pump()
        return ticket

    async def hold(self, ticket: Ticket) -> None:
        """Wait until the slot is granted. Cancelled while waiting, the claim is withdrawn. Raises Interrupted when no
        slot will be granted any more."""
        try:
            if ticket.state != "held":
                if self.refusal:
                    raise Interrupted(self.refusal)
                waiter = asyncio.get_running_loop().create_future()
                self._waiters[ticket] = waiter
                await waiter
            if self.stopped:  # the cancellation of this task is on its way
                await asyncio.get_running_loop().create_future()
        except BaseException:
            self._waiters.pop(ticket, None)
            self.release(ticket)
            raise

    def release(self, ticket: Ticket) -> None:
        """Give the slot back, or withdraw the claim. Doing it twice is harmless."""
        held = ticket.state == "held"
        self.scheduler.give_back(ticket)
        if held:
            self._watcher.released(ticket)
        if ticket.endpoint is not None:
            ticket.endpoint.tell_others()
        self.pump()

    def reject(self, ticket: Ticket, error: JobError) -> None:
        """It waits for a slot, and does not get one."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is not None and not waiter.done():
            self.scheduler.give_back(ticket)
            waiter.set_exception(error)

    async def again(self, ticket: Ticket, delay: float) -> None:
        """Join the queue again after ``delay`` seconds, to repeat a failed request."""
        if delay:
            self.scheduler.backing_off += 1
            try:
                await self._sleep(delay)
            finally:
                self.scheduler.backing_off -= 1
                self.pump()
        self.scheduler.again(ticket)
        self.pump()

    async def _sleep(self, delay: float) -> None:
        if self.refusal:
            raise Interrupted(self.refusal)
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        self._sleepers[sleeper] = None
        timer = loop.call_later(delay, _wake, sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            self._sleepers.pop(sleeper, None)

    # Feeds

    def feed(self, on_close: Callable[[], None]) -> Feed:
        feed = Feed(self, on_close)
        self._feeds.append(feed)
        self._fed = True
        return feed

    def forget(self, feed: Feed) -> None:
        self._feeds.remove(feed)
        self.look_ahead()

    def look_ahead(self) -> None:
        """What is still to come has changed."""
        rows: int | None = 0 if self._fed else None
        for feed in self._feeds:
            rows = None if rows is None or feed.rows is None else rows + feed.rows
        self.scheduler.forecast.rows = rows
        self._check_idle()

    @property
    def all_fed(self) -> bool:
        return all(feed.is_fed for feed in self._feeds)

    @property
    def waits(self) -> bool:
        """Whether a row waits for evidence of whose fault its failures are."""
        return self._watcher.waits

    @property
    def few_rows(self) -> bool:
        """Too few rows are left to tell a bad row from a bad endpoint."""
        return self.scheduler.busy + self._watcher.deciding < SEVERAL and self.all_fed

    @property
    def is_hungry(self) -> bool:
        """Whether another slot would be used now."""
        scheduler, most = self.scheduler, self.scheduler.max_inflight
        if scheduler.paused or self.refusal or (most is not None and scheduler.inflight >= most):
            return False
        if scheduler.wanted:
            return True
        agents = scheduler.max_agents
        if scheduler.closed or scheduler.backlogged or (agents is not None and scheduler.agents >= agents):
            return False
        return any(feed.is_hungry for feed in self._feeds)

    # Control

    def drain(self) -> None:
        """Nothing new starts; agents under way go on."""
        self.scheduler.closed = True
        for feed in tuple(self._feeds):
            feed.close()
        self.pump()

    def refuse(self, why: str, others: Iterable[asyncio.Future[None]] = ()) -> None:
        """No slot is granted any more: requests in flight finish; whoever waits for a slot, or for one of ``others``,
        is Interrupted."""
        self.refusal = self.refusal or why
        for waiter in (*self._waiters.values(), *self._sleepers, *others):
            if not waiter.done():
                waiter.set_exception(Interrupted(self.refusal))
        self._waiters.clear()
        self.drain()

    def stop(self) -> None:
        """The run is being left: from now on no request is sent, whoever holds a slot."""
        self.stopped = True
        self.drain()

    def pause(self, paused: bool) -> None:
        """While paused no request is sent; those in flight finish."""
        self.set_paused_by("the user", paused)

    def set_short_of_budget(self, short: bool) -> None:
        """While a request waits for others to be settled, no other gets a slot: it would only wait behind it."""
        self.set_paused_by("the budget", short)

    def set_paused_by(self, reason: str, paused: bool) -> None:
        """No slot is granted while there is a reason."""
        if paused != (reason in self._paused_by):
            self._paused_by ^= {reason}
            self.scheduler.paused = bool(self._paused_by)
            self.pump()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def pump(self) -> None:
        """Grant every slot that can be granted, then wake the feeds if a new agent may start."""
        scheduler = self.scheduler
        if scheduler.wanted and not self.refusal:
            now = asyncio.get_running_loop().time()
            while (ticket := scheduler.grant(now)) is not None:
                waiter = self._waiters.pop(ticket, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
                self._watcher.sent(ticket)
            if now < scheduler.due < inf:  # one that is overdue waits for a slot, not for the clock
                self._set_alarm(scheduler.due)
        # The youngest first: they work on others' results, and bring the whole to its end.
        hungry = [feed for feed in reversed(self._feeds) if feed.room is not None]
        if hungry and scheduler.has_room(asyncio.get_running_loop().time()):
            for feed in hungry:
                feed.wake()
        else:
            self._check_idle()

    def _check_idle(self) -> None:
        scheduler = self.scheduler
        if scheduler.wanted:
            return
        all_fed = self.all_fed
        if self._watcher.waits and not scheduler.backing_off and (all_fed or scheduler.is_full):
            self._watcher.idle()
        if all_fed and scheduler.inflight and len(scheduler.endpoints) > 1:
            self._watcher.spare()

    def _set_alarm(self, due: float) -> None:
        if self._alarm is None or due < self._alarm.when():
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_at(due, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.pump()


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)

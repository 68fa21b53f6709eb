"""Makes the scheduler awaitable: requests wait here for a slot, feeds wait here for room.

All deciding state is in ``scheduler``. This file maps tickets to futures and times to ``loop.call_at``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import cached_property
from math import inf
from typing import Protocol

from batch_agent.dispatch.feed import Feed
from batch_agent.errors import Interrupted, JobError
from batch_agent.scheduler.blame import SEVERAL
from batch_agent.scheduler.core import Scheduler, Slot, Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.forecast import AgentProgress


class Watcher(Protocol):
    """Receives what happens to slots."""

    @property
    def deciding(self) -> int:
        """Return the number of rows with a failed request for which it is not yet decided which side is at fault."""
        ...

    @property
    def waits(self) -> bool:
        """Return whether a row waits for evidence."""
        ...

    def sent(self, slot: Slot) -> None:
        """Called when a slot is granted."""
        ...

    def released(self, slot: Slot) -> None:
        """Called when a slot was given back that was a trial or has a part of the rate limits."""
        ...

    def idle(self) -> None:
        """Called when no further row will be sent: only requests in flight can still give evidence."""
        ...

    def spare(self) -> None:
        """Called at the end of the batch, when every turn has its slot and slots stay idle."""
        ...


class Slots:
    def __init__(self, scheduler: Scheduler, watcher: Watcher) -> None:
        self.scheduler = scheduler
        self._watcher = watcher
        self._waiters: dict[Ticket, asyncio.Future[Slot]] = {}
        self._sleepers: dict[asyncio.Future[None], None] = {}
        self._feeds: list[Feed] = []
        self._fed = False  # a feed was opened: it knows how many rows will come
        self._alarm: asyncio.TimerHandle | None = None  # for turns that have waited long enough for their endpoint
        self.stopped = False  # no request is sent any more, even by holders of a slot
        self.refusal = ""  # reason why no slot is granted any more
        self._paused_by: set[str] = set()  # reasons why no slot is granted for now

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all its requests. It is found at the first one: a run may be created outside of it."""
        return asyncio.get_running_loop()

    # Slots

    def claim(
        self, progress: AgentProgress, turns: int, *, avoid: Endpoint | None = None, pinned: Endpoint | None = None
    ) -> Ticket:
        """Join the queue for a slot, which may be granted at once. Follow it with ``hold`` or ``withdraw``."""
        now = self.loop.time()
        ticket = self.scheduler.request(progress, turns, now, pinned)
        if avoid is not None:
            ticket.avoid = frozenset({avoid})
        self.pump(now)
        return ticket

    def claim_control(self, endpoint: Endpoint) -> Ticket:
        """Claim a slot for a control request, which may be granted at once. Follow it with ``hold`` or ``withdraw``."""
        ticket = self.scheduler.control(endpoint)
        self.pump()
        return ticket

    async def hold(self, ticket: Ticket) -> Slot:
        """Wait for the slot and return it. A cancellation withdraws the claim. Raises Interrupted if no slot will be
        granted any more."""
        try:
            slot = ticket.slot
            if slot is None:
                if self.refusal:
                    raise Interrupted(self.refusal)
                waiter: asyncio.Future[Slot] = self.loop.create_future()
                self._waiters[ticket] = waiter
                slot = await waiter
            if self.stopped:  # the cancellation of this task is pending
                await self.loop.create_future()
            return slot
        except BaseException:
            self._waiters.pop(ticket, None)
            self.withdraw(ticket)
            raise

    def release(self, slot: Slot) -> None:
        """Give the slot back. A second call is harmless."""
        if self.scheduler.give_back(slot) and (slot.lease is not None or slot.trial):
            self._watcher.released(slot)
        if len(slot.endpoint.server.endpoints) > 1:
            slot.endpoint.tell_others()
        self.pump()

    def withdraw(self, ticket: Ticket) -> None:
        """Withdraw the claim, or give back the slot that it has got meanwhile. A second call is harmless."""
        if ticket.slot is not None:
            self.release(ticket.slot)
        else:
            self.scheduler.withdraw(ticket)
            self.pump()

    def reject(self, ticket: Ticket, error: JobError) -> None:
        """End the wait for a slot with an error."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is not None and not waiter.done():
            self.scheduler.withdraw(ticket)
            waiter.set_exception(error)

    async def again(self, slot: Slot, delay: float) -> None:
        """Join the queue again after ``delay`` seconds, to repeat a failed request."""
        if delay:
            at_fault = slot.ticket.row.charges > 0
            self.scheduler.backing_off += 1
            self.scheduler.at_fault += at_fault
            try:
                await self._sleep(delay)
            finally:
                self.scheduler.backing_off -= 1
                self.scheduler.at_fault -= at_fault
                self.pump()
        self.scheduler.again(slot)
        self.pump()

    async def _sleep(self, delay: float) -> None:
        if self.refusal:
            raise Interrupted(self.refusal)
        sleeper: asyncio.Future[None] = self.loop.create_future()
        self._sleepers[sleeper] = None
        timer = self.loop.call_later(delay, _wake, sleeper)
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
        """Update the scheduler with the number of rows still to come."""
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
        """Return whether a row waits for evidence about its failures."""
        return self._watcher.waits

    @property
    def few_rows(self) -> bool:
        """Return whether too few rows are left to tell a bad row from a bad endpoint."""
        return self.scheduler.busy + self._watcher.deciding < SEVERAL and self.all_fed

    @property
    def has_untested(self) -> bool:
        """Return whether a row waits, or can start, that has not failed yet."""
        scheduler = self.scheduler
        if scheduler.has_untested:
            return True
        full = scheduler.max_agents is not None and scheduler.agents >= scheduler.max_agents
        if full or scheduler.closed or scheduler.backlogged:
            return False
        return any(feed.is_hungry for feed in self._feeds)

    @property
    def is_hungry(self) -> bool:
        """Return whether another slot would be used now."""
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
        """Start no new agents. Running agents continue."""
        self.scheduler.closed = True
        for feed in tuple(self._feeds):
            feed.close()
        self.pump()

    def refuse(self, why: str, others: Iterable[asyncio.Future[None]] = ()) -> None:
        """Grant no more slots. Requests in flight finish. Tasks that wait for a slot or for one of ``others`` get
        Interrupted."""
        self.refusal = self.refusal or why
        waiting: list[asyncio.Future[Slot] | asyncio.Future[None]] = [
            *self._waiters.values(),
            *self._sleepers,
            *others,
        ]
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(Interrupted(self.refusal))
        self._waiters.clear()
        self.drain()

    def stop(self) -> None:
        """Send no request from now on, even from holders of a slot: the run is being closed."""
        self.stopped = True
        self.drain()

    def pause(self, paused: bool) -> None:
        """Send no request while paused. Requests in flight finish."""
        self.set_paused_by("the user", paused)

    def set_short_of_budget(self, short: bool) -> None:
        """Grant no slot while a request waits for others to settle: the next would only wait behind it."""
        self.set_paused_by("the budget", short)

    def set_paused_by(self, reason: str, paused: bool) -> None:
        """Add or remove a reason for granting no slots."""
        if paused != (reason in self._paused_by):
            self._paused_by ^= {reason}
            self.scheduler.paused = bool(self._paused_by)
            self.pump()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def pump(self, now: float | None = None) -> None:
        """Grant every slot that can be granted, then wake the feeds if a new agent may start."""
        scheduler, fed = self.scheduler, False
        if now is None:
            now = self.loop.time()
        if not self.refusal:
            while (slot := scheduler.grant(now)) is not None:
                waiter = self._waiters.pop(slot.ticket, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(slot)
                self._watcher.sent(slot)
                if not scheduler.waiting and not scheduler.wanted:
                    break
            # One that is overdue waits for a slot, not for the clock.
            if scheduler.waiting and now < scheduler.due < inf:
                self._set_alarm(scheduler.due)
        # The newest first: later stages work on earlier results, and finish the pipeline.
        for feed in reversed(self._feeds):
            if feed.room is not None:
                if not scheduler.has_room(now):
                    break
                feed.wake()
                fed = True
        if not fed and (len(scheduler.endpoints) > 1 or self._watcher.waits):
            self._check_idle()

    def _check_idle(self) -> None:
        scheduler, waits = self.scheduler, self._watcher.waits
        several = len(scheduler.endpoints) > 1
        if not (waits or several) or scheduler.wanted:
            return
        all_fed = self.all_fed
        if waits and not scheduler.backing_off and (all_fed or scheduler.is_full):
            self._watcher.idle()
        if all_fed and scheduler.inflight and several:
            self._watcher.spare()

    def _set_alarm(self, due: float) -> None:
        if self._alarm is None or due < self._alarm.when():
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self.loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.pump()


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)

"""The scheduler's decisions made awaitable: coroutines wait here for a slot, the feed waits here for room.

All state that decides is in ``scheduler``; this file only maps tickets to futures and time to ``loop.call_at``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.core import Scheduler, Ticket
from batch_agent.scheduler.outlook import Progress
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER

OnLimit = Callable[[int | None, str], None]


class Limiter:
    def __init__(
        self, max_inflight: int | None, max_agents: int | None = None, on_limit: OnLimit | None = None
    ) -> None:
        self.scheduler = Scheduler(max_inflight, max_agents)
        self.capacity = Capacity(max_inflight)
        self._on_limit = on_limit
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._room: asyncio.Future[None] | None = None
        self._stopped = False
        self._user_paused = False
        self._short_of_budget = False
        self._held_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # Slots

    def claim(self, progress: Progress, turns: int) -> Ticket:
        """Join the queue for a slot, having taken so many turns; it may be granted at once. Follow it with ``hold``, or
        ``release`` it."""
        ticket = self.scheduler.request(progress, turns, asyncio.get_running_loop().time())
        self._pump()
        return ticket

    async def hold(self, ticket: Ticket) -> None:
        """Until the ticket's slot is granted. Cancelled while waiting, the claim is withdrawn and nothing is lost."""
        try:
            if ticket.state != "held":
                waiter = asyncio.get_running_loop().create_future()
                self._waiters[ticket] = waiter
                await waiter
            if self._stopped:  # the cancellation of this task is on its way
                await asyncio.get_running_loop().create_future()
        except BaseException:
            self._waiters.pop(ticket, None)
            self.release(ticket)
            raise

    def release(self, ticket: Ticket) -> None:
        self.scheduler.give_back(ticket)
        self._pump()

    # Agents

    async def wait_room(self) -> bool:
        """Until another agent may start. False: none will, the run is draining."""
        while not self.scheduler.has_room():
            if self.scheduler.closed:
                return False
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        return True

    def expect(self, rows: int | None) -> None:
        """How many rows are still to be started; None where nobody knows."""
        self.scheduler.outlook.rows = rows

    def start_agent(self, progress: Progress) -> Ticket:
        """A new agent, with its claim for its first turn made now, so that the room it takes is seen to be taken."""
        self.scheduler.start_agent()
        return self.claim(progress, 0)

    def end_agent(self, progress: Progress, turns: int) -> None:
        self.scheduler.end_agent(progress, turns)
        self._pump()

    # Control

    def drain(self) -> None:
        """Nothing new starts; agents under way go on."""
        self.scheduler.closed = True
        self._wake_feed()

    def stop(self) -> None:
        """The run is being left: from now on no request leaves, whoever holds a slot."""
        self._stopped = True
        self.drain()

    def pause(self) -> None:
        """No request leaves until ``resume``; those on their way finish."""
        self._user_paused = True
        self._update_pause()

    def resume(self) -> None:
        self._user_paused = False
        self._update_pause()

    def set_backlogged(self, backlogged: bool) -> None:
        if backlogged != self.scheduler.backlogged:
            self.scheduler.backlogged = backlogged
            self._pump()

    def set_short_of_budget(self, short: bool) -> None:
        """While a call waits for others to settle, no other gets a slot: it would only wait behind it."""
        if short != self._short_of_budget:
            self._short_of_budget = short
            self._update_pause()

    def resize(self, max_inflight: int | None) -> None:
        self.capacity.resize(max_inflight)
        self._apply_limit("asked for")

    # What the server says about its load

    def succeeded(self, ticket: Ticket, seconds: float) -> None:
        """The ticket's request was answered, after so many seconds."""
        self.scheduler.outlook.answered(ticket.progress, seconds, asyncio.get_running_loop().time())
        if self.capacity.succeeded():
            self._apply_limit("answers are good")

    def overloaded(self, generation: int, retry_after: float | None) -> None:
        """The server refused for load: halve, and let nobody ask again before it said so."""
        if self.capacity.overloaded(generation, self.scheduler.inflight):
            self._apply_limit("the server is overloaded")
        if retry_after and retry_after <= LONGEST_RETRY_AFTER:
            loop = asyncio.get_running_loop()
            until = loop.time() + retry_after
            if until > self._held_until:
                self._held_until = until
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = loop.call_at(until, self._hold_is_over)
                self._update_pause()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _hold_is_over(self) -> None:
        self._held_until = 0.0
        self._timer = None
        self._update_pause()

    def _update_pause(self) -> None:
        self.scheduler.paused = self._user_paused or self._short_of_budget or self._held_until > 0
        self._pump()

    def _apply_limit(self, reason: str) -> None:
        self.scheduler.max_inflight = self.capacity.limit
        if self._on_limit is not None:
            self._on_limit(self.capacity.limit, reason)
        self._pump()

    def _pump(self) -> None:
        """Hand out every slot that can be handed out, then see whether a new agent may start."""
        while (ticket := self.scheduler.grant()) is not None:
            waiter = self._waiters.pop(ticket, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if self._room is not None and self.scheduler.has_room():
            self._wake_feed()

    def _wake_feed(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

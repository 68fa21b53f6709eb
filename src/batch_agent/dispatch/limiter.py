"""The scheduler's decisions made awaitable: coroutines wait here for a slot, the feed waits here for room.

All state that decides is in ``scheduler``; this file maps tickets to futures and time to ``loop.call_at``. What answers
and failures say about an endpoint is handed on in ``endpoints``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from batch_agent.dispatch.endpoints import Endpoints, OnHealth, OnLimit
from batch_agent.dispatch.liveness import Knock
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import Interrupted
from batch_agent.events import Ended
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Scheduler, Ticket
from batch_agent.scheduler.endpoint import Endpoint, Terms
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.health import SEVERAL

if TYPE_CHECKING:
    from batch_agent.dispatch.members import Following


class Feed:
    """One run's way to start agents. Several runs may share a limiter; each has a feed of its own, and all wait for the
    same room. ``on_close`` is called when nothing new is to start."""

    def __init__(self, limiter: Limiter, on_close: Callable[[], None]) -> None:
        self._limiter = limiter
        self._on_close = on_close
        self.closed = False  # no new agents, ever
        self.ended = False  # every input was read
        self.rows: int | None = None  # still to be started; None where nobody knows how many
        self.channel: RowChannel | None = None  # where its rows come from runs that share this limiter
        self.room: asyncio.Future[None] | None = None

    async def wait_room(self) -> bool:
        """Until another agent may start. False: none will."""
        while not self.closed:
            if self._limiter.scheduler.has_room():
                return True
            self.room = asyncio.get_running_loop().create_future()
            await self.room
        return False

    def take_from(self, channel: RowChannel) -> None:
        """What is not there yet is not counted: it comes from rows that are."""
        self.channel, self.rows = channel, 0

    def yields(self, slots: int | None) -> bool:
        """Whether it leaves its room to others."""
        channel = self.channel
        return channel is not None and channel.patient and (slots is None or channel.waiting + 1 < slots)

    def expect(self, rows: int | None) -> None:
        self.rows = rows
        self._limiter.look_ahead()

    def end(self) -> None:
        self.ended, self.rows = True, 0
        self._limiter.look_ahead()

    def close(self) -> None:
        """Nothing new starts; agents under way go on."""
        if not self.closed:
            self.closed = True
            self.wake()
            self._on_close()
            self._limiter.forget(self)

    def wake(self) -> None:
        room, self.room = self.room, None
        if room is not None:
            _wake(room)


class Limiter:
    def __init__(
        self,
        max_inflight: int | None,
        max_agents: int | None = None,
        on_limit: OnLimit = lambda endpoint, reason: None,
        *,
        endpoints: Sequence[Endpoint] = (),
        max_outage: float | None = None,
        on_health: OnHealth = lambda endpoint, now: None,
        terms: Terms | None = None,
        knock: Knock | None = None,
    ) -> None:
        """``max_inflight`` is at all endpoints together; ``terms`` are those of each."""
        self.terms = Terms(max_inflight) if terms is None else terms
        self.scheduler = Scheduler(max_inflight, max_agents, endpoints or [self.terms.endpoint("")])
        self.endpoints = Endpoints(
            self.scheduler, max_outage, on_health, on_limit, self._end, self._pump, self._are_few, knock
        )
        self._alarm: asyncio.TimerHandle | None = None  # for turns that have waited for their endpoint for long enough
        self.max_inflight = max_inflight  # as asked for; the scheduler's may be less, where others have their share
        self._share: int | None = None
        self.party: Following | None = None  # where the endpoints are a fleet's
        self.reading = asyncio.Lock()  # whoever holds it reads how busy the endpoints are
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._sleepers: set[asyncio.Future[None]] = set()
        self._feeds: list[Feed] = []
        self._tools_waited_for: set[asyncio.Future[None]] = set()
        self._stopped = False
        self._refusal = ""  # why nobody gets a slot any more
        self.over: tuple[Ended, str] | None = None  # how the run ends that could not go on, and why
        self._user_paused = False
        self._short_of_budget = False

    # Slots

    def claim(self, progress: Progress, turns: int, *, avoid: Endpoint | None = None) -> Ticket:
        """Join the queue for a slot, having taken so many turns; it may be granted at once. Follow it with ``hold``, or
        ``release`` it."""
        ticket = self.scheduler.request(progress, turns, asyncio.get_running_loop().time())
        ticket.avoid = avoid
        self._pump()
        return ticket

    async def hold(self, ticket: Ticket) -> None:
        """Until the ticket's slot is granted. Cancelled while waiting, the claim is withdrawn and nothing is lost.
        Raises Interrupted when no slot will be granted any more."""
        try:
            if ticket.state != "held":
                if self._refusal:
                    raise Interrupted(self._refusal)
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
        self.endpoints.budgets.settle(ticket)
        self.scheduler.give_back(ticket)
        if ticket.trial and ticket.endpoint is not None:
            self.endpoints.arm(ticket.endpoint)  # for the next one, where this one was withdrawn
        self._pump()

    async def again(self, ticket: Ticket, delay: float) -> None:
        """Join the queue again after ``delay`` seconds, to repeat a failed request."""
        if delay:
            self.scheduler.backing_off += 1
            try:
                await self._sleep(delay)
            finally:
                self.scheduler.backing_off -= 1
                self._pump()
        self.scheduler.again(ticket)
        self._pump()

    async def _sleep(self, delay: float) -> None:
        if self._refusal:
            raise Interrupted(self._refusal)
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        self._sleepers.add(sleeper)
        timer = loop.call_later(delay, _wake, sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            self._sleepers.discard(sleeper)

    def answered(self, ticket: Ticket, seconds: float, reply: Reply) -> None:
        """The ticket's request was answered, after so many seconds."""
        self.scheduler.answered(ticket, seconds, reply.usage, asyncio.get_running_loop().time())
        self.endpoints.answered(ticket, seconds, reply)

    # Agents

    def feed(self, on_close: Callable[[], None]) -> Feed:
        feed = Feed(self, on_close)
        self._feeds.append(feed)
        return feed

    def forget(self, feed: Feed) -> None:
        self._feeds.remove(feed)
        self.look_ahead()

    def look_ahead(self) -> None:
        """What is still to come has changed."""
        rows: int | None = 0
        for feed in self._feeds:
            rows = None if rows is None or feed.rows is None else rows + feed.rows
        self.scheduler.forecast.rows = rows
        if self.endpoints.doubts:
            self._pump()

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
        for feed in tuple(self._feeds):
            feed.close()
        self._pump()

    def refuse(self, why: str) -> None:
        """Nobody gets a slot any more: requests on their way finish, unless the server is down; whoever waits for a
        slot or will want one is Interrupted."""
        self._refusal = self._refusal or why
        self._interrupt(self._waiters.values())
        self._interrupt(self._sleepers)
        self._interrupt(self.endpoints.budgets.short)
        self._waiters.clear()
        self.endpoints.clear_doubts(Interrupted(self._refusal))
        self.endpoints.give_up_lost()
        self.drain()

    def refuse_now(self, why: str) -> None:
        """The same; and agents that wait for their tools do not wait any longer."""
        self.refuse(why)
        self._interrupt(self._tools_waited_for)

    async def wait_for_tools(self, ended: asyncio.Future[None]) -> None:
        """Until the tools have ended whose end this is."""
        self._tools_waited_for.add(ended)
        try:
            await ended
        finally:
            self._tools_waited_for.discard(ended)

    def _interrupt(self, waiting: Iterable[asyncio.Future[None]]) -> None:
        for waiter in tuple(waiting):
            if not waiter.done():
                waiter.set_exception(Interrupted(self._refusal))

    def _end(self, ended: Ended, why: str) -> None:
        """No endpoint is left to ask."""
        self.over = (ended, why)
        self.refuse(f"the run ended before this job was done: {why}")

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

    def set_at_tools(self, agents: int) -> None:
        """So many agents wait for a tool that is busy enough without them."""
        self.scheduler.at_tools = agents
        self._pump()

    def resize(self, max_inflight: int | None) -> None:
        self.endpoints.resize(max_inflight)
        self.grow(max_inflight)

    def grow(self, max_inflight: int | None) -> None:
        """As many at all endpoints together; what each may have stays."""
        if max_inflight != self.max_inflight:
            self.max_inflight = max_inflight
            self._set_most()

    def share(self, slots: int | None) -> None:
        """So many slots are its own, of those it has in common with others; None: all."""
        if slots != self._share:
            self._share = slots
            self._set_most()

    def _set_most(self) -> None:
        limits = [limit for limit in (self.max_inflight, self._share) if limit is not None]
        self.scheduler.max_inflight = min(limits, default=None)
        self._pump()

    def close(self) -> None:
        self.endpoints.close()
        if self._alarm is not None:
            self._alarm.cancel()

    def _update_pause(self) -> None:
        self.scheduler.paused = self._user_paused or self._short_of_budget
        self._pump()

    def _pump(self) -> None:
        """Hand out every slot that can be handed out, then see whether a new agent may start."""
        scheduler = self.scheduler
        if scheduler.wanted and not self._refusal:
            now = asyncio.get_running_loop().time()
            while (ticket := scheduler.grant(now)) is not None:
                waiter = self._waiters.pop(ticket, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
                self.endpoints.sent(ticket)
            if scheduler.due < inf:
                self._set_alarm(scheduler.due)
        # The youngest first: what comes of others' results, and brings the whole to its end.
        hungry = [feed for feed in reversed(self._feeds) if feed.room is not None]
        if hungry and scheduler.has_room():
            if len(hungry) > 1:
                slots = scheduler.slots
                hungry.sort(key=lambda feed: feed.yields(slots))
            for feed in hungry:
                feed.wake()
        elif self.endpoints.doubts and scheduler.idle and (self._all_fed or scheduler.is_full):
            self.endpoints.clear_doubts()  # nobody who could tell is on the way
        if self.party is not None:
            busy = scheduler.waiting or not (self._all_fed or scheduler.closed)
            self.party.want(inf if busy else scheduler.inflight + scheduler.backing_off)

    def _set_alarm(self, due: float) -> None:
        if self._alarm is None or due < self._alarm.when():
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_at(due, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._pump()

    def _are_few(self) -> bool:
        return self.scheduler.agents < SEVERAL and self._all_fed

    @property
    def _all_fed(self) -> bool:
        return all(feed.ended or (feed.channel is not None and feed.room is None) for feed in self._feeds)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)

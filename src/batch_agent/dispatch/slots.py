"""Slots, and the requests in flight that hold them: their time limits (``Deadlines``), which of them are recalled
(``Flights``), and the scheduler made awaitable (``Slots``): requests wait for a slot, feeds wait for room.

All deciding state is in ``scheduler``. ``Slots`` maps tickets to futures and times to ``loop.call_at``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Self

from batch_agent.blocking import clock_of
from batch_agent.dispatch.feed import Feed
from batch_agent.dispatch.policy import Observer, Policy, Question
from batch_agent.errors import Interrupted, JobError
from batch_agent.scheduler.core import Scheduler, Slot, Ticket
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import FIRST, AgentForecast
from batch_agent.scheduler.routing import Router
from batch_agent.scheduler.server import Endpoint
from batch_agent.value_type import lazy_property

if TYPE_CHECKING:
    from batch_agent.dispatch.endpoints import EndpointMonitor

MOST_EXTENSIONS = 10  # of one deadline: a loop that is always late must not keep it open forever
NEAR = 1.0  # seconds: only deadlines that are so near are kept in order


class Deadline:
    """A time limit: ``with deadline:`` around the slow part. Entered once, by the task that waits.

    It cancels the task that entered it, as ``asyncio.timeout`` does, and turns that cancellation into TimeoutError.
    Unlike ``asyncio.timeout`` it knows when the event loop stalled: answers that arrived during a stall have not been
    read yet, so a timer that fires late extends the deadline by the lateness. A deadline at the end of a stall is not
    late. So each deadline expires one turn of the loop after its timer, once everything that has arrived was delivered.
    """

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
        self._deadlines._live.pop(self, None)
        if not self.expired or task is None or task.uncancel() > self._cancelling or kind is None:
            return
        if issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def _expire(self) -> None:
        if self._task is not None and not self.expired:
            self.expired = True
            self._task.cancel()

    def _extend(self, seconds: float) -> bool:
        """Extend the deadline. Returns False if it was already extended too often."""
        self._extensions += 1
        self.when += seconds
        return self._extensions <= MOST_EXTENSIONS


class Deadlines:
    """The deadlines of all requests. Few of them are ever reached, so open ones are kept in any order, and only those
    that may expire within ``NEAR`` seconds are sorted, when the timer fires."""

    def __init__(self) -> None:
        self._live: dict[Deadline, None] = {}  # those that have a limit, between enter and exit
        self._near: list[tuple[float, int, Deadline]] = []  # a heap; entries of a moved or ended deadline are stale
        self._near_until = -inf  # later deadlines are not in it
        self._number = 0
        self._due = inf  # when the timer fires
        self._timer: asyncio.TimerHandle | None = None

    @lazy_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def after(self, seconds: float | None) -> Deadline:
        """Return a deadline that many seconds from now. None means no limit until it is rescheduled."""
        return Deadline(self, inf if seconds is None else self._loop.time() + seconds)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._live.clear()
        self._near.clear()

    def _add(self, deadline: Deadline) -> None:
        self._live[deadline] = None
        when = deadline.when
        if when < self._near_until:
            self._put(deadline)
        if when < self._due:
            self._set_timer(when)

    def _put(self, deadline: Deadline) -> None:
        self._number += 1
        heappush(self._near, (deadline.when, self._number, deadline))

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = when, self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        now, near = self._loop.time(), self._near
        late = now - self._due
        self._due, self._timer = inf, None
        if now >= self._near_until:
            self._near_until = now + NEAR
            near.clear()
            for deadline in self._live:
                if deadline.when < self._near_until:
                    self._put(deadline)
        while near and (near[0][0] <= now or _is_stale(near[0])):
            when, _, deadline = heappop(near)
            if deadline.when != when or deadline._task is None:
                continue
            if late > N.moment and deadline._extend(late):
                self._put(deadline)
            else:
                del self._live[deadline]
                self._loop.call_soon(deadline._expire)
        due = near[0][0] if near else min((deadline.when for deadline in self._live), default=inf)
        if due < inf:
            self._set_timer(due)


def _is_stale(entry: tuple[float, int, Deadline]) -> bool:
    return entry[2].when != entry[0] or entry[2]._task is None


# A request moves to an idle endpoint if its remaining time is more than this many times what that endpoint takes.
COMPUTED, QUEUED = 1.5, 0.6
CONTEXT = 3.0  # times these, if the other endpoint has to compute the context of the agent again
SLOWER = 1.25  # times what others take: then answers wait in a queue, or the endpoint is slower than the others
SHORTEST_TAIL = 0.05  # seconds between two checks at the end of a batch
STREAM_SILENCE = 3.0  # seconds without a byte after which an answer that has begun is recalled
# An endpoint that never answered loses its requests after this factor of the usual time or ``SLOWER`` times the slowest
# answer of others, whichever is sooner, and at least these seconds.
UNKNOWN_FACTOR, UNKNOWN_SECONDS = 3.0, 0.5
# A request may be lost after this factor of a usual answer, and at least the longest pause, without a byte. After this
# factor of the slowest answer it is cancelled, if a second one cannot be sent beside it. If another server works and
# many answers were much faster, it may be lost sooner.
LOST_FACTOR = 20.0


Flight = tuple[Deadline, Question, Policy, Observer]


class Flights:
    """The requests in flight of one dispatcher: their time limits, and which of them are recalled. ``look_again`` is
    called when the end of a batch must be checked again. ``send_beside`` sends a request that may be lost a second
    time, beside the first; it returns False if that is not possible.

    A request is recalled (cancelled, and sent again) in four cases: its endpoint went down or is silent; a trial needs
    its slot; it is far older than the slowest answer, so that it may be lost, and it cannot be sent again beside the
    first; or, at the end of a batch, a much slower endpoint still works on it while others are idle. It then ends as a
    timeout that is charged to no side. A request that is withdrawn ends in the same way and is not sent again here:
    the run is being drained, or the caller takes the request back, to ask later.
    """

    send_beside: Callable[[Slot, Question, Policy, Observer], bool]

    def __init__(self, router: Router, look_again: Callable[[], None], max_outage: float = inf) -> None:
        self._router, self._look_again, self._max_outage = router, look_again, max_outage
        self._at: dict[Endpoint, dict[Slot, Flight]] = {}  # the oldest first
        self._patient: dict[Endpoint, Slot] = {}  # the trial that continues beside later ones
        self._deadlines = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self.draining = False  # no new agents start

    def close(self) -> None:
        self._deadlines.close()
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, slot: Slot, question: Question, policy: Policy, observer: Observer, now: float) -> Deadline:
        """Return the time limit of one request; ``end`` must follow. A trial must be answered within the usual time."""
        endpoint, seconds = slot.endpoint, policy.timeout
        if slot.ticket.control:
            seconds = endpoint.health.control_seconds(now, self._max_outage)
        elif slot.trial:
            seconds = self._trial_seconds(slot, endpoint, seconds)
        deadline = self._deadlines.after(seconds)
        flights = self._at.get(endpoint)
        if flights is None:
            flights = self._at[endpoint] = {}
        flights[slot] = deadline, question, policy, observer
        return deadline

    def _trial_seconds(self, slot: Slot, endpoint: Endpoint, seconds: float | None) -> float | None:
        """Return the time limit of a trial. While other endpoints work, it is at most their allowed silence."""
        health, limit = endpoint.health, inf if seconds is None else seconds
        trial = health.trial_seconds(slot.sent_at)
        if trial is not None and self._patient.setdefault(endpoint, slot) is slot:
            trial = health.patient_seconds(slot.sent_at)
        if trial is not None:
            limit = min(limit, trial)
        if self._router.others_work(endpoint) and not health.patient:
            limit = min(limit, self._router.longest_silence)
        return None if limit == inf else limit

    def end(self, slot: Slot) -> None:
        endpoint = slot.endpoint
        flights = self._at[endpoint]
        flights.pop(slot, None)
        if not flights and endpoint.leaving:
            del self._at[endpoint]
        if slot.trial and self._patient.get(endpoint) is slot:
            del self._patient[endpoint]

    def at(self, endpoint: Endpoint) -> Collection[Slot]:
        """Return the requests in flight at the endpoint."""
        return tuple(self._at.get(endpoint, ()))

    def is_beside_suspect(self, slot: Slot) -> bool:
        """Return whether this is the request of a suspect, and the request of another suspect is in flight at the same
        endpoint and may fail next."""
        row = slot.ticket.row
        others = (other.ticket for other in self._at.get(slot.endpoint, ()))
        return row.suspect and any(other.suspect and other.row is not row for other in others)

    def has(self, slot: Slot) -> bool:
        """Return whether the request was sent and has not ended."""
        return slot in self._at.get(slot.endpoint, ())

    def patient(self, endpoint: Endpoint) -> Slot | None:
        """Return the trial that may continue beside later ones; None if there is none."""
        return self._patient.get(endpoint)

    # Recalls

    def recall(self, slot: Slot, at: float) -> None:
        """Recall the request at that time, unless it is answered before."""
        deadline = self._at[slot.endpoint][slot][0]
        if not deadline.expired:
            slot.recalled = True
            if slot.heard_at:
                at = max(at, slot.heard_at + STREAM_SILENCE)
            deadline.reschedule(min(deadline.when, at))

    def heard(self, ticket: Ticket, now: float) -> None:
        """Note that a piece of the answer arrived. From now on only a pause without data recalls the request."""
        slot = ticket.slot
        if slot is None:
            return
        slot.heard_at = now
        if slot.recalled:
            self._at[slot.endpoint][slot][0].reschedule(now + STREAM_SILENCE)

    def keep(self, slot: Slot) -> None:
        """Cancel a pending recall. An answer that has begun has no time limit."""
        slot.recalled = False
        self._at[slot.endpoint][slot][0].reschedule(inf)

    def withdraw(self, now: float, only: Collection[Question] | None = None) -> list[tuple[str, float]]:
        """Recall all requests for good, or only those of some questions, whose callers get ``TakenBack``. Returns the
        row of each request, if it is known, and when the request was sent."""
        left, chosen = list[tuple[str, float]](), set(map(id, only or ()))
        for flights in self._at.values():
            for slot, (deadline, question, _, _) in flights.items():
                if only is None or id(question) in chosen:
                    slot.taken_back = only is not None
                    slot.withdrawn = slot.recalled = True
                    deadline.reschedule(min(deadline.when, now))
                    left.append(("" if question.request is None else question.request.job_id, slot.sent_at))
        return left

    def recall_all(self, endpoint: Endpoint, now: float) -> None:
        for slot in self.at(endpoint):
            self.recall(slot, now)

    def recall_down(self, now: float) -> None:
        """Recall all requests at endpoints that are down."""
        for endpoint in tuple(self._at):
            if endpoint.health.is_down:
                self.recall_all(endpoint, now)

    def second(self, endpoint: Endpoint) -> Slot | None:
        """Return a request in flight there that was sent beside another one, and so may be recalled; None if there is
        none."""
        return next((slot for slot in self.at(endpoint) if slot.ticket.second and not slot.recalled), None)

    def make_room(self, endpoint: Endpoint, now: float, slots: int) -> None:
        """Recall a request that was sent beside another one, else the oldest one; and as many more as are needed to
        free ``slots`` slots."""
        if (second := self.second(endpoint)) is not None:
            self.recall(second, now)
            slots -= 1
        for _ in range(slots):
            endpoint.health.sounded = True
            self.recall_oldest(endpoint, now, once=True)

    def recall_oldest(self, endpoint: Endpoint, now: float, *, once: bool = False) -> None:
        """Recall one request from before the outage, so that a trial gets its slot. ``once``: no turn is recalled
        twice."""
        began = endpoint.health.down_since if endpoint.health.is_down else now
        waiting = [slot for slot in self.at(endpoint) if slot.sent_at < began and not slot.recalled]
        waiting = [slot for slot in waiting if not (slot.ticket.control or (once and slot.ticket.lost))]
        if waiting:
            oldest = min(waiting, key=lambda slot: slot.sent_at)
            oldest.ticket.lost = True
            self.recall(oldest, now)

    # Lost requests

    def heard_at(self, slot: Slot) -> float:
        """Return when a piece of the answer last arrived; 0 if none has."""
        return max(slot.heard_at, self._at[slot.endpoint][slot][1].heard_at)

    def lost_at(self, endpoint: Endpoint) -> float:
        """Return when the next request there will be so old that it may be lost."""
        patience = self._lost_after(endpoint)
        if patience == inf:
            return inf
        return min(
            (self._age_from(slot) + patience for slot in self._at.get(endpoint, ()) if _may_be_lost(slot)), default=inf
        )

    def send_lost(self, endpoint: Endpoint, room: float, now: float) -> None:
        """Send requests that may be lost a second time, each once, while there is ``room`` for them.

        They need no room if the endpoint has answered nothing for as long, or has answered requests that were sent
        later: then they do not wait in its queue. The first request continues if a second one gets a slot: there is
        room, or few of the requests in flight are as old. Otherwise it is recalled when it is far older than the
        slowest answer.
        """
        patience, server = self._lost_after(endpoint), endpoint.server
        if endpoint.health.is_down:
            for slot in self.at(endpoint):
                if _may_be_lost(slot) and now >= self._age_from(slot) + patience:
                    self.recall(slot, now)
            return
        slowest = self._slowest(endpoint)
        cancelled = max(patience, N.longest_pause, LOST_FACTOR * slowest)
        silent = now - server.answered_at >= cancelled
        if not slowest:
            endpoint.health.sounded = True
            room, silent = min(room, 1), False
        slots = self.at(endpoint)
        old = {slot for slot in slots if now >= self._age_from(slot) + patience}  # as ``lost_at`` adds it up
        slots_end = not silent and 4 * len(old) <= len(slots)
        for slot in slots:
            if slot not in old or not _may_be_lost(slot):
                continue
            if room <= 0 and not silent and slot.sent_at >= server.answered_sent:
                continue
            beside = (room > 0 or slots_end) and not self.heard_at(slot)
            if beside and self.send_beside(slot, *self._at[endpoint][slot][1:]):
                slot.ticket.lost = True
            elif now >= self._age_from(slot) + cancelled:
                slot.ticket.lost = True
                self.recall(slot, now)
            room -= slot.ticket.lost

    def _age_from(self, slot: Slot) -> float:
        return max(slot.sent_at, self.heard_at(slot))

    def _lost_after(self, endpoint: Endpoint) -> float:
        """Return the age in seconds from which a request may be lost. If no row was answered yet, it is unknown how
        long a row takes: then only one request counts as lost, and its second attempt shows it."""
        health, usual = endpoint.health, endpoint.server.usual or self._router.slowest
        others_work = self._router.others_work(endpoint)
        if health.patient:
            return inf
        if health.is_down:
            return max(N.shortest_silence, N.silence_factor * self._slowest(endpoint)) if others_work else inf
        if not usual and (health.sounded or not (health.answered or others_work)):
            return inf
        patience = max(N.longest_pause, LOST_FACTOR * usual)
        if health.is_learnt and others_work:  # a row that takes that much longer than all others is rare
            patience = min(patience, max(N.busy, N.silence_factor * health.slowest))
        return patience

    def _slowest(self, endpoint: Endpoint) -> float:
        return endpoint.health.slowest or self._router.slowest

    def loaded(self, endpoint: Endpoint, waiting: int, now: float) -> None:
        """If the run is being drained, withdraw the first turns that wait in the server's queue: the newest."""
        if self.draining and waiting > 0:
            first = [
                each
                for each in self.at(endpoint)
                if each.ticket.progress.turns == 0 and not (each.heard_at or each.trial)
            ]
            for slot in sorted(first, key=lambda each: -each.sent_at)[:waiting]:
                slot.withdrawn = True
                self.recall(slot, now)

    # The end of a batch

    def even_out(self, now: float) -> None:
        """Recall requests of a much slower endpoint while slots are idle, once per turn. Schedule the next check."""
        if self._timer is not None:
            return
        best = self._router.best()
        fast = 0.0 if best is None else self._router.seconds(best)
        if not fast:
            return
        slow = [
            (left, slot)
            for endpoint in self._at
            if endpoint is not best and not (endpoint.health.is_down or endpoint.health.patient)
            for place, slot in enumerate(self.at(endpoint), start=1)
            if (left := self._seconds_left(endpoint, slot, place, fast, now) / _cost_of_moving(slot)) > fast + N.unseen
            and _may_move(slot)
        ]
        slow.sort(key=lambda item: -item[0])
        for _, slot in slow[: int(min(self._router.spare, len(slow)))]:
            slot.ticket.moves += 1
            self._recall_slow(slot, now)
        self._timer = asyncio.get_running_loop().call_later(max(SHORTEST_TAIL, fast / 2), self._ring)

    def _recall_slow(self, slot: Slot, now: float) -> None:
        server = slot.endpoint.server
        if not server.seconds:
            server.unanswered = max(server.unanswered, now - slot.sent_at)
        self.recall(slot, now)

    def _ring(self) -> None:
        self._timer = None
        self._look_again()

    def _seconds_left(self, endpoint: Endpoint, slot: Slot, place: int, fast: float, now: float) -> float:
        """Return the expected seconds until the request ends where it is, from the usual time and from its place in the
        server's queue. Both are corrected for the cost of moving: a request that is being computed has made more
        progress than a queued one."""
        waited, server = now - slot.sent_at, endpoint.server
        if server.seconds:
            if server.seconds <= SLOWER * fast:
                return (server.seconds - waited) / COMPUTED
            # A server that computes many requests together sends no answer between two rounds.
            silent = now - server.answered_at if waited > server.seconds else 0.0
            return max((server.seconds - waited) / COMPUTED, max(place * server.gap, silent) / QUEUED)
        # The wait doubles with each move: of two endpoints that never answered, one may be slow and the other dead.
        patience = min(UNKNOWN_FACTOR * self._router.usual, SLOWER * self._router.slowest)
        return inf if waited > max(UNKNOWN_SECONDS, patience) * 2.0 ** min(slot.ticket.moves, 30) else 0.0


def _may_be_lost(slot: Slot) -> bool:
    return not (slot.ticket.lost or slot.ticket.control or slot.trial or slot.recalled)


def _cost_of_moving(slot: Slot) -> float:
    """Return a factor for the cost of moving a request: the context of an agent that has taken turns must be computed
    again at another endpoint."""
    return CONTEXT if slot.ticket.progress.turns else 1.0


def _may_move(slot: Slot) -> bool:
    """Return whether the request may be moved: once, or without limit from endpoints that have never answered."""
    moved = slot.ticket.moves > 0 and slot.endpoint.server.seconds > 0
    return not (slot.trial or slot.ticket.pinned or moved or slot.recalled or slot.heard_at)


class Slots:
    def __init__(self, scheduler: Scheduler, monitor: EndpointMonitor) -> None:
        self.scheduler = scheduler
        self._monitor = monitor
        self._waiters: dict[Ticket, asyncio.Future[Slot]] = {}
        self._sleepers: dict[asyncio.Future[None], None] = {}
        self._feeds: list[Feed] = []
        self._fed = False  # a feed was opened: it knows how many rows will come
        self.gated = 0  # feeds that wait for something else than room
        self._alarm: asyncio.TimerHandle | None = None  # for turns that have waited long enough for their endpoint
        self.stopped = False  # no request is sent any more, even by holders of a slot
        self.refusal = ""  # reason why no slot is granted any more
        self._paused_by: set[str] = set()  # reasons why no slot is granted for now

    @lazy_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all its requests. It is found at the first one: a run may be created outside of it."""
        return asyncio.get_running_loop()

    @lazy_property
    def clock(self) -> Callable[[], float]:
        """The function that returns the time of the event loop."""
        return clock_of(self.loop)

    # Slots

    def claim(
        self, progress: AgentForecast, turns: int, *, avoid: Endpoint | None = None, pinned: Endpoint | None = None
    ) -> Ticket:
        """Join the queue for a slot, which may be granted at once. Follow it with ``hold`` or ``withdraw``."""
        now = self.clock()
        ticket = self.scheduler.request(progress, turns, now, pinned, at_once=not self.refusal)
        if avoid is not None:
            ticket.avoid = frozenset({avoid})
        if ticket.slot is not None:
            self._monitor.sent(ticket.slot)
        elif turns == FIRST or not self.scheduler.is_occupied:
            self._grant(now)  # it leaves no more room for agents than before
        if len(self.scheduler.endpoints) > 1 or self._monitor.undecided:
            self._check_idle()
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
        if self.scheduler.give_back(slot) and (slot.reservation is not None or slot.trial):
            self._monitor.released(slot)
        if len(slot.endpoint.server.endpoints) > 1:
            slot.endpoint.tell_others()
        self.pump()

    def withdraw(self, ticket: Ticket) -> None:
        """Withdraw the claim. If it has got a slot meanwhile, give the slot back. A second call has no effect."""
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
            gives_way = slot.ticket.row.gives_way(delay)
            self.scheduler.backing_off += 1
            self.scheduler.giving_way += gives_way
            try:
                await self._sleep(delay)
            finally:
                self.scheduler.backing_off -= 1
                self.scheduler.giving_way -= gives_way
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
        """Return whether any row waits for evidence about its failures."""
        return bool(self._monitor.undecided)

    @property
    def few_rows(self) -> bool:
        """Return whether too few rows are left to tell a bad row from a bad endpoint."""
        return self.scheduler.busy + self._monitor.deciding < N.several and self.all_fed

    @property
    def has_untested(self) -> bool:
        """Return whether there is a row that has not failed yet, and that waits or can start."""
        return self.scheduler.has_untested or self._can_start

    @property
    def is_hungry(self) -> bool:
        """Return whether another slot would be used now."""
        scheduler, most = self.scheduler, self.scheduler.max_inflight
        if scheduler.paused or self.refusal or (most is not None and scheduler.inflight >= most):
            return False
        return bool(scheduler.wanted) or self._can_start

    @property
    def _can_start(self) -> bool:
        """Whether another agent may start, and a feed has a row for it."""
        scheduler, most = self.scheduler, self.scheduler.max_agents
        if scheduler.closed or scheduler.backlogged or (most is not None and scheduler.agents >= most):
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
            now = self.clock()
        if scheduler.waiting or scheduler.wanted:
            self._grant(now)
        if self.gated:
            for feed in reversed(self._feeds):
                feed.open_gate()
        # The newest first: later stages work on earlier results, and finish the pipeline.
        for feed in reversed(self._feeds):
            if feed.room is not None:
                if not scheduler.has_room(now):
                    break
                feed.wake()
                fed = True
        if not fed and (len(scheduler.endpoints) > 1 or self._monitor.undecided):
            self._check_idle()

    def _grant(self, now: float) -> None:
        scheduler = self.scheduler
        if self.refusal:
            return
        while (slot := scheduler.grant(now)) is not None:
            waiter = self._waiters.pop(slot.ticket, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(slot)
            self._monitor.sent(slot)
            if not scheduler.wanted:
                return
        # One that is overdue waits for a slot, not for the clock.
        if scheduler.waiting and now < scheduler.due < inf:
            self._set_alarm(scheduler.due)

    def _check_idle(self) -> None:
        scheduler, waits = self.scheduler, self._monitor.undecided
        several = len(scheduler.endpoints) > 1
        if not (waits or several) or scheduler.wanted:
            return
        all_fed = self.all_fed
        if waits and not scheduler.backing_off and (all_fed or scheduler.is_full):
            self._monitor.idle()
        if all_fed and scheduler.inflight and several:
            self._monitor.spare()

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

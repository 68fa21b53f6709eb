"""What answers and failures say about the endpoints, made awaitable: ``scheduler.health`` and ``scheduler.refusals``
with timers for trials, for silence and for the end of patience, and futures for those who wait to learn whose fault it
was.

Where one of several endpoints is down, no row waits for it: it is knocked at, which costs no row anything, and gets a
trial when it has opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from batch_agent.dispatch.alarms import Alarms
from batch_agent.dispatch.budgets import Budgets
from batch_agent.dispatch.liveness import Knock, why_shut
from batch_agent.errors import BackendError, ContextOverflow, Interrupted, Rejected, Timeout
from batch_agent.messages import Reply, Usage
from batch_agent.scheduler.core import Scheduler, Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.engine_load import Reading
from batch_agent.scheduler.health import SHORTEST_SILENCE, SILENCE_FACTOR, trouble_of
from batch_agent.scheduler.limit_search import LimitSearch
from batch_agent.scheduler.rates import is_spent
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER

if TYPE_CHECKING:
    from batch_agent.events import Ended

MOST_CROWDED = 20  # refusals of one turn that were others' fault, before they count like its own
NEVER_ANSWERED = 15.0  # seconds after which a server is given up that has not answered once

OnHealth = Callable[[Endpoint, float], None]
OnLimit = Callable[[Endpoint, str], None]
OnOver = Callable[["Ended", str], None]


class Endpoints:
    """``wake`` is called when somebody who waits for a slot may get one. ``are_few`` says whether the agents that are
    left are too few to put an endpoint down. Without a ``knock`` an endpoint that is down is tried with a row's turn
    also while others work."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_outage: float | None,
        on_health: OnHealth,
        on_limit: OnLimit,
        on_over: OnOver,
        wake: Callable[[], None],
        are_few: Callable[[], bool],
        knock: Knock | None = None,
    ) -> None:
        self._scheduler, self._all = scheduler, scheduler.endpoints
        self._max_outage = inf if max_outage is None else max_outage
        self._on_health, self._on_limit, self._on_over = on_health, on_limit, on_over
        self._wake, self._touch, self._are_few = wake, scheduler.touch, are_few
        self._knock = knock
        self._knocks: dict[Endpoint, asyncio.Task[None]] = {}
        self._doubted: dict[Endpoint, set[Ticket]] = {}  # failed since the endpoint's last good answer
        self.doubts: list[tuple[Ticket, asyncio.Future[None]]] = []  # those who wait to learn whose fault it was
        self._limits: dict[Endpoint, dict[Ticket, asyncio.Timeout]] = {}  # of requests on their way
        self._patient: dict[Endpoint, Ticket] = {}  # the trial that may be waited for beside the next ones
        self._unreachable: list[Endpoint] = []  # given up because nothing worked any more
        self._alarms = Alarms(self._look)
        self.budgets = Budgets(self.arm)

    # Requests

    def sent(self, ticket: Ticket) -> None:
        endpoint = ticket.endpoint
        assert endpoint is not None
        if ticket.trial:
            self._on_health(endpoint, ticket.sent_at)
        search = endpoint.capacity.search
        if search is not None and search.ramp_at is None:
            endpoint.capacity.ramp(endpoint.inflight, ticket.sent_at)
            self.arm(endpoint)
        if endpoint.rates is not None:
            ticket.lease = endpoint.rates.begin(ticket.sent_at)
            self.arm(endpoint)
        elif ticket.trial or endpoint not in self._alarms:
            self.arm(endpoint)

    def limit(self, ticket: Ticket, seconds: float | None) -> asyncio.Timeout:
        """The time limit of one request; ``finished`` must follow. An endpoint on trial has to answer in the time that
        it usually takes, and an answer that was lost in an outage is not waited for."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        if ticket.trial and (trial := endpoint.health.trial_seconds(ticket.sent_at)) is not None:
            if self._patient.setdefault(endpoint, ticket) is ticket:
                trial = endpoint.health.patient_seconds(ticket.sent_at)
            seconds = min(trial, seconds or inf)
        limit = asyncio.timeout(seconds)
        self._limits.setdefault(endpoint, {})[ticket] = limit
        return limit

    def finished(self, ticket: Ticket) -> None:
        endpoint = ticket.endpoint
        assert endpoint is not None
        self._limits[endpoint].pop(ticket, None)
        if ticket.trial and self._patient.get(endpoint) is ticket:
            del self._patient[endpoint]

    def answered(self, ticket: Ticket, seconds: float, reply: Reply) -> None:
        """A good answer: what failed although it was asked no later has failed by itself. Of what was asked later it
        says nothing: a server may finish what it has and take nothing new."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        self._is_alive(endpoint, ticket, seconds)
        self.budgets.learn(endpoint, ticket, reply.quota, reply.usage)
        counted = reply.usage.prompt_tokens or reply.usage.completion_tokens
        self.budgets.settle(ticket, reply.usage if counted else None)
        endpoint.refusals.answered(ticket.sent_at)
        if doubted := self._doubted.get(endpoint):
            for other in [other for other in doubted if other.sent_at <= ticket.sent_at]:
                other.doubtful, other.broke = 0, False
                doubted.remove(other)
        if self.doubts:
            self._tell_what_is_known(endpoint)
        if not endpoint.health.is_down:
            tokens = reply.usage.completion_tokens
            self._say(endpoint, endpoint.capacity.succeeded(ticket.sent_at, seconds, tokens, _now()))

    def failed(self, ticket: Ticket, error: BackendError) -> None:
        """Called while the ticket is still held. Counts the failure as the row's own, as long as it may be."""
        endpoint, now = ticket.endpoint, _now()
        assert endpoint is not None
        kind, health = trouble_of(error), endpoint.health
        self.budgets.learn(endpoint, ticket, error.quota, error.usage or Usage())
        free = error.usage is None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self.budgets.settle(ticket, Usage() if free else error.usage)
        if ticket.lost and (ticket.overdue or ticket.sent_at < health.down_since):
            return  # it was we who ended it
        if kind is None:
            ticket.failures += 1
            self._is_alive(endpoint, ticket, now - ticket.sent_at)
            if isinstance(error, Rejected) and not isinstance(error, ContextOverflow) and not ticket.chore:
                self._refused(endpoint, ticket, error)
            return
        if kind == "overload":
            self._overloaded(endpoint, ticket, error, now)
            if is_spent(error.quota) and ticket.crowded < MOST_CROWDED:
                ticket.crowded += 1
                return  # nobody's fault, and it is known when there will be more
        elif isinstance(error, Timeout) and not error.unreached and endpoint.capacity.search is not None:
            # A number that we found ourselves was too high: they wait in the server's queue.
            self._say(endpoint, endpoint.capacity.overloaded(ticket.generation, endpoint.inflight))
        if kind == "broken" and not ticket.moved and self.others_work(endpoint):
            ticket.moved = True  # it goes elsewhere; what breaks there too may be its own fault
        elif kind == "overload" and _is_crowded(ticket, endpoint, error):
            ticket.crowded += 1  # it was sent beside too many others, which is no fault of its own
        elif kind != "unreached" and ticket.failures > ticket.doubtful and not health.is_down:
            ticket.failures += 1  # it has failed while others were answered: it says nothing about the server
            return
        elif kind != "unreached":
            ticket.failures += 1
            ticket.doubtful += 1
            ticket.broke = ticket.broke or kind == "broken"
            self._doubted.setdefault(endpoint, set()).add(ticket)
        if health.failed(kind, ticket.progress, endpoint.inflight - 1, str(error), now):
            self._goes_down(endpoint, now)
        elif health.is_down:
            if ticket.trial and not ticket.suspect and self._are_few():
                ticket.hits += ticket.broke  # there are not enough to tell an outage from a bad row
            self._forgive(endpoint)
            if ticket.trial and not ticket.overdue:
                health.trial_over()
                self._trial_failed(endpoint, now)

    async def learn(self, ticket: Ticket) -> None:
        """Until it is known whose fault the ticket's failure was. Raises Interrupted when the run is over."""
        assert ticket.endpoint is not None
        if not self._in_doubt(ticket.endpoint, ticket):
            return
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.doubts.append((ticket, known))
        self._wake()
        await known

    def clear_doubts(self, error: Interrupted | None = None) -> None:
        """Whatever is known by now is all that will be."""
        doubts, self.doubts = self.doubts, []
        for _, known in doubts:
            if not known.done():
                known.set_result(None) if error is None else known.set_exception(error)

    def _tell_what_is_known(self, endpoint: Endpoint) -> None:
        """To those who wait to learn it, and are no longer in doubt."""
        doubts, self.doubts = self.doubts, []
        for ticket, known in doubts:
            if ticket.endpoint is not endpoint or self._in_doubt(endpoint, ticket):
                self.doubts.append((ticket, known))
            elif not known.done():
                known.set_result(None)

    def _in_doubt(self, endpoint: Endpoint, ticket: Ticket) -> bool:
        if endpoint.given_up:
            return False
        return ticket in self._doubted.get(endpoint, ()) or endpoint.refusals.is_unclear(ticket.progress)

    def give_up_lost(self) -> None:
        """Nothing more is sent: requests on their way finish, but not those at a server that is down."""
        now = _now()
        for endpoint, limits in self._limits.items():
            if endpoint.health.is_down:
                for ticket in limits:
                    self._lose(ticket, now)

    def loaded(self, endpoint: Endpoint, load: Reading) -> None:
        """The endpoint told how busy it is."""
        self._say(endpoint, endpoint.capacity.loaded(load, endpoint.inflight))
        self._touch(endpoint)
        self._wake()

    def seek(self, endpoint: Endpoint, search: LimitSearch, why: str) -> None:
        endpoint.capacity.start_search(search)
        self._touch(endpoint)
        self._say(endpoint, why)

    def _say(self, endpoint: Endpoint, reason: str) -> None:
        if reason:
            self._on_limit(endpoint, reason)

    def resize(self, ceiling: int | None) -> None:
        for endpoint in self._all:
            endpoint.capacity.resize(ceiling)
            self._on_limit(endpoint, "asked for")
            self._touch(endpoint)

    def others_work(self, endpoint: Endpoint) -> bool:
        router = self._scheduler.router
        return len(self._all) > 1 and router.working > router.works(endpoint)

    def close(self) -> None:
        self._alarms.close()
        for knock in self._knocks.values():
            knock.cancel()

    # An endpoint's ups and downs

    def _is_alive(self, endpoint: Endpoint, ticket: Ticket, seconds: float) -> None:
        now = _now()
        began = endpoint.health.down_since
        if endpoint.health.answered_after(seconds, ticket.sent_at, now):
            endpoint.held_until = 0.0
            for other in self._limits.get(endpoint, ()):
                if other.overdue or (other.sent_at < began and not other.lost):
                    self._lose(other, now + endpoint.health.grace)
            self._touch(endpoint)
            self._on_health(endpoint, now)
            self._scheduler.rejoin()
            self._take_up_again()
            self.arm(endpoint)
            self._wake()

    def _take_up_again(self) -> None:
        """One endpoint works again: those that were given up with it may do so too."""
        unreachable, self._unreachable = self._unreachable, []
        for endpoint in unreachable:
            endpoint.given_up = ""
            self._touch(endpoint)
            self.arm(endpoint)

    def _overloaded(self, endpoint: Endpoint, ticket: Ticket, error: BackendError, now: float) -> None:
        """It refused for load: halve, and let nobody ask again before it said so. A budget by the minute that is spent
        says nothing of what may be in flight."""
        wait = error.retry_after or 0.0
        wait = wait if wait <= LONGEST_RETRY_AFTER else 0.0  # its row fails, and nobody else waits
        if not endpoint.health.is_down and not is_spent(error.quota):
            self._say(endpoint, endpoint.capacity.overloaded(ticket.generation, endpoint.inflight, wait, now))
        if wait > 0.0 and now + wait > endpoint.held_until:
            endpoint.held_until = now + wait
            self._touch(endpoint)
            self.arm(endpoint)

    def _goes_down(self, endpoint: Endpoint, now: float) -> None:
        endpoint.go_down()
        self._touch(endpoint)
        self._forgive(endpoint)
        self._on_limit(endpoint, "the server is down")
        self._on_health(endpoint, now)
        self._tell_what_is_known(endpoint)
        self.arm(endpoint)

    def _trial_failed(self, endpoint: Endpoint, now: float) -> None:
        self._on_health(endpoint, now)
        self._lose_patience(endpoint, now)
        self.arm(endpoint)

    def _lose_patience(self, endpoint: Endpoint, now: float) -> None:
        """Nothing is given up as long as something works: it is knocked at, now and then, until the run ends."""
        if now >= self._patience_ends(endpoint) and not endpoint.given_up and not self.others_work(endpoint):
            self._unreachable.append(endpoint)
            self._give_up(endpoint, "unreachable", self._what_was_tried(endpoint, now))

    def _forgive(self, endpoint: Endpoint) -> None:
        """What failed was the server, not the rows; though a row that is there each time may be what fells it."""
        for ticket in self._doubted.pop(endpoint, ()):
            ticket.failures -= ticket.doubtful
            ticket.hits += ticket.broke and (not ticket.trial or ticket.suspect)
            ticket.doubtful, ticket.broke = 0, False

    def _refused(self, endpoint: Endpoint, ticket: Ticket, error: Rejected) -> None:
        left = endpoint.inflight - 1
        if endpoint.refusals.refused(ticket.progress, error.status, str(error), ticket.sent_at, left) == "all":
            self._give_up(endpoint, "failed", f"the run stopped at a refusal that concerns every row: {error}")

    def _give_up(self, endpoint: Endpoint, ended: Ended, why: str) -> None:
        if endpoint.given_up:
            return
        endpoint.given_up = why
        self._touch(endpoint)
        if all(other.given_up or other.leaving for other in self._all):
            self._on_over(ended, why)
        self._tell_what_is_known(endpoint)

    # Time

    def arm(self, endpoint: Endpoint) -> None:
        """For what is due there first."""
        now = _now()
        self._alarms.set(endpoint, min((due for due in self._dues(endpoint) if due > now), default=inf))

    def _dues(self, endpoint: Endpoint) -> tuple[float, ...]:
        """When something is to be done about an endpoint, if nothing happens before."""
        health = endpoint.health
        if endpoint.given_up:
            return ()
        if health.state == "on trial":
            return (health.trial_ends,)
        if health.state == "down":
            return health.next_trial, endpoint.held_until, self._patience_ends(endpoint)
        search, rates = endpoint.capacity.search, endpoint.rates
        ramp_at = inf if search is None or search.ramp_at is None else search.ramp_at
        free_at = inf if rates is None else rates.free_at(_now())
        return endpoint.held_until, self._silent_at(endpoint) if endpoint.inflight else inf, ramp_at, free_at

    def _silent_at(self, endpoint: Endpoint) -> float:
        """Where too little is known of an endpoint, its siblings say what is usual."""
        if endpoint.health.silent_at < inf or self._knock is None or not self.others_work(endpoint):
            return endpoint.health.silent_at
        return endpoint.health.heard + max(SHORTEST_SILENCE, SILENCE_FACTOR * self._scheduler.router.usual)

    def _patience_ends(self, endpoint: Endpoint) -> float:
        health = endpoint.health
        return health.down_since + (self._max_outage if health.answered else min(self._max_outage, NEVER_ANSWERED))

    def _look(self, due: list[Endpoint]) -> None:
        now = _now()
        for endpoint in due:
            self._look_at(endpoint, now)
        self.budgets.serve()
        self._wake()
        for endpoint in due:
            self.arm(endpoint)

    def _look_at(self, endpoint: Endpoint, now: float) -> None:
        health = endpoint.health
        if endpoint.held_until and endpoint.held_until <= now:
            endpoint.held_until = 0.0
        self._say(endpoint, endpoint.capacity.ramp(endpoint.inflight, now))
        self._touch(endpoint)
        if not self.budgets.short and health.is_silent(endpoint.inflight, now):
            self._is_silent(endpoint, now)
        elif not self.budgets.short and not health.is_down and endpoint.inflight and now >= self._silent_at(endpoint):
            self._knock_at(endpoint)
        elif health.state == "on trial" and now >= health.trial_ends:
            self._wait_beside(endpoint, now)
        elif health.state == "down":
            # Without a trial nobody has asked yet, and nobody knows.
            if health.trials or endpoint.held_until:
                self._lose_patience(endpoint, now)
            if now >= health.next_trial and not endpoint.given_up and self.others_work(endpoint):
                if self._knock is None:
                    self._scheduler.router.trials.append(endpoint)
                else:
                    health.try_now(now)
                    self._knock_at(endpoint)

    def _is_silent(self, endpoint: Endpoint, now: float) -> None:
        endpoint.health.go_down(now, silent=True)
        endpoint.health.reason = f"{endpoint.inflight} requests are in flight, and nothing came back for too long"
        self._goes_down(endpoint, now)
        if not self.others_work(endpoint):
            self._give_up_oldest(endpoint, now)
            return
        for ticket in self._limits.get(endpoint, ()):
            self._lose(ticket, now)

    # Knocking

    def _knock_at(self, endpoint: Endpoint) -> None:
        if self._knock is not None and endpoint not in self._knocks:
            self._knocks[endpoint] = asyncio.get_running_loop().create_task(self._hear(self._knock, endpoint))

    async def _hear(self, knock: Knock, endpoint: Endpoint) -> None:
        """An endpoint that is down and opens gets a trial; one that works and does not open is down."""
        health = endpoint.health
        try:
            reason = await why_shut(knock, endpoint.name)
        finally:
            del self._knocks[endpoint]
        now = _now()
        health.reason = reason or health.reason
        if not health.is_down:
            if reason:
                self._is_silent(endpoint, now)
            else:
                health.heard = now  # it is slow
                self.arm(endpoint)
        else:
            health.trial_over()
            if reason:
                self._trial_failed(endpoint, now)
            else:
                health.next_trial = now
                self._scheduler.router.trials.append(endpoint)
        self._wake()

    def _wait_beside(self, endpoint: Endpoint, now: float) -> None:
        """The trial takes longer than usual. Where it may, it goes on, while others are tried."""
        ticket = self._patient.get(endpoint)
        if ticket is not None and not ticket.overdue:
            ticket.overdue = True
            endpoint.health.trial_over()
            self._give_up_oldest(endpoint, now)
            self._trial_failed(endpoint, now)

    def _give_up_oldest(self, endpoint: Endpoint, now: float) -> None:
        """Of the requests from before the outage one is taken back, to be the trial: all slots may be theirs."""
        began = endpoint.health.down_since
        waiting = [t for t in self._limits.get(endpoint, ()) if t.sent_at < began and not t.lost]
        if waiting:
            self._lose(min(waiting, key=lambda ticket: ticket.sent_at), now)

    def _lose(self, ticket: Ticket, at: float) -> None:
        assert ticket.endpoint is not None
        limit = self._limits[ticket.endpoint][ticket]
        if not limit.expired():
            ticket.lost = True
            limit.reschedule(min(limit.when() or inf, at))

    def _what_was_tried(self, endpoint: Endpoint, now: float) -> str:
        health = endpoint.health
        outage = f"{now - health.down_since:.0f} s and {health.trials} trials"
        if health.answered:
            return f"the server was down for longer than max_outage, {self._max_outage:g} s: {outage}; {health.reason}"
        return f"the server never answered, in {outage}: {health.reason}"


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_crowded(ticket: Ticket, endpoint: Endpoint, error: BackendError) -> bool:
    """Whether a refusal for load was the others' fault."""
    asks_little = (error.retry_after or 0.0) <= LONGEST_RETRY_AFTER
    return endpoint.inflight > 1 and ticket.crowded < MOST_CROWDED and asks_little and not ticket.once

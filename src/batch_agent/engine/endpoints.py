"""What answers and failures say about the endpoints, made awaitable: ``scheduler.health`` and ``scheduler.refusals``
with timers for trials, for silence and for the end of patience, and futures for those who wait to learn whose fault it
was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from batch_agent.errors import BackendError, ContextOverflow, Interrupted, Rejected, Timeout, Unavailable
from batch_agent.messages import Quota, Reply, Usage
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.engine_load import Reading
from batch_agent.scheduler.health import Kind
from batch_agent.scheduler.rates import Rates, is_spent
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER
from batch_agent.scheduler.seeking import Seeker

if TYPE_CHECKING:
    from batch_agent.events import Ended

MOST_CROWDED = 20  # refusals of one turn that were others' fault, before they count like its own
NEVER_ANSWERED = 15.0  # seconds after which a server is given up that has not answered once

OnHealth = Callable[[Endpoint, float], None]
OnLimit = Callable[[Endpoint, str], None]
OnOver = Callable[["Ended", str], None]


class Endpoints:
    """``wake`` is called when somebody who waits for a slot may get one, ``rejoin`` when an endpoint is back.
    ``are_few`` says whether the agents that are left are too few to put an endpoint down."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        max_outage: float | None,
        on_health: OnHealth,
        on_limit: OnLimit,
        on_over: OnOver,
        wake: Callable[[], None],
        rejoin: Callable[[], None],
        are_few: Callable[[], bool],
    ) -> None:
        self._all = endpoints
        self._max_outage = inf if max_outage is None else max_outage
        self._on_health, self._on_limit, self._on_over = on_health, on_limit, on_over
        self._wake, self._rejoin, self._are_few = wake, rejoin, are_few
        self._doubted: dict[Endpoint, set[Ticket]] = {}  # failed since the endpoint's last good answer
        self.doubts: list[tuple[Ticket, asyncio.Future[None]]] = []  # those who wait to learn whose fault it was
        self._limits: dict[Ticket, asyncio.Timeout] = {}  # of requests on their way
        self._patient: dict[Endpoint, Ticket] = {}  # the trial that may be waited for beside the next ones
        self.short: set[asyncio.Future[None]] = set()  # those who wait for a budget, with their slots
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf

    # Requests

    def sent(self, ticket: Ticket) -> None:
        endpoint = ticket.endpoint
        assert endpoint is not None
        if ticket.trial:
            self._on_health(endpoint, ticket.sent_at)
            self.arm()
        seeker = endpoint.capacity.seeker
        if seeker is not None and seeker.ramp_at is None:
            endpoint.capacity.ramp(endpoint.inflight, ticket.sent_at)
            self.arm(endpoint)
        if endpoint.rates is not None:
            ticket.lease = endpoint.rates.begin(ticket.sent_at)
            self.arm(endpoint)
        elif self._due == inf:
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
        self._limits[ticket] = limit
        return limit

    def finished(self, ticket: Ticket) -> None:
        self._limits.pop(ticket, None)
        if ticket.trial and ticket.endpoint is not None and self._patient.get(ticket.endpoint) is ticket:
            del self._patient[ticket.endpoint]

    async def afford(self, ticket: Ticket, expect: Callable[[], Usage]) -> None:
        """Until the endpoint's budgets have room for what the request is expected to take; ``settle`` must follow."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        rates, counted = endpoint.rates, ticket.lease
        if rates is None or counted is None or not rates.counts_tokens:
            return
        expected = expect()
        lease = rates.reserve(counted, expected, _now())
        waited = lease is None
        while lease is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.short.add(turn)
            self.arm(endpoint)
            try:
                await turn
            finally:
                self.short.discard(turn)
            lease = rates.reserve(counted, expected, _now())
        if waited:
            rates.count(_now())  # it leaves later than it was counted: better twice than too early
        ticket.lease = lease

    def settle(self, ticket: Ticket, used: Usage | None = None, *, asked: bool = True) -> None:
        """What the request took of the budgets; None where nobody knows. ``asked``: the endpoint has seen it."""
        lease, endpoint = ticket.lease, ticket.endpoint
        if lease is None or endpoint is None or endpoint.rates is None:
            return
        ticket.lease = None
        if asked:
            endpoint.rates.settle(lease, used, _now())
        else:
            endpoint.rates.unsend(lease, _now())
        self._serve_short()
        self.arm(endpoint)

    def _serve_short(self) -> None:
        for turn in self.short:
            if not turn.done():
                turn.set_result(None)

    def _learn_quota(self, endpoint: Endpoint, ticket: Ticket, quota: Quota | None, used: Usage) -> None:
        if quota is not None:
            if endpoint.rates is None:
                endpoint.rates = Rates()
            endpoint.rates.learn(quota, ticket.lease, endpoint.inflight - 1, used, _now())
            self.arm(endpoint)

    def answered(self, ticket: Ticket, seconds: float, reply: Reply) -> None:
        """A good answer: what failed although it was asked no later has failed by itself. Of what was asked later it
        says nothing: a server may finish what it has and take nothing new."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        self._is_alive(endpoint, ticket, seconds)
        self._learn_quota(endpoint, ticket, reply.quota, reply.usage)
        counted = reply.usage.prompt_tokens or reply.usage.completion_tokens
        self.settle(ticket, reply.usage if counted else None)
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
        self._learn_quota(endpoint, ticket, error.quota, error.usage or Usage())
        free = error.usage is None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self.settle(ticket, Usage() if free else error.usage)
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
        elif isinstance(error, Timeout) and not error.unreached and endpoint.capacity.seeker is not None:
            # A number that we found ourselves was too high: they wait in the server's queue.
            self._say(endpoint, endpoint.capacity.overloaded(ticket.generation, endpoint.inflight))
        crowded = kind == "overload" and endpoint.inflight > 1 and ticket.crowded < MOST_CROWDED
        crowded = crowded and (error.retry_after or 0.0) <= LONGEST_RETRY_AFTER
        ticket.crowded += crowded  # it was sent beside too many others, which is no fault of its own
        if kind != "unreached" and not crowded and ticket.failures > ticket.doubtful and not health.is_down:
            ticket.failures += 1  # it has failed while others were answered: it says nothing about the server
            return
        if kind != "unreached" and not crowded:
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
        for ticket in self._limits:
            assert ticket.endpoint is not None
            if ticket.endpoint.health.is_down:
                self._lose(ticket, now)

    def loaded(self, endpoint: Endpoint, load: Reading) -> None:
        """The endpoint told how busy it is."""
        self._say(endpoint, endpoint.capacity.loaded(load, endpoint.inflight))
        self._wake()

    def seek(self, endpoint: Endpoint, seeker: Seeker, why: str) -> None:
        endpoint.capacity.seek(seeker)
        self._say(endpoint, why)

    def _say(self, endpoint: Endpoint, reason: str) -> None:
        if reason:
            self._on_limit(endpoint, reason)

    def resize(self, ceiling: int | None) -> None:
        for endpoint in self._all:
            endpoint.capacity.resize(ceiling)
            self._on_limit(endpoint, "asked for")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # An endpoint's ups and downs

    def _is_alive(self, endpoint: Endpoint, ticket: Ticket, seconds: float) -> None:
        now = _now()
        began = endpoint.health.down_since
        if endpoint.health.answered_after(seconds, ticket.sent_at, now):
            endpoint.held_until = 0.0
            for other in self._limits:
                if other.endpoint is endpoint and (other.overdue or (other.sent_at < began and not other.lost)):
                    self._lose(other, now + endpoint.health.grace)
            self._on_health(endpoint, now)
            self._rejoin()
            self.arm()
            self._wake()

    def _overloaded(self, endpoint: Endpoint, ticket: Ticket, error: BackendError, now: float) -> None:
        """It refused for load: halve, and let nobody ask again before it said so. A budget by the minute that is spent
        says nothing of what may be in flight."""
        if not endpoint.health.is_down and not is_spent(error.quota):
            self._say(endpoint, endpoint.capacity.overloaded(ticket.generation, endpoint.inflight))
        wait = error.retry_after or 0.0
        if 0.0 < wait <= LONGEST_RETRY_AFTER and now + wait > endpoint.held_until:
            endpoint.held_until = now + wait
            self.arm()

    def _goes_down(self, endpoint: Endpoint, now: float) -> None:
        endpoint.go_down()
        self._forgive(endpoint)
        self._on_limit(endpoint, "the server is down")
        self._on_health(endpoint, now)
        self._tell_what_is_known(endpoint)
        self.arm()

    def _trial_failed(self, endpoint: Endpoint, now: float) -> None:
        self._on_health(endpoint, now)
        if now >= self._patience_ends(endpoint):
            self._give_up(endpoint, "unreachable", self._what_was_tried(endpoint, now))
        self.arm()

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
        if all(other.given_up for other in self._all):
            self._on_over(ended, why)
        self._tell_what_is_known(endpoint)

    # Time

    def arm(self, only: Endpoint | None = None) -> None:
        """One timer, for what is due first; ``only`` where it is one endpoint alone that may want it earlier."""
        now = _now()
        among = self._all if only is None else (only,)
        due = min((due for endpoint in among for due in self._dues(endpoint) if due > now), default=inf)
        if due != self._due and (only is None or due < self._due):
            self._due = due
            self.close()
            self._timer = None if due == inf else asyncio.get_running_loop().call_at(due, self._look)

    def _dues(self, endpoint: Endpoint) -> tuple[float, ...]:
        """When something is to be done about an endpoint, if nothing happens before."""
        health = endpoint.health
        if endpoint.given_up:
            return ()
        if health.state == "on trial":
            return (health.trial_ends,)
        if health.state == "down":
            return health.next_trial, endpoint.held_until, self._patience_ends(endpoint)
        seeker, rates = endpoint.capacity.seeker, endpoint.rates
        ramp_at = inf if seeker is None or seeker.ramp_at is None else seeker.ramp_at
        free_at = inf if rates is None else rates.free_at(_now())
        return endpoint.held_until, health.silent_at if endpoint.inflight else inf, ramp_at, free_at

    def _patience_ends(self, endpoint: Endpoint) -> float:
        health = endpoint.health
        return health.down_since + (self._max_outage if health.answered else min(self._max_outage, NEVER_ANSWERED))

    def _look(self) -> None:
        now = _now()
        self._due = inf
        for endpoint in self._all:
            health = endpoint.health
            if endpoint.held_until <= now:
                endpoint.held_until = 0.0
            self._say(endpoint, endpoint.capacity.ramp(endpoint.inflight, now))
            if not self.short and health.is_silent(endpoint.inflight, now):
                health.go_down(now, silent=True)
                health.reason = f"{endpoint.inflight} requests are in flight, and nothing came back for too long"
                self._goes_down(endpoint, now)
                self._give_up_oldest(endpoint, now)
            elif health.state == "on trial" and now >= health.trial_ends:
                self._wait_beside(endpoint, now)
            # Without a trial nobody has asked yet, and nobody knows.
            elif (
                health.state == "down"
                and (health.trials or endpoint.held_until)
                and now >= self._patience_ends(endpoint)
            ):
                self._give_up(endpoint, "unreachable", self._what_was_tried(endpoint, now))
        self._serve_short()
        self._wake()
        self.arm()

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
        waiting = [t for t in self._limits if t.endpoint is endpoint and t.sent_at < began and not t.lost]
        if waiting:
            self._lose(min(waiting, key=lambda ticket: ticket.sent_at), now)

    def _lose(self, ticket: Ticket, at: float) -> None:
        limit = self._limits[ticket]
        if not limit.expired():
            ticket.lost = True
            limit.reschedule(min(limit.when() or inf, at))

    def _what_was_tried(self, endpoint: Endpoint, now: float) -> str:
        health = endpoint.health
        outage = f"{now - health.down_since:.0f} s and {health.trials} trials"
        if health.answered:
            return f"the server was down for longer than max_outage, {self._max_outage:g} s: {outage}; {health.reason}"
        return f"the server never answered, in {outage}: {health.reason}"


def trouble_of(error: BackendError) -> Kind | None:
    """What a failure says about the server; None when it says nothing against it."""
    if error.overload:
        return "overload"
    if error.unreached:
        return "unreached"
    if isinstance(error, Unavailable) or (isinstance(error, Timeout) and not error.text):
        return "broken"
    return None


def _now() -> float:
    return asyncio.get_running_loop().time()

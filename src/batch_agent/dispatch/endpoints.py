"""The endpoints of a dispatcher over time: what attempts say about them, trials, probes, silence, the end of patience.

``scheduler.blame`` judges each attempt and ``scheduler.health`` knows the timing; this file applies the verdicts and
turns due times into timers.

A trial begins with a probe. While other endpoints work, it goes no further if the probe fails: no row waits for an
endpoint that is down. If nothing works, a row follows whatever the probe says, since the page that is probed may be at
fault; a row that breaks after a good probe may be what brings the server down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from batch_agent.backends.base import Backend, Probe
from batch_agent.dispatch.alarms import Alarms
from batch_agent.dispatch.budgets import Budgets
from batch_agent.dispatch.deadlines import Deadline, Deadlines
from batch_agent.dispatch.decisions import Decisions
from batch_agent.dispatch.probing import probe
from batch_agent.dispatch.rate_mark import RateMark
from batch_agent.errors import BackendError, ContextOverflow, Interrupted, RateLimited, Rejected
from batch_agent.messages import Reply, Usage
from batch_agent.scheduler.blame import Attempt, Outcome, Verdict, judge, outcome_of
from batch_agent.scheduler.core import Scheduler, Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.engine_load import Reading
from batch_agent.scheduler.health import SHORTEST_SILENCE, SILENCE_FACTOR
from batch_agent.scheduler.limit_search import LimitSearch
from batch_agent.scheduler.rates import is_spent

if TYPE_CHECKING:
    from batch_agent.dispatch.slots import Slots
    from batch_agent.events import Ended

NEVER_REACHED = 30.0  # seconds after which an endpoint is given up that no request has ever reached
TAIL_FACTOR = 1.5  # times what an idle endpoint takes: what a request must still take where it is, to be taken back
SHORTEST_TAIL = 0.05  # seconds between two looks at the end of a batch
SECOND_LOOK = 0.25  # seconds after which silence is looked at again
UNKNOWN_FACTOR = 3.0  # times the usual seconds, after which a request at an endpoint that never answered is taken back

OnHealth = Callable[[Endpoint, float], None]
OnLimit = Callable[[Endpoint, str], None]
OnOver = Callable[["Ended", str], None]


class EndpointMonitor:
    """``on_over`` is told how and why the run ends when no endpoint is left. ``max_outage`` None waits for ever for an
    endpoint that has answered, ``inf`` also for one that never did."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend | None,
        max_outage: float | None,
        on_health: OnHealth,
        on_limit: OnLimit,
        on_over: OnOver,
    ) -> None:
        self._scheduler, self._all = scheduler, scheduler.endpoints
        self._backend = backend
        self._max_outage = inf if max_outage is None else max_outage
        self._max_silence = inf if max_outage == inf else min(self._max_outage, NEVER_REACHED)  # before the first word
        self._on_health, self._on_limit, self._on_over = on_health, on_limit, on_over
        self._slots: Slots | None = None
        self._probes: dict[Endpoint, asyncio.Task[Probe]] = {}
        self._flights: dict[Endpoint, dict[Ticket, Deadline]] = {}
        self._recalled: set[Ticket] = set()  # in flight, taken back by us
        self._tried_elsewhere: set[Ticket] = set()  # taken back once at the end of the batch
        self._patient: dict[Endpoint, Ticket] = {}  # the trial that is waited for beside the next ones
        self._unreachable: list[Endpoint] = []  # given up because nothing worked any more
        self._mark: RateMark | None = None
        self._seen: dict[Endpoint, str] = {}  # the health that was last reported
        self._quiet: dict[Endpoint, float] = {}  # since when it has said nothing, at the first look
        self._tail_timer: asyncio.TimerHandle | None = None
        self._alarms = Alarms(self._look)
        self._deadlines = Deadlines()
        self.budgets = Budgets(self.arm)
        self.decisions = Decisions(self._all, self._probe, self._few_rows, self._pump)

    def start(self, slots: Slots) -> None:
        self._slots = slots
        for endpoint in self._all:
            self.attach(endpoint)

    def attach(self, endpoint: Endpoint) -> None:
        """Share what is known of the server with its other dispatchers."""
        slots = self._slots
        assert slots is not None
        endpoint.is_hungry = lambda: slots.is_hungry
        endpoint.on_change = self._changed_by_others

    def close(self) -> None:
        self._alarms.close()
        self._deadlines.close()
        if self._tail_timer is not None:
            self._tail_timer.cancel()
        for task in self._probes.values():
            task.cancel()
        for endpoint in self._all:
            endpoint.on_change = None
            endpoint.close()

    # Requests

    def sent(self, ticket: Ticket) -> None:
        endpoint = ticket.endpoint
        assert endpoint is not None
        if ticket.trial:
            self._report(endpoint, ticket.sent_at)
        search = endpoint.capacity.search
        if search is not None and search.ramp_at is None:
            endpoint.capacity.ramp(endpoint.server.inflight, ticket.sent_at)
            self.arm(endpoint)
        if endpoint.server.rates is not None:
            if self._mark is not None:
                self._mark.mark()
            ticket.lease = endpoint.server.rates.begin(ticket.sent_at)
            self.arm(endpoint)
        elif ticket.trial or endpoint not in self._alarms:
            self.arm(endpoint)

    def deadline(self, ticket: Ticket, seconds: float | None) -> Deadline:
        """The time limit of one request; ``finished`` must follow. A trial has to be answered in the time that the
        endpoint usually takes."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        limit = inf if seconds is None else seconds
        if ticket.trial and (trial := endpoint.health.trial_seconds(ticket.sent_at)) is not None:
            if self._patient.setdefault(endpoint, ticket) is ticket:
                trial = endpoint.health.patient_seconds(ticket.sent_at)
            limit = min(limit, trial)
        if ticket.trial and self.others_work(endpoint) and not endpoint.health.patient:
            limit = min(limit, self._longest_silence)
        deadline = self._deadlines.after(None if limit == inf else limit)
        flights = self._flights.get(endpoint)
        if flights is None:
            flights = self._flights[endpoint] = {}
        flights[ticket] = deadline
        return deadline

    def keep_rates(self, mark: RateMark) -> None:
        """Keep the user's rate limits over a kill: what an earlier session may have used counts."""
        self._mark = mark
        left = mark.seconds_left()
        for endpoint in self._all if left else ():
            if endpoint.server.rates is not None:
                endpoint.server.rates.fill(_now() + left)
                self.arm(endpoint)

    def released(self, ticket: Ticket) -> None:
        """The ticket has given its slot back."""
        if ticket.lease is not None:
            self.budgets.settle(ticket)
        if ticket.trial and ticket.endpoint is not None:
            self.arm(ticket.endpoint)  # for the next trial, if this one was withdrawn

    def finished(self, ticket: Ticket) -> None:
        endpoint = ticket.endpoint
        assert endpoint is not None
        self._flights[endpoint].pop(ticket, None)
        if ticket.trial and self._patient.get(endpoint) is ticket:
            del self._patient[endpoint]

    def answered(self, ticket: Ticket, seconds: float, reply: Reply) -> None:
        endpoint, now = ticket.endpoint, _now()
        assert endpoint is not None
        server = endpoint.server
        self._recalled.discard(ticket)
        self._tried_elsewhere.discard(ticket)
        self._scheduler.answered(ticket, seconds, reply.usage, now)
        server.learn(seconds)
        server.refused_since = None
        self._is_alive(endpoint, ticket, seconds, now)
        if reply.quota is not None or ticket.lease is not None:
            counted = reply.usage.prompt_tokens or reply.usage.completion_tokens
            self.budgets.learn(endpoint, ticket, reply.quota, reply.usage)
            self.budgets.settle(ticket, reply.usage if counted else None)
        server.refusals.answered(ticket.sent_at)
        if server.history.open or server.history.alone:
            server.history.add(Attempt(ticket.row, ticket.sent_at, now, "answered", ticket.trial), _GOOD)
        self.decisions.wake()
        if not endpoint.health.is_down:
            tokens = reply.usage.completion_tokens
            self._say(endpoint, endpoint.capacity.succeeded(ticket.sent_at, seconds, tokens, now))

    def failed(self, ticket: Ticket, error: BackendError) -> tuple[Attempt, Verdict]:
        """Judge a failed attempt and apply the verdict. Called while the ticket still holds its slot."""
        endpoint, now = ticket.endpoint, _now()
        assert endpoint is not None
        server, health = endpoint.server, endpoint.health
        self.budgets.learn(endpoint, ticket, error.quota, error.usage or Usage())
        free = error.usage is None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self.budgets.settle(ticket, Usage() if free else error.usage)
        outcome: Outcome = outcome_of(error)
        if ticket in self._recalled:
            self._recalled.discard(ticket)
            outcome = "recalled"
        if outcome == "overloaded" and is_spent(error.quota):
            outcome = "recalled"  # it is known when there will be more: neither side is to blame
        if outcome == "silent" and ticket.trial and not health.is_down:
            outcome = "recalled"  # the endpoint has come back, and the time limit of a trial is not the row's
        left = server.inflight - 1
        if outcome == "overloaded" and not left and not isinstance(error, RateLimited) and not error.retry_after:
            outcome = "broken"  # a lone request cannot be too many: the server, or this row, has another problem
        attempt = Attempt(ticket.row, ticket.sent_at, now, outcome, ticket.trial, ticket.sound, left)
        others, few = self.others_work(endpoint), self._few_rows()
        verdict = judge(attempt, server.history, is_down=health.is_down, others_healthy=others, few_rows=few)
        server.history.add(attempt, verdict)
        if outcome != "recalled" or ticket.avoid is None:  # it still avoids the endpoint where it failed
            ticket.avoid = endpoint if verdict.move else None
        self._apply(endpoint, ticket, error, outcome, verdict, now)
        self.decisions.wake()
        return attempt, verdict

    def _apply(
        self, endpoint: Endpoint, ticket: Ticket, error: BackendError, outcome: Outcome, verdict: Verdict, now: float
    ) -> None:
        health = endpoint.health
        if outcome == "recalled":
            return
        if outcome not in ("unreachable", "silent"):
            health.reached = True
        if verdict.endpoint == "healthy":
            self._is_alive(endpoint, ticket, now - ticket.sent_at, now)
            return
        if outcome == "overloaded":
            self._overloaded(endpoint, ticket, error, now)
            if not ticket.trial:
                return
        elif outcome == "silent" and endpoint.capacity.search is not None and not health.is_down:
            # The number that we found ourselves was too high: requests wait in the server's queue.
            self._say(endpoint, endpoint.capacity.overloaded(ticket.generation, endpoint.server.inflight))
        if not health.is_down:
            health.fail(str(error), now)
            if verdict.endpoint == "down":
                health.go_down(now)
                self._goes_down(endpoint, now)
        else:
            health.reason, health.heard = str(error), now
            if ticket.trial and not ticket.overdue:
                health.trial_over()
                self._trial_failed(endpoint, now)
        if verdict.probe:
            self._probe(endpoint)

    def scope(self, ticket: Ticket, error: BackendError) -> str:
        """Whom a refusal concerns: ``confirm`` asks for the same request once more. May end the run."""
        endpoint = ticket.endpoint
        assert endpoint is not None
        if not isinstance(error, Rejected) or isinstance(error, ContextOverflow) or ticket.chore:
            return "row"
        left = endpoint.server.inflight - 1
        refusals, confirmed = endpoint.server.refusals, ticket.row.denials > 1
        scope = refusals.scope(ticket.progress, error.status, str(error), ticket.sent_at, left, confirmed=confirmed)
        if scope == "all":
            self._give_up(endpoint, "failed", f"the run stopped at a refusal that concerns every row: {error}")
        return scope

    def idle(self) -> None:
        """No row will be sent that could tell whose fault a failure was."""
        self.decisions.nobody_else()

    def interrupt(self, why: str) -> None:
        """Nothing more is sent: rows that wait are interrupted, requests at endpoints that are down are taken back."""
        self.decisions.interrupt(Interrupted(why))
        now = _now()
        for endpoint, flights in self._flights.items():
            if endpoint.health.is_down:
                for ticket in flights:
                    self._recall(ticket, now)

    @property
    def deciding(self) -> int:
        return self.decisions.under_way

    @property
    def waits(self) -> bool:
        return bool(self.decisions.waiting)

    # What is known of endpoints

    def _few_rows(self) -> bool:
        assert self._slots is not None
        return self._slots.few_rows

    def loaded(self, endpoint: Endpoint, load: Reading) -> None:
        """The server told how busy it is."""
        self._say(endpoint, endpoint.capacity.loaded(load, endpoint.server.inflight))
        self._wake(endpoint)

    def search(self, endpoint: Endpoint, search: LimitSearch, why: str) -> None:
        endpoint.capacity.start_search(search)
        self._scheduler.touch(endpoint)
        self._say(endpoint, why)

    def _say(self, endpoint: Endpoint, reason: str) -> None:
        if reason:
            self._on_limit(endpoint, reason)

    def resize(self, ceiling: int | None) -> None:
        for endpoint in self._all:
            endpoint.capacity.resize(ceiling)
            self._on_limit(endpoint, "asked for")
            self._scheduler.touch(endpoint)

    def others_work(self, endpoint: Endpoint) -> bool:
        router = self._scheduler.router
        return len(self._all) > 1 and router.working > router.works(endpoint)

    def _wake(self, endpoint: Endpoint) -> None:
        self._scheduler.touch(endpoint)
        self._pump()

    def _pump(self) -> None:
        assert self._slots is not None
        self._slots.pump()

    def _changed_by_others(self, endpoint: Endpoint) -> None:
        """Another dispatcher freed a slot of the server, or found it down or back."""
        if endpoint.health.state not in ("suspect", self._seen.get(endpoint, "healthy")):
            was_down = self._seen.get(endpoint) == "down"
            self._report(endpoint, _now())
            if was_down and not endpoint.health.is_down:
                self._scheduler.rejoin()
        self.decisions.wake()
        self.arm(endpoint)
        self._wake(endpoint)

    def _report(self, endpoint: Endpoint, now: float) -> None:
        self._seen[endpoint] = endpoint.health.state
        self._on_health(endpoint, now)

    # Up and down

    def _is_alive(self, endpoint: Endpoint, ticket: Ticket, seconds: float, now: float) -> None:
        began = endpoint.health.down_since
        if not endpoint.health.answer(seconds, ticket.sent_at, now):
            return
        endpoint.server.held_until = 0.0
        for other in self._flights.get(endpoint, ()):
            if other.overdue or (other.sent_at < began and other not in self._recalled):
                self._recall(other, now + endpoint.health.grace)
        self._scheduler.touch(endpoint)
        self._report(endpoint, now)
        self._scheduler.rejoin()
        self._take_up_again()
        self.arm(endpoint)
        endpoint.tell_others()
        self._wake(endpoint)

    def _take_up_again(self) -> None:
        """One endpoint works again: those that were given up with it may do so too."""
        unreachable, self._unreachable = self._unreachable, []
        for endpoint in unreachable:
            endpoint.given_up = ""
            self._scheduler.touch(endpoint)
            self.arm(endpoint)

    def _overloaded(self, endpoint: Endpoint, ticket: Ticket, error: BackendError, now: float) -> None:
        """Halve what is in flight, and hold everything back until the server accepts more."""
        server, wait = endpoint.server, error.retry_after or 0.0
        if server.refused_since is None:
            server.refused_since = now
        if server.inflight > 1:
            self._say(endpoint, endpoint.capacity.overloaded(ticket.generation, server.inflight, wait, now))
        else:
            # Even a lone request is refused: this says nothing about how many the server takes when it accepts again.
            endpoint.capacity.restart(server.most_in_flight)
            if not wait and not endpoint.health.is_down:
                endpoint.health.reason = str(error)
                endpoint.health.go_down(now)
                self._goes_down(endpoint, now)
        endpoint.health.reason = str(error)
        if wait > 0.0 and now + wait > server.held_until:
            server.held_until = now + wait
            self._scheduler.touch(endpoint)
            self.arm(endpoint)
        if max(now, server.held_until) - server.refused_since > self._max_outage:
            self._lose_patience(endpoint, f"the server refuses every request: {error}")

    def _goes_down(self, endpoint: Endpoint, now: float) -> None:
        """The health is down already."""
        endpoint.server.history.go_down()
        endpoint.server.go_down()
        self._scheduler.touch(endpoint)
        self._on_limit(endpoint, "the server is down")
        self._report(endpoint, now)
        self.decisions.wake()
        self.arm(endpoint)
        endpoint.tell_others()

    def _trial_failed(self, endpoint: Endpoint, now: float) -> None:
        health = endpoint.health
        health.next_trial = max(health.next_trial, now + health.pause(now))
        self._report(endpoint, now)
        if now >= self._patience_ends(endpoint):
            self._lose_patience(endpoint, self._what_was_tried(endpoint, now))
        self.arm(endpoint)

    def not_sent(self, ticket: Ticket) -> None:
        """The request could not be made. If it was a trial, the next one is."""
        if ticket.trial and ticket.endpoint is not None:
            self._try_next(ticket.endpoint)

    def _try_next(self, endpoint: Endpoint) -> None:
        """Let the next row be the trial."""
        endpoint.health.trial_over()
        endpoint.health.ready = True
        trials = self._scheduler.router.trials
        if self.others_work(endpoint) and endpoint not in trials:
            trials.append(endpoint)

    def _lose_patience(self, endpoint: Endpoint, why: str) -> None:
        """An endpoint is given up only when no other works; until then it is probed now and then."""
        if not endpoint.given_up and not self.others_work(endpoint):
            self._unreachable.append(endpoint)
            self._give_up(endpoint, "unreachable", why)

    def _give_up(self, endpoint: Endpoint, ended: Ended, why: str) -> None:
        if endpoint.given_up:
            return
        endpoint.given_up = why
        self._scheduler.touch(endpoint)
        if all(other.given_up or other.leaving for other in self._all):
            self._on_over(ended, why)
        self.decisions.wake()

    # Time

    def arm(self, endpoint: Endpoint) -> None:
        """Set the alarm for what is due at the endpoint first."""
        now = _now()
        self._alarms.set(endpoint, min((due for due in self._dues(endpoint) if due > now), default=inf))

    def _dues(self, endpoint: Endpoint) -> tuple[float, ...]:
        health, server = endpoint.health, endpoint.server
        if endpoint.given_up:
            return ()
        if health.state == "on trial":
            return (health.trial_ends,)
        if health.state == "down":
            return health.next_trial, server.held_until, self._patience_ends(endpoint)
        search, rates = endpoint.capacity.search, server.rates
        ramp_at = inf if search is None or search.ramp_at is None else search.ramp_at
        free_at = inf if rates is None else rates.free_at(_now())
        return server.held_until, self._silent_at(endpoint) if endpoint.inflight else inf, ramp_at, free_at

    def _silent_at(self, endpoint: Endpoint) -> float:
        """When an endpoint has been silent for too long. If too little is known of it, its siblings' usual time
        counts."""
        if endpoint.health.silent_at < inf or endpoint.health.patient or not self.others_work(endpoint):
            return endpoint.health.silent_at
        return endpoint.health.heard + self._longest_silence

    @property
    def _longest_silence(self) -> float:
        """Seconds that an endpoint may be silent while others answer."""
        usual = self._scheduler.router.usual
        return max(SHORTEST_SILENCE, SILENCE_FACTOR * usual) if usual else inf

    def _patience_ends(self, endpoint: Endpoint) -> float:
        health = endpoint.health
        known = health.answered or health.reached
        return health.down_since + (self._max_outage if known else self._max_silence)

    def _look(self, due: list[Endpoint]) -> None:
        now = _now()
        for endpoint in due:
            self._look_at(endpoint, now)
        self.budgets.serve()
        assert self._slots is not None
        self._slots.pump()
        for endpoint in due:
            self.arm(endpoint)

    def _look_at(self, endpoint: Endpoint, now: float) -> None:
        health, server = endpoint.health, endpoint.server
        if server.held_until and server.held_until <= now:
            server.held_until = 0.0
        self._say(endpoint, endpoint.capacity.ramp(server.inflight, now))
        self._scheduler.touch(endpoint)
        if health.state == "on trial":
            if now >= health.trial_ends:
                self._wait_beside(endpoint, now)
        elif health.state == "down":
            # Before the first trial nothing was tried.
            if (health.trials or server.held_until) and now >= self._patience_ends(endpoint):
                self._lose_patience(endpoint, self._what_was_tried(endpoint, now))
            if now >= health.next_trial and not endpoint.given_up and self._backend is not None:
                health.try_now(now, probing=True)
                self._probe(endpoint)
        elif endpoint.inflight and not self.budgets.short and now >= self._silent_at(endpoint):
            if self._quiet.get(endpoint) != health.heard:  # answers that came while the loop stalled are read first
                self._quiet[endpoint] = health.heard
                self._alarms.set(endpoint, now + SECOND_LOOK)
            elif self.others_work(endpoint):
                self._probe(endpoint)
            elif health.is_silent(server.inflight, now):
                self._is_silent(endpoint, now)

    def _is_silent(self, endpoint: Endpoint, now: float, why: str = "") -> None:
        endpoint.health.go_down(now, silent=True)
        silent = f"{endpoint.inflight} requests are in flight, and nothing came back for too long"
        endpoint.health.reason = why or silent
        self._goes_down(endpoint, now)
        if not self.others_work(endpoint):
            self._recall_oldest(endpoint, now)
            return
        for ticket in self._flights.get(endpoint, ()):
            self._recall(ticket, now)

    # Probes

    def leave(self, endpoint: Endpoint) -> None:
        """Take back what an endpoint that leaves has in flight, if it is down; find out, if that is not known."""
        if not endpoint.health.is_down:
            self._probe(endpoint)
        elif self.others_work(endpoint):
            for ticket in self._flights.get(endpoint, ()):
                self._recall(ticket, _now())

    def _probe(self, endpoint: Endpoint) -> asyncio.Task[Probe] | None:
        if endpoint not in self._probes and self._backend is not None:
            task = asyncio.get_running_loop().create_task(self._probing(self._backend, endpoint))
            self._probes[endpoint] = task
        return self._probes.get(endpoint)

    async def _probing(self, backend: Backend, endpoint: Endpoint) -> Probe:
        try:
            found = await probe(backend, endpoint.name)
        except asyncio.CancelledError:
            if endpoint.health.probing:
                endpoint.health.trial_over()
                endpoint.tell_others()
            raise
        finally:
            del self._probes[endpoint]
        self._found(endpoint, found, _now())
        endpoint.tell_others()
        self._wake(endpoint)
        return found

    def _found(self, endpoint: Endpoint, found: Probe, now: float) -> None:
        """Apply what a probe found."""
        health = endpoint.health
        health.reached = health.reached or found.state == "up"
        if not health.is_down:
            if found.state == "down":
                self._is_silent(endpoint, now, f"a probe failed: {found.reason}")
            else:
                self._is_slow(endpoint, now)
        elif health.state == "on trial" and health.probing:
            if found.state == "down" and self.others_work(endpoint):
                health.reason = found.reason or health.reason
                health.trials += 1
                health.trial_over()
                self._trial_failed(endpoint, now)
            else:
                self._try_next(endpoint)
        health.up_at = -inf if found.state == "down" else now

    def _is_slow(self, endpoint: Endpoint, now: float) -> None:
        """The endpoint is up although it was silent."""
        if endpoint.health.is_silent(endpoint.server.inflight, now) and self.others_work(endpoint):
            self._is_silent(endpoint, now)  # it answers probes, and no request that siblings would have answered
            return
        endpoint.health.heard = now
        self.arm(endpoint)

    # Requests that are taken back

    def _wait_beside(self, endpoint: Endpoint, now: float) -> None:
        """The trial takes longer than usual. It goes on if it may, while others are tried."""
        ticket = self._patient.get(endpoint)
        if ticket is not None and not ticket.overdue:
            ticket.overdue = True
            endpoint.health.trial_over()
            self._recall_oldest(endpoint, now)
            self._trial_failed(endpoint, now)

    def _recall_oldest(self, endpoint: Endpoint, now: float) -> None:
        """Take back one request from before the outage, to be the trial: all slots may be theirs."""
        began = endpoint.health.down_since
        flights = self._flights.get(endpoint, ())
        waiting = [ticket for ticket in flights if ticket.sent_at < began and ticket not in self._recalled]
        if waiting:
            self._recall(min(waiting, key=lambda ticket: ticket.sent_at), now)

    def _recall(self, ticket: Ticket, at: float) -> None:
        assert ticket.endpoint is not None
        deadline = self._flights[ticket.endpoint][ticket]
        if not deadline.expired:
            self._recalled.add(ticket)
            deadline.reschedule(min(deadline.when, at))

    def spare(self) -> None:
        """Every turn has its slot and slots stay idle: take back what a much slower endpoint still has, once for each
        turn, and look again soon."""
        if self._tail_timer is not None:
            return
        now, router = _now(), self._scheduler.router
        best = router.best()
        fast = 0.0 if best is None else router.seconds(best)
        if not fast:
            return
        slow: list[tuple[float, Ticket]] = []
        for endpoint, flights in self._flights.items():
            if endpoint is not best and not endpoint.health.is_down:
                slow += [(self._seconds_left(endpoint, ticket, now), ticket) for ticket in flights]
        slow = [(left, ticket) for left, ticket in slow if left > TAIL_FACTOR * fast and self._may_recall(ticket)]
        slow.sort(key=lambda item: -item[0])
        for _, ticket in slow[: int(min(router.spare, len(slow)))]:
            self._tried_elsewhere.add(ticket)
            self._recall(ticket, now)
        pause = max(SHORTEST_TAIL, fast / 2)
        self._tail_timer = asyncio.get_running_loop().call_later(pause, self._look_at_tail)

    def _look_at_tail(self) -> None:
        self._tail_timer = None
        assert self._slots is not None
        self._slots.pump()

    def _seconds_left(self, endpoint: Endpoint, ticket: Ticket, now: float) -> float:
        """What a request is still expected to take where it is."""
        waited, seconds = now - ticket.sent_at, endpoint.server.seconds
        if seconds:
            return seconds - waited
        return inf if waited > UNKNOWN_FACTOR * self._scheduler.router.usual else 0.0

    def _may_recall(self, ticket: Ticket) -> bool:
        return not (ticket.trial or ticket.pinned or ticket in self._tried_elsewhere or ticket in self._recalled)

    def is_in_flight(self, ticket: Ticket) -> bool:
        """Whether its request was sent, and has not ended."""
        return ticket.endpoint is not None and ticket in self._flights.get(ticket.endpoint, ())

    def is_recalled(self, ticket: Ticket) -> bool:
        return ticket in self._recalled

    def _what_was_tried(self, endpoint: Endpoint, now: float) -> str:
        health = endpoint.health
        outage = f"{now - health.down_since:.0f} s and {health.trials} trials"
        if health.answered or health.reached:
            return f"the server was down for longer than max_outage, {self._max_outage:g} s: {outage}; {health.reason}"
        return f"the server never answered, in {outage}: {health.reason}"


_GOOD = Verdict("clear", "healthy")


def _now() -> float:
    return asyncio.get_running_loop().time()

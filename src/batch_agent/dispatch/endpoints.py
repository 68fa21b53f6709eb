"""Tracks the endpoints of a dispatcher over time: verdicts on attempts, trials, probes, silence, final outages.

This file applies the verdicts of ``scheduler.blame`` and turns the due times of ``Health`` into timers. A
trial starts with a probe. If the probe fails while other endpoints work, no row is sent; otherwise a row follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from batch_agent.backends.base import ModelRequest, Probe
from batch_agent.dispatch.control import Ask, ControlRequests
from batch_agent.dispatch.decisions import Decisions
from batch_agent.dispatch.probing import Probed, Probes
from batch_agent.dispatch.rate_limits import RateLimits
from batch_agent.dispatch.slots import Flights
from batch_agent.errors import BackendError, ContextOverflow, Interrupted, RateLimited, Rejected
from batch_agent.messages import Reply, Usage
from batch_agent.scheduler.blame import CONTROL_PAUSE, SEVERAL, Attempt, Outcome, Verdict, judge, outcome_of
from batch_agent.scheduler.capacity import LimitSearch
from batch_agent.scheduler.core import Scheduler, Slot
from batch_agent.scheduler.engine_load import Load
from batch_agent.scheduler.rates import is_spent
from batch_agent.scheduler.server import Denial, Endpoint, Scope

if TYPE_CHECKING:
    from batch_agent.dispatch.slots import Slots
    from batch_agent.events import Ended

# One timer for the alarms of all endpoints, so that a timer never scans every endpoint.


class Alarms:
    """Calls ``ring`` with the endpoints whose alarm is due. An early alarm is harmless: ``ring`` sets the next one."""

    def __init__(self, ring: Callable[[list[Endpoint]], None]) -> None:
        self._ring = ring
        self._heap: list[tuple[float, int, Endpoint]] = []
        self._set: dict[Endpoint, float] = {}  # due time of each endpoint; other heap entries of it are stale
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._closed = False

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._set

    def set(self, endpoint: Endpoint, due: float) -> None:
        """Set the alarm, unless an earlier one is already set, or the run is over: requests that are cancelled at its
        end give their slots back."""
        if due < self._set.get(endpoint, inf) and not self._closed:
            self._set[endpoint] = due
            self._numbers += 1
            heappush(self._heap, (due, self._numbers, endpoint))
            self._set_timer()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        while self._heap and self._set.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        due = self._heap[0][0] if self._heap else inf
        if due != self._timer_at and not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = None if due == inf else asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timer, self._timer_at = None, inf
        due: list[Endpoint] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, endpoint = heappop(self._heap)
            if self._set.get(endpoint) == at:
                del self._set[endpoint]
                due.append(endpoint)
        self._ring(due)
        self._set_timer()


NEVER_REACHED = 30.0  # seconds after which an endpoint that was never reached is given up
DENIED_SECONDS = 60.0  # of denials after good answers, until an endpoint is given up
PROVEN_ANSWERS = 20  # after that many good answers, a Retry-After of one request may be chance
EXCESSIVE = 60.0  # seconds: a Retry-After above this, after good answers, is confirmed by a second request
SHORT_WAIT = 2.0  # seconds: a shorter Retry-After costs less than finding out whether it concerns all rows
FEW_SLOW = 8  # requests in flight that may all be of rows that take long
SECOND_LOOK = 0.25  # seconds after which silence is checked again
LOOK_FOR_ROOM = 5.0  # seconds after which a request that may be lost is looked at again

ALL_REFUSED = "the run stopped because every row is refused: {error}"

OnHealth = Callable[[Endpoint, float], None]
OnLimit = Callable[[Endpoint, str], None]
OnOver = Callable[["Ended", str], None]


class EndpointMonitor:
    """Calls ``on_over`` with outcome and reason when no endpoint is left. ``max_outage=None`` waits without limit for
    an endpoint that has answered before, ``inf`` also for one that never answered."""

    _slots: Slots  # set by ``start``

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Probed | None,
        max_outage: float | None,
        on_health: OnHealth,
        on_limit: OnLimit,
        on_over: OnOver,
        ask_control: Ask,
        *,
        control_requests: bool,
    ) -> None:
        self._scheduler, self._all, self._router = scheduler, scheduler.endpoints, scheduler.router
        self._max_outage = inf if max_outage is None else max_outage
        self._max_silence = inf if max_outage == inf else min(self._max_outage, NEVER_REACHED)  # before a first answer
        self._on_health, self._on_limit, self._on_over = on_health, on_limit, on_over
        self.trust_probes = False  # the caller probes; an endpoint found up needs no trial
        self._unreachable: list[Endpoint] = []  # given up because no endpoint worked
        self._seen: dict[Endpoint, str] = {}  # the health last reported
        self._quiet: dict[Endpoint, float] = {}  # time of the last byte, as seen at the first check
        self._alarms = Alarms(self._look)
        self.flights = Flights(scheduler.router, self._pump)
        self.rate_limits = RateLimits(self.arm)
        self._probes = Probes(backend, self.found)
        self.controls = ControlRequests(backend, ask_control, self._no_evidence, enabled=control_requests)
        self.decisions = Decisions(
            self._all,
            self.probe,
            self.control,
            self.controls.can_ask,
            lambda: self._slots.few_rows,
            self._pump,
        )
        self.undecided = self.decisions.waiting.keys()  # failed requests whose rows wait for evidence

    def start(self, slots: Slots) -> None:
        self._slots = slots
        for endpoint in self._all:
            self.attach(endpoint)

    def attach(self, endpoint: Endpoint) -> None:
        """Share what is known about the server with its other dispatchers."""
        endpoint.is_hungry = lambda: self._slots.is_hungry
        endpoint.on_change = self._changed_by_others

    def close(self) -> None:
        for part in (self._alarms, self.flights, self._probes, self.controls):
            part.close()
        for endpoint in self._all:
            endpoint.on_change = None
            endpoint.close()

    # Requests

    def sent(self, slot: Slot) -> None:
        endpoint = slot.endpoint
        if slot.trial:
            self._report(endpoint, slot.sent_at)
        search = endpoint.capacity.search
        if search is not None and search.ramp_at is None:
            endpoint.capacity.ramp(endpoint.server.inflight, slot.sent_at)
            self.arm(endpoint)
        if endpoint.server.rates is not None:
            self.rate_limits.begin(slot)
        elif slot.trial or endpoint not in self._alarms:
            self.arm(endpoint)

    def released(self, slot: Slot) -> None:
        """Called when a slot was given back that was a trial or has a part of the rate limits."""
        if slot.reservation is not None:
            self.rate_limits.settle(slot)
        if slot.trial:
            self.arm(slot.endpoint)  # for the next trial, if this one was withdrawn

    def answered(self, slot: Slot, began: float, reply: Reply) -> None:
        endpoint, now = slot.endpoint, self._slots.clock()
        server, seconds = endpoint.server, now - began
        if slot.ticket.control:
            self._control_answered(slot, reply, now)
            return
        self._scheduler.answered(slot, seconds, reply.usage, now)
        server.learn(seconds, now)
        if slot.sent_at > server.answered_sent:
            server.answered_sent = slot.sent_at
        if server.held_until and server.held_for <= slot.sent_at:
            server.held_until = 0.0
            self._scheduler.touch(endpoint)
        server.refused_since = None
        if server.excessive is not None and slot.sent_at >= server.excessive[1]:
            server.excessive = None
        self._is_alive(endpoint, slot, seconds, now)
        if server.answers == 1:  # now it is known how long a row takes, and when others are late
            if now >= self.flights.lost_at(endpoint):
                self._alarms.set(endpoint, now + SECOND_LOOK)
            self.arm(endpoint)
        if reply.quota is not None or slot.reservation is not None:
            counted = reply.usage.prompt_tokens or reply.usage.completion_tokens
            self.rate_limits.learn(endpoint, slot, reply.quota, reply.usage)
            self.rate_limits.settle(slot, reply.usage if counted else None)
        server.refusals.answered(slot.sent_at)
        if server.history.open or server.history.alone:
            server.history.add(Attempt(slot.ticket.row, slot.sent_at, now, "answered", slot.trial), _GOOD)
        if self.undecided:
            self.decisions.wake()
        if not endpoint.health.is_down:
            tokens = reply.usage.completion_tokens
            meanwhile = server.answers - slot.answers_before
            capacity = endpoint.capacity
            if capacity.causes:
                capacity.confirm(slot.ticket.row)
            if reason := capacity.succeeded(slot.sent_at, seconds, tokens, now, meanwhile):
                self._on_limit(endpoint, reason)

    def _control_answered(self, slot: Slot, reply: Reply, now: float) -> None:
        """Apply the answer of a control request: the endpoint works, and rows that failed before it are bad. It says
        nothing about the time that rows take."""
        endpoint, server = slot.endpoint, slot.endpoint.server
        server.refused_since = server.excessive = None
        server.control_sent = max(server.control_sent, slot.sent_at)
        self.rate_limits.learn(endpoint, slot, reply.quota, reply.usage)
        self.rate_limits.settle(slot, reply.usage)
        endpoint.health.slowest_control = max(endpoint.health.slowest_control, now - slot.sent_at)
        self._is_alive(endpoint, slot, 0.0, now)
        server.refusals.answered(slot.sent_at)
        server.history.add(Attempt(slot.ticket.row, slot.sent_at, now, "answered", control=True), _GOOD)
        self.decisions.wake()
        self._wake(endpoint)
        self._alarms.set(endpoint, now + SECOND_LOOK)

    def failed(self, slot: Slot, error: BackendError, request: ModelRequest | None = None) -> tuple[Attempt, Verdict]:
        """Judge a failed attempt and apply the verdict. Called before the slot is given back."""
        endpoint, now = slot.endpoint, self._slots.loop.time()
        server, health = endpoint.server, endpoint.health
        self.rate_limits.learn(endpoint, slot, error.quota, error.usage or Usage())
        free = error.usage is None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self.rate_limits.settle(slot, Usage() if free else error.usage)
        control = slot.ticket.control
        if not control:
            self.controls.like(request)
        outcome: Outcome = outcome_of(error)
        if outcome == "stale" and (slot.ticket.row.stale or health.is_down):
            outcome = "broken"  # a row that is sent again and closes every connection
        if slot.recalled:
            outcome = "recalled"
        if outcome == "overloaded" and (is_spent(error.quota) or self.rate_limits.is_spent(slot)):
            outcome = "recalled"  # a rate limit with a known end: neither side is at fault
        if outcome == "silent" and slot.trial and not health.is_down:
            outcome = "recalled"  # the endpoint is back; a trial's time limit is not the row's fault
        if outcome == "silent" and not slot.trial and not health.is_down and server.is_queued(slot):
            outcome = "recalled"  # it waited behind others that were answered: too many were sent
            meanwhile = server.answers - slot.answers_before
            if not control:  # whose time limit is shorter than that of rows
                self.say(endpoint, endpoint.capacity.timed_out(meanwhile, now - slot.sent_at))
        if control and outcome == "silent" and not health.is_down and health.asks_again():
            outcome = "recalled"
            self.controls.renew(endpoint, self._slots)
        left = server.inflight - 1
        if outcome == "overloaded" and not left and not isinstance(error, RateLimited) and not error.retry_after:
            outcome = "broken"  # one request alone cannot be too many: the server or this row has another problem
        excessive = self.is_excessive(endpoint, error)
        row = slot.ticket.row
        beside = server.history.has_other_cause(row, slot.sent_at) or self.flights.is_beside_suspect(slot)
        sent, trial, waits = slot.sent_at, slot.trial, bool(error.retry_after)
        attempt = Attempt(row, sent, now, outcome, trial, slot.sound, left, beside, control, waits, excessive)
        if outcome == "overloaded" and row.overloaded(attempt, server.answered_sent, server.control_sent):
            self.say(endpoint, endpoint.capacity.pardon(row, max(server.answered_sent, server.control_sent)))
        others, few = self._router.others_work(endpoint) and slot.ticket.pinned is None, self._slots.few_rows
        verdict = judge(
            attempt,
            server.history,
            is_down=health.is_down,
            others_healthy=others,
            few_rows=few,
            can_ask=self.controls.can_ask(endpoint),
            all_tested=not self._slots.has_untested,
        )
        if not control:
            server.history.add(attempt, verdict)
        slot.ticket.avoid = slot.ticket.avoid | {endpoint} if verdict.move else frozenset()
        self._apply(endpoint, slot, error, outcome, verdict, now)
        self.decisions.wake()
        return attempt, verdict

    def _apply(
        self, endpoint: Endpoint, slot: Slot, error: BackendError, outcome: Outcome, verdict: Verdict, now: float
    ) -> None:
        health = endpoint.health
        if outcome == "recalled":
            return
        if outcome not in ("unreachable", "silent") or (outcome == "silent" and now - slot.sent_at > NEVER_REACHED):
            health.reached = True  # in the second case a connection was made
        if outcome == "denied" and health.is_denied and health.is_down:
            self._still_denied(endpoint, slot, error, now)
            return
        if verdict.endpoint == "healthy":
            self._is_alive(endpoint, slot, now - slot.sent_at, now)
            return
        health.is_denied = False
        if outcome == "silent" and endpoint.capacity.search is not None and not health.is_down:
            # The limit that we found ourselves was too high: requests wait in the server's queue.
            self.say(endpoint, endpoint.capacity.overloaded(slot.generation, endpoint.server.inflight))
        if verdict.endpoint == "doubted":
            self._is_doubted(endpoint, error, now)
            return
        if outcome == "overloaded":
            self._overloaded(endpoint, slot, error, now)
            if slot.ticket.control:
                self._forgive(endpoint)
            if not slot.trial:
                return
        if not health.is_down:
            health.fail(str(error), now)
            if verdict.endpoint == "down":
                health.go_down(now, silent=outcome == "silent")  # it may only be slow: any answer shows that it works
                self._goes_down(endpoint, now)
        else:
            health.reason, health.heard = str(error), now
            if slot.trial and not slot.overdue:
                health.trial_over()
                self._trial_failed(endpoint, now)
        if verdict.probe:
            self.probe(endpoint)

    def scope(self, slot: Slot, error: BackendError) -> Scope:
        """Return which rows a refusal concerns; ``confirm`` means: send the request again. May end the run."""
        endpoint = slot.endpoint
        if not isinstance(error, Rejected) or isinstance(error, ContextOverflow) or slot.ticket.chore:
            return "row"
        if endpoint.health.is_denied:
            return "all"
        row, refusals, now = slot.ticket.row, endpoint.server.refusals, self._slots.loop.time()
        denial, can_ask = Denial(slot.sent_at, now, row.denials), self.controls.can_ask(endpoint)
        left = endpoint.server.inflight - 1
        scope = refusals.scope(slot.ticket.progress, error.status, str(error), denial, left, can_ask=can_ask)
        if scope == "all":
            if refusals.has_answered or self._router.others_work(endpoint):
                self._is_denied(endpoint, error, now)
            else:
                self._give_up(endpoint, "failed", ALL_REFUSED.format(error=error))
        return scope

    def _is_denied(self, endpoint: Endpoint, error: BackendError, now: float) -> None:
        """Treat the endpoint as down: it may deny rows only for a while, as a gateway does while it restarts."""
        health = endpoint.health
        if not health.is_down:
            health.reason = str(error)
            health.go_down(now)
            health.is_denied = True
            self._goes_down(endpoint, now)

    def _still_denied(self, endpoint: Endpoint, slot: Slot, error: BackendError, now: float) -> None:
        """Apply a denial of an endpoint that denies every row. It is given up after a while if no other one works."""
        health = endpoint.health
        health.reason, health.heard = str(error), now
        if slot.trial and not slot.overdue:
            health.trial_over()
            self._trial_failed(endpoint, now)
        if now - health.down_since >= DENIED_SECONDS and not self._router.others_work(endpoint):
            self._give_up(endpoint, "failed", ALL_REFUSED.format(error=error))

    # Control requests

    def control(self, endpoint: Endpoint) -> asyncio.Task[bool | None] | None:
        """Send a control request to the endpoint as soon as it takes one. The result is applied when it arrives."""
        asked = self.controls.start(endpoint, self._slots)
        self.arm(endpoint)
        return asked

    def _is_doubted(self, endpoint: Endpoint, error: BackendError, now: float) -> None:
        """Send nothing but a control request, which shows whether the endpoint or its rows are bad."""
        endpoint.health.doubt(str(error), now)
        # A Retry-After of rows may concern these rows alone. If it concerns all, the control request gets it too.
        endpoint.server.held_until = 0.0
        self._scheduler.touch(endpoint)
        if self.control(endpoint) is None:
            self._no_evidence(endpoint)

    def _no_evidence(self, endpoint: Endpoint) -> None:
        """Continue without control requests: an endpoint in doubt counts as down, and rows are its trials."""
        now = self._slots.loop.time()
        if endpoint.health.in_doubt:
            endpoint.health.go_down(now)
            self._goes_down(endpoint, now)
        elif endpoint.health.state == "down":
            self._try_next(endpoint)

    def _forgive(self, endpoint: Endpoint) -> None:
        """Charge no row: the endpoint refuses every request for load."""
        endpoint.server.history.go_down()
        endpoint.health.in_doubt = False
        self._wake(endpoint)

    # The end

    def idle(self) -> None:
        """Called when no further row will be sent that could show which side caused a failure."""
        self.decisions.nobody_else()

    def spare(self) -> None:
        """Called when every turn has its slot and slots stay idle."""
        self.flights.even_out(self._slots.loop.time())

    def interrupt(self, why: str) -> None:
        """Send nothing more: interrupt waiting rows and cancel requests at endpoints that are down."""
        self.decisions.interrupt(Interrupted(why))
        self.flights.recall_down(self._slots.loop.time())

    @property
    def deciding(self) -> int:
        return self.decisions.under_way

    # What is known of endpoints

    def loaded(self, endpoint: Endpoint, load: Load) -> None:
        """Apply a load reading of the server."""
        self.say(endpoint, endpoint.capacity.loaded(load, endpoint.server.inflight))
        self._scheduler.admission.read(endpoint, load)
        self.flights.loaded(endpoint, load.waiting, self._slots.loop.time())
        self._wake(endpoint)

    def search(self, endpoint: Endpoint, search: LimitSearch, why: str) -> None:
        endpoint.capacity.start_search(search)
        self._scheduler.touch(endpoint)
        self.say(endpoint, why)

    def say(self, endpoint: Endpoint, reason: str) -> None:
        if reason:
            self._on_limit(endpoint, reason)

    def resize(self, ceiling: int | None) -> None:
        for endpoint in self._all:
            endpoint.capacity.resize(ceiling)
            self._on_limit(endpoint, "asked for")
            self._scheduler.touch(endpoint)

    def _wake(self, endpoint: Endpoint) -> None:
        self._scheduler.touch(endpoint)
        self._pump()

    def _pump(self) -> None:
        self._slots.pump()

    def _changed_by_others(self, endpoint: Endpoint) -> None:
        """Called when another dispatcher released a slot of the server, or found it down or up again."""
        if endpoint.health.state not in ("suspect", self._seen.get(endpoint, "healthy")):
            was_down = self._seen.get(endpoint) == "down"
            self._report(endpoint, self._slots.loop.time())
            if was_down and not endpoint.health.is_down:
                self._scheduler.rejoin()
        self.decisions.wake()
        self.arm(endpoint)
        self._wake(endpoint)

    def _report(self, endpoint: Endpoint, now: float) -> None:
        self._seen[endpoint] = endpoint.health.state
        self._on_health(endpoint, now)

    # Up and down

    def _is_alive(self, endpoint: Endpoint, slot: Slot, seconds: float, now: float) -> None:
        if endpoint.health.is_limited:
            endpoint.server.flows_again(slot.sent_at)
        if endpoint.health.answer(seconds, slot.sent_at, now):
            endpoint.server.held_until = 0.0
            self._comes_up(endpoint, now, was_slow=slot.sent_at < endpoint.health.down_since)

    def _comes_up(self, endpoint: Endpoint, now: float, *, was_slow: bool = False) -> None:
        """Apply a recovery. The health is already good. ``was_slow``: it has what was sent before it seemed down."""
        for other in self.flights.at(endpoint):
            if other.heard_at:
                self.flights.keep(other)
            elif self.flights.heard_at(other) > endpoint.health.down_since:
                pass  # its answer is on its way
            elif other.overdue or (other.sent_at < endpoint.health.down_since and not (other.recalled or was_slow)):
                self.flights.recall(other, now + endpoint.health.grace)
        self._scheduler.touch(endpoint)
        self._report(endpoint, now)
        self._scheduler.rejoin()
        unreachable, self._unreachable = self._unreachable, []
        for lost in unreachable:  # given up together with this one, and may be up again too
            lost.given_up = ""
            self._scheduler.touch(lost)
            self.arm(lost)
        self.arm(endpoint)
        endpoint.tell_others()
        self._wake(endpoint)

    def _overloaded(self, endpoint: Endpoint, slot: Slot, error: BackendError, now: float) -> None:
        """Halve the limit, and send nothing until the server accepts requests again."""
        server, wait, capacity = endpoint.server, error.retry_after or 0.0, endpoint.capacity
        excessive = self.is_excessive(endpoint, error)
        if excessive and not self._is_confirmed(endpoint, slot, now):
            return  # the next request shows whether it concerns all rows
        others_tell = server.inflight > 1 or self._slots.has_untested or self.controls.can_ask(endpoint)
        if slot.ticket.row.is_alone_refused and others_tell:
            return
        if server.refused_since is None:
            server.refused_since = now
        if server.inflight > 1:
            row = slot.ticket.row
            self.say(endpoint, capacity.overloaded(slot.generation, server.inflight, wait, now, cause=row))
            is_row = not slot.ticket.control  # a control request was sent to find out whether the refusals concern all
            if capacity.tolerates and is_row and not excessive and (not wait or server.answers >= PROVEN_ANSWERS):
                return  # the server takes other requests meanwhile; only this one waits
            if wait > SHORT_WAIT and server.answers >= PROVEN_ANSWERS and not self._is_confirmed(endpoint, slot, now):
                return  # the next request shows whether it concerns all rows
            if wait > SHORT_WAIT and not slot.ticket.control and self.controls.can_ask(endpoint):
                if slot.sent_at >= server.history.controlled_at + CONTROL_PAUSE:
                    self._is_doubted(endpoint, error, now)  # if it concerns all rows, the control request gets it too
                return
        elif not slot.ticket.control and wait <= self._max_outage and self.controls.can_ask(endpoint):
            return  # the row may be the cause; if it is refused again, or others are, a control request decides
        else:
            # Even one request alone is refused: this says nothing about how many the server takes later.
            capacity.restart(server.most_in_flight)
            if not wait and not endpoint.health.is_down:
                endpoint.health.reason = str(error)
                endpoint.health.go_down(now)
                endpoint.health.is_limited = isinstance(error, RateLimited) and server.dry_up(now)
                self._goes_down(endpoint, now)
        endpoint.health.reason = str(error)
        if wait > 0.0 and now + wait > server.held_until:
            server.held_until = now + wait
            one = server.inflight > 1 and (capacity.tolerates or wait > SHORT_WAIT)
            server.held_for = slot.sent_at if one else inf
            if isinstance(error, RateLimited) and (slot.ticket.control or not one):
                server.dry_up(now, wait)
            self._scheduler.touch(endpoint)
            self.arm(endpoint)
        if max(now, server.held_until) - server.refused_since > self._max_outage:
            limit = f"max_outage, {self._max_outage:g} s"
            self._lose_patience(endpoint, f"the server refuses every request for longer than {limit}: {error}")

    def is_excessive(self, endpoint: Endpoint, error: BackendError) -> bool:
        """Return whether a refusal for load that asks for a long wait may concern only its row."""
        server, wait = endpoint.server, error.retry_after or 0.0
        may_work = server.refusals.has_answered or server.inflight > 1
        return error.overload and wait > min(EXCESSIVE, self._max_outage) and may_work

    def _is_confirmed(self, endpoint: Endpoint, slot: Slot, now: float) -> bool:
        """Return whether such a refusal of another row, with no answer since the first, shows that it concerns all. A
        control request is another row; if none can be sent, the same row will do."""
        server, row = endpoint.server, slot.ticket.row
        if server.excessive is None:
            server.excessive = row, now
        first, since = server.excessive
        alone = self._slots.few_rows and not self.controls.can_ask(endpoint)
        return slot.sent_at > since and (row is not first or alone)

    def _goes_down(self, endpoint: Endpoint, now: float) -> None:
        """Apply an outage. The health is already set to down."""
        endpoint.server.history.go_down()
        if not endpoint.health.is_denied:  # a denial says nothing about how many requests it takes afterwards
            endpoint.server.go_down()
            self._on_limit(endpoint, "the server is down")
        self._scheduler.touch(endpoint)
        self._report(endpoint, now)
        self.decisions.wake()
        self.arm(endpoint)
        endpoint.tell_others()

    def _trial_failed(self, endpoint: Endpoint, now: float) -> None:
        health = endpoint.health
        health.next_trial = max(health.next_trial, now + health.pause(now))
        self._report(endpoint, now)
        if not health.is_denied and now >= self._patience_ends(endpoint):
            self._lose_patience(endpoint, endpoint.health.what_was_tried(now, self._max_outage))
        self.arm(endpoint)

    def not_sent(self, slot: Slot) -> None:
        """Called when the request could not be sent. If it was a trial, the next row becomes the trial."""
        if slot.trial:
            self._try_next(slot.endpoint)

    def _try_next(self, endpoint: Endpoint) -> None:
        """Make the next row the trial. If all rows have failed, every other trial is a control request: no row can show
        that the endpoint is back if all of them are bad. So is each trial while no row waits but suspects."""
        endpoint.health.trial_over()
        endpoint.health.ready = True
        # Before the first answer a row would have no time limit.
        all_failed = self._slots.few_rows or not self._slots.has_untested or not endpoint.health.answered
        is_next = endpoint.health.trials % 2 == 1 or not (self._scheduler.waiting or self._scheduler.aside)
        is_next = is_next or not endpoint.health.answered
        if all_failed and is_next and self.controls.can_ask(endpoint):
            self.control(endpoint)
        self.arm(endpoint)  # the row may have to wait
        if self._router.others_work(endpoint) and endpoint not in self._router.trials:
            self._router.trials.append(endpoint)

    def _lose_patience(self, endpoint: Endpoint, why: str) -> None:
        """Give the endpoint up if no other one works. Otherwise it is probed from time to time."""
        if not endpoint.given_up and not self._router.others_work(endpoint):
            self._unreachable.append(endpoint)
            self._give_up(endpoint, "unreachable", why)

    def _give_up(self, endpoint: Endpoint, ended: Ended, why: str) -> None:
        if endpoint.given_up:
            return
        endpoint.given_up = why
        self.controls.stop(endpoint)
        self._scheduler.touch(endpoint)
        if all(other.given_up or other.leaving for other in self._all):
            self._on_over(ended, why)
        self.decisions.wake()

    # Time

    def arm(self, endpoint: Endpoint) -> None:
        """Set the alarm for what is due first at the endpoint."""
        now = self._slots.loop.time()
        self._alarms.set(endpoint, min((due for due in self._dues(endpoint) if due > now), default=inf))

    def _dues(self, endpoint: Endpoint) -> tuple[float, ...]:
        health, server = endpoint.health, endpoint.server
        if endpoint.given_up or (endpoint.leaving and not endpoint.inflight):
            return ()
        if health.state == "on trial":
            return (health.trial_ends,)
        now = self._slots.loop.time()
        free_at = inf if server.rates is None else server.rates.free_at(now)
        if health.state == "down":
            return health.next_trial, server.held_until, self._patience_ends(endpoint), free_at
        search = endpoint.capacity.search
        ramp_at = inf if search is None or search.ramp_at is None else search.ramp_at
        if not endpoint.inflight:
            return server.held_until, ramp_at, free_at
        lost_at = self.flights.lost_at(endpoint)
        if lost_at <= now:
            lost_at = now + LOOK_FOR_ROOM
        return server.held_until, self._silent_at(endpoint), lost_at, ramp_at, free_at

    def _silent_at(self, endpoint: Endpoint) -> float:
        """Return when the endpoint counts as silent, by its own answers; if too few, by those of other endpoints."""
        if endpoint.health.is_learnt or endpoint.health.patient or not self._router.others_work(endpoint):
            return endpoint.health.silent_at
        return endpoint.health.heard + self._router.longest_silence

    def _patience_ends(self, endpoint: Endpoint) -> float:
        known = endpoint.health.answered or endpoint.health.reached
        return endpoint.health.down_since + (self._max_outage if known else self._max_silence)

    def _look(self, due: list[Endpoint]) -> None:
        now = self._slots.loop.time()
        for endpoint in due:
            self._look_at(endpoint, now)
        self.rate_limits.serve()
        self._slots.pump()
        for endpoint in due:
            self.arm(endpoint)

    def _look_at(self, endpoint: Endpoint, now: float) -> None:
        health, server = endpoint.health, endpoint.server
        if server.held_until and server.held_until <= now:
            server.held_until = 0.0
        self.say(endpoint, endpoint.capacity.ramp(server.inflight, now))
        self._scheduler.touch(endpoint)
        if health.state == "on trial":
            if now >= health.trial_ends:
                self._wait_beside(endpoint, now)
        elif health.state == "down":
            # Nothing was tried before the first trial.
            tried = (health.trials or server.held_until) and not health.is_denied
            if tried and now >= self._patience_ends(endpoint):
                self._lose_patience(endpoint, endpoint.health.what_was_tried(now, self._max_outage))
            if now >= health.next_trial and not (endpoint.given_up or self.trust_probes) and self._probes:
                health.try_now(now, probing=True)
                self.probe(endpoint)
        elif endpoint.inflight and not self.rate_limits.short:
            if now >= self._silent_at(endpoint):
                self._look_into(endpoint, now)
            if not health.is_down and now >= self.flights.lost_at(endpoint):
                self.flights.send_lost(endpoint, self._room_for_lost(endpoint), now)

    def _room_for_lost(self, endpoint: Endpoint) -> float:
        """Return the number of idle slots for requests of this endpoint: elsewhere, or here if there is none."""
        if not self._router.others_work(endpoint):
            spare = endpoint.spare
        else:
            spare = 0.0 if self._router.best(avoid={endpoint}) is None else self._router.spare
        most = self._scheduler.max_inflight
        return spare if most is None else min(spare, most - self._scheduler.inflight)

    def _look_into(self, endpoint: Endpoint, now: float) -> None:
        """Find out why nothing arrives from the endpoint. A stream that sends is an answer on its way."""
        health = endpoint.health
        heard = max((self.flights.heard_at(slot) for slot in self.flights.at(endpoint)), default=0.0)
        if heard > health.heard:
            health.heard = heard
        elif self._quiet.get(endpoint) != health.heard:  # after a stall of the loop, read pending answers first
            self._quiet[endpoint] = health.heard
            self._alarms.set(endpoint, now + SECOND_LOOK)
        elif self._router.others_work(endpoint):
            self.probe(endpoint)
        elif health.is_silent(endpoint.server.inflight, now) and not self._may_be_slow_rows(endpoint):
            self._is_silent(endpoint, now)
        else:  # too few requests or answers to tell
            looks, certain = health.look(now), health.is_learnt and endpoint.server.inflight >= SEVERAL
            occupied = self._scheduler.is_occupied
            if not certain or occupied:
                self.probe(endpoint)
            # If no slot is free, one row is sent again to make room. Its second attempt shows how long a row takes.
            if (looks or (certain and not occupied)) and self.controls.can_ask(endpoint):
                second = self.flights.second(endpoint)
                if occupied and health.sounded and second is None:
                    return
                self.control(endpoint)
                if occupied:
                    self.flights.make_room(endpoint, now)

    def _may_be_slow_rows(self, endpoint: Endpoint) -> bool:
        """Return whether the few requests in flight may be rows that take long, and a control request can tell."""
        few = endpoint.server.inflight <= FEW_SLOW or not (self._scheduler.wanted or self._slots.has_untested)
        can_make_room = not endpoint.health.sounded or self.flights.second(endpoint) is not None
        has_slot = not self._scheduler.is_occupied or can_make_room
        return few and has_slot and self.controls.can_ask(endpoint)

    def _is_silent(self, endpoint: Endpoint, now: float, why: str = "") -> None:
        health = endpoint.health
        health.go_down(now, silent=True)
        health.reason = why or f"{endpoint.inflight} requests are in flight, and no answer has arrived"
        self._goes_down(endpoint, now)
        if self._router.others_work(endpoint):
            self.flights.recall_all(endpoint, now)
        elif health.is_learnt or not self.controls.can_ask(endpoint):
            self.flights.recall_oldest(endpoint, now)
        elif self._scheduler.is_occupied:  # no slot is free for a control request
            self.flights.recall_oldest(endpoint, now, once=True)

    def leave(self, endpoint: Endpoint) -> None:
        """Cancel the requests of an endpoint that leaves if it is down. Probe it if its state is unknown."""
        self.controls.stop(endpoint)
        if not endpoint.health.is_down:
            self.probe(endpoint)
        elif self._router.others_work(endpoint):
            self.flights.recall_all(endpoint, self._slots.loop.time())

    # Probes

    def probe(self, endpoint: Endpoint) -> asyncio.Task[Probe] | None:
        """Probe the endpoint. The result is applied when it arrives."""
        return self._probes.start(endpoint)

    def found(self, endpoint: Endpoint, found: Probe) -> None:
        """Apply the result of a probe."""
        health, now = endpoint.health, self._slots.loop.time()
        health.reached = health.reached or found.state == "up"
        if health.is_down and found.state != "down" and self.trust_probes:
            health.reached = True
            health.recover()
            self._comes_up(endpoint, now)
        elif not health.is_down:
            if found.state == "down":
                self._is_silent(endpoint, now, f"a probe failed: {found.reason}")
            else:
                self._is_slow(endpoint, now)
        elif health.state == "on trial" and health.probing:
            if found.state == "down" and self._router.others_work(endpoint):
                health.reason = found.reason or health.reason
                health.trials += 1
                health.trial_over()
                self._trial_failed(endpoint, now)
            else:
                self._try_next(endpoint)
        if found.state == "down" and self.trust_probes:
            health.reason = found.reason or health.reason
            self.flights.recall_all(endpoint, now)
        health.up_at = -inf if found.state == "down" else now
        self._wake(endpoint)

    def _is_slow(self, endpoint: Endpoint, now: float) -> None:
        """Handle an endpoint that was silent but answers probes."""
        if endpoint.health.is_silent(endpoint.server.inflight, now) and self._router.others_work(endpoint):
            self._is_silent(endpoint, now)  # it answers probes, but not requests that others would have answered
            return
        endpoint.health.heard = now
        self.arm(endpoint)

    def _wait_beside(self, endpoint: Endpoint, now: float) -> None:
        """Handle a trial that takes longer than usual: it continues if allowed, while other rows are tried."""
        slot = self.flights.patient(endpoint)
        if slot is not None and not slot.overdue:
            slot.overdue = True
            endpoint.health.trial_over()
            self.flights.recall_oldest(endpoint, now)
            self._trial_failed(endpoint, now)


_GOOD = Verdict("clear", "healthy")

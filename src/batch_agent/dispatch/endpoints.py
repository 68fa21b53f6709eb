"""Carries out what ``ServerState`` decides: trials, probes, control requests, recalls, the end of patience.

The monitor tells each server's state what happens there, and turns the effects and due times that it returns into
requests and timers. It decides nothing about a server. A trial starts with a probe. If the probe fails while other
endpoints work, no row is sent; otherwise a row follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from batch_agent.backends.base import ModelRequest, Probe
from batch_agent.dispatch.control import Ask, ControlRequests
from batch_agent.dispatch.decisions import Decisions
from batch_agent.dispatch.probing import Probed, Probes
from batch_agent.dispatch.rate_limits import RateLimits
from batch_agent.dispatch.slots import Flights
from batch_agent.errors import BackendError, Interrupted
from batch_agent.messages import Reply, Usage
from batch_agent.scheduler import server_events as events
from batch_agent.scheduler.capacity import LimitSearch
from batch_agent.scheduler.core import Scheduler, Slot
from batch_agent.scheduler.engine_load import Load
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_events import Around, Effects, Judged

if TYPE_CHECKING:
    from batch_agent.dispatch.slots import Slots
    from batch_agent.events import Ended


class Alarms:
    """At most one timer for each endpoint. An early alarm is harmless: ``ring`` sets the next one."""

    def __init__(self, ring: Callable[[Endpoint], None]) -> None:
        self._ring = ring
        self._timers: dict[Endpoint, asyncio.TimerHandle] = {}
        self._closed = False

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._timers

    def set(self, endpoint: Endpoint, due: float) -> None:
        """Set the alarm of an endpoint. Does nothing if an earlier one is set, or if the run is over, when cancelled
        requests give their slots back."""
        before = self._timers.get(endpoint)
        if self._closed or due == inf or (before is not None and before.when() <= due):
            return
        if before is not None:
            before.cancel()
        self._timers[endpoint] = asyncio.get_running_loop().call_at(due, self._fire, endpoint)

    def close(self) -> None:
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()

    def _fire(self, endpoint: Endpoint) -> None:
        del self._timers[endpoint]
        self._ring(endpoint)


LOOK_FOR_ROOM = 5.0  # seconds after which a request that may be lost is looked at again

OnHealth = Callable[[Endpoint, float], None]
OnLimit = Callable[[Endpoint, str], None]
OnOver = Callable[["Ended", str], None]


class EndpointMonitor:
    """Watches the endpoints of a dispatcher. ``on_over`` is called with outcome and reason when no endpoint is left.
    ``max_outage=None``: an endpoint that has answered before is waited for without limit. ``inf``, for a service: no
    endpoint is ever given up."""

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
        patience = inf if max_outage is None else max_outage
        self._patience = patience, inf if max_outage == inf else min(patience, N.never_reached)
        self._on_health, self._on_limit, self._on_over = on_health, on_limit, on_over
        self.trust_probes = False  # the caller probes; an endpoint found up needs no trial
        self._unreachable: list[Endpoint] = []  # given up because no endpoint worked
        self._seen: dict[Endpoint, str] = {}  # the health last reported
        self._alarms = Alarms(self._look)
        self.flights = Flights(scheduler.router, self._pump, patience)
        self.rate_limits = RateLimits(self.arm)
        self._probes = Probes(backend, self.found)
        self.controls = ControlRequests(backend, ask_control, self._unasked, enabled=control_requests)
        self.decisions = Decisions(
            self._all,
            self.probe,
            self.control,
            self.controls.can_ask,
            lambda: self._slots.few_rows,
            self._pump,
        )
        self.undecided = self.decisions.waiting.keys()  # failed requests whose rows wait for evidence

    @property
    def is_endless(self) -> bool:
        """Whether the dispatcher is that of a service, so that no endpoint is ever given up."""
        return self._patience[1] == inf

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

    # What happens to requests

    def sent(self, slot: Slot) -> None:
        """Called when a slot is granted."""
        endpoint = slot.endpoint
        if slot.trial:
            self._report(endpoint, slot.sent_at)
        search = endpoint.capacity.search
        if search is not None and search.ramp_at is None:
            self._tell(endpoint, events.Sent(slot), slot.sent_at)
            self.arm(endpoint)
        if endpoint.server.rates is not None:
            self.rate_limits.begin(slot)
        elif slot.trial or endpoint not in self._alarms:
            self.arm(endpoint)

    def released(self, slot: Slot) -> None:
        """Called when a slot was given back that was a trial, or that holds a part of the rate limits."""
        if slot.reservation is not None:
            self.rate_limits.settle(slot)
        if slot.trial:
            self.arm(slot.endpoint)  # for the next trial, if this one was withdrawn

    def answered(self, slot: Slot, began: float, reply: Reply) -> None:
        endpoint, control = slot.endpoint, slot.ticket.control
        now, server = self._slots.clock(), endpoint.server
        seconds = now - (slot.sent_at if control else began)
        if not control:
            self._scheduler.answered(slot, seconds, reply.usage, now)
        if reply.quota is not None or slot.reservation is not None:
            counted = reply.usage.prompt_tokens or reply.usage.completion_tokens
            self.rate_limits.learn(endpoint, slot, reply.quota, reply.usage)
            self.rate_limits.settle(slot, reply.usage if counted or control else None)
        if effects := server.on(events.Answered(slot, seconds, reply.usage), now):
            self._do(endpoint, effects, now)
        if control or server.answers == 1:  # now it is known that it works, or how long a row takes
            if control or now >= self.flights.lost_at(endpoint):
                self._alarms.set(endpoint, now + N.moment)
            self.arm(endpoint)
        if self.undecided:
            self.decisions.wake()

    def failed(self, slot: Slot, error: BackendError, request: ModelRequest | None = None) -> Judged:
        """Judge a failed attempt and apply the verdict. Called before the slot is given back."""
        endpoint, now = slot.endpoint, self._slots.loop.time()
        self.rate_limits.learn(endpoint, slot, error.quota, error.usage or Usage())
        free = error.usage is None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self.rate_limits.settle(slot, Usage() if free else error.usage)
        if not slot.ticket.control:
            self.controls.like(endpoint, request)
        beside = self.flights.is_beside_suspect(slot)
        effects = endpoint.server.on(events.Failed(slot, error, self._around(endpoint), beside), now)
        judged = effects.pop()
        assert isinstance(judged, Judged)
        slot.ticket.avoid = slot.ticket.avoid | {endpoint} if judged.verdict.move else frozenset()
        self._do(endpoint, effects, now)
        self.decisions.wake()
        return judged

    def not_sent(self, slot: Slot) -> None:
        """Called when the request could not be sent. If it was a trial, the next row becomes the trial."""
        if slot.trial:
            self._unasked(slot.endpoint)

    def _unasked(self, endpoint: Endpoint) -> None:
        self._tell(endpoint, events.Unasked(self._around(endpoint)), self._slots.loop.time())

    def loaded(self, endpoint: Endpoint, load: Load) -> None:
        """Apply a load reading of the server."""
        now = self._slots.loop.time()
        self._tell(endpoint, events.Reading(load), now)
        self._scheduler.admission.read(endpoint)
        self.flights.loaded(endpoint, load.waiting, now)
        self._wake(endpoint)

    def unread(self, endpoint: Endpoint) -> None:
        """Continue without load readings of the server."""
        self._tell(endpoint, events.ReadingLost(), self._slots.loop.time())
        self._scheduler.admission.read(endpoint)
        self._wake(endpoint)

    def found(self, endpoint: Endpoint, found: Probe) -> None:
        """Apply the result of a probe."""
        event = events.ProbeEnded(found.state, found.reason, self._around(endpoint), self.trust_probes)
        self._tell(endpoint, event, self._slots.loop.time())
        self.arm(endpoint)

    def _around(self, endpoint: Endpoint) -> Around:
        scheduler, slots = self._scheduler, self._slots
        others_work = self._router.others_work(endpoint)
        return Around(
            others_work=others_work,
            few_rows=slots.few_rows,
            has_untested=slots.has_untested,
            can_ask=self.controls.can_ask(endpoint),
            wants_slot=bool(scheduler.waiting or scheduler.aside),
            is_full=scheduler.is_occupied,
            patience=self._patience[0],
            first_patience=self._patience[1],
            silence=self._router.longest_silence if others_work else inf,
        )

    # Effects

    def _tell(self, endpoint: Endpoint, event: events.ServerEvent, now: float) -> None:
        self._do(endpoint, endpoint.server.on(event, now), now)

    def _do(self, endpoint: Endpoint, effects: Effects, now: float) -> None:
        for effect in effects:
            match effect:
                case events.Limit(reason):
                    self._on_limit(endpoint, reason)
                case events.SendProbe():
                    self.probe(endpoint)
                case events.Control(again):
                    if again:
                        self.controls.renew(endpoint, self._slots)
                    elif self.control(endpoint) is None:
                        self._unasked(endpoint)
                case events.WentDown():
                    self._went_down(endpoint, now)
                case events.CameUp(was_slow):
                    self._came_up(endpoint, now, was_slow)
                case events.TrialEnded():
                    self._report(endpoint, now)
                    self.arm(endpoint)
                case events.Ready():
                    self.arm(endpoint)  # the row may have to wait
                    if self._router.others_work(endpoint) and endpoint not in self._router.trials:
                        self._router.trials.append(endpoint)
                case events.Recall(which, once):
                    self._recall(endpoint, which, now, once)
                case events.GiveUp(ended, why):
                    self._give_up(endpoint, ended, why)
                case events.Wake():
                    self.decisions.wake()
                    self.arm(endpoint)
                    self._wake(endpoint)
                case Judged():
                    pass

    def _recall(self, endpoint: Endpoint, which: str, now: float, once: bool) -> None:
        if which == "all":
            self.flights.recall_all(endpoint, now)
        elif which == "room":
            # Interactive requests have slots beyond the limit.
            self.flights.make_room(endpoint, now, 1 + self._scheduler.excess)
        else:
            self.flights.recall_oldest(endpoint, now, once=once)

    def _went_down(self, endpoint: Endpoint, now: float) -> None:
        self._scheduler.touch(endpoint)
        self._report(endpoint, now)
        self.decisions.wake()
        self.arm(endpoint)
        endpoint.tell_others()
        if self._scheduler.standbys:
            self._pump()

    def _came_up(self, endpoint: Endpoint, now: float, was_slow: bool) -> None:
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

    def _give_up(self, endpoint: Endpoint, ended: Ended, why: str) -> None:
        if endpoint.given_up:
            return
        if ended == "unreachable":
            self._unreachable.append(endpoint)
        endpoint.given_up = why
        self.controls.stop(endpoint)
        # A standby that is idle now does not help: all servers refuse, and none was down before.
        is_last = all(not other.is_usable for other in self._all)
        self._scheduler.touch(endpoint)
        if is_last:
            self._on_over(ended, why + self._why_not_instead(endpoint))
        self.decisions.wake()

    def _why_not_instead(self, endpoint: Endpoint) -> str:
        """Return the reason why the standby did not answer instead; for a standby, why the other servers did not. "" if
        there are no standbys."""
        standbys = self._scheduler.standbys
        others = standbys if endpoint.standby is None else [each for each in self._all if each.standby is None][:1]
        what = "the standby" if endpoint.standby is None else "and"
        reasons = [(other.name, other.given_up or other.health.reason) for other in others if standbys]
        return "".join(f"; {what} {name}: {reason}" for name, reason in reasons if reason)

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

    def leave(self, endpoint: Endpoint) -> None:
        """Cancel the requests of an endpoint that leaves if it is down. Probe it if its state is unknown."""
        self.controls.stop(endpoint)
        if not endpoint.health.is_down:
            self.probe(endpoint)
        elif self._router.others_work(endpoint):
            self.flights.recall_all(endpoint, self._slots.loop.time())

    @property
    def deciding(self) -> int:
        """The number of rows with a failed request for which it is not yet decided which side is at fault."""
        return self.decisions.under_way

    # Requests of its own

    def probe(self, endpoint: Endpoint) -> asyncio.Task[Probe] | None:
        """Probe the endpoint. The result is applied when it arrives."""
        return self._probes.start(endpoint)

    def control(self, endpoint: Endpoint) -> asyncio.Task[bool | None] | None:
        """Send a control request to the endpoint as soon as it takes one. The result is applied when it arrives."""
        asked = self.controls.start(endpoint, self._slots)
        self.arm(endpoint)
        return asked

    # Limits

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
        """Called when another dispatcher has released a slot of the server, or has found it down or up again."""
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

    # Time

    def arm(self, endpoint: Endpoint) -> None:
        """Set the alarm for what is due first at the endpoint."""
        if endpoint.given_up or (endpoint.leaving and not endpoint.inflight):
            return
        now = self._slots.loop.time()
        silence = self._router.longest_silence if self._router.others_work(endpoint) else inf
        due = endpoint.server.due(endpoint.inflight, self._patience, silence, now)
        if endpoint.inflight:
            lost_at = self.flights.lost_at(endpoint)
            due = min(due, lost_at if lost_at > now else now + LOOK_FOR_ROOM)
        self._alarms.set(endpoint, due)

    def _look(self, endpoint: Endpoint) -> None:
        now, flights = self._slots.loop.time(), self.flights
        inflight = 0 if self.rate_limits.short else endpoint.inflight
        event = events.Tick(
            self._around(endpoint),
            inflight,
            heard=max((flights.heard_at(slot) for slot in flights.at(endpoint)), default=0.0),
            patient=flights.patient(endpoint),
            second=flights.second(endpoint) is not None,
            probes=bool(self._probes) and not (endpoint.given_up or self.trust_probes),
        )
        self._tell(endpoint, event, now)
        self._scheduler.touch(endpoint)
        if inflight and now >= flights.lost_at(endpoint):
            flights.send_lost(endpoint, self._room_for_lost(endpoint), now)
        self.rate_limits.serve()
        self._slots.pump()
        self.arm(endpoint)

    def _room_for_lost(self, endpoint: Endpoint) -> float:
        """Return the number of idle slots for sending requests of this endpoint again: at other endpoints, or here if
        there is no other."""
        if not self._router.others_work(endpoint):
            spare = endpoint.spare
        else:
            spare = 0.0 if self._router.best(avoid={endpoint}) is None else self._router.spare
        most = self._scheduler.max_inflight
        return spare if most is None else min(spare, most - self._scheduler.inflight)

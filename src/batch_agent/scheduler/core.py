"""The scheduler: which ready agent gets the next inference slot, at which endpoint, and whether a new agent may start.

There are two limits. The capacity of an endpoint bounds its slots. A slot is held from the sending of a request until
its answer is complete, and never during a tool call. ``max_agents`` bounds the live agents. A new agent starts only if
a slot would otherwise be idle, so running agents come before new ones, and inputs are read only as fast as needed. An
agent that waits for a retry counts as if it wanted a slot. While as many agents as slots wait for a saturated tool, no
new agent starts. At the end of the batch, all remaining rows start at once.

``ordering`` estimates the rest of an agent and decides which ready agent goes first, and ``routing`` chooses
among endpoints. A turn goes to the endpoint of the agent's last turn, or to the one of its key. If that endpoint is
full, the turn waits there (``Parking``) until the wait costs more than recomputing the prefix elsewhere. It does not
block the turns behind it. With one endpoint, all of this is skipped.

While every endpoint is down, one turn after another is a trial. A turn whose trial failed is set aside, so that no
single row decides. If few are set aside, a new agent may start as a trial, and later another one now and then. A turn
that was in flight twice when its endpoint went down is a suspect: it may crash the server. It is sent when no other
turn waits, and never beside another suspect.

All methods are synchronous and get the time as a parameter. ``dispatch.slots`` wakes the coroutines of granted tickets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from batch_agent.errors import InternalError
from batch_agent.messages import Usage
from batch_agent.scheduler.admission import Admission
from batch_agent.scheduler.blame import RowHistory
from batch_agent.scheduler.capacity import MOST, START
from batch_agent.scheduler.lanes import Lanes
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import (
    FIRST,
    LAST,
    AgentForecast,
    KvParts,
    Parking,
    Queue,
    ResidentFirst,
    TurnForecast,
)
from batch_agent.scheduler.rates import Reservation
from batch_agent.scheduler.routing import Router
from batch_agent.scheduler.server import Endpoint

AFTER_CRASH = 10.0  # seconds by which a suspect is tried later for each crash of a server, if others wait

State = Literal["waiting", "set aside", "off the queue"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One agent's claim to a slot for one turn. It waits in a queue, holds a slot, or backs off before a retry."""

    progress: AgentForecast  # of the agent
    _row: RowHistory | None = None  # made at its first failure
    state: State = "waiting"
    slot: Slot | None = None  # the slot that it holds now
    pinned: Endpoint | None = None  # the only endpoint it may go to
    avoid: frozenset[Endpoint] = frozenset()  # used only if no other endpoint can take it
    anywhere: bool = False  # it has waited long enough for its own endpoint
    control: bool = False  # a control request: no agent's, sent to its ``pinned`` endpoint as soon as that takes it
    tried_at: float = 0.0  # when it last got a slot
    lost: bool = False  # a request was sent again because it was far older than other answers; once
    second: bool = False  # the request is sent beside another one that may be lost
    moves: int = 0  # times its request was recalled because another endpoint was faster

    @property
    def row(self) -> RowHistory:
        """The failures of the turn."""
        if self._row is None:
            self._row = RowHistory()
        return self._row

    @property
    def suspect(self) -> bool:
        return self._row is not None and self._row.suspect

    @property
    def chore(self) -> bool:
        """Whether this is an auxiliary request and not an agent's turn. Such requests are left out of the
        statistics."""
        return self.progress.turns < 0


@dataclass(slots=True, eq=False)
class Slot:
    """A slot that a ticket holds, or held, at one endpoint for one attempt."""

    ticket: Ticket
    endpoint: Endpoint
    sent_at: float
    generation: int  # generation of the endpoint's capacity when it was sent
    sound: bool  # the endpoint had just proved to be up when it was sent
    trial: bool  # the endpoint was down; this request tests it
    answers_before: int  # answers of the server when it was sent
    overdue: bool = False  # a trial that took too long; it continues beside the next one
    recalled: bool = False  # the dispatcher withdrew it
    taken_back: bool = False  # recalled because its caller wants to ask later
    withdrawn: bool = False  # recalled for good: the run is being drained, and the server has not begun with it
    heard_at: float = 0.0  # when a part of its answer was last passed on; then it cannot move any more
    reservation: Reservation | None = None  # its part of the endpoint's rate limits, while it is in flight


class Scheduler:
    def __init__(
        self, max_inflight: int | None = None, max_agents: int | None = None, endpoints: Sequence[Endpoint] = ()
    ) -> None:
        self.endpoints = list(endpoints) or [Endpoint()]
        self.max_inflight = max_inflight  # total over all endpoints
        self.allotted: int | None = None  # part of them for this process of a run; None: all
        self.max_agents = max_agents
        self.paused = False  # no grants
        self.closed = False  # no new agents any more
        self.backlogged = False  # no new agents until results are taken
        self.inflight = 0
        self.agents = 0
        self.waiting = 0  # includes parked turns, not suspects
        self.backing_off = 0  # agents that wait for a retry and hold no slot
        self.giving_way = 0  # of them, those in whose place new agents start
        self.at_tools = 0  # agents blocked on saturated tools
        self.aside: deque[Ticket] = deque()  # turns whose trial failed
        self.suspects: deque[Ticket] = deque()
        self.controls: dict[Ticket, Endpoint] = {}  # control requests that wait
        self.controls_in_flight = 0
        self.forecast = TurnForecast()
        self.router = Router(self.endpoints)
        self._queue: Queue[Ticket] = Queue(self.forecast)
        self._parking: Parking[Ticket, Endpoint | str] = Parking(self.forecast)
        self._lanes: Lanes[Ticket] = Lanes()  # turns that are pinned to an endpoint
        self.admission: Admission[Ticket] = Admission(self.forecast)  # by the engine's KV cache
        self.parts = KvParts.of(False)
        self._freed: dict[Endpoint, None] = {}  # endpoints that may have a slot for turns parked there
        self.standbys = [endpoint for endpoint in self.endpoints if endpoint.standby is not None]
        self._suspect_in_flight: Slot | None = None  # the suspect that runs beside other turns
        if self.standbys:
            self._switch_standbys()

    def use(self, parts: KvParts) -> None:
        """Set which parts of KV cache scheduling are on. Call it before the first turn."""
        self.parts = parts
        admission = self.admission
        admission.enabled, admission.holds = parts.any, parts.admission
        self._queue = Queue(self.forecast)
        if parts.order:
            self._queue = ResidentFirst(self.forecast, lambda ticket: admission.is_evicted(ticket.progress))

    # Endpoints

    def add(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
        if endpoint.standby is not None:
            self.standbys.append(endpoint)
        self.router.add(endpoint)
        self.touch(self.endpoints[0])  # it may have been the only endpoint, so its state was not tracked
        for gone in [known for known in self.endpoints if known.leaving]:
            self._drop_if_done(gone)

    def leave(self, endpoint: Endpoint) -> None:
        """Stop sending to the endpoint; remove it after its last answer."""
        endpoint.leaving = True
        self.touch(endpoint)
        self._drop_if_done(endpoint)

    def _drop_if_done(self, endpoint: Endpoint) -> None:
        if endpoint.inflight or len(self.endpoints) == 1 or endpoint not in self.endpoints:
            return
        self.endpoints.remove(endpoint)
        if endpoint.standby is not None:
            self.standbys.remove(endpoint)
        self.router.drop(endpoint)
        self.admission.drop(endpoint)
        self._freed.pop(endpoint, None)
        if len(self.endpoints) == 1:
            self._unpark(self.endpoints[0])
            for model in list(self._parking.names):
                self._unpark(model)

    def touch(self, endpoint: Endpoint) -> None:
        """Record that the capacity of an endpoint has changed."""
        self.router.touch(endpoint)
        if self._lanes.places:
            self._lanes.touch(endpoint)
        if self._parking.parked:
            if endpoint in self._parking and not self.router.works(endpoint):
                self._unpark(endpoint)
            self._freed[endpoint] = None
        if self.standbys and endpoint.standby is None:
            self._switch_standbys()

    def _switch_standbys(self) -> None:
        """Use the standbys while no other endpoint works. An endpoint that denies every row counts as reachable: its
        key or its model is wrong, which the user must correct."""
        idle = self.router.working_primaries > 0 or any(map(_denies, self.endpoints))
        for standby in self.standbys:
            if standby.is_idle != idle:
                standby.is_idle = idle
                self.touch(standby)
                if not idle:
                    self.rejoin()

    @property
    def due(self) -> float:
        """When the next waiting turn must be checked again; infinite if none waits."""
        if not self._parking.parked and not self.admission.held:
            return inf
        return min(self._parking.due, self.admission.due)

    # Agents

    def has_room(self, now: float = 0.0) -> bool:
        """Return whether an agent may start now: a slot is free and no ready agent wants it, or the batch is ending."""
        if self.paused or self.closed or self.backlogged or (self.admission.is_on and not self.admission.has_room(now)):
            return False
        if self.max_agents is not None and self.agents >= self.max_agents:
            return False
        spare = self._spare()
        if self.aside and len(self.aside) >= N.few and not self.slots:
            trials = max(endpoint.health.trials for endpoint in self.endpoints)
            # The last rows of a batch start nevertheless: only they can tell a bad server from bad rows.
            rows = inf if self.forecast.rows is None else self.forecast.rows
            # With a few set aside, a new agent starts only once in as many trials.
            if len(self.aside) >= N.few + trials // N.few and rows > len(self.aside):
                return False
        if self.at_tools and self.at_tools >= min(self.inflight + spare, MOST):
            return False
        nowhere = not self.waiting or self.waiting == len(self._parking.parked) + len(self._lanes.places)
        if nowhere and spare > self.backing_off - (self.giving_way and self._in_their_place()):
            return True
        if self.forecast.rows is None or not (slots := self.slots):
            return False
        return self.forecast.ending(0, slots)

    def _in_their_place(self) -> int:
        """Return how many agents may start in place of rows that wait for a retry. The number is limited: the next rows
        may fail as well, and their agents would accumulate."""
        slots = self.slots
        return min(self.giving_way, max(START, self.inflight if slots is None else slots))

    def _spare(self) -> float:
        """Return the number of slots that would stay idle."""
        one = len(self.endpoints) == 1  # the common case, on the hot path
        most = self.max_inflight if self.allotted is None else self.allotted
        left = inf if most is None else most - self.inflight
        if left <= 0:
            return left
        spare = self.endpoints[0].spare if one else self.router.spare
        return spare if spare < left else left

    @property
    def slots(self) -> int | None:
        """Total slots of healthy endpoints; None means unlimited."""
        slots = self.endpoints[0].slots if len(self.endpoints) == 1 else self.router.slots
        most = self.max_inflight if self.allotted is None else self.allotted
        if slots is None or most is None:
            return most if slots is None else slots
        return min(slots, most)

    @property
    def is_full(self) -> bool:
        """Whether no agent may start, and waiting alone will not change that."""
        held = any(e.server.held_until and not e.given_up for e in self.endpoints)
        passing = self.paused or self.backlogged or held or self.allotted == 0
        return not passing and not self.has_room()

    @property
    def is_crowded(self) -> bool:
        """Whether another agent takes each slot that becomes free, so that no agent gains by being ready sooner. False
        if something other than the slots keeps agents from starting."""
        if self.admission.holding:
            return False
        if self.waiting:
            return True
        slots, rows = self.slots, self.forecast.rows
        if slots is None or rows == 0 or self.closed or self.backlogged:
            return False
        if self.max_agents is not None and self.agents >= self.max_agents:
            return False
        return self._spare() <= 0 if rows is None else self.agents + rows > slots

    @property
    def is_occupied(self) -> bool:
        """Whether this dispatcher has as many requests in flight as it may have."""
        most = self.max_inflight if self.allotted is None else self.allotted
        return most is not None and self.inflight >= most

    @property
    def excess(self) -> int:
        """The number of requests in flight beyond those that this dispatcher may have, which exist because interactive
        requests do not wait."""
        most = self.max_inflight if self.allotted is None else self.allotted
        return 0 if most is None else max(0, self.inflight - most)

    @property
    def busy(self) -> int:
        """Number of turns that have a slot, wait for one, or soon will."""
        return (
            self.inflight
            - self.controls_in_flight
            + self.waiting
            + self.backing_off
            + len(self.aside)
            + len(self.suspects)
        )

    @property
    def wanted(self) -> bool:
        """Whether a turn is ready for a slot."""
        return bool(self.waiting or self.aside or self.suspects or self.controls)

    @property
    def has_untested(self) -> bool:
        """Whether a turn waits that has not failed yet: it can show whether a row or an endpoint is bad."""
        return any(not ticket.row.tested for ticket in self._queue.newest())

    def start_agent(self) -> None:
        self.agents += 1
        self.forecast.start()

    def end_agent(self, progress: AgentForecast, turns: int) -> None:
        """Record the end of an agent; ``turns`` is its total number of turns."""
        if self.agents <= 0:
            raise InternalError("an agent ended that never started")
        self.agents -= 1
        self.forecast.end(progress, turns)
        if self.admission.enabled:
            self.admission.end(progress)

    def request(
        self, progress: AgentForecast, turns: int, now: float, pinned: Endpoint | None = None, *, at_once: bool = False
    ) -> Ticket:
        """Queue a turn of an agent that has taken ``turns`` turns, and return its ticket. ``grant`` returns its slot
        later. ``pinned``: it may go only to that endpoint. ``at_once``: if a slot is free and no turn waits, it gets
        the slot here, as ``grant`` would give it."""
        answered_at = progress.answered_at
        self.forecast.go_on(progress, turns, now)
        if self.admission.is_on and answered_at is not None:
            self.admission.go_on(progress, now - answered_at)
        ticket = Ticket(progress, pinned=pinned)
        if at_once and not self.waiting and turns != FIRST and self._is_free(now):
            endpoint = self.endpoints[0]
            if not self.admission.enabled or self.admission.admit(ticket, progress, endpoint, now):
                self._hold(ticket, endpoint, now)
                return ticket
        elif pinned is not None and len(self.endpoints) > 1:
            self._lanes.add(ticket, pinned)
        else:
            self._queue.add(ticket, progress.turns)
        self.waiting += 1
        return ticket

    def _is_free(self, now: float) -> bool:
        """Return whether the only endpoint works, and has a slot that is not wanted by a turn outside the queue."""
        if self.paused or self.aside or self.suspects or self.controls or len(self.endpoints) > 1:
            return False
        most = self.max_inflight if self.allotted is None else self.allotted
        endpoint = self.endpoints[0]
        return (most is None or self.inflight < most) and not endpoint.health.is_down and endpoint.has_slot(now)

    def control(self, endpoint: Endpoint) -> Ticket:
        """Return the claim of a control request, which ``grant`` serves before all turns."""
        ticket = Ticket(AgentForecast(LAST), pinned=endpoint, control=True)
        self.controls[ticket] = endpoint
        return ticket

    def again(self, slot: Slot) -> None:
        """Queue a turn whose request failed before turns of equal rank, or set it aside. It is set aside while no
        endpoint works if its own trial failed, or if it failed while others were answered: then it is no good trial."""
        ticket = slot.ticket
        if ticket.pinned is not None and len(self.endpoints) > 1:
            self._wait(ticket)
            self._lanes.add(ticket, ticket.pinned, first=not slot.trial)
        elif ticket.suspect or ((slot.trial or ticket.row.charges) and not self.router.working):
            ticket.state = "set aside"
            (self.suspects if ticket.suspect else self.aside).append(ticket)
        else:
            self._rejoin(ticket)

    def rejoin(self) -> None:
        """Queue all turns set aside, because an endpoint is back."""
        while self.aside:
            self._rejoin(self.aside.pop())

    def _rejoin(self, ticket: Ticket) -> None:
        self._wait(ticket)
        self._queue.add(ticket, ticket.progress.turns, first=True)

    def grant(self, now: float = 0.0) -> Slot | None:
        """Return the slot of the next ticket that may go; None if no slot is free or no turn waits."""
        if self.paused or not (self.waiting or self.aside or self.suspects or self.controls):
            return None
        match = self._match_first(now) if FIRST in self._queue.lines else None
        most = self.max_inflight if self.allotted is None else self.allotted
        if match is None and most is not None and self.inflight >= most:
            return None
        if self.admission.held:
            for held in self.admission.release(now):
                self._queue.add(held, held.progress.turns, first=True)
        one = len(self.endpoints) == 1 and not self._lanes.places
        if match is None and self.controls:
            match = self._match_control(now)
        if match is None:
            match = self._match_one(now) if one else self._match_many(now)
        if match is None:
            return None
        ticket, endpoint = match
        self.waiting -= ticket.state == "waiting" and not ticket.control
        slot = self._hold(ticket, endpoint, now)
        if not one:
            self.router.touch(endpoint)
            if self._lanes.places:
                self._lanes.touch(endpoint)
        return slot

    def _hold(self, ticket: Ticket, endpoint: Endpoint, now: float) -> Slot:
        ticket.state, ticket.tried_at, ticket.anywhere = "off the queue", now, False
        sound, capacity = endpoint.health.is_sound(now), endpoint.capacity
        trial = endpoint.take(now, self.backing_off if len(self.endpoints) == 1 else 0)
        slot = Slot(ticket, endpoint, now, capacity.generation, sound, trial, endpoint.server.answers)
        ticket.slot = slot
        if not slot.trial and ticket.suspect:
            self._suspect_in_flight = slot
        self.inflight += 1
        self.controls_in_flight += ticket.control
        return slot

    def _match_control(self, now: float) -> tuple[Ticket, Endpoint] | None:
        for ticket, endpoint in self.controls.items():
            if endpoint.takes_control(now):
                del self.controls[ticket]
                return ticket, endpoint
        return None

    def _match_first(self, now: float) -> tuple[Ticket, Endpoint] | None:
        """Return an interactive request, and the least busy endpoint for it; None if there is none. It does not wait
        for the end of another request, but the limits of a provider and outages hold for it too."""
        for ticket in self._queue.first():
            model = ticket.progress.model
            able = [
                endpoint
                for endpoint in self.endpoints
                if endpoint.is_working and endpoint.takes_control(now) and self.router.serves(endpoint, model)
            ]
            if able:
                self._queue.remove(ticket, FIRST)
                return ticket, min(able, key=lambda each: each.inflight / (each.slots or inf))
        return None

    def _match_one(self, now: float) -> tuple[Ticket, Endpoint] | None:
        endpoint, admission = self.endpoints[0], self.admission
        if not endpoint.has_slot(now):
            return None
        while (ticket := self._next(trial=endpoint.health.is_down)) is not None:
            if not admission.enabled or admission.admit(ticket, ticket.progress, endpoint, now):
                return ticket, endpoint
        return None

    def _match_many(self, now: float) -> tuple[Ticket, Endpoint] | None:
        while self._parking.parked and (impatient := self._parking.impatient(now)) is not None:
            impatient.anywhere, impatient.avoid = True, frozenset()
            self._queue.add(impatient, impatient.progress.turns, first=True)
        match = self._match_parked(now) or self._lanes.take(now)
        if match is not None:
            return match
        trial = self._trial(now)
        if trial is not None and (match := self._match_trial(trial, now)) is not None:
            return match
        while self._free(now) and (ticket := self._next()) is not None:
            endpoint = self._route(ticket, now)
            if endpoint is not None and self._admit(ticket, endpoint, now):
                return ticket, endpoint
        return None

    def _admit(self, ticket: Ticket, endpoint: Endpoint, now: float) -> bool:
        admission = self.admission
        return not admission.enabled or admission.admit(ticket, ticket.progress, endpoint, now)

    def _match_parked(self, now: float) -> tuple[Ticket, Endpoint] | None:
        while self._freed:
            endpoint = next(iter(self._freed))
            if endpoint.has_slot(now):  # or a trial for turns that can go nowhere else
                ticket = self._parking.take(endpoint, self.slots) or self._of_its_kind(endpoint)
                if ticket is not None:
                    if self._admit(ticket, endpoint, now):
                        return ticket, endpoint
                    continue
            del self._freed[endpoint]
        return None

    def _of_its_kind(self, endpoint: Endpoint) -> Ticket | None:
        """Return a waiting turn for a model of this endpoint, or None. For an endpoint that does not work, only a turn
        for a model that no working endpoint serves."""
        router, works = self.router, self.router.works(endpoint)
        for model in self._parking.names:
            if router.serves(endpoint, model) and (works or not router.is_served(model)):
                return self._parking.take(model, self.slots)
        return None

    def _trial(self, now: float) -> Endpoint | None:
        """Return a down endpoint that may get a trial: one that a probe recommends or, if no endpoint works, one whose
        trial is due. None if there is none."""
        if not (self._queue.size or self.aside or self.suspects):
            return None
        trials = self.router.trials
        while trials:
            endpoint = trials.popleft()
            if endpoint.health.state == "down" and endpoint.has_slot(now):
                return endpoint
        if self.router.working:
            return None
        due = [endpoint for endpoint in self.endpoints if endpoint.has_slot(now)]
        return min(due, key=lambda each: (not each.health.is_sound(now), each.health.trials), default=None)

    def _match_trial(self, trial: Endpoint, now: float) -> tuple[Ticket, Endpoint] | None:
        """Return the next ticket for a trial of this endpoint, or a ticket that must go to another endpoint first; None
        if there is none."""
        # While other endpoints work, the ticket may go there, where a suspect must be alone.
        while (ticket := self._next(trial=not self.router.working)) is not None:
            # While other endpoints work, a turn that has failed is not used for a trial.
            again = ticket.avoid and self.router.working
            if ticket.pinned is None and not again and self.router.serves(trial, ticket.progress.model):
                return ticket, trial
            endpoint = self._route(ticket, now)
            if endpoint is not None:
                if endpoint is not trial and self.router.working:
                    self.router.trials.appendleft(trial)
                return ticket, endpoint
        return None

    def _free(self, now: float) -> bool:
        """Return whether an endpoint is free. Slow endpoints that would delay the end of the batch do not count."""
        router = self.router
        left = self.forecast.turns_to_come - self.inflight
        while True:
            best = router.best()
            if best is None:
                if not router.wake(left if self.inflight else inf):
                    return False
            elif not best.has_slot(now):  # its rate limit is used up
                router.hide(best)
            elif self.inflight > best.inflight and router.is_slow_for(best, left, self.slots or self.inflight):
                router.rest(best, left)
            else:
                return True

    def _route(self, ticket: Ticket, now: float) -> Endpoint | None:
        """Return the endpoint for the ticket; None if the ticket was parked."""
        progress, router, pinned = ticket.progress, self.router, ticket.pinned
        if pinned is not None:
            if pinned.has_slot(now):
                return pinned
            self._wait(ticket)
            self._lanes.add(ticket, pinned)
            return None
        worth, home = 0.0, None
        if not (ticket.anywhere or ticket.suspect):
            home = progress.home
            if home is None or not router.works(home):
                home = router.home(progress.key, progress.model) if progress.key else None
            worth = router.prefix.seconds(progress.tokens or int(router.first_tokens))
        best = self._best(progress, ticket.avoid, now)
        if home is None or home in ticket.avoid:
            pass
        elif router.is_free(home) and home.has_slot(now):
            if best is None or router.seconds(home) <= N.much_slower * router.seconds(best) + worth + N.unseen:
                return home
        elif worth > router.wait(home, self._parking.waiting(home)):
            self._park(ticket, home, now + worth)
            return None
        if best is None and ticket.avoid:
            other = router.other(ticket.avoid, progress.model, progress.tokens)
            if other is not None:  # it has no slot now
                self._park(ticket, other, now + self._patience(ticket, other))
                return None
            ticket.avoid = frozenset()
            best = self._best(progress, ticket.avoid, now)
        if best is None:  # the free endpoints cannot take this turn
            self._park(ticket, progress.model)
        return best

    def _patience(self, ticket: Ticket, other: Endpoint) -> float:
        """Return how many seconds a turn waits for an endpoint other than the one where it failed: that one may be
        silent, and may be the first to be up again. A hedge, which has not failed, waits as long as its first
        request."""
        if not ticket.row.tested:
            return inf
        return max(N.slack, N.much_slower * self.router.wait(other, self._parking.waiting(other)))

    def _park(self, ticket: Ticket, place: Endpoint | str, due: float = inf) -> None:
        self._wait(ticket)
        self._parking.park(ticket, ticket.progress.turns, place, due)

    def _wait(self, ticket: Ticket) -> None:
        """Count a ticket that was set aside or has failed as waiting."""
        self.waiting += ticket.state != "waiting"
        ticket.state = "waiting"

    def _best(self, progress: AgentForecast, avoid: frozenset[Endpoint], now: float) -> Endpoint | None:
        """Return the free endpoint that will finish the turn soonest; a resting one only if there is no other."""
        while True:
            best = self.router.best(progress.model, progress.tokens, avoid)
            if best is None:
                if not self.router.wake(inf):
                    return None
            elif best.has_slot(now):
                return best
            else:
                self.router.hide(best)

    def _unpark(self, place: Endpoint | str) -> None:
        while (ticket := self._parking.take(place, None)) is not None:
            self._queue.add(ticket, ticket.progress.turns, first=True)

    def _next(self, *, trial: bool = False) -> Ticket | None:
        """Return the next ready ticket. A suspect runs alone; a trial is alone at its endpoint."""
        if self._queue.size:
            return self._queue.take(None if self._queue.size == 1 else self.slots)
        suspect: Ticket | None = None
        if self.suspects and (trial or self._suspect_in_flight is None):
            # Rows that were only in flight when another one crashed the server come before those that crash it.
            suspect = min(self.suspects, key=lambda ticket: ticket.tried_at + AFTER_CRASH * len(ticket.row.crashes))
        # Trials alternate: a row that always fails must not keep a suspect from being tried.
        if self.aside and (suspect is None or self.aside[0].tried_at <= suspect.tried_at):
            return self.aside.popleft()
        if suspect is not None:
            self.suspects.remove(suspect)
        return suspect

    def give_back(self, slot: Slot) -> bool:
        """Give the slot back. Returns False if it was given back before."""
        ticket, endpoint = slot.ticket, slot.endpoint
        if ticket.slot is not slot:
            return False
        ticket.slot = None
        self.inflight -= 1
        self.controls_in_flight -= ticket.control
        endpoint.give_back()
        if len(self.endpoints) > 1:
            self._given_back(endpoint)
        if slot is self._suspect_in_flight:
            self._suspect_in_flight = None
        if slot.trial and not slot.overdue:
            endpoint.health.trial_over()
        return True

    def withdraw(self, ticket: Ticket) -> None:
        """Drop the claim of a ticket that holds no slot. Has no effect if it was dropped before."""
        if ticket.state == "set aside":
            (self.aside if ticket in self.aside else self.suspects).remove(ticket)
        elif ticket.control:
            self.controls.pop(ticket, None)
        elif ticket.state == "waiting":
            self.waiting -= 1
            if ticket in self.admission.held:
                del self.admission.held[ticket]
            elif ticket in self._parking.parked:
                self._parking.remove(ticket)
            elif ticket in self._lanes.places:
                self._lanes.remove(ticket)
            else:
                self._queue.remove(ticket, ticket.progress.turns)
        ticket.state = "off the queue"

    def _given_back(self, endpoint: Endpoint) -> None:
        self.touch(endpoint)
        if endpoint.leaving:
            self._drop_if_done(endpoint)

    def answered(self, slot: Slot, seconds: float, usage: Usage, now: float) -> None:
        """Record that the request was answered after ``seconds``."""
        progress, endpoint, chore = slot.ticket.progress, slot.endpoint, slot.ticket.chore
        self.forecast.answered(progress, seconds, now)
        if self.admission.enabled and not chore:
            self.admission.answered(progress, endpoint, usage, seconds, now)
        if len(self.endpoints) > 1:
            self.router.answered(seconds)
            if not chore:
                self.router.learn_prefix(usage, seconds, first=progress.home is None)
                progress.home, progress.tokens = endpoint, usage.prompt_tokens + usage.completion_tokens


def _denies(endpoint: Endpoint) -> bool:
    return endpoint.standby is None and endpoint.is_usable and endpoint.health.is_down and endpoint.health.is_denied

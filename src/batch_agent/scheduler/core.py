"""The scheduler: which ready agent gets the next inference slot, at which endpoint, and whether a new agent may start.

Two gates. An endpoint's capacity bounds its slots, held from the moment a request leaves until its answer is complete
and never during a tool. ``max_agents`` bounds the agents alive. A new agent starts only when a slot would otherwise
stay idle, so agents under way are always served before newcomers, and inputs are read exactly as fast as they are
needed. An agent that waits to repeat a failed request will want a slot again, so it counts as if it wanted one; and
while as many agents as there are slots wait for a tool that cannot keep up, more of them would only wait there too.
When the batch comes to its end, what is left starts at once.

Which ready agent goes first is ``ordering``'s part, and what may be expected of an agent is ``outlook``'s.

While every endpoint is down, one turn after another is its trial. A turn whose trial failed is set aside, so that not
one row alone decides; where those are few, a new agent may start to be tried, and later now and then another. A turn
that was in flight when its
endpoint went down, twice, is a suspect: it may be what brings the server down. It goes when there is nobody else, and
never beside another suspect.

Everything here is synchronous and is told the time. ``engine.limiter`` wakes the coroutines that ``grant`` names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batch_agent.errors import InternalError
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.ordering import LAST, Queue
from batch_agent.scheduler.outlook import Outlook, Progress
from batch_agent.scheduler.rates import Lease

MOST_AT_TOOLS = 1024  # agents that may wait for busy tools where the number of slots has no limit
MOST_ASIDE = 8  # turns whose trial failed, before a new agent is started only for every so many trials
SUSPECT = 2  # outages at whose beginning a turn was in flight

State = Literal["waiting", "set aside", "held", "gone"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One agent's claim to one slot for one turn; it is claimed with again when the request is repeated."""

    progress: Progress  # its agent's, and what tells one agent from another
    state: State = "waiting"
    endpoint: Endpoint | None = None  # where it was last granted a slot
    sent_at: float = 0.0  # when
    generation: int = 0  # of the endpoint's capacity then
    trial: bool = False  # the endpoint was down, and this is the request that finds out
    overdue: bool = False  # it did not find out in time, and is waited for beside the next
    failures: int = 0  # its own, as far as is known
    doubtful: int = 0  # of these, since its endpoint's last good answer
    broke: bool = False  # one of the doubtful ones may have been what brought the server down
    hits: int = 0  # outages that began while it was in flight
    lost: bool = False  # its request was given up, once, because its answer was lost in an outage
    crowded: int = 0  # refusals because others took what there was, of slots or of a budget
    lease: Lease | None = None  # of the endpoint's budgets, while it is in flight

    @property
    def chore(self) -> bool:
        """A request beside the agents' own turns, which says nothing about what they will be told."""
        return self.progress.turns == LAST

    @property
    def suspect(self) -> bool:
        return self.hits >= SUSPECT


class Scheduler:
    def __init__(
        self, max_inflight: int | None = None, max_agents: int | None = None, endpoints: Sequence[Endpoint] = ()
    ) -> None:
        self.endpoints = list(endpoints) or [Endpoint()]
        self.max_inflight = max_inflight  # at all endpoints together
        self.max_agents = max_agents
        self.paused = False  # no grants
        self.closed = False  # no new agents, ever
        self.backlogged = False  # no new agents until results were taken
        self.inflight = 0
        self.agents = 0
        self.waiting = 0  # suspects aside
        self.backing_off = 0  # agents that will repeat a request and hold no slot meanwhile
        self.at_tools = 0  # agents whose call waits for a tool that is busy enough without it
        self.aside: deque[Ticket] = deque()  # turns whose trial failed
        self.suspects: deque[Ticket] = deque()
        self.outlook = Outlook()
        self._queue: Queue[Ticket] = Queue(self.outlook)
        self._suspect_in_flight: Ticket | None = None

    def has_room(self) -> bool:
        """Whether an agent may start now: a slot is free and nobody who is ready, or will be soon, wants it; or the
        batch is ending."""
        if self.paused or self.closed or self.backlogged:
            return False
        if self.max_agents is not None and self.agents >= self.max_agents:
            return False
        spare = self._spare()
        if len(self.aside) >= MOST_ASIDE and not self.slots:
            trials = max(endpoint.health.trials for endpoint in self.endpoints)
            if len(self.aside) >= MOST_ASIDE + trials // MOST_ASIDE:
                return False
        if self.at_tools and self.at_tools >= min(self.inflight + spare, MOST_AT_TOOLS):
            return False
        if not self.waiting and spare > self.backing_off:
            return True
        slots = self.slots
        return slots is not None and slots > 0 and self.outlook.ending(0, slots)

    def _spare(self) -> float:
        """Slots that stay idle if nobody takes them."""
        one = len(self.endpoints) == 1  # as nearly always, and on the hot path
        spare = self.endpoints[0].spare if one else sum(endpoint.spare for endpoint in self.endpoints)
        return spare if self.max_inflight is None else min(spare, self.max_inflight - self.inflight)

    @property
    def slots(self) -> int | None:
        """Slots in all, at endpoints that work; None: no end of them."""
        slots = 0
        for endpoint in self.endpoints:
            limit = endpoint.slots
            if limit is None:
                return self.max_inflight
            slots += limit
        return slots if self.max_inflight is None else min(slots, self.max_inflight)

    @property
    def is_full(self) -> bool:
        """No agent may start, and no time that passes will change that."""
        passing = self.paused or self.backlogged or any(e.held_until and not e.given_up for e in self.endpoints)
        return not passing and not self.has_room()

    @property
    def idle(self) -> bool:
        """Nothing is in flight, and nobody wants a slot."""
        return not (self.inflight or self.backing_off or self.wanted)

    @property
    def wanted(self) -> bool:
        """Somebody is ready for a slot."""
        return bool(self.waiting or self.aside or self.suspects)

    def start_agent(self) -> None:
        self.agents += 1
        self.outlook.start()

    def end_agent(self, progress: Progress, turns: int) -> None:
        """``turns`` is how many the agent took in all."""
        if self.agents <= 0:
            raise InternalError("an agent ended that never started")
        self.agents -= 1
        self.outlook.end(progress, turns)

    def request(self, progress: Progress, turns: int, now: float) -> Ticket:
        """A turn of an agent that has taken so many joins the queue; ``grant`` says when it may go."""
        self.outlook.go_on(progress, turns, now)
        ticket = Ticket(progress)
        self._queue.add(ticket, progress.turns)
        self.waiting += 1
        return ticket

    def again(self, ticket: Ticket) -> None:
        """A turn whose request failed joins the queue again, before its equals; or is set aside."""
        if ticket.suspect or ticket.trial:
            ticket.state = "set aside"
            (self.suspects if ticket.suspect else self.aside).append(ticket)
        else:
            self._rejoin(ticket)

    def rejoin(self) -> None:
        """An endpoint is back: those whose trial failed had nothing to do with it."""
        while self.aside:
            self._rejoin(self.aside.pop())

    def _rejoin(self, ticket: Ticket) -> None:
        ticket.state = "waiting"
        self._queue.add(ticket, ticket.progress.turns, first=True)
        self.waiting += 1

    def grant(self, now: float = 0.0) -> Ticket | None:
        """The next ticket that may go, now held, with the endpoint it goes to; None when no slot is free or nobody
        waits."""
        if self.paused or not self.wanted:
            return None
        if self.max_inflight is not None and self.inflight >= self.max_inflight:
            return None
        endpoint = self._free_endpoint(now)
        if endpoint is None:
            return None
        ticket = self._next()
        if ticket is None:
            return None
        ticket.state = "held"
        ticket.endpoint = endpoint
        ticket.sent_at = now
        ticket.generation = endpoint.capacity.generation
        ticket.trial, ticket.overdue = endpoint.take(now), False
        self.inflight += 1
        return ticket

    def _free_endpoint(self, now: float) -> Endpoint | None:
        """The one with the most room; a trial only where nobody has room."""
        if len(self.endpoints) == 1:
            return self.endpoints[0] if self.endpoints[0].has_slot(now) else None
        free = [endpoint for endpoint in self.endpoints if endpoint.has_slot(now)]
        return min(free, key=lambda e: (e.health.is_down, e.inflight / (e.capacity.limit or 1e9)), default=None)

    def _next(self) -> Ticket | None:
        if self.waiting:
            self.waiting -= 1
            return self._queue.take(self.slots)
        if self.aside:
            return self.aside.popleft()
        if self._suspect_in_flight is None:
            self._suspect_in_flight = self.suspects.popleft()
            return self._suspect_in_flight
        return None

    def give_back(self, ticket: Ticket) -> None:
        """The ticket's turn is over, or its agent no longer wants it. Giving back twice is harmless."""
        if ticket.state == "held":
            assert ticket.endpoint is not None
            self.inflight -= 1
            ticket.endpoint.inflight -= 1
            if ticket is self._suspect_in_flight:
                self._suspect_in_flight = None
            if ticket.trial and not ticket.overdue:
                ticket.endpoint.health.trial_over()
        elif ticket.state == "set aside":
            (self.suspects if ticket.suspect else self.aside).remove(ticket)
        elif ticket.state == "waiting":
            self.waiting -= 1
            self._queue.remove(ticket, ticket.progress.turns)
        ticket.state = "gone"

"""The scheduler: which ready agent gets the next inference slot, and whether a new agent may start.

Two gates. ``max_inflight`` bounds the slots, held from the moment a request leaves until its answer is complete and
never during a tool. ``max_agents`` bounds the agents alive. A new agent starts only when a slot would otherwise stay
idle, so agents under way are always served before newcomers, and inputs are read exactly as fast as they are needed.

Among ready agents the one with the fewest turns left goes first; waiting lifts an agent by one turn every ``AGEING``
grants. Because everyone ages at the same rate, an agent's place never changes while it waits: its rank is a constant
and a heap is enough.

Everything here is synchronous. ``engine.limiter`` wakes the coroutines that ``grant`` names.
"""

from __future__ import annotations

import heapq
from typing import Literal

from batch_agent.errors import InternalError

AGEING = 256  # grants a waiting agent sees pass before it counts as one turn nearer to its end

State = Literal["waiting", "held", "gone"]


class Ticket:
    """One agent's claim to one slot for one turn."""

    __slots__ = ("rank", "state")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.state: State = "waiting"


class Scheduler:
    def __init__(self, max_inflight: int | None = None, max_agents: int | None = None) -> None:
        self.max_inflight = max_inflight
        self.max_agents = max_agents
        self.paused = False  # no grants
        self.closed = False  # no new agents, ever
        self.backlogged = False  # no new agents until results were taken
        self.inflight = 0
        self.agents = 0
        self.waiting = 0
        self._granted = 0
        self._heap: list[tuple[int, int, Ticket]] = []
        self._order = 0

    def has_room(self) -> bool:
        """Whether an agent may start now: a slot is free and nobody who is ready wants it."""
        return not (
            self.paused
            or self.closed
            or self.backlogged
            or self.waiting
            or (self.max_inflight is not None and self.inflight >= self.max_inflight)
            or (self.max_agents is not None and self.agents >= self.max_agents)
        )

    def start_agent(self) -> None:
        self.agents += 1

    def end_agent(self) -> None:
        if self.agents <= 0:
            raise InternalError("an agent ended that never started")
        self.agents -= 1

    def request(self, turns_left: int) -> Ticket:
        """A ready turn joins the queue; ``grant`` says when it may go."""
        ticket = Ticket(turns_left * AGEING + self._granted)
        self._order += 1
        heapq.heappush(self._heap, (ticket.rank, self._order, ticket))
        self.waiting += 1
        return ticket

    def grant(self) -> Ticket | None:
        """The next ticket that may go, now held; None when no slot is free or nobody waits."""
        if self.paused or not self.waiting:
            return None
        if self.max_inflight is not None and self.inflight >= self.max_inflight:
            return None
        heap = self._heap
        while True:
            ticket = heapq.heappop(heap)[2]
            if ticket.state == "waiting":
                break
        ticket.state = "held"
        self.waiting -= 1
        self.inflight += 1
        self._granted += 1
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """The ticket's turn is over, or its agent no longer wants it. Giving back twice is harmless."""
        if ticket.state == "held":
            self.inflight -= 1
        elif ticket.state == "waiting":
            self.waiting -= 1
            self._forget_withdrawn()
        ticket.state = "gone"

    def _forget_withdrawn(self) -> None:
        # Withdrawn tickets stay in the heap until popped; when they outnumber the others it is rebuilt.
        if len(self._heap) > 64 + 2 * self.waiting:
            self._heap = [entry for entry in self._heap if entry[2].state == "waiting"]
            heapq.heapify(self._heap)

"""The scheduler: which ready agent gets the next inference slot, and whether a new agent may start.

Two gates. ``max_inflight`` bounds the slots, held from the moment a request leaves until its answer is complete and
never during a tool. ``max_agents`` bounds the agents alive. A new agent starts only when a slot would otherwise stay
idle, so agents under way are always served before newcomers, and inputs are read exactly as fast as they are needed.
When the batch comes to its end, what is left starts at once.

Which ready agent goes first is ``ordering``'s part, and what may be expected of an agent is ``outlook``'s.

Everything here is synchronous. ``engine.limiter`` wakes the coroutines that ``grant`` names.
"""

from __future__ import annotations

from typing import Literal

from batch_agent.errors import InternalError
from batch_agent.scheduler.ordering import Queue
from batch_agent.scheduler.outlook import Outlook, Progress

State = Literal["waiting", "held", "gone"]


class Ticket:
    """One agent's claim to one slot for one turn."""

    __slots__ = ("progress", "state")

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
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
        self.outlook = Outlook()
        self._queue: Queue[Ticket] = Queue(self.outlook)

    def has_room(self) -> bool:
        """Whether an agent may start now: a slot is free and nobody who is ready wants it, or the batch is ending."""
        if (
            self.paused
            or self.closed
            or self.backlogged
            or (self.max_agents is not None and self.agents >= self.max_agents)
        ):
            return False
        if self.max_inflight is None:
            return not self.waiting
        idle = not self.waiting and self.inflight < self.max_inflight
        return idle or self.outlook.ending(0, self.max_inflight)

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

    def grant(self) -> Ticket | None:
        """The next ticket that may go, now held; None when no slot is free or nobody waits."""
        if self.paused or not self.waiting:
            return None
        if self.max_inflight is not None and self.inflight >= self.max_inflight:
            return None
        ticket = self._queue.take(self.max_inflight)
        ticket.state = "held"
        self.waiting -= 1
        self.inflight += 1
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """The ticket's turn is over, or its agent no longer wants it. Giving back twice is harmless."""
        if ticket.state == "held":
            self.inflight -= 1
        elif ticket.state == "waiting":
            self.waiting -= 1
            self._queue.remove(ticket, ticket.progress.turns)
        ticket.state = "gone"

"""What one agent has used so far: requests, turns, tokens, money, time."""

from __future__ import annotations

from dataclasses import dataclass, field

from batch_agent.job import Timings
from batch_agent.messages import Reply, Usage
from batch_agent.record.steps import Spent


@dataclass(slots=True)
class Tally:
    """What one agent has used so far. Times in seconds."""

    sent: int = 0  # requests that left
    retries: int = 0  # requests sent again, and answers requested again
    again: bool = False  # the next request is one of these
    turns: int = 0  # complete answers
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None  # $, of the turns whose price is known
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    first_token: float | None = None
    before: float = 0.0  # seconds spent in earlier sessions

    @property
    def attempts(self) -> int:
        return 1 + self.retries if self.sent else 0

    def leave(self) -> None:
        self.sent += 1
        self.retries += self.again
        self.again = False

    def add(self, reply: Reply, cost: float | None) -> None:
        self.turns += 1
        self.pay(reply.usage, cost)
        if self.first_token is None:
            self.first_token = reply.first_token

    def pay(self, usage: Usage, cost: float | None) -> None:
        self.usage += usage
        if cost is not None:
            self.cost = cost + (self.cost or 0.0)

    def follow(self, reply: Reply, spent: Spent) -> None:
        """Count a turn of an earlier session, with everything spent by then."""
        self.add(reply, None)
        self.take_over(spent)

    def take_over(self, spent: Spent) -> None:
        self.sent, self.retries, self.cost, self.before = spent.sent, spent.retries, spent.cost, spent.total
        self.again = False
        self.queued, self.inference, self.tool_wait = spent.queued, spent.inference, spent.tool_wait

    def spent(self, seconds: float) -> Spent:
        """Return everything spent. ``seconds`` is the agent's lifetime in this session."""
        total = self.before + seconds
        return Spent(self.sent, self.retries, self.queued, self.inference, self.tool_wait, total, self.cost)

    def timings(self, total: float) -> Timings:
        return Timings(self.queued, self.inference, self.tool_wait, total, self.first_token)

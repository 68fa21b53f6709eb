"""Tool calls that start while the model is still writing its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from batch_agent.agent.resources import Resources
from batch_agent.job import Job
from batch_agent.messages import ToolCall
from batch_agent.tools.pool import PendingCall

# The most calls of one answer that are run. Models that plan make a few at once. A model that writes hundreds is in a
# loop, and each of its calls would need a task, a record and a message.
MOST_CALLS = 64


@dataclass(slots=True)
class EarlyCalls:
    """Tool calls that started while their answer was streamed, by call id."""

    r: Resources
    job: Job
    turn: int
    started: dict[str, PendingCall] = field(default_factory=dict)

    def __call__(self, call: ToolCall) -> None:
        # A write starts only when the answer is complete, because an incomplete answer is requested again.
        if len(self.started) < MOST_CALLS and self.r.tools.can_start_early(call.name):
            self.started[call.id] = self.r.start_tool(call, self.job, self.turn)

    def gained(self, now: float) -> float:
        """Return the seconds that the longest call has been running."""
        return max((pending.seconds(now) for pending in self.started.values()), default=0.0)

    def abandon(self) -> None:
        for pending in self.started.values():
            pending.abandon()
        self.started.clear()

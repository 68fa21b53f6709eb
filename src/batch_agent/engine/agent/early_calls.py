"""Tool calls that are started while the model is still writing its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from batch_agent.engine.agent.resources import Resources
from batch_agent.job import Job
from batch_agent.messages import ToolCall
from batch_agent.tools.pool import PendingCall

# Calls of one answer that are run. Models that plan ask for a handful at once; one that writes hundreds is in a loop,
# and each of its calls would be a task, an outcome in the record and a message in the conversation.
MOST_CALLS = 64


@dataclass(slots=True)
class EarlyCalls:
    """Tool calls started while their answer was still being streamed, by call id."""

    r: Resources
    job: Job
    turn: int
    started: dict[str, PendingCall] = field(default_factory=dict)

    def __call__(self, call: ToolCall) -> None:
        # A write waits for the end of the answer: an answer that breaks off is asked for again.
        if len(self.started) < MOST_CALLS and self.r.tools.can_start_early(call.name):
            self.started[call.id] = self.r.start_tool(call, self.job, self.turn)

    def gained(self, now: float) -> float:
        """Seconds for which the longest of them has been running."""
        return max((pending.seconds(now) for pending in self.started.values()), default=0.0)

    def abandon(self) -> None:
        for pending in self.started.values():
            pending.abandon()
        self.started.clear()

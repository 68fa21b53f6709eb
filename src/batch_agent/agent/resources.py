"""The state that the agents of one run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from batch_agent.agent.prefix_leader import PrefixLeader
from batch_agent.agent.shapes import Shapes
from batch_agent.agent.tool_prewarm import ToolPrewarm
from batch_agent.backends.base import Backend
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy
from batch_agent.events import Sink
from batch_agent.job import Job
from batch_agent.messages import Conversation, ToolCall
from batch_agent.record.digests import ShapeDigests
from batch_agent.scheduler.streaming import Streaming
from batch_agent.tools.pool import PendingCall, ToolPool

if TYPE_CHECKING:
    from batch_agent.agent.compaction import Compactor
    from batch_agent.agent.touches import Touches
    from batch_agent.observe.telemetry import Traces


@dataclass(slots=True)
class Resources:
    backend: Backend
    dispatcher: Dispatcher
    policy: Policy  # retries and timeouts of turns
    tools: ToolPool
    schema: OutputSchema[object] | None
    shared: Conversation
    shapes: Shapes
    emit: Sink
    run: str  # its id
    clock: Callable[[], float]  # wall-clock time for events
    max_turns: int | None
    timeout_per_agent: float | None
    early_tools: bool  # start a tool while the model is still writing
    ends_with_answer: bool = True  # an agent ends with a valid answer without tool calls
    keeps_cut_text: bool = False  # free text that was cut at max_tokens is accepted and marked as truncated
    streaming: Streaming = field(default_factory=Streaming)
    prewarm: ToolPrewarm | None = None
    compactor: Compactor | None = None  # None: conversations are never cut
    schema_noted: bool = False  # an event reported that the server does not enforce the schema
    touches: Touches | None = None  # None: contexts are not touched while tools run
    lead: PrefixLeader | None = None  # None: no request is sent ahead of the others
    digests: ShapeDigests = field(default_factory=ShapeDigests)
    traces: Traces | None = None  # None: the run is not traced
    hints: bool = True  # send hints about each agent to servers that plan
    answers: int = 0  # number of complete answers
    answer_tokens: int = 0  # sum over all of them

    @property
    def usual_tokens(self) -> int | None:
        """Mean completion tokens of an answer; None before the first."""
        return self.answer_tokens // self.answers if self.answers else None

    def start_tool(self, call: ToolCall, job: Job, turn: int) -> PendingCall:
        if self.traces is None:
            return self.tools.start(call, job, turn)
        # Most calls need no trace context, because their result is cached or shared.
        return self.tools.start(call, job, turn, partial(self.traces.of_call, self.run, job.index, turn, call.id))

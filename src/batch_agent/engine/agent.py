"""One agent's life: turns, tools, validation, repair, until it has an output or an error.

An agent owns its conversation and its tally, nothing else: slots, tools and the backend are the run's (``Resources``).
Whatever goes wrong for this job alone is a JobError and ends on its result; anything else is a fault of this package
and stops the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.engine.turn import EarlyCalls, Resources, Tally, take_turn
from batch_agent.errors import AgentTimeout, BackendError, JobError, LimitExceeded, OutputError
from batch_agent.events import ToolFinished, ToolStarted
from batch_agent.job import AgentError, AgentResult, Job
from batch_agent.messages import Conversation, Message, Reply, ToolCall
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import Parsed, parse_output
from batch_agent.scheduler.core import Ticket


class Agent:
    def __init__(self, job: Job, resources: Resources) -> None:
        self.job = job
        self.error: JobError | None = None
        self._r = resources
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._conversation = Conversation((Message("user", job.prompt),), parent=resources.shared)
        self._tally = Tally()
        self._text = ""  # the model's latest

    async def run(self, ticket: Ticket) -> AgentResult[object]:
        """To the end, starting with a claim to a slot that was made already. A JobError is part of the result."""
        parsed: Parsed[object] | None = None
        deadline = self._r.timeout_per_agent
        try:
            if deadline is None:
                parsed = await self._converse(ticket)
            else:
                async with asyncio.timeout(deadline) as limit:
                    parsed = await self._converse(ticket)
        except TimeoutError:
            if deadline is None or not limit.expired():
                raise
            turns = self._tally.turns
            self.error = AgentTimeout(f"timeout_per_agent, {deadline:g} s, is over after {turns} answers of the model")
        except JobError as error:
            self.error = error
        return self.result(parsed)

    def result(self, parsed: Parsed[object] | None) -> AgentResult[object]:
        return AgentResult(
            index=self.job.index,
            job_id=self.job.job_id,
            input=self.job.input,
            ok=self.error is None,
            output=None if parsed is None else parsed.value,
            error=None if self.error is None else AgentError.of(self.error),
            attempts=self._tally.attempts,
            turns=self._tally.turns,
            usage=self._tally.usage,
            timings=self._tally.timings(self._loop.time() - self._began),
            messages=tuple(self._conversation.messages),
            raw_text=self._text,
            repaired=parsed is not None and parsed.repaired,
        )

    def turns_left(self) -> int:
        return max(0, self._r.max_turns - self._tally.turns) if self._r.max_turns is not None else -self._tally.turns

    async def _converse(self, ticket: Ticket) -> Parsed[object]:
        r, shapes = self._r, self._r.shapes
        shape = shapes.first
        repairs = 0
        while True:
            reply, early = await self._ask(shape, ticket)
            if reply.tool_calls:
                await self._use_tools(reply.tool_calls, early)
                shape = shapes.later
            else:
                try:
                    return self._parse(reply.text)
                except OutputError as error:
                    if repairs == r.max_retries or r.schema is None:
                        raise
                    self._conversation.append(Message("user", repair_prompt(error, r.schema)))
                repairs += 1
                self._tally.retries += 1
                shape = shapes.repair
            ticket = r.limiter.claim(self.turns_left())

    async def _ask(self, shape: RequestShape, ticket: Ticket) -> tuple[Reply, EarlyCalls | None]:
        r = self._r
        request = ModelRequest(shape, self._conversation, self.job.job_id, self.turns_left())
        # On the last turn no tool will be run, so there is nothing to start early.
        last = r.max_turns is not None and self._tally.turns + 1 >= r.max_turns
        early = EarlyCalls(r.tools) if r.early_tools and shape.tools and not last else None
        try:
            reply = await take_turn(r, request, self.job.index, self._tally, ticket, early)
        except BaseException as error:
            if early is not None:
                early.abandon()
            if isinstance(error, BackendError) and error.text:
                self._text = error.text
            raise
        self._text = reply.text
        self._conversation.append(Message("assistant", reply.text, reply.tool_calls, reasoning=reply.reasoning))
        return reply, early

    async def _use_tools(self, calls: Sequence[ToolCall], early: EarlyCalls | None) -> None:
        r, index = self._r, self.job.index
        if r.max_turns is not None and self._tally.turns >= r.max_turns:
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            raise LimitExceeded(f"after max_turns, {r.max_turns}, the model still wants to call {names}")
        began = self._loop.time()
        started = early.started if early is not None else {}
        pending = [started.get(call.id) or r.tools.start(call) for call in calls]
        try:
            for call in calls:
                r.emit(ToolStarted(began, index, call.name))
            for call, waiting in zip(calls, pending, strict=True):
                outcome = await waiting.wait()
                self._conversation.append(Message("tool", outcome.text, tool_call_id=call.id))
                now = self._loop.time()
                r.emit(ToolFinished(now, index, call.name, outcome.seconds, outcome.ok, outcome.source))
        finally:
            for waiting in pending:
                waiting.abandon()
            self._tally.tool_wait += self._loop.time() - began

    def _parse(self, text: str) -> Parsed[object]:
        schema = self._r.schema
        return Parsed(strip_reasoning(text), repaired=False) if schema is None else parse_output(text, schema)

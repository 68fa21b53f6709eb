"""One agent's life: turns, tools, validation, repair, until it has an output or an error.

An agent owns its conversation and its tally, nothing else: slots, tools and the backend are the run's (``Resources``).
Whatever goes wrong for this job alone is a JobError and ends on its result; anything else is a fault of this package
and stops the run.

With a trail the agent follows what an earlier session recorded of it, through this same code, and then goes on from
there; what it does now is recorded before anything is built on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.engine.turn import EarlyCalls, Resources, Tally, take_turn
from batch_agent.errors import AgentTimeout, BackendError, Interrupted, JobError, LimitExceeded, OutputError
from batch_agent.events import ToolFinished, ToolStarted
from batch_agent.job import AgentError, AgentResult, Job
from batch_agent.messages import Conversation, Message, Reply, ToolCall
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import Parsed, parse_output
from batch_agent.scheduler.core import Ticket
from batch_agent.store.steps import Begun, Done, Failed, Outcome, PastTurn, Turn
from batch_agent.store.trail import Trail
from batch_agent.tools.pool import PendingCall

UNKNOWN_OUTCOME = (
    "Error: the run was interrupted while {name} was running, and its outcome is unknown: it may or may not have taken "
    "effect. It was not run again. Find out before you repeat it."
)


class _FailedBefore(Exception):
    """The record ends in a failure that is not to be tried again."""


class Agent:
    def __init__(self, job: Job, resources: Resources, trail: Trail | None = None) -> None:
        self.job = job
        self.error: JobError | None = None
        self._verdict: AgentError | None = None
        self._trail = trail
        self._past: PastTurn | None = None  # the latest answer, when it comes from the record
        self._final: Reply | None = None
        self._fresh = trail is None or not trail.has_past  # did something that was not recorded before
        self._r = resources
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._conversation = Conversation((Message("user", job.prompt),), parent=resources.shared)
        self._tally = Tally()
        self._text = ""  # the model's latest
        self._repairs = 0

    async def run(self, ticket: Ticket | None) -> AgentResult[object]:
        """To the end, starting with a claim to a slot, where one was made already. A JobError is part of the result."""
        parsed: Parsed[object] | None = None
        deadline = self._r.timeout_per_agent
        limit = asyncio.timeout(deadline)
        try:
            if deadline is None:  # the usual case, on the hot path
                parsed = await self._converse(ticket)
            else:
                async with limit:
                    parsed = await self._converse(ticket)
        except TimeoutError:
            if not limit.expired():
                raise
            turns = self._tally.turns
            self.fail(AgentTimeout(f"timeout_per_agent, {deadline:g} s, is over after {turns} answers of the model"))
        except JobError as error:
            self.fail(error)
        except _FailedBefore:
            pass
        return self.result(parsed)

    def fail(self, error: JobError) -> None:
        self.error, self._verdict = error, AgentError.of(error)

    def record_end(self) -> None:
        """How the agent ended goes to its trail; an agent that was interrupted has not ended."""
        if self._trail is None or not self._fresh or isinstance(self.error, Interrupted):
            return
        spent = self._tally.spent(self._loop.time() - self._began)
        if self._verdict is not None:
            self._trail.add(Failed(self._verdict, self._text, spent))
        elif self._final is not None:
            self._trail.add(Done(self._final, spent))

    async def settle(self) -> None:
        """Until everything recorded of it is on disk."""
        if self._trail is not None:
            await self._trail.settle()

    def result(self, parsed: Parsed[object] | None) -> AgentResult[object]:
        return AgentResult(
            index=self.job.index,
            job_id=self.job.job_id,
            input=self.job.input,
            ok=self._verdict is None,
            output=None if parsed is None else parsed.value,
            error=self._verdict,
            attempts=self._tally.attempts,
            turns=self._tally.turns,
            usage=self._tally.usage,
            cost=self._tally.cost,
            timings=self._tally.timings(self._tally.before + (self._loop.time() - self._began if self._fresh else 0.0)),
            messages=tuple(self._conversation.messages),
            raw_text=self._text,
            repaired=parsed is not None and parsed.repaired,
            resumed=not self._fresh,
        )

    def turns_left(self) -> int:
        return max(0, self._r.max_turns - self._tally.turns) if self._r.max_turns is not None else -self._tally.turns

    async def _converse(self, ticket: Ticket | None) -> Parsed[object]:
        r, shapes = self._r, self._r.shapes
        shape = shapes.first
        while True:
            reply, early = await self._ask(shape, ticket)
            if reply.tool_calls:
                self._record_turn(reply)
                await self._use_tools(reply.tool_calls, early)
                shape = shapes.later
            else:
                try:
                    parsed = self._parse(reply.text)
                    self._final = reply
                    return parsed
                except OutputError as error:
                    self._record_turn(reply)
                    if self._stays_failed():
                        self._leave_record()
                    if r.schema is None or (self._repairs >= r.max_retries and not self._may_repair()):
                        raise
                    self._conversation.append(Message("user", repair_prompt(error, r.schema)))
                self._repairs += 1
                self._tally.again = True
                shape = shapes.repair
            ticket = None

    async def _ask(self, shape: RequestShape, ticket: Ticket | None) -> tuple[Reply, EarlyCalls | None]:
        """The next answer, from the record or from the model."""
        early = None
        self._past = None if self._trail is None else self._trail.next_turn()
        if self._past is not None:
            reply = self._past.reply
            self._tally.follow(reply, self._past.spent)
        else:
            self._leave_record()
            if ticket is None:
                await self.settle()  # before more is built on it
                ticket = self._r.limiter.claim(self.turns_left())
            reply, early = await self._ask_model(shape, ticket)
        self._text = reply.text
        self._conversation.append(reply.message())
        return reply, early

    async def _ask_model(self, shape: RequestShape, ticket: Ticket) -> tuple[Reply, EarlyCalls | None]:
        r = self._r
        request = ModelRequest(shape, self._conversation, self.job.job_id, self.turns_left(), self.job.index)
        # On the last turn no tool will be run, so there is nothing to start early.
        last = r.max_turns is not None and self._tally.turns + 1 >= r.max_turns
        may_stream = r.early_tools and shape.tools and shape.tool_choice != "none" and not last
        early = EarlyCalls(r.tools) if may_stream and r.streaming.wants_next() else None
        try:
            reply = await take_turn(r, request, self.job.index, self._tally, ticket, early)
        except BaseException as error:
            if early is not None:
                early.abandon()
            self._text = (error.text if isinstance(error, BackendError) else "".join(request.said)) or self._text
            raise
        return reply, early

    async def _use_tools(self, calls: Sequence[ToolCall], early: EarlyCalls | None) -> None:
        r = self._r
        if self._stays_failed():
            self._follow_to_failure(calls)
        if r.max_turns is not None and self._tally.turns >= r.max_turns and not self._follows():
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            raise LimitExceeded(f"after max_turns, {r.max_turns}, the model still wants to call {names}")
        known = self._recorded_outcomes(calls)
        new = [position for position in range(len(calls)) if position not in known]
        began = self._loop.time()
        pending = await self._start_calls(calls, new, early) if new else {}
        try:
            for position, call in enumerate(calls):
                text = known[position] if position in known else await self._outcome(position, call, pending[position])
                self._conversation.append(Message("tool", text, tool_call_id=call.id, tool_name=call.name))
        finally:
            for waiting in pending.values():
                waiting.abandon()
            if new:
                self._tally.tool_wait += self._loop.time() - began

    async def _start_calls(
        self, calls: Sequence[ToolCall], new: Sequence[int], early: EarlyCalls | None
    ) -> dict[int, PendingCall]:
        tools, index = self._r.tools, self.job.index
        started = early.started if early is not None else {}
        if self._trail is not None:
            self._fresh = True
            writes = tuple(position for position in new if not tools.can_start_early(calls[position].name))
            if writes:
                # A write that was begun must never be taken for one that was not.
                self._trail.add(Begun(writes))
                try:
                    await self._trail.settle()
                except BaseException:
                    for waiting in started.values():
                        waiting.abandon()
                    raise
        now = self._loop.time()
        for position in new:
            self._r.emit(ToolStarted(now, index, calls[position].name))
        return {position: started.get(calls[position].id) or tools.start(calls[position]) for position in new}

    async def _outcome(self, position: int, call: ToolCall, waiting: PendingCall) -> str:
        outcome = await waiting.wait()
        if self._trail is not None:
            self._trail.add(Outcome(position, outcome.text))
        now = self._loop.time()
        self._r.emit(ToolFinished(now, self.job.index, call.name, outcome.seconds, outcome.ok, outcome.source))
        return outcome.text

    # The record

    def _follows(self) -> bool:
        return self._trail is not None and self._trail.goes_on

    def _stays_failed(self) -> bool:
        """The last recorded turn was taken, and what followed it then was a failure that is not tried again."""
        return self._trail is not None and self._trail.failed is not None and not self._trail.goes_on

    def _follow_to_failure(self, calls: Sequence[ToolCall]) -> None:
        """The outcomes that the agent had learnt when it failed. No call is run for it any more."""
        outcomes = {} if self._past is None else self._past.outcomes
        for position, call in enumerate(calls):
            if position not in outcomes:
                break
            self._conversation.append(Message("tool", outcomes[position], tool_call_id=call.id, tool_name=call.name))
        self._leave_record()

    def _may_repair(self) -> bool:
        """What was recorded is past the limit; and an answer that failed its agent then gets another chance now."""
        return self._follows() or (self._past is not None and self._trail is not None and self._trail.retried)

    def _record_turn(self, reply: Reply) -> None:
        if self._trail is not None and self._past is None:
            self._trail.add(Turn(reply, self._tally.spent(self._loop.time() - self._began)))

    def _recorded_outcomes(self, calls: Sequence[ToolCall]) -> Mapping[int, str]:
        """What the record knows of these calls, by position. A write that was begun and has no outcome gets one that
        says so."""
        if self._past is None or self._trail is None:
            return {}
        known = dict(self._past.outcomes)
        for position in sorted(self._past.begun - known.keys()):
            known[position] = UNKNOWN_OUTCOME.format(name=calls[position].name)
            self._trail.add(Outcome(position, known[position]))
        return known

    def _leave_record(self) -> None:
        """There is nothing more to follow: the agent failed then and there, or goes on from here."""
        failed = None if self._trail is None else self._trail.failed
        if failed is not None:
            self._verdict = failed.error
            self._text = failed.text
            self._tally.take_over(failed.spent)
            raise _FailedBefore
        if self._trail is not None and self._trail.retried and not self._fresh:
            self._repairs = 0
        self._fresh = True

    def _parse(self, text: str) -> Parsed[object]:
        schema = self._r.schema
        return Parsed(strip_reasoning(text), repaired=False) if schema is None else parse_output(text, schema)

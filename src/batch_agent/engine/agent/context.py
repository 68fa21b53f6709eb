"""What an agent can do: ask the model and call tools.

Both are answered from the agent's trail as long as that has something of an earlier session, and then by the model and
the tools; what is new is recorded before anything is built on it. Whoever works with a context need not know which it
was: a worker that was interrupted is run again from its start, and finds itself where it was. So what a worker does
must follow from its row and from what it is told here, and it does one thing at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.pictures import content_of
from batch_agent.engine.agent.calls import run_calls
from batch_agent.engine.agent.compaction import Compactor
from batch_agent.engine.agent.early_calls import MOST_CALLS, EarlyCalls
from batch_agent.engine.agent.history import History
from batch_agent.engine.agent.resources import Resources
from batch_agent.engine.agent.shapes import Shapes
from batch_agent.engine.agent.tally import Tally
from batch_agent.engine.agent.turn import CUT, TurnCall
from batch_agent.errors import BackendError, ContextOverflow, JobError, LimitExceeded, OutputError, Truncated
from batch_agent.events import AnswerRejected, ContextCompacted
from batch_agent.job import AgentError, Job
from batch_agent.messages import Conversation, Message, Reply, ToolCall
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import parse_output
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.forecast import Progress
from batch_agent.store.steps import Done, Ended, Failed, Outcome, Spent, Turn
from batch_agent.store.trail import FailedBefore, Trail

TOO_MANY_CALLS = "Error: not run: {count} calls in one answer are too many; ask for at most {most} at once."


class AgentContext:
    """``conversation`` begins with the task; ``text`` is the model's latest. ``failure`` is what an ask or a call ended
    in: there is no going on after that, since a trail cannot tell what was done about it."""

    __slots__ = (
        "_answer",
        "_began",
        "_called",
        "_cut_from",
        "_early",
        "_forgiven",
        "_history",
        "_loop",
        "_r",
        "_repairs",
        "_trail",
        "failure",
        "job",
        "progress",
        "repaired",
        "tally",
        "text",
        "ticket",
        "truncated",
    )

    def __init__(self, job: Job, resources: Resources, trail: Trail) -> None:
        self.job = job
        self.tally = Tally()
        self.progress = Progress(key=job.affinity, model=resources.shapes.first.model)
        self.text = ""
        self.repaired = False  # the output was read from JSON that had to be mended
        self.truncated = False  # the output is text that was cut at max_tokens
        self.failure: JobError | None = None
        self.ticket: Ticket | None = None  # a claim to a slot that was made already
        self._r = resources
        self._history = History(resources.shared, content_of(job))
        self._cut_from: int | None = None  # tokens, where the conversation was cut since the latest answer
        self._trail = trail
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._answer: Reply | None = None  # the latest answer, while it is not known whether it leads on
        self._early: EarlyCalls | None = None
        self._called = 0  # calls of the latest answer that were made
        self._repairs = 0  # answers asked for again because they did not validate
        self._forgiven = 0  # of those, the ones before a failure that is being tried again

    @property
    def shapes(self) -> Shapes:
        return self._r.shapes

    @property
    def conversation(self) -> Conversation:
        """All that was said, also what is no longer sent because the conversation was cut."""
        return self._history.said

    def turns_left(self) -> int:
        limit = self._turn_limit
        return max(0, limit - self.tally.turns) if limit is not None else -self.tally.turns

    # What a worker does

    async def ask(self, shape: RequestShape | None = None) -> Reply:
        """The model's answer to the conversation, of which it is then a part. ``shape`` is the kind of request, where
        that is not the usual one."""
        self._go_on()
        try:
            reply = self._replayed()
            if reply is None:
                reply = await self._send_fitting(self._next_shape(shape))
                self._answer = reply if self._trail.records else None
        except JobError as error:
            self.failure = error
            raise
        self.text = reply.text
        self._history.answered(reply)
        self._called = 0
        return reply

    async def call(self, calls: Sequence[ToolCall]) -> list[str]:
        """What became of these calls, which are those of the latest answer or the next few of them. The model reads it
        with what it is asked next."""
        self._go_on()
        try:
            return await self._outcomes(calls)
        except JobError as error:
            self.failure = error
            raise

    def say(self, text: str) -> None:
        """What the model is told with the next question."""
        self._history.append(Message("user", text))

    def read(self, reply: Reply) -> object:
        """The answer as a value of the output schema; as text without one. Raises OutputError."""
        schema = self._r.schema
        if schema is None:
            self.truncated = reply.finish_reason == CUT
            if self.truncated and not self._r.keeps_cut_text:  # a record of a session that did
                raise Truncated("the answer was cut at max_tokens", text=reply.text)
            return strip_reasoning(reply.text)
        parsed = parse_output(reply.text, schema)
        self.repaired = parsed.repaired
        return parsed.value

    def repair(self, error: OutputError) -> None:
        """Show the model what is wrong with its answer. Raises the error where that was done often enough."""
        self._go_on()
        trail, schema = self._trail, self._r.schema
        if trail.stays_failed:
            self._leave_record()
        if schema is None or (self._repairs - self._forgiven >= self._r.policy.max_retries and not trail.forgives):
            raise error
        self.say(repair_prompt(error, schema))
        if trail.fresh:
            r, index, turn = self._r, self.job.index, self.tally.turns
            r.emit(AnswerRejected(r.clock(), r.run, index, turn, error.type, str(error)))
        self._repairs += 1
        self.tally.again = True

    # What the run does

    def end(self, verdict: AgentError | None) -> None:
        """How the agent ended goes to its trail, where that is new."""
        trail = self._trail
        if not trail.records or not trail.fresh:
            return
        spent = self._spent()
        if verdict is not None:
            self._lead_on()
            trail.add(Failed(verdict, self.text, spent))
        elif self._answer is not None:
            trail.add(Done(self._answer, spent))
        else:
            trail.add(Ended(spent))

    def close(self) -> None:
        """The worker is done: what was started for it and never asked for is given up."""
        if self._early is not None:
            self._early.abandon()
            self._early = None

    def seconds(self) -> float:
        """How long the agent was worked on, in all sessions."""
        return self.tally.before + (self._loop.time() - self._began if self._trail.fresh else 0.0)

    # Asking

    def _replayed(self) -> Reply | None:
        """The answer that an earlier session recorded; None: the model is to be asked."""
        if (compacted := self._trail.compacted) is not None:
            self.tally.pay(compacted.usage, None)
            self._history.compact(compacted.cut)
        past = self._trail.next_turn()
        if past is None:
            return None
        self.tally.follow(past.reply, past.spent)
        return past.reply

    def _next_shape(self, shape: RequestShape | None) -> RequestShape:
        """The kind of the next request. Raises LimitExceeded when there is none."""
        self._leave_record()
        if self._out_of_turns and not self.tally.again:  # an answer that is asked for again comes on top
            raise LimitExceeded(f"after max_turns, {self._r.max_turns}, the agent asks again")
        self.close()
        if shape is None:
            shape = self.shapes.later if self.tally.turns else self.shapes.first
        return shape

    async def _send_fitting(self, shape: RequestShape) -> Reply:
        """Cut what is about to outgrow the context; what the server finds too long all the same is sent once more."""
        compactor, history = self._r.compactor, self._history
        if compactor is None:
            return await self._send(shape)
        if excess := compactor.excess(history):
            await self._cut(compactor, excess)
        try:
            reply = await self._send(compactor.fitted(shape, compactor.foreseen(history)))
        except ContextOverflow as error:
            again, excess = compactor.after(error, shape, history)
            if again is shape and not (excess and await self._cut(compactor, excess)):
                raise
            self.tally.again = True
            reply = await self._send(again)
        self._tell_of_cut(reply)
        return reply

    async def _cut(self, compactor: Compactor, excess: int) -> bool:
        before = compactor.foreseen(self._history)
        compacted = await compactor.compact(self._history, excess, self.job, self.tally)
        if compacted is None:
            return False
        self._cut_from = before or 0
        self._trail.add(compacted)
        return True

    def _tell_of_cut(self, reply: Reply) -> None:
        if self._cut_from is None:
            return
        r, usage, before = self._r, reply.usage, self._cut_from
        self._cut_from = None
        turn, index = self.tally.turns, self.job.index
        r.emit(ContextCompacted(r.clock(), r.run, index, turn, before, usage.prompt_tokens, usage.cached_tokens))

    async def _send(self, shape: RequestShape) -> Reply:
        r, ticket, left = self._r, self.ticket, self.turns_left()
        if ticket is None:
            await self._trail.settle()  # before more is built on it
            ticket = r.dispatcher.slots.claim(self.progress, self.tally.turns)
        self.ticket = None
        can_call = bool(shape.tools) and shape.tool_choice != "none"
        # On the last turn no tool will be run, so there is nothing to start early.
        last = r.max_turns is not None and left <= 1
        request = ModelRequest(
            shape,
            self._history.asked,
            self.job.job_id,
            left,
            self.job.index,
            run=r.run,
            turn=self.tally.turns + 1,
            last=last or (r.ends_with_answer and not can_call),
            hints=r.hints,
            traceparent="" if r.traces is None else r.traces.of_turn(r.run, self.job.index, self.tally.turns + 1),
            usual_tokens=r.usual_tokens,
            on_begin=r.lead.end if r.lead is not None and r.lead.take() else None,
        )
        may_stream = r.early_tools and can_call and not last
        streams = may_stream and r.streaming.wants_next()
        early = EarlyCalls(r, self.job, self.tally.turns + 1) if streams else None
        try:
            turn = TurnCall(r, request, self.job.index, self.tally, early)
            reply = await r.dispatcher.ask(turn, r.policy, ticket=ticket, observer=turn)
        except BaseException as error:
            if early is not None:
                early.abandon()
            self.text = (error.text if isinstance(error, BackendError) else "".join(request.said)) or self.text
            raise
        self._early = early
        return reply

    @property
    def _turn_limit(self) -> int | None:
        limit = self._r.max_turns
        return None if limit is None else limit + self._repairs

    @property
    def _out_of_turns(self) -> bool:
        limit = self._turn_limit
        return limit is not None and self.tally.turns >= limit

    # Calling tools

    async def _outcomes(self, calls: Sequence[ToolCall]) -> list[str]:
        first, trail = self._called, self._trail
        self._called += len(calls)
        known = trail.outcomes()
        if trail.stays_failed:  # no call is run for it any more
            self._tell(calls, first, known)
            self._leave_record()
        if self._out_of_turns and not trail.goes_on:
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            raise LimitExceeded(f"after max_turns, {self._r.max_turns}, the model still wants to call {names}")
        if len(calls) > MOST_CALLS:
            self._refuse(len(calls), first, known)
        new = {place: call for place, call in enumerate(calls, first) if place not in known}
        began = self._loop.time()
        try:
            if new:
                self._leave_record()
                await run_calls(self._r, trail, self.job, self.tally.turns, new, known, self._early)
        finally:
            if new:
                self.tally.tool_wait += self._loop.time() - began
            texts = self._tell(calls, first, known)
        return texts

    def _tell(self, calls: Sequence[ToolCall], first: int, known: Mapping[int, str]) -> list[str]:
        """The outcomes in the order of the calls, as far as they are known, into the conversation."""
        texts = []
        for place, call in enumerate(calls, first):
            if place not in known:
                break
            texts.append(known[place])
            self._history.append(Message("tool", known[place], tool_call_id=call.id, tool_name=call.name))
        return texts

    def _refuse(self, count: int, first: int, known: dict[int, str]) -> None:
        """So many calls at once are no plan but a loop: none of them is run, and the model is told."""
        self.close()
        for place in range(first, first + count):
            if place not in known:
                known[place] = TOO_MANY_CALLS.format(count=count, most=MOST_CALLS)
                self._trail.add(Outcome(place, known[place]))

    # The record

    def _go_on(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._lead_on()

    def _lead_on(self) -> None:
        """The latest answer did not end the agent."""
        if self._answer is not None:
            self._trail.add(Turn(self._answer, self._spent()))
            self._answer = None

    def _leave_record(self) -> None:
        """There is nothing more to follow: the agent failed then and there, or goes on from here."""
        trail = self._trail
        if trail.fresh:
            return
        if trail.retried:
            self._forgiven = self._repairs
        try:
            trail.leave()
        except FailedBefore as before:
            self.text = before.failed.text
            self.tally.take_over(before.failed.spent)
            raise

    def _spent(self) -> Spent:
        return self.tally.spent(self._loop.time() - self._began)


Worker: TypeAlias = Callable[[object, AgentContext], Awaitable[object]]

"""The context of the tool loop and of built-in workers: send requests and call tools, one at a time.

While the agent's trail has recorded steps of an earlier session, requests and calls are answered from it, then by the
model and the tools. New steps are recorded before other steps depend on them. An interrupted worker runs again from its
start and reaches the same state. So its actions must depend only on its row and on the answers from here. Each request
is compared with the one recorded at the same position: a recorded answer is never used for another request. Users'
workers are replayed differently (``row_work.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from batch_agent.agent.calls import run_calls
from batch_agent.agent.compaction import Compactor
from batch_agent.agent.early_calls import MOST_CALLS, EarlyCalls
from batch_agent.agent.history import History
from batch_agent.agent.resources import Resources
from batch_agent.agent.shapes import Shapes
from batch_agent.agent.touches import Touches
from batch_agent.agent.turn import CUT, TurnCall
from batch_agent.agent.work_state import WorkState
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.pictures import content_of
from batch_agent.errors import (
    BackendError,
    ContextOverflow,
    JobError,
    LimitExceeded,
    OutputError,
    ReplayMismatch,
    Truncated,
)
from batch_agent.events import AnswerRejected, ContextCompacted
from batch_agent.job import AgentError, Job
from batch_agent.messages import Message, Reply, ToolCall
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import parse_output
from batch_agent.record.digests import difference, is_same, next_asked
from batch_agent.record.steps import Done, Ended, Failed, Outcome, Turn
from batch_agent.record.trail import FailedBefore, Trail
from batch_agent.scheduler.kvflow import pin_seconds

TOO_MANY_CALLS = "Error: not run: {count} calls in one answer are too many; ask for at most {most} at once."
MISMATCH = (
    "the next request of this row differs from the recorded one: {difference}. The recorded answers are not "
    "used. Undo the change since the run was recorded; or resume with force_resume=True (--force-resume), "
    "which uses recorded answers without this check"
)


class LoopContext(WorkState):
    """``failure`` is the error of a request or call. It is final: the journal has no recoveries."""

    def __init__(self, job: Job, resources: Resources, trail: Trail, worker: InnerWorker) -> None:
        super().__init__(job, resources, trail)
        self._worker = worker
        self._history = History(resources.shared, content_of(job))
        self._cut_from: int | None = None  # tokens before the cut, if the conversation was cut since the latest answer
        self._answer: Reply | None = None  # the latest answer, until it is known whether it is the last one
        self._asked = ""  # digest of its request
        # The digest of the latest request, and the number of messages it covers. The row's key covers the first
        # messages.
        self._chain, self._digested = trail.key, len(self._history.said.messages)
        self._early: EarlyCalls | None = None
        self._repairs = 0  # answers that were requested again because they were invalid
        self._forgiven = 0  # the number of those before a failure that is now retried

    def work(self) -> Awaitable[object]:
        return self._worker(self.job.input, self)

    @property
    def shapes(self) -> Shapes:
        return self._r.shapes

    @property
    def messages(self) -> Sequence[Message]:
        return self._history.said.messages

    def turns_left(self) -> int:
        limit = self._turn_limit
        return max(0, limit - self.tally.turns) if limit is not None else -self.tally.turns

    # What a worker does

    async def ask(self, shape: RequestShape | None = None) -> Reply:
        """Return the model's answer to the conversation, and add it. ``shape``: the kind of request."""
        self._go_on()
        if shape is None:
            shape = self.shapes.later if self.tally.turns else self.shapes.first
        try:
            reply = self._replayed(shape)
            if reply is None:
                self._ready_to_send()
                reply = await self._send_fitting(shape)
                self._answer = reply if self._trail.records else None
        except JobError as error:
            self.failure = error
            raise
        self.text = reply.text
        self._history.answered(reply)
        return reply

    async def call(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run these calls of the latest answer and return their results. The model gets them with the next request."""
        self._go_on()
        try:
            return await self._outcomes(calls)
        except JobError as error:
            self.failure = error
            raise

    def say(self, text: str) -> None:
        self._history.append(Message("user", text))

    def read(self, reply: Reply) -> object:
        """Return the answer as a value of the output schema; as text without a schema. Raises OutputError."""
        schema = self._r.schema
        if schema is None:
            self.truncated = reply.finish_reason == CUT
            if self.truncated and not self._r.keeps_cut_text:  # recorded by a session that kept such text
                raise Truncated("the answer was cut at max_tokens", text=reply.text)
            return strip_reasoning(reply.text)
        parsed = parse_output(reply.text, schema)
        self.repaired = parsed.repaired
        return parsed.value

    def repair(self, error: OutputError) -> None:
        """Show the error to the model. Raises the error if the retries are used up."""
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
        trail = self._trail
        if not trail.records or not trail.fresh:
            return
        spent = self._spent()
        if verdict is not None:
            self._lead_on()
            trail.add(Failed(verdict, self.text, spent))
        elif self._answer is not None:
            trail.add(Done(self._answer, spent, self._asked))
        else:
            trail.add(Ended(spent))

    async def close(self) -> None:
        self._abandon_early()

    def _abandon_early(self) -> None:
        if self._early is not None:
            self._early.abandon()
            self._early = None

    # Asking

    def _replayed(self, shape: RequestShape) -> Reply | None:
        """Return the recorded answer of an earlier session; None if the model must be asked."""
        if (compacted := self._trail.compacted) is not None:
            self.tally.pay(compacted.usage, None)
            self._history.compact(compacted.cut)
        past = self._trail.next_turn()
        if self._trail.records:
            self._check(shape, None if past is None or not self._trail.checks else past.asked)
        if past is None:
            return None
        self.tally.follow(past.reply, past.spent)
        return past.reply

    def _check(self, shape: RequestShape, then: str | None) -> None:
        """Compute the digest of the next request. Raises ReplayMismatch if it differs from ``then``."""
        new, first = self._history.said.messages[self._digested :], self._digested + 1
        self._digested += len(new)
        self._chain, self._asked = next_asked(self._chain, self._r.digests.of(shape), new)
        if then is not None and not is_same(then, self._asked):
            raise ReplayMismatch(MISMATCH.format(difference=difference(then, self._asked, new, first)))

    def _ready_to_send(self) -> None:
        """End the replay. Raises LimitExceeded if no further request is allowed."""
        self._leave_record()
        if self._out_of_turns and not self.tally.again:  # a repeated answer does not count as a turn
            raise LimitExceeded(f"after max_turns, {self._r.max_turns}, the agent asks again")
        self._abandon_early()

    async def _send_fitting(self, shape: RequestShape) -> Reply:
        """Cut a conversation that would exceed the context, and send it; again if the server refuses its length."""
        compactor, history = self._r.compactor, self._history
        if compactor is None:
            return await self._send(shape)
        if excess := compactor.excess(history):
            await self._cut(compactor, excess)
        fitted = shape if shape.max_tokens is None else compactor.fitted(shape, compactor.foreseen(history))
        try:
            reply = await self._send(fitted)
        except ContextOverflow as error:
            again, excess = compactor.after(error, shape, history)
            if again is shape and not (excess and await self._cut(compactor, excess)):
                raise
            self.tally.again = True
            reply = await self._send(again)
        if self._cut_from is not None:
            self._tell_of_cut(reply, self._cut_from)
        return reply

    async def _cut(self, compactor: Compactor, excess: int) -> bool:
        before = compactor.foreseen(self._history)
        compacted = await compactor.compact(self._history, excess, self.job, self.tally)
        if compacted is None:
            return False
        self._cut_from = before or 0
        self._trail.add(compacted)
        return True

    def _tell_of_cut(self, reply: Reply, before: int) -> None:
        r, usage = self._r, reply.usage
        self._cut_from = None
        turn, index = self.tally.turns, self.job.index
        r.emit(ContextCompacted(r.clock(), r.run, index, turn, before, usage.prompt_tokens, usage.cached_tokens))

    async def _send(self, shape: RequestShape) -> Reply:
        r, ticket, left = self._r, self.ticket, self.turns_left()
        if ticket is None:
            await self._trail.settle()  # before later steps depend on it
            if r.dispatcher.scheduler.admission.enabled:
                self.progress.expected = self._history.foreseen() or 0
            ticket = r.dispatcher.slots.claim(self.progress, self.tally.turns)
        self.ticket = None
        can_call = bool(shape.tools) and shape.tool_choice != "none"
        # No tool runs after the last turn, so none can start early.
        last = r.max_turns is not None and left <= 1
        request = ModelRequest(
            shape,
            self._history.asked,
            self.job.job_id,
            left,
            self.job.index,
            run=r.run,
            turn=self.tally.turns + 1,
            priority=self._priority(left),
            pin_seconds=0.0 if last or not can_call else self._pin_seconds(),
            last=last or (r.ends_with_answer and not can_call),
            hints=r.hints,
            traceparent="" if r.traces is None else r.traces.of_turn(r.run, self.job.index, self.tally.turns + 1),
            usual_tokens=r.usual_tokens,
            on_begin=r.lead.end if r.lead is not None and r.lead.take() else None,
        )
        may_stream = r.early_tools and can_call and not last
        streams = may_stream and r.streaming.wants_next()
        early = EarlyCalls(r, self.job, self.tally.turns + 1) if streams else None
        self._asking = request
        try:
            turn = TurnCall(r, request, self.job.index, self.tally, early)
            reply = await r.dispatcher.ask(turn, r.policy, ticket=ticket, observer=turn)
        except BaseException as error:
            if early is not None:
                early.abandon()
            self.text = (error.text if isinstance(error, BackendError) else "".join(request.said)) or self.text
            raise
        finally:
            self._asking = None
        self._early = early
        return reply

    def _priority(self, left: int) -> int:
        """Return the turns left, so that the engine serves agents near their end first, and new agents can start. When
        all have started, this order would delay the end of the batch: then all have the priority of a new agent."""
        return self._turn_limit or 0 if self._r.dispatcher.scheduler.forecast.all_started else left

    def _pin_seconds(self) -> float:
        scheduler = self._r.dispatcher.scheduler
        return pin_seconds(scheduler.forecast, self.tally.turns) if scheduler.parts.pin else 0.0

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
        trail = self._trail
        known = trail.outcomes()
        if trail.stays_failed:  # no more calls are run for it
            self._tell(calls, known)
            self._leave_record()
        if self._out_of_turns and not trail.goes_on:
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            raise LimitExceeded(f"after max_turns, {self._r.max_turns}, the model still wants to call {names}")
        if len(calls) > MOST_CALLS:
            self._refuse(len(calls), known)
        new = {place: call for place, call in enumerate(calls) if place not in known}
        began = self._loop.time()
        try:
            if new:
                self._leave_record()
                calling = run_calls(self._r, trail, self.job, self.tally.turns, new, known, self._early)
                await (calling if self._r.touches is None else self._touching(self._r.touches, new, calling))
        finally:
            if new:
                self.tally.tool_wait += self._loop.time() - began
            texts = self._tell(calls, known)
        return texts

    async def _touching(self, touches: Touches, calls: Mapping[int, ToolCall], calling: Awaitable[None]) -> None:
        """Keep the agent's context in the engine's cache while the calls run."""
        names = [call.name for call in calls.values()]
        async with touches.during(self._r.tools, names, self.progress, self._history.asked):
            await calling

    def _tell(self, calls: Sequence[ToolCall], known: Mapping[int, str]) -> list[str]:
        """Add the known outcomes to the conversation, in the order of the calls, and return them."""
        texts = []
        for place, call in enumerate(calls):
            if place not in known:
                break
            texts.append(known[place])
            self._history.append(Message("tool", known[place], tool_call_id=call.id, tool_name=call.name))
        return texts

    def _refuse(self, count: int, known: dict[int, str]) -> None:
        """Refuse all calls of an answer with too many, and tell the model. Such an answer is a loop, not a plan."""
        self._abandon_early()
        for place in range(count):
            if place not in known:
                known[place] = TOO_MANY_CALLS.format(count=count, most=MOST_CALLS)
                self._trail.add(Outcome(place, known[place]))

    # The record

    def _go_on(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._lead_on()

    def _lead_on(self) -> None:
        """Record the latest answer as a turn that did not end the agent."""
        if self._answer is not None:
            self._trail.add(Turn(self._answer, self._spent(), self._asked))
            self._answer = None

    def _leave_record(self) -> None:
        """End the replay. Raises FailedBefore if the record ends with a failure that is not retried."""
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


InnerWorker: TypeAlias = Callable[[object, LoopContext], Awaitable[object]]

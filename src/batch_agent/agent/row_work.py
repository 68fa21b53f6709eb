"""One row while a user's worker processes it: its requests, its tool calls, and their record.

Replay is by content. A recorded request is found by its digest (messages, model, tools, sampling, schema) and by the
number of equal requests before it; a tool call in the same way by its name and arguments. So a worker may send many
requests at once, and in another order after a resume. A request that is not recorded is sent. An answer is on disk
before the worker receives it, and a call that may write is on disk before it starts.

All requests go through ``answer``: those of ``AgentContext`` and of any other client of this row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from batch_agent.agent.gateway_row import GatewayRow
from batch_agent.agent.resources import Resources
from batch_agent.agent.turn import TurnCall
from batch_agent.agent.work_state import WorkState
from batch_agent.agent.workplace import Workplace
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.pictures import content_of
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.policy import Question
from batch_agent.errors import BackendError, InputError, Interrupted, LimitExceeded, RowEnded, StoreError
from batch_agent.events import ToolFinished, ToolStarted
from batch_agent.job import AgentError, Job
from batch_agent.messages import Conversation, Message, Reply, ToolCall
from batch_agent.record.digests import call_digest, request_digest
from batch_agent.record.replay import WorkReplay, chain
from batch_agent.record.steps import CallBegun, CallEnded, Ended, Failed, conversation_of_ask
from batch_agent.record.trail import UNKNOWN_OUTCOME, FailedBefore, Trail
from batch_agent.scheduler.forecast import Progress

if TYPE_CHECKING:
    from batch_agent.agent.user_worker import UserWorker

T = TypeVar("T")
Send: TypeAlias = Callable[[ModelRequest], Question]
ENDED = "the row of this context has ended: it accepts no more requests or calls"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The end of a tool call. ``unknown``: it was interrupted, may have written, and is not repeated."""

    text: str
    ok: bool
    unknown: bool = False


class RowWork(WorkState):
    """``conversation`` is the row's own: the shared messages, the task, and later messages."""

    def __init__(self, job: Job, resources: Resources, trail: Trail, worker: UserWorker) -> None:
        super().__init__(job, resources, trail)
        self._key = ""  # API key at the gateway; created at first use
        own = [Message("user", content_of(job))] if job.prompt else []
        self.conversation = Conversation(own, parent=resources.shared)
        self.worker = worker
        self._replay = WorkReplay(trail.past, resources.shared.messages)
        self._place: Workplace | None = None  # created at first use
        self._output: str | None = None  # the worker's return value as JSON
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing: set[asyncio.Task[Any]] = set()  # tasks of calls that may write
        self._progress_of = {self.progress.model: self.progress}
        self._calls = 0
        for ask in trail.past.asked:  # all paid answers count, even if they are not requested again
            self.tally.add(ask.reply, None)
            self.text = ask.reply.text
        if trail.past.spent is not None:
            self.tally.take_over(trail.past.spent)

    async def work(self) -> object:
        past, trail = self._trail.past, self._trail
        if past.failed is not None and not trail.retried:
            raise FailedBefore(past.failed)
        if (kept := self._kept) is not None:  # side effects of the worker are not repeated
            return self.worker.read(kept)
        if trail.has_past:
            await self._loop.run_in_executor(None, self.worker.places.clear, trail.agent)
        returned = await self.worker.run(self)
        self._output, output, self.repaired = self.worker.written(returned)
        return output

    @property
    def _kept(self) -> str | None:
        """The recorded output, if it is still valid: the fingerprint of the run has not changed."""
        ended = self._trail.past.ended
        if ended is None or (self._trail.checks and ended.fingerprint != self.worker.fingerprint):
            return None
        return ended.output

    @property
    def shared(self) -> Conversation:
        """The messages that all rows begin with: the system prompt, if there is one."""
        return self._r.shared

    # Asking

    async def answer(
        self,
        shape: RequestShape,
        conversation: Conversation,
        *,
        send: Send | None = None,
        schema: OutputSchema[object] | None = None,
    ) -> Reply:
        """Return the model's answer to a conversation, for this row. It comes from the record, or else from the
        dispatcher, with the row's priority, price and budget. It is on disk when this returns.

        ``send`` creates the question to send, if that is not ``backend.infer(request)``; its ``request`` determines the
        price. Raises BackendError, LimitExceeded, Interrupted, RowEnded.
        """
        self._check_caller()
        messages = tuple(conversation.messages)
        digests = chain(messages)
        digest = request_digest(digests[-1], self._r.digests.of(shape))
        nth = self._replay.take(digest)
        reply = self._replay.answer(digest, nth)
        if reply is None:

            async def ask() -> Reply:
                reply = await self._dispatch(shape, conversation, send, schema)
                self._trail.add(self._replay.add_ask(digest, nth, reply, self._spent(), messages, digests))
                await self._trail.settle()
                return reply

            try:
                reply = await self._owned(ask())
            except BaseException as error:
                self._replay.give_back(digest, nth)
                if isinstance(error, BackendError):
                    self.text = error.text or self.text
                raise
        self.text = reply.text
        return reply

    async def _dispatch(
        self, shape: RequestShape, conversation: Conversation, send: Send | None, schema: OutputSchema[object] | None
    ) -> Reply:
        r, tally, turns = self._r, self.tally, self.tally.turns
        if r.max_turns is not None and turns >= r.max_turns:
            raise LimitExceeded(f"after max_turns, {r.max_turns}, the worker asks again")
        self._trail.fresh = True
        request = ModelRequest(
            shape,
            conversation,
            self.job.job_id,
            -turns if r.max_turns is None else r.max_turns - turns,
            self.job.index,
            run=r.run,
            turn=turns + 1,
            hints=r.hints,
            traceparent="" if r.traces is None else r.traces.of_turn(r.run, self.job.index, turns + 1),
            usual_tokens=r.usual_tokens,
        )
        turn = TurnCall(r, request, self.job.index, tally, None, schema)
        ticket = r.dispatcher.slots.claim(self._progress(shape.model), turns)
        question = turn if send is None else send(request)
        self._asking = request
        try:
            return await r.dispatcher.ask(question, r.policy, ticket=ticket, observer=turn)
        finally:
            if self._asking is request:
                self._asking = None

    def _progress(self, model: str) -> Progress:
        """Return the row's progress for this model; it determines the choice of server."""
        if model not in self._progress_of:
            self._progress_of[model] = Progress(key=self.job.affinity, model=model)
        return self._progress_of[model]

    # Calling tools

    async def call(self, call: ToolCall) -> CallOutcome:
        """Return the end of a tool call, from the record if it was made before. A call that may write is never made
        twice: if it was begun and has no outcome, it is ``unknown``."""
        self._check_caller()
        if not self._r.tools.knows(call.name):
            return await self._owned(self._run_call(call))
        digest = call_digest(call.name, call.arguments)
        nth = self._replay.take(digest)
        past, wrote = self._replay.outcome(digest, nth), self._replay.wrote(digest, nth)
        if past is not None and (past.ok or wrote or not self._trail.retried):
            return CallOutcome(past.text, past.ok)
        if wrote:
            return CallOutcome(UNKNOWN_OUTCOME.format(name=call.name), ok=False, unknown=True)
        try:
            return await self._owned(self._recorded_call(call, digest, nth))
        except BaseException:
            self._replay.give_back(digest, nth)
            raise

    async def _recorded_call(self, call: ToolCall, digest: str, nth: int) -> CallOutcome:
        self._trail.fresh = True
        if self._r.tools.can_start_early(call.name):
            outcome = await self._run_call(call)
        else:
            # A begun write must never be mistaken for one that did not start.
            await self._record_call(CallBegun(digest, nth, call.name, call.arguments))
            writing = asyncio.current_task()
            assert writing is not None
            self._writing.add(writing)
            try:
                outcome = await self._run_call(call)
            finally:
                self._writing.discard(writing)
        await self._record_call(CallEnded(digest, nth, call.name, call.arguments, outcome.ok, outcome.text))
        return outcome

    async def _record_call(self, step: CallBegun | CallEnded) -> None:
        self._replay.add_call(step)
        self._trail.add(step)
        await self._trail.settle()

    async def _run_call(self, call: ToolCall) -> CallOutcome:
        r, index, turn = self._r, self.job.index, self.tally.turns
        place, self._calls = self._calls, self._calls + 1
        began = self._loop.time()
        r.emit(ToolStarted(r.clock(), r.run, index, turn, place, call.id, call.name))
        pending = r.start_tool(call, self.job, turn)
        try:
            ended = pending.ended()
            # The outcome of a write must be known, so it is waited for even after the run's time limit.
            end = await (r.dispatcher.wait_for_tools(ended) if r.tools.can_start_early(call.name) else ended)
        finally:
            pending.abandon()
            self.tally.tool_wait += self._loop.time() - began
        r.emit(ToolFinished(r.clock(), r.run, index, turn, place, call.id, call.name, end.seconds, end.ok, end.source))
        return CallOutcome(end.text, end.ok)

    # What the worker started

    def check_open(self) -> None:
        """Raise RowEnded after the row's end, or the failure that prevents it from continuing."""
        if self._closed:
            raise RowEnded(ENDED)
        if self.failure is not None:
            raise self.failure

    def _check_caller(self) -> None:
        self.check_open()
        if asyncio.get_running_loop() is not self._loop:
            raise InputError(
                "an AgentContext works only in its run's event loop: to use another, write a plain function"
            )

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, run in a task that ends with the row."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and not cancelled_by_us():
                raise RowEnded(ENDED) from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Interrupted | StoreError) and self.failure is None:
            self.failure = error  # final, even if the worker catches it

    @property
    def key(self) -> str:
        """The API key of this row at the gateway. It is valid until the row ends."""
        if not self._key:
            self._key = self.worker.gateway.admit(GatewayRow(self, self._r.backend))
        return self._key

    async def wait_for(self, worker: asyncio.Task[Any]) -> None:
        """Wait until the worker has ended. Raises Interrupted at the run's time limit, after running writes."""
        ended = self._loop.create_future()

        def tell(_: object) -> None:
            if not ended.done():
                ended.set_result(None)

        worker.add_done_callback(tell)
        try:
            await self._r.dispatcher.wait_for_tools(ended)
        except Interrupted:
            if self._writing:
                await asyncio.wait(self._writing)
            raise

    async def close(self) -> None:
        self._closed = True
        if self._key:
            self.worker.gateway.dismiss(self._key)
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if self._place is not None and not self.worker.places.keeps:
            await self._loop.run_in_executor(None, self._place.leave)
        if cancelled is not None:
            raise cancelled

    # Its end

    @property
    def place(self) -> Workplace:
        if self._place is None:
            self._place = self.worker.places.open(self._trail.agent)
        return self._place

    @property
    def artifacts(self) -> Mapping[str, Path]:
        return self.worker.places.artifacts(self._trail.agent) if self._place is None else self._place.artifacts

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation of the latest answer; the row's own conversation if there was no request."""
        asks = self._replay.asks
        if not asks:
            return self.conversation.messages
        return conversation_of_ask(asks, len(asks) - 1, self._r.shared.messages)

    def end(self, verdict: AgentError | None) -> None:
        trail, past = self._trail, self._trail.past
        if self._kept is not None or (past.failed is not None and not trail.retried):
            return
        if verdict is not None:
            trail.add(Failed(verdict, self.text, self._spent()))
        else:
            trail.add(Ended(self._spent(), self._output, self.worker.fingerprint))

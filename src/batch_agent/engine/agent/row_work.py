"""One row while a worker of the user's works on it: its asks, its tool calls, and their record.

Replay is by content. An ask is found in the record by the digest of what is asked (messages, model, tools, sampling,
schema) and by how often the same was asked before; a tool call by its name and arguments, likewise. So a worker may ask
many things at once, and in another order after a resume. What is not found is sent. An answer is on disk before the
worker receives it, and a call that may write is on disk before it starts.

``answer`` is the one way to a model: ``AgentContext`` and whatever else asks as this row call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.blocking import in_thread
from batch_agent.compiler.pictures import content_of
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.policy import Question
from batch_agent.engine.agent.gateway_row import GatewayRow
from batch_agent.engine.agent.resources import Resources
from batch_agent.engine.agent.turn import TurnCall
from batch_agent.engine.agent.work_state import WorkState
from batch_agent.engine.agent.workplace import Workplace
from batch_agent.errors import BackendError, Interrupted, LimitExceeded, RowEnded, StoreError
from batch_agent.events import ToolFinished, ToolStarted
from batch_agent.job import AgentError, Job
from batch_agent.messages import Conversation, Message, Reply, ToolCall
from batch_agent.scheduler.forecast import Progress
from batch_agent.store.digests import call_digest, message_digest, request_digest
from batch_agent.store.steps import (
    ALONE,
    SHARED,
    Asked,
    CallBegun,
    CallEnded,
    Ended,
    Failed,
    conversation_of_ask,
)
from batch_agent.store.trail import UNKNOWN_OUTCOME, FailedBefore, Trail
from batch_agent.tools.pool import ToolOutcome

if TYPE_CHECKING:
    from batch_agent.engine.agent.user_worker import UserWorker

T = TypeVar("T")
Send: TypeAlias = Callable[[ModelRequest], Question]
ENDED = "the row of this context has ended: nothing can be asked or called for it any more"
NOTHING: Final = b""  # the digest of a conversation without messages


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a tool call ended. ``text`` is what a model reads. ``unknown``: it was interrupted while it may have been
    writing, and is not run again."""

    text: str
    ok: bool
    unknown: bool = False


class RowWork(WorkState):
    """``conversation`` is the row's own: what all rows share, the task, and what was said since."""

    __slots__ = (
        "_asks",
        "_calls",
        "_closed",
        "_counts",
        "_ends",
        "_freed",
        "_key",
        "_known",
        "_output",
        "_past_asks",
        "_past_calls",
        "_place",
        "_progress_of",
        "_tasks",
        "_worker",
        "_written",
        "conversation",
    )

    def __init__(self, job: Job, resources: Resources, trail: Trail, worker: UserWorker) -> None:
        super().__init__(job, resources, trail)
        self._worker = worker
        self._place: Workplace | None = None  # made when it is first asked for
        self._key = ""  # at the gateway; likewise
        own = [Message("user", content_of(job))] if job.prompt else []
        self.conversation = Conversation(own, parent=resources.shared)
        self._output: str | None = None  # what the worker returned, as JSON
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._progress_of = {self.progress.model: self.progress}
        self._calls = 0
        self._counts: dict[str, int] = {}  # by digest: how often the same was asked or called
        self._freed: dict[str, list[int]] = {}  # numbers of those that came to nothing
        past = trail.past
        self._past_asks = {(ask.digest, ask.nth): ask.reply for ask in past.asked}
        self._past_calls: dict[tuple[str, int], CallBegun | CallEnded] = {}
        self._written: set[tuple[str, int]] = set()  # recorded calls that may have written
        for step in past.worked:
            if isinstance(step, CallBegun):
                self._written.add((step.digest, step.nth))
            if not isinstance(step, Asked):
                self._past_calls[step.digest, step.nth] = step
        # Digests of conversations, from which an ask may go on: it is recorded without what was said before.
        self._ends = {ALONE: NOTHING, SHARED: _chain(NOTHING, resources.shared.messages)[-1]}
        self._known = {digest: number for number, digest in reversed(self._ends.items())}
        self._asks: list[Asked] = []  # all of the row, in the order of their answers
        for ask in past.asked:
            self._add_ask(ask, _chain(self._ends[ask.after], ask.said)[-1])
            self.tally.add(ask.reply, None)
            self.text = ask.reply.text
        if past.spent is not None:  # all that earlier sessions took counts, whether or not it is asked for again
            self.tally.take_over(past.spent)

    def _add_ask(self, ask: Asked, asked: bytes) -> None:
        """``asked`` is the digest of the conversation that it answers."""
        number, end = len(self._asks), message_digest(asked, ask.reply.message())
        self._ends[number], self._known[end] = end, number
        self._asks.append(ask)

    async def work(self) -> object:
        if (failed := self._trail.past.failed) is not None and not self._trail.retried:
            raise FailedBefore(failed)
        if self._trail.past.output is not None:  # its side effects are not repeated
            return self._worker.read(self._trail.past.output)
        if self._trail.has_past:
            await in_thread(partial(self._worker.places.clear, self._trail.agent))
        returned = await self._worker.run(self)
        self._output, output, self.repaired = self._worker.written(returned)
        return output

    @property
    def worker(self) -> UserWorker:
        return self._worker

    @property
    def shared(self) -> Conversation:
        """What all rows begin with: the system prompt, if there is one."""
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
        """The model's answer to a conversation, asked as this row: from the record if it has been answered before, else
        by the dispatcher, in the row's order, at its price and within its budget; it is on disk when this returns.

        ``send`` makes the question that is sent, for one that is not ``backend.infer(request)``; its ``request`` is
        what is priced. Raises BackendError, LimitExceeded, Interrupted, RowEnded.
        """
        self.check_open()
        messages = tuple(conversation.messages)
        chain = _chain(NOTHING, messages)
        digest = request_digest(chain[-1], self._r.digests.of(shape))
        nth = self._take(digest)
        reply = self._past_asks.get((digest, nth))
        if reply is None:
            reply = await self._owned(
                self._asked(self._dispatch(shape, conversation, send, schema), digest, nth, chain, messages)
            )
        self.text = reply.text
        return reply

    async def _asked(
        self,
        asking: Coroutine[Any, Any, Reply],
        digest: str,
        nth: int,
        chain: Sequence[bytes],
        messages: tuple[Message, ...],
    ) -> Reply:
        """The answer, recorded."""
        try:
            reply = await asking
        except BaseException as error:
            # The next that asks the same is the nth again, so that a resumed worker finds its answer.
            heappush(self._freed.setdefault(digest, []), nth)
            if isinstance(error, BackendError):
                self.text = error.text or self.text
            raise
        start = next(place for place in range(len(messages), -1, -1) if chain[place] in self._known)
        ask = Asked(digest, nth, reply, self._spent(), self._known[chain[start]], messages[start:])
        self._add_ask(ask, chain[-1])
        self._trail.add(ask)
        await self._trail.settle()
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
            usual_tokens=r.usual_tokens,
        )
        turn = TurnCall(r, request, self.job.index, tally, None, schema)
        ticket = r.dispatcher.slots.claim(self._progress(shape.model), turns)
        return await r.dispatcher.ask(turn if send is None else send(request), r.policy, ticket=ticket, observer=turn)

    def _progress(self, model: str) -> Progress:
        """The row's, where it asks this model: servers are chosen by it."""
        if model not in self._progress_of:
            self._progress_of[model] = Progress(key=self.job.affinity, model=model)
        return self._progress_of[model]

    def _take(self, digest: str) -> int:
        """How often the same was asked before, and not in vain."""
        if freed := self._freed.get(digest):
            return heappop(freed)
        nth = self._counts.get(digest, 0)
        self._counts[digest] = nth + 1
        return nth

    # Calling tools

    async def call(self, call: ToolCall) -> CallOutcome:
        """How a call of one of the run's tools ended: from the record if it was made before. A call that may write is
        never made twice: one that was begun and has no outcome is ``unknown``."""
        self.check_open()
        if not self._r.tools.knows(call.name):
            return await self._owned(self._run_call(call))
        digest = call_digest(call.name, call.arguments)
        nth = self._take(digest)
        past, wrote = self._past_calls.get((digest, nth)), (digest, nth) in self._written
        if isinstance(past, CallEnded) and (past.ok or wrote or not self._trail.retried):
            return CallOutcome(past.text, past.ok)
        if wrote:
            return CallOutcome(UNKNOWN_OUTCOME.format(name=call.name), ok=False, unknown=True)
        return await self._owned(self._recorded_call(call, digest, nth))

    async def _recorded_call(self, call: ToolCall, digest: str, nth: int) -> CallOutcome:
        trail = self._trail
        trail.fresh = True
        if not self._r.tools.can_start_early(call.name):
            # A write that was begun must never be taken for one that was not.
            trail.add(CallBegun(digest, nth, call.name, call.arguments))
            await trail.settle()
        outcome = await self._run_call(call)
        trail.add(CallEnded(digest, nth, call.name, call.arguments, outcome.ok, outcome.text))
        await trail.settle()
        return outcome

    async def _run_call(self, call: ToolCall) -> CallOutcome:
        r, index, turn = self._r, self.job.index, self.tally.turns
        place, self._calls = self._calls, self._calls + 1
        began, ended = self._loop.time(), self._loop.create_future()
        r.emit(ToolStarted(r.clock(), r.run, index, turn, place, call.id, call.name))
        pending = r.tools.start(call, self.job, turn)
        found: list[ToolOutcome] = []

        def tell(end: ToolOutcome | Exception) -> None:
            if ended.done():
                return
            if isinstance(end, Exception):
                ended.set_exception(end)
                return
            found.append(end)
            ended.set_result(None)

        try:
            pending.on_end(tell)
            # What became of a write must be known: it is waited for whatever the run's time is.
            await (r.dispatcher.wait_for_tools(ended) if r.tools.can_start_early(call.name) else ended)
        finally:
            pending.abandon()
            self.tally.tool_wait += self._loop.time() - began
        [end] = found
        r.emit(ToolFinished(r.clock(), r.run, index, turn, place, call.id, call.name, end.seconds, end.ok, end.source))
        return CallOutcome(end.text, end.ok)

    # What the worker started

    def check_open(self) -> None:
        """Raises RowEnded after the row's end, and what it failed with where it cannot go on."""
        if self._closed:
            raise RowEnded(ENDED)
        if self.failure is not None:
            raise self.failure

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` comes to, in a task of this row's: it ends with the row, whoever waits for it."""
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
            self.failure = error  # the run cannot go on, whatever the worker makes of it

    @property
    def key(self) -> str:
        """What shows at the gateway that a request is this row's; it ends with the row."""
        if not self._key:
            self._key = self._worker.gateway.admit(GatewayRow(self, self._r.backend))
        return self._key

    async def close(self) -> None:
        self._closed = True
        if self._key:
            self._worker.gateway.dismiss(self._key)
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if self._place is not None and not self._worker.places.keeps:
            await in_thread(self._place.leave)
        if cancelled is not None:
            raise cancelled

    # Its end

    @property
    def place(self) -> Workplace:
        """Its working directory and its artifacts."""
        if self._place is None:
            self._place = self._worker.places.open(self._trail.agent)
        return self._place

    @property
    def artifacts(self) -> Mapping[str, Path]:
        return self._worker.places.artifacts(self._trail.agent) if self._place is None else self._place.artifacts

    @property
    def messages(self) -> Sequence[Message]:
        """Of the latest answer and what led to it; the row's own conversation, where nothing was asked."""
        if not self._asks:
            return self.conversation.messages
        return conversation_of_ask(self._asks, len(self._asks) - 1, self._r.shared.messages)

    def end(self, verdict: AgentError | None) -> None:
        trail = self._trail
        if trail.ended or trail.past.unreadable:
            return
        if verdict is not None:
            trail.add(Failed(verdict, self.text, self._spent()))
        else:
            trail.add(Ended(self._spent(), self._output))


def _chain(before: bytes, messages: Sequence[Message]) -> list[bytes]:
    """The digest of the conversation before each message, and of all of it."""
    chain = [before]
    for message in messages:
        chain.append(message_digest(chain[-1], message))
    return chain

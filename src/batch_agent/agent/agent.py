"""An agent: its loop (``tool_loop``), and a row from its start to its result (``Agent``).

An agent owns the record of its row, its tally and its tool calls. Its conversation is a ``Dialogue``. Slots, tools and
the backend belong to the run (``Resources``). A failure of this job alone is a JobError and becomes part of its result.
Any other exception is a bug of this package and stops the run.

Replay is by content. A recorded request is found by its digest (messages, model, tools, sampling, schema) and by the
number of equal requests before it; a tool call in the same way by its name and arguments. So a worker may send many
requests at once, and in another order after a resume. What is not recorded is sent; by the tool loop only when no
recorded answers are left. An answer is on disk before anything depends on it, and a call that may write is on disk
before it starts.

The tool loop and built-in workers get one ``Dialogue``, whose messages follow from the row. They run again from their
start and reach the same state, so their actions must depend only on the row and on the answers. A user's worker gets an
``AgentContext``, and its output is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from pydantic import JsonValue

from batch_agent.agent.dialogue import Dialogue, EarlyCalls, Resources, Send
from batch_agent.agent.transcript import transcript
from batch_agent.agent.workplace import Workplace
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.attachments import content_of
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.errors import (
    AgentTimeout,
    InputError,
    Interrupted,
    JobError,
    OutputError,
    RecordUnreadable,
    RowEnded,
    StoreError,
)
from batch_agent.events import ToolFinished, ToolStarted
from batch_agent.job import JOINED, AgentError, AgentResult, BaseResult, Job, Timings
from batch_agent.messages import (
    Attachment,
    Conversation,
    JsonObject,
    Message,
    Reply,
    ToolCall,
    Usage,
    content_shown,
    with_images,
)
from batch_agent.observe.metrics import LiveAgent
from batch_agent.record.commits import UNKNOWN_OUTCOME, FailedBefore, Trail
from batch_agent.record.replay import Call as RecordedCall
from batch_agent.record.replay import Key, WorkReplay, writes_of
from batch_agent.record.steps import (
    Asked,
    CallBegun,
    CallEnded,
    CallWithdrawn,
    Ended,
    Failed,
    Used,
    call_digest,
    conversation_of_ask,
)
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.tools.pool import PendingCall, ToolOutcome
from batch_agent.value_type import value_type

if TYPE_CHECKING:
    from batch_agent.agent.user_worker import UserWorker

T = TypeVar("T")
InnerWorker: TypeAlias = Callable[[object, Dialogue], Awaitable[object]]

ENDED = "the row of this context has ended: it accepts no more requests or calls"
NO_USAGE = Usage()
NO_ARTIFACTS: Mapping[str, Path] = {}
UNREADABLE = (
    "the record of this row is damaged, and it contains a write that was begun: the row is not run again, because "
    "that could write twice. Check what it wrote; to run it again, give the row another id. ({reason})"
)


async def tool_loop(row: object, dialogue: Dialogue) -> object:
    """Return the output of the agent. The loop requests an answer. If the answer calls tools, it runs them and repeats.
    If the answer is invalid, or calls tools that were not offered, it tells the model so and repeats."""
    shapes = dialogue.shapes
    shape = shapes.first
    offers_tools = bool(shape.tools) and shape.tool_choice != "none"
    while True:
        reply = await dialogue.ask(shape)
        if not reply.tool_calls:
            try:
                return dialogue.read(reply)
            except OutputError as error:
                dialogue.repair(error)
            shape = shapes.repair
        elif offers_tools:
            await dialogue.call(reply.tool_calls)
            shape = shapes.later
        else:
            dialogue.refuse(reply.tool_calls)
            shape = shapes.repair


@value_type
class CallOutcome:
    """The outcome of a tool call. ``unknown``: the call was interrupted and may have written, so it is not repeated."""

    text: str
    ok: bool
    unknown: bool = False
    images: tuple[Attachment, ...] = ()

    def message(self, call: ToolCall) -> Message:
        content = with_images(self.text, self.images)
        return Message("tool", content, tool_call_id=call.id, tool_name=call.name)


@dataclass(slots=True)
class Tally:
    """What one agent has used so far. Times in seconds. ``counted`` is the agent in the metrics of the run."""

    counted: LiveAgent | None = None
    sent: int = 0  # requests that left
    retries: int = 0  # requests sent again, and answers requested again
    again: bool = False  # the next request is one of these
    turns: int = 0  # complete answers
    usage: Usage = NO_USAGE
    cost: float | None = None  # $, of the turns whose price is known
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    first_token: float | None = None
    before: float = 0.0  # seconds spent in earlier sessions
    answered_by: tuple[str, ...] = ()  # "" for the model that was asked, and the models of standbys

    @property
    def attempts(self) -> int:
        return 1 + self.retries if self.sent else 0

    def add(self, reply: Reply, cost: float | None) -> None:
        self.turns += 1
        self.usage = reply.usage if self.usage is NO_USAGE else self.usage + reply.usage
        if cost is not None:
            self.cost = cost + (self.cost or 0.0)
        if self.first_token is None:
            self.first_token = reply.first_token
        if reply.answered_by not in self.answered_by:
            self.answered_by += (reply.answered_by,)

    def pay(self, usage: Usage, cost: float | None) -> None:
        self.usage += usage
        if cost is not None:
            self.cost = cost + (self.cost or 0.0)

    def take_over(self, spent: Used) -> None:
        self.sent, self.retries, self.cost, self.before = spent.sent, spent.retries, spent.cost, spent.total
        self.again = False
        self.queued, self.inference, self.tool_wait = spent.queued, spent.inference, spent.tool_wait

    def spent(self, seconds: float) -> Used:
        """Return everything spent. ``seconds`` is the agent's lifetime in this session."""
        total = self.before + seconds
        return Used(self.sent, self.retries, self.queued, self.inference, self.tool_wait, total, self.cost)

    def timings(self, total: float) -> Timings:
        return Timings(self.queued, self.inference, self.tool_wait, total, self.first_token)


class Agent:
    """A row while it is worked on. ``trail`` is its record. ``worker`` is the tool loop, a built-in worker, or the
    user's. ``wrote`` are calls of earlier entries of a cascade that may have written."""

    works = True  # unlike a row with samples, between two of them
    text = ""  # the model's latest
    ticket: Ticket | None = None  # a slot that was already requested
    asking: ModelRequest | None = None  # the latest request in flight
    latest: tuple[Conversation, int] | None = None  # the conversation of the latest answer, and its length
    # The latest answer of the tool loop, and the digest of its request, until it is recorded.
    answered: tuple[Reply, str] | None = None
    # Its end
    tasks: Sequence[asyncio.Task[None]] = ()  # the tasks that run it until its result is delivered
    stopped_by: JobError | None = None  # the error of an early stop
    failure: JobError | StoreError | None = None  # final: the worker's return value cannot replace it
    error: JobError | None = None
    recorded: AgentResult[object] | None = None  # its result, once it is being written to disk
    repaired = False  # the JSON of the output was repaired
    truncated = False  # a text that was cut at max_tokens was kept
    doubts: Mapping[str, float | None] | None = None  # of the output, by field
    _task: asyncio.Task[object] | None = None  # while it works
    _verdict: AgentError | None = None
    _output: object = None
    _closed = False
    # Of a user's worker
    _calls = 0
    _key = ""  # API key at the gateway; created at first use
    _place: Workplace | None = None  # created at first use
    _returned: str | None = None  # the worker's return value as JSON

    def __init__(
        self,
        job: Job,
        resources: Resources,
        trail: Trail,
        worker: InnerWorker | UserWorker,
        wrote: Sequence[RecordedCall] = (),
    ) -> None:
        self.job = job
        self.r = resources
        self.trail = trail
        self.tally = Tally(resources.emit.metrics.agent(resources.run, job.index))
        self.progress = AgentForecast(key=job.affinity, model=resources.shapes.first.model)
        self.written: list[RecordedCall] = []  # calls of this session that may have written
        slots = resources.dispatcher.slots
        self._loop, self._clock = slots.loop, slots.clock
        self._began = self._clock()
        self._worker = worker
        self.worker: UserWorker | None = None if callable(worker) else worker  # None for built-in workers too
        has_task = self.worker is None or bool(job.prompt)
        own = [Message("user", content_of(job) if job.images else job.prompt)] if has_task else []
        self.conversation = Conversation(own, parent=resources.shared)  # the row's own
        if self.worker is not None:
            self._progress_of: dict[str, AgentForecast] = {}  # for models other than the run's
            self._started: set[asyncio.Task[Any]] = set()  # by the worker
            self._writing: set[asyncio.Future[None]] = set()  # calls that may write
        past = trail.past
        has_steps = past.turns or past.worked or past.left is not None
        is_replayed = has_steps or wrote or (self.worker is not None and trail.records)
        self.replay = WorkReplay(past, checks=trail.checks, wrote=wrote) if is_replayed else None
        if has_steps or trail.has_past:
            self._count_past()

    def _count_past(self) -> None:
        """Count everything that is recorded, even if it is not needed again: it was paid."""
        past = self.trail.past
        for reply in [] if past.left is None else past.left.replies:
            self.tally.pay(reply.usage, None)
        for reply in past.replies:
            self.tally.add(reply, None)
            self.text = reply.text
        for compacted in past.cuts + ([] if past.left is None else past.left.cuts):
            self.tally.pay(compacted.usage, None)
        if past.failed is not None:
            self.text = past.failed.text
        if past.spent is not None:
            self.tally.take_over(past.spent)

    # Its life

    async def run(self, ticket: Ticket | None) -> AgentResult[object]:
        """Return the result, with a JobError as part of it. ``ticket``: a slot already requested."""
        r, past, deadline = self.r, self.trail.past, self.r.timeout_per_agent
        working: Awaitable[object]
        self.ticket = ticket
        limit = None if deadline is None else asyncio.timeout(max(0.0, deadline - self.seconds_before))
        self._task = task = asyncio.current_task(self._loop)
        if self.stopped_by is not None and task is not None:
            task.cancel()
        try:
            if past.unreadable:
                raise RecordUnreadable(UNREADABLE.format(reason=past.unreadable))
            if past.failed is not None and not self.trail.retried:
                raise FailedBefore(past.failed)
            if callable(self._worker):  # the tool loop, or a built-in worker
                own = Dialogue(self, self.conversation, r.shapes, r.schema, max_turns=r.max_turns, compacts=True)
                working = self._worker(self.job.input, own)
            else:
                working = self._run_user(self._worker)
            if limit is None:
                self._output = await working
            else:
                async with limit:
                    self._output = await working
            if self.failure is not None:
                raise self.failure
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            turns = self.tally.turns
            self.fail(AgentTimeout(f"timeout_per_agent, {deadline:g} s, is over after {turns} answers of the model"))
        except JobError as error:
            self.fail(error)
        except asyncio.CancelledError:
            if self.stopped_by is None or task is None or task.uncancel():  # another cancellation is for the whole run
                raise
            self.fail(self.stopped_by)
        finally:
            self._task = None
            await self.close()
        return self.result()

    def stop(self, error: JobError) -> None:
        """End the agent now with this error, unless it has ended."""
        if self.stopped_by is None:
            self.stopped_by = error
            if self._task is not None:
                self._task.cancel()

    def anew(self) -> Agent:
        """Return an agent for the same job that starts again."""
        again = Agent(self.job, self.r, self.trail.anew(), self._worker)
        again.tasks = self.tasks
        return again

    async def _run_user(self, worker: UserWorker) -> object:
        trail = self.trail
        if (kept := self._kept) is not None:  # side effects of the worker are not repeated
            self.truncated = trail.past.ended is not None and trail.past.ended.truncated
            return worker.read(kept)
        if trail.has_past or trail.past.left is not None:
            await self._loop.run_in_executor(None, worker.places.clear, trail.agent)
        returned = await worker.run(self)
        self._returned, output, self.repaired = worker.written(returned)
        return output

    @property
    def user(self) -> UserWorker:
        """The user's worker. Only its contexts ask for it."""
        assert self.worker is not None
        return self.worker

    @property
    def _kept(self) -> str | None:
        """The recorded output of a user's worker, if the fingerprint of the run has not changed since."""
        ended = self.trail.past.ended
        if ended is None or self.worker is None:
            return None
        return None if self.trail.checks and ended.fingerprint != self.worker.fingerprint else ended.output

    # Asking

    async def answer(self, shape: RequestShape, conversation: Conversation, *, send: Send | None = None) -> Reply:
        """Return the model's answer to a conversation, for this row (``Dialogue.ask``). It is on disk when this
        returns. Raises BackendError, LimitExceeded, Interrupted, RowEnded."""
        return await self.owned(Dialogue(self, conversation, self.r.shapes, None).ask(shape, send=send))

    def claim(self, model: str, dialogue: Dialogue) -> Ticket:
        """Return the ticket for the next request: the one that the run has already requested, or a new one."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            return ticket
        slots, progress = self.r.dispatcher.slots, self.progress
        if model != progress.model:  # it determines the choice of server
            if self.worker is None:
                progress.model = model  # a built-in worker has one conversation
            else:
                progress = self._progress_of.setdefault(model, AgentForecast(key=self.job.affinity, model=model))
        if slots.scheduler.admission.is_on:
            progress.expected = dialogue.foreseen() or 0
        return slots.claim(progress, self.tally.turns)

    def record_answer(self) -> None:
        """Record the latest answer of the tool loop, unless it ended the agent."""
        if self.answered is not None:
            reply, digest = self.answered
            self.answered = None
            self.trail.add(Asked(digest, 0, reply, self.spent()))

    # Calling tools

    async def make_calls(
        self, calls: Sequence[ToolCall], known: dict[int, CallOutcome], early: EarlyCalls | None = None
    ) -> None:
        """Make these tool calls at once, until the last one ends. Outcomes are added to ``known`` by position, as they
        arrive. A call that was made before has its recorded outcome. A call that may write is never made twice: if it
        was begun and has no outcome, it is ``unknown``. ``early`` has calls that started while the answer was
        streamed."""
        tools, trail = self.r.tools, self.trail
        keys: list[Key | None] = []
        new: dict[int, ToolCall] = {}
        writes: list[int] = []
        for place, call in enumerate(calls):
            key = outcome = None
            if self.replay is not None:
                key, outcome = self._recorded(self.replay, place, call)
            keys.append(key)
            if outcome is not None:
                known[place] = outcome
                continue
            new[place] = call
            if not tools.can_start_early(call.name) and tools.knows(call.name):
                writes.append(place)
        if not new:
            return
        trail.fresh = True
        pending: dict[int, PendingCall] = {}
        try:
            if writes and trail.records:
                # A begun write must never be mistaken for one that did not start.
                for place in writes:
                    self._record(place, calls[place], keys[place])
                await trail.settle()
            await self._run_calls(new, pending, known, keys, early, writes=bool(writes))
        finally:
            for place in writes:
                if place in known:
                    self._note_write(calls[place], known[place])
                # Nor may one that did not start be mistaken for a begun write: then it would never be made.
                elif not (place in pending and pending[place].has_begun):
                    self._withdraw(place, keys[place])
            for key in map(keys.__getitem__, new):
                if self.replay is not None and key is not None:
                    self.replay.give_back(*key)
        if self.worker is not None:
            await trail.settle()

    async def _run_calls(
        self,
        calls: Mapping[int, ToolCall],
        pending: dict[int, PendingCall],
        known: dict[int, CallOutcome],
        keys: Sequence[Key | None],
        early: EarlyCalls | None,
        *,
        writes: bool,
    ) -> None:
        r, index, turn = self.r, self.job.index, self.tally.turns
        began = self._clock()
        emit, first = r.emit, 0
        if self.worker is not None:
            first, self._calls = self._calls, self._calls + len(calls)
        every: asyncio.Future[None] = self._loop.create_future()
        left = len(calls)

        def ended(place: int, call: ToolCall, end: ToolOutcome | Exception) -> None:
            nonlocal left
            if isinstance(end, Exception):
                if not every.done():
                    every.set_exception(end)
                return
            known[place] = outcome = CallOutcome(end.text, end.ok, images=end.images)
            # Recorded at once: another call may run for hours. A tool that a worker names may be added later.
            if self.trail.records and (self.worker is None or r.tools.knows(call.name)):
                with suppress(StoreError):  # the agent gets the error at its next step
                    self._record(place, call, keys[place], outcome)
            at = r.clock()
            number, seconds = first + place, end.seconds
            emit.metrics.tool_finished(self.tally.counted, at, now, turn, call.name, seconds, end.ok, end.source)
            if ToolFinished in emit.sinks.wanted:
                told = number, call.id, call.name, seconds, end.ok, end.source
                emit.sinks(ToolFinished(at, r.run, index, turn, *told))
            left -= 1
            if not left and not every.done():  # it is done if the agent was cancelled
                every.set_result(None)

        now = r.clock()
        for place, call in calls.items():
            emit.metrics.tool_started(self.tally.counted, now)
            if ToolStarted in emit.sinks.wanted:
                emit.sinks(ToolStarted(now, r.run, index, turn, first + place, call.id, call.name))
        begun = early.started if early is not None else {}
        for place, call in calls.items():
            pending[place] = begun.get(call.id) or r.start_tool(call, self.job, turn)
        if r.prewarm is not None:
            r.prewarm.asked(index, calls.values())
        if writes and self.worker is not None:
            self._writing.add(every)
            every.add_done_callback(self._writing.discard)
        try:
            for place, waiting in pending.items():
                waiting.on_end(partial(ended, place, calls[place]))
            if not every.done():
                # A begun write is always waited for, because its outcome must be known.
                await (every if writes else r.dispatcher.wait_for_tools(every))
            every.result()
        finally:
            for waiting in pending.values():
                waiting.abandon()
            self.tally.tool_wait += self._clock() - began

    def _note_write(self, call: ToolCall, outcome: CallOutcome) -> None:
        """Note a call that may have written, for the later entries of a cascade."""
        digest = call_digest(call.name, call.arguments)
        end = CallEnded(digest, 0, "", "", outcome.ok, outcome.text, outcome.images)
        self.written.append((digest, True, end))

    def _recorded(self, replay: WorkReplay, place: int, call: ToolCall) -> tuple[Key, CallOutcome | None]:
        """Return the digest and number of a call that begins, and its recorded outcome or None. ``place`` is its place
        in its answer."""
        loops, (key, past, wrote) = self.worker is None, replay.call(call.name, call.arguments)
        unknown = UNKNOWN_OUTCOME.format(name=call.name) if wrote else ""
        # A failed row is retried: a failed read of its worker is made again, or it could never succeed.
        if past is not None and (past.ok or wrote or loops or not self.trail.retried):
            # The tool loop records the text that it tells its model as the end of an interrupted write.
            outcome = CallOutcome(past.text, past.ok, images=past.images, unknown=wrote and past.text == unknown)
        elif wrote:
            outcome = CallOutcome(unknown, ok=False, unknown=True)
        else:
            return key, None
        if loops and (past is None or past.digest):  # the model must read the same text after the next resume
            self._record(place, call, key, outcome)
        return key, outcome

    def refuse_call(self, place: int, call: ToolCall, text: str) -> CallOutcome:
        """Give a call of an answer an outcome without making it."""
        key, outcome = (None, None) if self.replay is None else self._recorded(self.replay, place, call)
        if outcome is None:
            outcome = CallOutcome(text, ok=False)
            self._record(place, call, key, outcome)
        return outcome

    def _record(self, place: int, call: ToolCall, key: Key | None, end: CallOutcome | None = None) -> None:
        """Record that a call begins, or its end. A call of the tool loop is recorded by its place in its answer, which
        has its name and arguments."""
        named = (
            (*key, call.name, call.arguments) if self.worker is not None and key is not None else ("", place, "", "")
        )
        step = CallBegun(*named) if end is None else CallEnded(*named, end.ok, end.text, end.images)
        if self.replay is not None and key is not None:
            self.replay.add_call(step, key)
        self.trail.add(step)

    def _withdraw(self, place: int, key: Key | None) -> None:
        """Record that a call did not begin: it was cancelled before it started."""
        if self.replay is not None and key is not None:
            self.replay.withdraw_call(key)
        if self.trail.records:
            named = key if self.worker is not None and key is not None else ("", place)
            with suppress(StoreError):  # then the end of the row is not recorded either
                self.trail.add(CallWithdrawn(*named))

    # What a user's worker started

    def check_open(self) -> None:
        """Raise RowEnded after the row's end, or the failure that prevents it from continuing."""
        if self._closed:
            raise RowEnded(ENDED)
        if self.failure is not None:
            raise self.failure

    async def owned(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, run in a task that ends with the row."""
        try:
            self.check_open()
            if asyncio.get_running_loop() is not self._loop:
                raise InputError(
                    "an AgentContext works only in its run's event loop: to use another, write a plain function"
                )
        except BaseException:
            work.close()
            raise
        task = self._loop.create_task(work)
        self._started.add(task)
        task.add_done_callback(self._task_ended)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and not cancelled_by_us():
                raise RowEnded(ENDED) from None
            raise

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._started.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Interrupted | StoreError) and self.failure is None:
            self.failure = error  # final, even if the worker catches it

    @property
    def key(self) -> str:
        """The API key of this row at the gateway. It is valid until the row ends."""
        if not self._key:
            self._key = self.user.admit(self)
        return self._key

    async def wait_for(self, worker: asyncio.Task[Any]) -> None:
        """Wait until the worker has ended. Raises Interrupted at the run's time limit, after running writes."""
        ended = self._loop.create_future()

        def tell(_: object) -> None:
            if not ended.done():
                ended.set_result(None)

        worker.add_done_callback(tell)
        try:
            await self.r.dispatcher.wait_for_tools(ended)
        except Interrupted:
            if self._writing:
                await asyncio.wait(self._writing)
            raise

    async def close(self) -> None:
        """Stop everything that was started for the worker and is no longer needed."""
        self._closed = True
        if self.ticket is not None:  # the worker did not use the slot that was requested for it
            self.r.dispatcher.slots.withdraw(self.ticket)
            self.ticket = None
        if self.worker is None:
            return
        if self._key:
            self.worker.gateway.dismiss(self._key)
        cancelled: asyncio.CancelledError | None = None
        while self._started:
            for task in self._started:
                task.cancel()
            try:
                await asyncio.wait(self._started)
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
            self._place = self.user.places.open(self.trail.agent)
        return self._place

    @property
    def artifacts(self) -> Mapping[str, Path]:
        if self.worker is None:
            return NO_ARTIFACTS
        return self.worker.places.artifacts(self.trail.agent) if self._place is None else self._place.artifacts

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation of the tool loop. For a user's worker, that of the latest answer."""
        past, shared = self.trail.past, self.r.shared
        if self.worker is None:
            if self.trail.stays_failed:
                return transcript(self.job, shared, self.r.schema, past)
            return self.conversation.messages
        if self.latest is not None:
            conversation, length = self.latest
            return conversation.messages[:length]
        asks = past.asked
        return conversation_of_ask(asks, len(asks) - 1, shared.messages) if asks else self.conversation.messages

    @property
    def seconds_before(self) -> float:
        """Seconds that earlier sessions worked in this conversation."""
        left = self.trail.past.left
        return self.tally.before - (0.0 if left is None or left.spent is None else left.spent.total)

    def seconds(self) -> float:
        """Return how long the agent has worked, in all sessions."""
        return self.tally.before + (self._clock() - self._began if self.trail.fresh else 0.0)

    def spent(self) -> Used:
        return self.tally.spent(self._clock() - self._began)

    def shown(self) -> JsonObject:
        """Return the conversation so far. ``saying`` has the answer that is being streamed; None if there is no
        request."""
        asking, tally = self.asking, self.tally
        return {
            "index": self.job.index,
            "job_id": self.job.job_id,
            "messages": cast("list[JsonValue]", [message.to_dict() for message in self.messages]),
            "saying": None if asking is None else "".join(asking.said),
            "endpoint": None if asking is None else asking.endpoint or None,
            "turns": tally.turns,
            "attempts": tally.attempts,
            "seconds": round(self.seconds()),
            "timings": {"queued": tally.queued, "inference": tally.inference, "tool_wait": tally.tool_wait},
            "usage": {"prompt_tokens": tally.usage.prompt_tokens, "completion_tokens": tally.usage.completion_tokens},
            "cost": tally.cost,
        }

    def fail(self, error: JobError) -> None:
        self.error, self._output = error, None
        self._verdict = error.failed.error if isinstance(error, FailedBefore) else AgentError.of(error)

    def record_end(self, result: AgentResult[object]) -> None:
        """Record the end of the agent, unless it is recorded already. An interrupted agent has not ended."""
        if isinstance(self.error, Interrupted):
            return
        self.recorded = result
        trail, verdict = self.trail, self._verdict
        if not trail.records or trail.past.unreadable or trail.stays_failed or self._kept is not None:
            return
        if self.worker is None and not trail.fresh:
            return
        if verdict is not None:
            self.record_answer()
            trail.add(Failed(verdict, self.text, self.spent()))
        elif self.worker is None:
            trail.add(Ended(self.spent(), None, "", *(self.answered or ())))
        else:
            trail.add(Ended(self.spent(), self._returned, self.worker.fingerprint, truncated=self.truncated))

    def result(self) -> AgentResult[object]:
        job, tally, verdict = self.job, self.tally, self._verdict
        ok = verdict is None
        # A class that is called with 18 names takes as long as everything else here, and each row comes here.
        result: Any = BaseResult(job.index, job.job_id, job.input, ok, self._output, verdict)
        result.attempts, result.turns = tally.attempts, tally.turns
        result.usage, result.cost = tally.usage, tally.cost
        result.timings = tally.timings(self.seconds())
        # Images become placeholders, because results stay in memory.
        result.messages = tuple(
            [
                each if isinstance(each.content, str) else replace(each, content=content_shown(each.content))
                for each in self.messages
            ]
        )
        result.raw_text, result.artifacts = self.text, self.artifacts
        result.repaired, result.truncated = ok and self.repaired, ok and self.truncated
        result.resumed, result.shortened = not self.trail.fresh, job.shortened
        if self.r.doubted is not None and ok:
            result.doubts = self.doubts or dict.fromkeys(name for _, name in self.r.doubted)
        if tally.answered_by and (self.r.dispatcher.scheduler.standbys or any(tally.answered_by)):
            asked = self.r.shapes.first.model
            result.answered_by = JOINED.join(name or asked for name in tally.answered_by)
        return cast("AgentResult[object]", result)

    @property
    def writes(self) -> list[RecordedCall]:
        """The calls of this agent, in all sessions, that may have written."""
        return [*writes_of(self.trail.past), *self.written]

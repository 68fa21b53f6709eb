"""A conversation of a row with the model: ask, call tools, read and repair answers.

The tool loop and built-in workers have one dialogue, whose messages follow from the row. A user's worker has any number
of them: each ``ctx.ask`` and ``ctx.loop`` is one. The ``Agent`` owns what they share: the tally, the record, the tool
calls.

A request that is recorded is answered from the record, and any other is sent. A conversation that would exceed the
model's context is cut before it is sent. All of it is kept in ``said``; ``asked`` is the part that the model still
reads. Both are one conversation until the first cut. So messages that were sent never change, except at a cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from batch_agent.agent.prefix_leader import PrefixLeader
from batch_agent.agent.shapes import Shapes
from batch_agent.agent.tool_prewarm import ToolPrewarm
from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.compiler.compaction import MESSAGE_TOKENS, Cut, history_tokens, message_tokens
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.dispatch.dispatcher import Dispatcher, ModelCall
from batch_agent.dispatch.policy import Observer, Policy, Question
from batch_agent.errors import (
    BackendError,
    ContextOverflow,
    EmptyAnswer,
    Invalid,
    JobError,
    LimitExceeded,
    OutputError,
    Rejected,
    ReplayMismatch,
    Truncated,
)
from batch_agent.events import (
    AnswerRejected,
    ContextCompacted,
    SchemaUnsupported,
    StreamingDecided,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from batch_agent.foreign import drop_frames
from batch_agent.job import Job
from batch_agent.messages import Conversation, Message, Reply, ToolCall, Usage, content_text
from batch_agent.observe.metrics import Emit
from batch_agent.outputs.extract import documents_in, strip_reasoning
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import parse_output
from batch_agent.record.commits import WHOLE, ShapeDigests, difference, next_asked, request_digest
from batch_agent.record.replay import NO_MESSAGES, chain
from batch_agent.scheduler.ordering import Streaming, pin_seconds
from batch_agent.tools.pool import PendingCall, ToolPool
from batch_agent.trust.doubt import Doubted, doubts_of

if TYPE_CHECKING:
    from batch_agent.agent.agent import Agent, CallOutcome, Tally
    from batch_agent.agent.compaction import Compactor
    from batch_agent.agent.touches import Touches
    from batch_agent.observe.telemetry import Traces

# After this many rows whose images were refused, no images are sent; a single refusal may concern only that image.
IMAGE_REFUSALS = 3


@dataclass(slots=True)
class Resources:
    backend: Backend
    dispatcher: Dispatcher
    policy: Policy  # retries and timeouts of turns
    tools: ToolPool
    schema: OutputSchema[object] | None
    shared: Conversation
    shapes: Shapes
    emit: Emit
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
    sees_images: bool | None = None  # the model accepts images of tool results; None: not known yet
    image_refusals: int = 0
    lead: PrefixLeader | None = None  # None: no request is sent ahead of the others
    digests: ShapeDigests = field(default_factory=ShapeDigests)
    traces: Traces | None = None  # None: the run is not traced
    hints: bool = True  # send hints about each agent to servers that plan
    doubted: Sequence[Doubted] | None = None  # the fields whose doubts are wanted; None: none
    offered: frozenset[str] | None = None  # the tools of the pool that these agents may call; None: all
    answers: int = 0  # number of complete answers
    answer_tokens: int = 0  # sum over all of them

    def note_images(self, *, accepted: bool) -> None:
        """Learn whether the server accepts images of tool results: it answered a request with them, or one from which
        they were left out after a refusal."""
        self.image_refusals += not accepted
        if accepted or self.image_refusals >= IMAGE_REFUSALS:
            self.sees_images = accepted

    def start_tool(self, call: ToolCall, job: Job, turn: int) -> PendingCall:
        if self.offered is not None and call.name not in self.offered:
            return self.tools.refuse(call.name, self.offered)
        if self.traces is None:
            return self.tools.start(call, job, turn)
        # Most calls need no trace context, because their result is cached or shared.
        return self.tools.start(call, job, turn, partial(self.traces.of_call, self.run, job.index, turn, call.id))


UNCUT = Cut()
CUT = "length"  # finish reason of a text that was cut at max_tokens and is kept
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


class TurnCall(ModelCall, Observer):
    """One turn of an agent for the dispatcher: the request, and what each attempt changes in the agent's tally.
    ``early`` has the tool calls that start while the answer is streamed. ``schema`` is that of the answer."""

    __slots__ = ("_early", "_index", "_r", "_schema", "_tally")

    def __init__(
        self,
        r: Resources,
        request: ModelRequest,
        index: int,
        tally: Tally,
        early: EarlyCalls | None,
        schema: OutputSchema[object] | None,
    ) -> None:
        self.backend, self.request = r.backend, request
        self.on_tool_call = _start_nothing if early is None and request.on_begin is not None else early
        self._r, self._index, self._tally, self._early = r, index, tally, early
        self._schema = schema

    def shortened(self, cut: Truncated) -> Reply | None:
        if self._schema is not None or not self._r.keeps_cut_text or cut.in_call or not _is_begun(cut.text):
            return super().shortened(cut)
        return Reply(cut.text, usage=cut.usage or Usage(), finish_reason=CUT)

    def check(self, reply: Reply) -> None:
        if not reply.tool_calls and not _has_answer(reply.text, self._schema):
            raise EmptyAnswer(f"{self.backend.name} gave an empty answer", text=reply.text, usage=reply.usage)

    def lost(self) -> None:
        """Stop the tools of this request, because another request was answered first."""
        if self._early is not None:
            self._early.abandon()

    # What an attempt changes

    def sent(self, queued: float) -> None:
        r, tally = self._r, self._tally
        tally.queued += queued
        tally.sent += 1
        tally.retries += tally.again
        tally.again = False
        at = r.clock()
        r.emit.metrics.turn_started(tally.counted, at, tally.turns + 1)
        if TurnStarted in r.emit.sinks.wanted:
            r.emit.sinks(TurnStarted(at, r.run, self._index, tally.turns + 1))

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        r, tally = self._r, self._tally
        tally.inference += seconds
        tally.pay(error.usage or Usage(), cost)
        self.lost()
        tally.again = delay is not None
        turn, endpoint = tally.turns + 1, self.request.endpoint
        message, spent = str(error), (error.usage, cost or 0.0)
        r.emit(TurnFailed(r.clock(), r.run, self._index, turn, error.type, message, delay, *spent, endpoint, seconds))

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        r, tally = self._r, self._tally
        tally.inference += seconds
        tally.add(reply, cost)
        r.answers += 1
        r.answer_tokens += reply.usage.completion_tokens
        at = r.clock()
        turn, endpoint = tally.turns, self.request.endpoint
        r.emit.metrics.turn_finished(tally.counted, at, turn, reply, seconds, cost, endpoint)
        if TurnFinished in r.emit.sinks.wanted:
            told = reply.usage, seconds, reply.first_token, cost, reply.saved, endpoint, reply.model
            r.emit.sinks(TurnFinished(at, r.run, self._index, turn, *told))
        if self._schema is not None and not r.schema_noted and (note := r.backend.capabilities.schema_note):
            r.schema_noted = True
            r.emit(SchemaUnsupported(r.clock(), r.run, note))
        if self._early is not None and reply.saved is None:
            gained = self._early.gained(asyncio.get_running_loop().time())
            inflight = r.dispatcher.scheduler.inflight
            decided = r.streaming.learn(gained, reply.usage.completion_tokens, inflight)
            if decided is not None:
                r.emit(StreamingDecided(r.clock(), r.run, *decided))


def _has_answer(text: str, schema: OutputSchema[object] | None) -> bool:
    """Return whether the text is an answer: more than reasoning if the text is the output."""
    text = text.strip()
    if text and schema is None and (text[0] == "<" or text[-1] == ">"):  # the whole text may be inside tags
        with suppress(OutputError):  # the reader of the answer reports it
            text = strip_reasoning(text)
    return bool(text)


def _is_begun(text: str) -> bool:
    """Return whether a text that was cut contains more than reasoning."""
    try:
        return bool(strip_reasoning(text).strip())
    except OutputError:
        return False


def _start_nothing(call: ToolCall) -> None:
    """Do nothing. For an answer that is streamed only to notice its beginning."""


Send: TypeAlias = Callable[[ModelRequest], Question]
TOO_MANY_CALLS = "Error: not run: {count} calls in one answer are too many; ask for at most {most} at once."
NOT_SHOWN = "[not shown: images are not accepted here]"
NOT_OFFERED = "Error: not run: no tools are offered here. Answer without calling tools."
MISMATCH = (
    "the next request of this row differs from the recorded one: {difference}. The recorded answers are not "
    'used. Undo the change since the run was recorded; or resume with on_change="keep" (--keep-answers), '
    "which uses recorded answers without this check"
)


class Dialogue:
    """A conversation. ``said`` are its messages, to which new ones are added. ``shapes`` are the kinds of request,
    ``schema`` is that of the answer. ``max_turns`` limits the answers, without those that were repaired. ``compacts``:
    the conversation is cut if it does not fit. ``mirror`` is a conversation to which the same new messages are
    added."""

    turns = 0  # answers
    cut = UNCUT
    _repairs = 0  # answers that were requested again because they were invalid
    _early: EarlyCalls | None = None
    _measured: int | None = None  # the server's count for ``_measured_at`` messages of ``asked``
    _measured_at = 0
    _answered = False  # since the latest cut
    _cut_from: int | None = None  # tokens before the cut, if the conversation was cut since the latest answer

    def __init__(
        self,
        agent: Agent,
        said: Conversation,
        shapes: Shapes,
        schema: OutputSchema[object] | None,
        *,
        max_turns: int | None = None,
        compacts: bool = False,
        mirror: Conversation | None = None,
    ) -> None:
        self.shapes, self.schema, self.max_turns = shapes, schema, max_turns
        self.said = self.asked = said
        self._agent, self._mirror = agent, mirror
        self._compactor = agent.r.compactor if compacts else None
        self._follows = agent.worker is None  # its messages follow from the row, so they are not recorded
        self._fixed = _fixed(said)
        # The digest of the conversation before each message; for the tool loop, that of its latest request alone. And
        # the number of messages that they cover. The row's key covers the first messages of the tool loop, and its
        # id, which may change, is no part of that.
        self._digests = [agent.trail.asked if self._follows else NO_MESSAGES]
        self._digested = len(said.messages) if self._follows else 0
        # Tool results have images. They are part of ``said`` always, and of ``asked`` unless the model refuses images.
        self._images = not self._follows and any(map(_has_images, said.messages))
        self._hides = self._images and agent.r.sees_images is False
        if self._hides:
            self._rebuild()

    # Asking

    async def ask(self, shape: RequestShape | None = None, *, send: Send | None = None) -> Reply:
        """Return the model's answer to the conversation, and add it. ``shape`` is the kind of request. ``send`` creates
        the question to send, if that is not ``backend.infer(request)``; its ``request`` determines the price."""
        agent = self._agent
        r, trail = agent.r, agent.trail
        agent.check_open()
        if agent.answered is not None:
            agent.record_answer()
        if shape is None:
            shape = self.shapes.later if self.turns else self.shapes.first
        digest, nth, reply, turn = "", 0, None, None
        try:
            if trail.records:
                digest, nth, reply = self._recorded(shape)
            if reply is None:
                self._leave_record()
                fitted, compactor, overflows = shape, self._compactor, 0
                if compactor is not None and compactor.context is not None:
                    fitted = await self._made_to_fit(shape, digest, compactor)
                while reply is None:
                    if self._follows and trail.records and agent.ticket is None:
                        await trail.settle()  # before later steps depend on it
                    turn = self._turn(fitted)
                    question = turn if send is None else send(turn.request)
                    ticket = agent.claim(fitted.model, self)
                    try:
                        reply = await r.dispatcher.ask(question, r.policy, ticket=ticket, observer=turn)
                    except ContextOverflow as error:
                        overflows += 1
                        if compactor is None or overflows > 1:
                            raise
                        fitted, excess = compactor.after(error, shape, self)
                        if fitted is shape and not (excess and await self._compact(excess, digest)):
                            raise
                        agent.tally.again = True
                    except BackendError as error:
                        if send is not None or not self._hide_images(error):
                            raise
                reply = self._noted(reply, digest, nth)
                if not self._follows:
                    await trail.settle()
        except BaseException as error:
            self._gave_up(error, digest, nth, None if turn is None else turn.request)
            raise
        finally:
            if turn is not None and agent.asking is turn.request:
                agent.asking = None
        self._add_answer(reply)
        return reply

    async def _made_to_fit(self, shape: RequestShape, digest: str, compactor: Compactor) -> RequestShape:
        """Cut the conversation if it is too long for the context. Returns the shape with as many tokens for the answer
        as there is room for."""
        if excess := compactor.excess(self):
            await self._compact(excess, digest)
        return shape if shape.max_tokens is None else compactor.fitted(shape, compactor.foreseen(self))

    def _noted(self, reply: Reply, digest: str, nth: int) -> Reply:
        """Record a new answer; the tool loop records it together with its next step. Returns the answer with doubts in
        place of its tokens."""
        agent, trail, replay = self._agent, self._agent.trail, self._agent.replay
        if reply.tokens is not None:
            reply = self._doubted(reply)
        if self._images and agent.r.sees_images is None:
            agent.r.note_images(accepted=not self._hides)
        if self._cut_from is not None:
            self._tell_of_cut(reply, self._cut_from)
        if self._follows:
            agent.answered = (reply, digest) if trail.records else None
        elif replay is not None:
            said = self.said.messages[: self._digested]
            trail.add(replay.add_ask(digest, nth, reply, agent.spent(), said, self._digests, agent.r.shared.messages))
        return reply

    def _doubted(self, reply: Reply) -> Reply:
        """Return the answer with its doubts in place of its tokens."""
        fields, tokens = self._agent.r.doubted, reply.tokens
        if fields is None or tokens is None or reply.tool_calls:
            return replace(reply, tokens=None)
        documents = [] if self.schema is None else documents_in(reply.text)
        asked = [field for field, _ in fields]
        doubts = doubts_of(reply.text, tokens, asked, documents, reasoned=bool(reply.reasoning))
        named = {name: doubts[field.name] for field, name in fields if field.name in doubts}
        return replace(reply, tokens=None, doubts=named)

    def _recorded(self, shape: RequestShape) -> tuple[str, int, Reply | None]:
        """Return the digest and the number of the next request, and its recorded answer or None. Raises ReplayMismatch
        if recorded answers of the tool loop are left and none belongs to this request."""
        agent, digests, first = self._agent, self._digests, self._digested
        replay, new = agent.replay, self.said.messages[first:]
        of_shape = agent.r.digests.of(shape)
        self._digested += len(new)
        if self._follows:
            digests[-1], digest = next_asked(digests[-1], of_shape, new)
        else:
            digests += chain(new, digests[-1])[1:]
            digest = request_digest(digests[-1], of_shape)
        if replay is None:
            return digest, 0, None
        nth, reply, compacted = replay.answer(digest[:WHOLE], self.turns if self._follows else None)
        if compacted is not None:
            self.compact(compacted.cut)
        if reply is not None:
            agent.tally.again = False
        elif self._goes_on:
            then = agent.trail.past.turns[self.turns].asked
            raise ReplayMismatch(MISMATCH.format(difference=difference(then, digest, new, first + 1)))
        return digest, nth, reply

    def _leave_record(self) -> None:
        """Begin to send requests. Raises LimitExceeded if no further request is allowed."""
        agent = self._agent
        agent.trail.fresh = True
        if self._is_out_of_turns:
            raise LimitExceeded(f"after max_turns, {self.max_turns}, the model has not given its last answer")
        limit = agent.r.max_turns
        if not self._follows and limit is not None and agent.tally.turns >= limit:
            raise LimitExceeded(f"after max_turns, {limit}, the worker asks again")
        if self._early is not None:
            self.close()

    def _turn(self, shape: RequestShape) -> TurnCall:
        """Return the next request."""
        agent, limit = self._agent, self.max_turns
        r, job, taken = agent.r, agent.job, agent.tally.turns
        scheduler, number = r.dispatcher.scheduler, taken + 1
        if limit is not None:
            limit += self._repairs
            left = max(0, limit - self.turns)
        else:  # requests beside a loop share the limit of their row
            limit = None if self._follows else r.max_turns
            left = -taken if limit is None else max(0, limit - taken)
        can_call = bool(shape.tools) and shape.tool_choice != "none"
        # No tool runs after the last turn, so none can start early.
        last = limit is not None and left <= 1
        pins = scheduler.parts.pin and can_call and not last
        agent.asking = request = ModelRequest(
            shape,
            self.asked,
            job.job_id,
            left,
            job.index,
            run=r.run,
            turn=number,
            # Turns left, so that the engine serves agents near their end first, and new agents can start. When all have
            # started, this order would delay the end of the batch: then all have the priority of a new agent.
            priority=(limit or 0) if scheduler.forecast.all_started else left,
            pin_seconds=pin_seconds(scheduler.forecast, number - 1) if pins else 0.0,
            last=self._follows and (last or (r.ends_with_answer and not can_call)),
            hints=r.hints,
            traceparent="" if r.traces is None else r.traces.of_turn(r.run, job.index, number),
            usual_tokens=r.answer_tokens // r.answers if r.answers else None,
            seed=job.seed,
            on_begin=r.lead.end if r.lead is not None and r.lead.take() else None,
        )
        calls_tools = self._follows or self.max_turns is not None  # else the worker does
        may_stream = r.early_tools and can_call and not last and calls_tools
        streams = may_stream and not scheduler.is_crowded and r.streaming.wants_next()
        self._early = EarlyCalls(r, job, number) if streams else None
        return TurnCall(r, request, job.index, agent.tally, self._early, self.schema)

    def _gave_up(self, error: BaseException, digest: str, nth: int, request: ModelRequest | None) -> None:
        """Note that a request failed or was cancelled."""
        agent = self._agent
        self.close()
        if agent.replay is not None and digest:
            agent.replay.give_back(digest[:WHOLE], nth)
        if request is not None:
            said = error.text if isinstance(error, BackendError) else "".join(request.said)
            agent.text = said or agent.text
        if self._follows and isinstance(error, JobError):
            agent.failure = error

    def _add_answer(self, reply: Reply) -> None:
        self._append(reply.message())
        self.turns += 1
        self._answered = True
        usage = reply.usage if reply.saved is None else reply.saved
        if usage.prompt_tokens:  # else the earlier count plus an estimate of later messages is more exact
            # Reasoning is not sent back.
            self._measured = usage.prompt_tokens + usage.completion_tokens - usage.reasoning_tokens
            self._measured_at = len(self.asked.messages)
        if self._early is not None and not reply.tool_calls:
            self.close()
        agent = self._agent
        agent.text = reply.text
        if not self._follows:
            agent.latest = self.said, len(self.said.messages)

    @property
    def _is_out_of_turns(self) -> bool:
        return self.max_turns is not None and self.turns >= self.max_turns + self._repairs

    # Calling tools

    async def call(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run these calls of the latest answer and return their results. The model gets them with the next request."""
        agent, r = self._agent, self._agent.r
        agent.check_open()
        agent.record_answer()
        known: dict[int, CallOutcome] = {}
        try:
            if self._is_out_of_turns and not self._goes_on:
                names = ", ".join(dict.fromkeys(call.name for call in calls))
                raise LimitExceeded(f"after max_turns, {self.max_turns}, the model still wants to call {names}")
            if len(calls) > MOST_CALLS:
                self._refuse(calls, TOO_MANY_CALLS.format(count=len(calls), most=MOST_CALLS), known)
            elif r.touches is None:
                await agent.make_calls(calls, known, self._early)
            else:
                async with r.touches.during(r.tools, [call.name for call in calls], agent.progress, self.asked):
                    await agent.make_calls(calls, known, self._early)
        except JobError as error:
            if self._follows:
                agent.failure = error
            raise
        finally:
            texts = self._tell(calls, known)
        return texts

    def refuse(self, calls: Sequence[ToolCall]) -> None:
        """Tell the model that its calls are not run, because no tools were offered. Raises Invalid if the retries are
        used up."""
        names = ", ".join(dict.fromkeys(call.name for call in calls))
        self._begin_repair(Invalid(f"the model calls {names}, although no tools are offered"))
        known: dict[int, CallOutcome] = {}
        self._refuse(calls, NOT_OFFERED, known)
        self._tell(calls, known)

    def _refuse(self, calls: Sequence[ToolCall], text: str, known: dict[int, CallOutcome]) -> None:
        """Give all calls of an answer the same outcome, ``text``, and run none of them."""
        self.close()
        for place, call in enumerate(calls):
            known[place] = self._agent.refuse_call(place, call, text)

    def _tell(self, calls: Sequence[ToolCall], known: Mapping[int, CallOutcome]) -> list[str]:
        """Add the known outcomes to the conversation, in the order of the calls, and return them."""
        texts = []
        for place, call in enumerate(calls):
            if place not in known:
                break
            texts.append(known[place].text)
            self._append(known[place].message(call))
        return texts

    # Answers

    def say(self, text: str) -> None:
        self._append(Message("user", text))

    def read(self, reply: Reply) -> object:
        """Return the answer as a value of the schema; as text without a schema. Raises OutputError."""
        agent = self._agent
        if self.schema is None:
            cut = reply.finish_reason == CUT
            if cut and not agent.r.keeps_cut_text:  # recorded by a session that kept such text
                raise Truncated("the answer was cut at max_tokens", text=reply.text)
            agent.truncated = agent.truncated or cut
            agent.doubts = reply.doubts
            return strip_reasoning(reply.text)
        parsed = parse_output(reply.text, self.schema)
        agent.repaired = self._follows and parsed.repaired
        if reply.doubts is not None:
            agent.doubts = dict.fromkeys(reply.doubts) if parsed.repaired else reply.doubts
        return parsed.value

    def repair(self, error: OutputError) -> None:
        """Show the error to the model. Raises the error if the retries are used up."""
        if self.schema is None:
            raise error
        self._begin_repair(error)
        self.say(repair_prompt(error, self.schema))

    def _begin_repair(self, error: OutputError) -> None:
        agent = self._agent
        r = agent.r
        agent.check_open()
        agent.record_answer()
        if self._repairs >= r.policy.max_retries and not self._goes_on:
            raise error
        if agent.trail.fresh:
            r.emit(AnswerRejected(r.clock(), r.run, agent.job.index, agent.tally.turns, error.type, str(error)))
        self._repairs += 1
        agent.tally.again = True
        drop_frames(error)

    @property
    def _goes_on(self) -> bool:
        """Whether recorded answers of the tool loop are left. Limits on its length do not apply to them."""
        return self._follows and self.turns < len(self._agent.trail.past.turns)

    def close(self) -> None:
        """Cancel the tool calls that started early and that the answer does not contain."""
        if self._early is not None:
            self._early.abandon()
            self._early = None

    def _append(self, message: Message) -> None:
        self.said.append(message)
        if not isinstance(message.content, str) and _has_images(message):
            self._images = True
            self._hides = self._hides or self._agent.r.sees_images is False
        if self.asked is not self.said:
            self.asked.append(_without_images(message) if self._hides else message)
        elif self._hides:
            self._rebuild()
        if self._mirror is not None:
            self._mirror.append(message)

    # Its length

    def foreseen(self) -> int | None:
        """Return the server's count of tokens, plus an estimate of later messages; None without a count."""
        if self._measured is None:
            return None
        tokens, new = self._measured, self.asked.messages[self._measured_at :]
        for message in new:
            text = message.content
            if message.tool_calls or not isinstance(text, str) or not text.isascii():
                tokens += message_tokens(message)
            else:
                tokens += MESSAGE_TOKENS - (-len(text) // BYTES_PER_TOKEN)
        return tokens

    def estimated(self) -> int | None:
        """Return the estimated tokens of the next prompt without its fixed part. None before an answer."""
        return history_tokens(self.own_asked) if self._answered else None

    @property
    def own(self) -> Sequence[Message]:
        """The messages after the fixed part, which is never cut: the messages of all agents, or the system prompt."""
        return self.said.messages[self._fixed :]

    @property
    def own_asked(self) -> Sequence[Message]:
        return self.asked.messages[self._fixed :]

    def compact(self, cut: Cut) -> None:
        self.cut = cut
        self._rebuild()
        self._measured, self._answered = None, False

    def _rebuild(self) -> None:
        """Derive ``asked`` from ``said``."""
        parent, own = self.said.parent, self.cut.apply(self.own)
        fixed = self.said.messages[: self._fixed] if parent is None else []
        self.asked = Conversation([*fixed, *(map(_without_images, own) if self._hides else own)], parent=parent)

    def _hide_images(self, error: BackendError) -> bool:
        """Leave out the images of tool results, because the model may not accept them. Returns whether that may help
        after this error."""
        if not self._images or self._hides or not (isinstance(error, Rejected) or "image" in str(error).lower()):
            return False
        self._hides = True
        self._rebuild()
        self._agent.tally.again = True
        return True

    async def _compact(self, excess: int, digest: str) -> bool:
        """Cut the conversation by about ``excess`` tokens. Returns whether that was possible."""
        agent, compactor = self._agent, self._compactor
        assert compactor is not None
        before = compactor.foreseen(self)
        compacted = await compactor.compact(self, excess, agent.job, agent.tally, "" if self._follows else digest)
        if compacted is None:
            return False
        self._cut_from = before or 0
        agent.trail.add(compacted)
        return True

    def _tell_of_cut(self, reply: Reply, before: int) -> None:
        agent, usage = self._agent, reply.usage
        r = agent.r
        self._cut_from = None
        turn, index = agent.tally.turns, agent.job.index
        r.emit(ContextCompacted(r.clock(), r.run, index, turn, before, usage.prompt_tokens, usage.cached_tokens))


def _has_images(message: Message) -> bool:
    return message.role == "tool" and not isinstance(message.content, str)


def _without_images(message: Message) -> Message:
    """Return a tool result without its images; its text names them."""
    if not _has_images(message):
        return message
    return replace(message, content=f"{content_text(message.content)}\n{NOT_SHOWN}")


def _fixed(conversation: Conversation) -> int:
    """Return the number of messages at the beginning that are never cut."""
    if conversation.parent is not None:
        return len(conversation.parent.messages)
    messages = conversation.messages
    return next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))

"""One turn of an agent for the dispatcher: the request, and the effects of each attempt on the agent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import EllipsisType

from batch_agent.agent.early_calls import EarlyCalls
from batch_agent.agent.resources import Resources
from batch_agent.agent.tally import Tally
from batch_agent.backends.base import ModelRequest
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.dispatcher import ModelCall
from batch_agent.dispatch.policy import Observer
from batch_agent.errors import BackendError, EmptyAnswer, OutputError, Truncated
from batch_agent.events import SchemaUnsupported, StreamingDecided, TurnFailed, TurnFinished, TurnStarted
from batch_agent.messages import Reply, ToolCall, Usage
from batch_agent.outputs.extract import strip_reasoning

CUT = "length"  # finish reason of a text that was cut at max_tokens and is kept


class TurnCall(ModelCall, Observer):
    """A Question and its Observer. ``early`` has the tool calls that start while the answer is streamed. ``schema`` is
    the schema of the answer, if not the run's."""

    __slots__ = ("_early", "_index", "_r", "_schema", "_tally")

    def __init__(
        self,
        r: Resources,
        request: ModelRequest,
        index: int,
        tally: Tally,
        early: EarlyCalls | None,
        schema: OutputSchema[object] | EllipsisType | None = ...,
    ) -> None:
        super().__init__(r.backend, request, early)
        if early is None and request.on_begin is not None:
            self.on_tool_call = _start_nothing
        self._r, self._index, self._tally, self._early = r, index, tally, early
        self._schema = r.schema if isinstance(schema, EllipsisType) else schema

    def shortened(self, cut: Truncated) -> Reply:
        if not self._r.keeps_cut_text or cut.in_call or not _is_begun(cut.text):
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
        tally.leave()
        r.emit(TurnStarted(r.clock(), r.run, self._index, tally.turns + 1))

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
        r.emit(
            TurnFinished(
                r.clock(),
                r.run,
                self._index,
                tally.turns,
                reply.usage,
                seconds,
                reply.first_token,
                cost,
                reply.saved,
                self.request.endpoint,
                reply.model,
            )
        )
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
    """Do nothing; for an answer that is streamed only to detect its beginning."""

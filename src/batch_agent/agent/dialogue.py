"""A conversation of a user's worker with a model: the interface of the tool loop, on the worker's record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batch_agent.agent.early_calls import MOST_CALLS
from batch_agent.agent.loop_context import TOO_MANY_CALLS
from batch_agent.agent.row_work import RowWork
from batch_agent.agent.shapes import Shapes
from batch_agent.backends.base import RequestShape
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.system import schema_instruction
from batch_agent.errors import LimitExceeded, OutputError
from batch_agent.messages import Conversation, Message, Reply, ToolCall
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.repair import repair_prompt
from batch_agent.outputs.validate import parse_output


class Dialogue:
    """``own`` is the row's conversation, which continues here. Or it has messages of the worker; if these have no
    system prompt, the shared messages come before them. Without ``max_turns`` only the row's limit applies."""

    def __init__(
        self,
        work: RowWork,
        shapes: Shapes,
        schema: OutputSchema[object] | None,
        own: Conversation,
        max_turns: int | None,
    ) -> None:
        self.shapes = shapes
        self._work, self._schema, self._max_turns = work, schema, max_turns
        self._own = own if own is work.conversation else None
        self._asked = own if self._own is not None else _with_system(own, work.shared)
        if shapes.schema_in_prompt and schema is not None:
            self._asked = _with_schema(self._asked, schema)
        self._turns = self._repairs = 0

    async def ask(self, shape: RequestShape) -> Reply:
        if self._max_turns is not None and self._turns >= self._max_turns + self._repairs:
            raise LimitExceeded(f"after max_turns, {self._max_turns}, the model has not answered")
        reply = await self._work.answer(shape, self._asked, schema=self._schema)
        self._turns += 1
        self._append(reply.message())
        return reply

    async def call(self, calls: Sequence[ToolCall]) -> list[str]:
        if self._max_turns is not None and self._turns >= self._max_turns + self._repairs:
            names = ", ".join(dict.fromkeys(call.name for call in calls))
            raise LimitExceeded(f"after max_turns, {self._max_turns}, the model still wants to call {names}")
        if len(calls) > MOST_CALLS:
            texts = [TOO_MANY_CALLS.format(count=len(calls), most=MOST_CALLS)] * len(calls)
        else:
            texts = [outcome.text for outcome in await asyncio.gather(*map(self._work.call, calls))]
        for call, text in zip(calls, texts, strict=True):
            self._append(Message("tool", text, tool_call_id=call.id, tool_name=call.name))
        return texts

    def read(self, reply: Reply) -> object:
        if self._schema is None:
            return strip_reasoning(reply.text)
        return parse_output(reply.text, self._schema).value

    def repair(self, error: OutputError) -> None:
        if self._schema is None or self._repairs >= self._work.worker.max_retries:
            raise error
        self._append(Message("user", repair_prompt(error, self._schema)))
        self._repairs += 1

    def _append(self, message: Message) -> None:
        self._asked.append(message)
        if self._own is not None and self._own is not self._asked:
            self._own.append(message)


def _with_system(own: Conversation, shared: Conversation) -> Conversation:
    if any(message.role == "system" for message in own.messages):
        return own
    return Conversation(own.messages, parent=shared)


def _with_schema(conversation: Conversation, schema: OutputSchema[object]) -> Conversation:
    """Return the conversation with the schema in its system prompt."""
    told = schema_instruction(schema.json_text)
    first, *rest = conversation.messages
    if first.role == "system" and isinstance(first.content, str):
        return Conversation([Message("system", f"{first.content}\n\n{told}"), *rest])
    return Conversation([Message("system", told), *conversation.messages])

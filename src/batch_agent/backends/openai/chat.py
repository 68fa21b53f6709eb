"""The ``/chat/completions`` wire: OpenAI, and every server that speaks its dialect (vLLM, SGLang, llama.cpp, Ollama …).

This file writes requests; ``chat_answer`` reads answers, ``schema`` writes the schemas, ``server`` has what these
servers share beside the wire, and ``http/backend`` sends requests. A body is head, messages and tail. The head is
encoded once per RequestShape, each message once per conversation, the shared ones once for all agents; the tail has
fields of one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import echoed, written, written_options
from batch_agent.backends.openai.chat_answer import NOTHING, AnswerStream, opened, read_answer
from batch_agent.backends.openai.providers import STANDARD, Dialect
from batch_agent.backends.openai.server import OpenAIServer
from batch_agent.messages import Message, MessageView, Part, content_json, content_text, images_of


def encode_head(shape: RequestShape, stream: bool, dialect: Dialect = STANDARD) -> bytes:
    """Return the body up to the bracket that opens the messages, included. ``extra_body`` overrides other fields."""
    fields: dict[str, object] = {
        "model": dialect.deployment or shape.model,
        dialect.max_tokens_field: shape.max_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "stop": list(shape.stop) or None,
    }
    if dialect.seed_field is not None:
        fields[dialect.seed_field] = shape.seed
    if shape.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in shape.tools
        ]
        fields["tool_choice"] = _tool_choice(shape.tool_choice)
    if shape.schema is not None:
        form = dialect.schema_form(shape.schema)
        schema = {"name": shape.schema_name, "schema": form.schema, "strict": form.strict}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if stream:
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True} if dialect.stream_options else None
    return written_options(shape, fields, ("messages", "stream"))[:-1] + b',"messages":['


def encode_message(message: Message) -> bytes:
    sealed = NOTHING if message.sealed is None else opened(message.sealed)
    content = message.content if isinstance(message.content, str) else content_json(message.content)
    fields: dict[str, object] = {"role": message.role, "content": content, **sealed.fields}
    if message.tool_calls:
        # Content stays "" beside calls: some chat templates fail on null.
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": echoed(call.arguments)},
                **sealed.of_call(call.id),
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return written(fields)


class ChatView(MessageView):
    """A tool result of this wire is text. Its images follow in a user message, after all results of the same answer."""

    __slots__ = ()
    encode = staticmethod(encode_message)

    def extend(self, messages: Sequence[Message]) -> None:
        shown: list[Part] = []
        for message in messages:
            if shown and message.role != "tool":
                self.pieces.append(encode_message(Message("user", tuple(shown))))
                shown = []
            if message.role == "tool" and (images := images_of(message.content)):
                shown += [f"Images from {message.tool_name or 'the tool'}:", *images]
                message = replace(message, content=content_text(message.content))
            self.pieces.append(encode_message(message))
        if shown:
            self.pieces.append(encode_message(Message("user", tuple(shown))))


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": choice}}
    return choice


class OpenAIBackend(OpenAIServer):
    path = "/chat/completions"
    wire = "chat"
    read_whole = staticmethod(read_answer)
    view = ChatView
    read_stream = AnswerStream

    def write_head(self, shape: RequestShape, streamed: bool) -> bytes:
        return encode_head(shape, streamed, self._dialect)

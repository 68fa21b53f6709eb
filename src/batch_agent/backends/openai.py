"""The ``/chat/completions`` wire: OpenAI, and every server that speaks its dialect (vLLM, SGLang, llama.cpp, Ollama …).

This file writes requests; ``openai_answer`` reads answers, ``openai_schema`` writes the schemas they must keep to, and
``http_backend`` takes the one to the other. A body is head, messages and tail. The head is encoded once per
RequestShape, each message once per conversation, the shared ones once for all agents; the tail is what a turn has of
its own, if anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.http import HttpClient
from batch_agent.backends.http_backend import HttpBackend
from batch_agent.backends.openai_answer import AnswerStream, read_answer
from batch_agent.backends.openai_schema import response_schema
from batch_agent.backends.wire import Naming, echoed, written, written_options
from batch_agent.messages import Conversation, JsonObject, Message, MessageView, Reply, content_json

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True)
class Tail:
    """What one request has of its own beside its messages: fields of the body (a priority, hints) and headers (an id).
    It stands behind the messages, so that the prefix stays the same."""

    fields: JsonObject = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class OpenAIBackend(HttpBackend[bytes]):
    """One server at ``base_url`` (up to and without ``/chat/completions``). ``tail`` says what each request has of its
    own, for servers that take hints."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        capabilities: Capabilities | None = None,
        name: str | None = None,
        max_tokens_field: MaxTokensField = "max_tokens",
        tail: Callable[[ModelRequest], Tail] | None = None,
    ) -> None:
        http = HttpClient(base_url, api_key=api_key, headers=headers)
        chat = http.route("POST", "/chat/completions")
        super().__init__(http, chat, capabilities=capabilities or Capabilities(images=True), name=name)
        self._models = http.route("GET", "/models")
        self._max_tokens_field: MaxTokensField = max_tokens_field
        self._tail = tail

    def write_head(self, shape: RequestShape, streamed: bool) -> bytes:
        return encode_head(shape, streamed, self._max_tokens_field)

    def write_body(self, head: bytes, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        if self._tail is None:
            return join_body(head, request.conversation), None
        tail = self._tail(request)
        return join_body(head, request.conversation, end_body(tail.fields, request.shape)), tail.headers

    def read_whole(self, body: bytes, naming: Naming) -> Reply:
        return read_answer(body, naming)

    def read_stream(
        self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]
    ) -> AnswerStream:
        return AnswerStream(naming, on_tool_call, clock, said)

    async def models(self) -> list[str]:
        body = await self._http.send(self._models) or b""
        names = _model_names(body)
        if names is None:
            shown = self._models.faults.clean(body.decode("utf-8", "replace"))
            raise self._models.faults.bad(f"the answer is not a list of models: {shown}")
        return names


def encode_head(shape: RequestShape, stream: bool, max_tokens_field: MaxTokensField) -> bytes:
    """All of a body up to and with the bracket that opens the messages. ``extra_body`` has the last word."""
    fields: dict[str, object] = {
        "model": shape.model,
        max_tokens_field: shape.max_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "seed": shape.seed,
        "stop": list(shape.stop) or None,
    }
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
        fields["response_format"] = {"type": "json_schema", "json_schema": response_schema(shape)}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return written_options(shape, fields, ("messages", "stream"))[:-1] + b',"messages":['


def encode_message(message: Message) -> bytes:
    fields: dict[str, object] = {"role": message.role, "content": content_json(message.content)}
    if message.tool_calls:
        # Content stays "" beside calls: null is what some chat templates stumble over.
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": echoed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return written(fields)


class ChatView(MessageView):
    __slots__ = ()
    encode = staticmethod(encode_message)


def join_body(head: bytes, conversation: Conversation, end: bytes = b"]}") -> bytes:
    return b"".join((head, b",".join(conversation.view(ChatView).pieces), end))


def end_body(fields: JsonObject, shape: RequestShape) -> bytes:
    """What closes the messages, with the fields of a request's own. The user's extra_body has the last word."""
    own = {name: value for name, value in fields.items() if name not in shape.extra_body}
    return b"]," + orjson.dumps(own)[1:] if own else b"]}"


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": choice}}
    return choice


def _model_names(body: bytes) -> list[str] | None:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    entries = document.get("data") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return None
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

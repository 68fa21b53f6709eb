"""The ``/chat/completions`` wire: OpenAI, and every server that speaks its dialect (vLLM, SGLang, llama.cpp, Ollama …).

This file writes requests; ``openai_answer`` reads answers, ``openai_schema`` writes the schemas they must keep to, and
``http`` moves the bytes. A body is head, messages and tail. The head is encoded once per RequestShape, each message
once per conversation, the shared ones once for all agents; the tail is what a turn has of its own, if anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self
from weakref import WeakKeyDictionary

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.generating import Generates
from batch_agent.backends.http import HttpClient
from batch_agent.backends.openai_answer import AnswerStream, read_answer
from batch_agent.backends.openai_schema import response_schema
from batch_agent.backends.transport import Transport
from batch_agent.errors import SpecError
from batch_agent.messages import Content, Conversation, JsonObject, Message, MessageView, Reply, content_json

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True)
class Tail:
    """What one request has of its own beside its messages: fields of the body (a priority, hints) and headers (an id).
    It stands behind the messages, so that the prefix stays the same."""

    fields: JsonObject = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class OpenAIBackend(Generates):
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
        transport: Transport | None = None,
    ) -> None:
        self._http = HttpClient(base_url, api_key=api_key, headers=headers, transport=transport)
        self._chat = self._http.route("POST", "/chat/completions")
        self._models = self._http.route("GET", "/models")
        self._capabilities = capabilities or Capabilities(images=True)
        self._name = name or self._http.base_url
        self._max_tokens_field: MaxTokensField = max_tokens_field
        self._tail = tail
        self._heads: WeakKeyDictionary[RequestShape, dict[bool, bytes]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"OpenAIBackend({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    def check(self, shape: RequestShape) -> None:
        encode_head(shape, False, self._max_tokens_field)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        faults = self._chat.faults
        turn = len(request.conversation.messages)
        stream = None
        if on_tool_call is not None and self._capabilities.streaming:
            stream = AnswerStream(faults, turn, on_tool_call, asyncio.get_running_loop().time, request.said)
        tail = None if self._tail is None else self._tail(request)
        body = self._body(request, stream is not None, tail)
        headers = None if tail is None else tail.headers
        answer = await self._http.send(self._chat, body, stream.feed if stream else None, headers)
        if answer is None and stream is not None:
            return stream.finish()
        # Also where a stream was asked for and the server, which is allowed to, sent the whole at once.
        reply = read_answer(answer or b"", faults, turn)
        if on_tool_call is not None:
            for call in reply.tool_calls:
                on_tool_call(call)
        return reply

    async def models(self) -> list[str]:
        body = await self._http.send(self._models) or b""
        names = _model_names(body)
        if names is None:
            shown = self._models.faults.clean(body.decode("utf-8", "replace"))
            raise self._models.faults.bad(f"the answer is not a list of models: {shown}")
        return names

    def _body(self, request: ModelRequest, stream: bool, tail: Tail | None) -> bytes:
        heads = self._heads.get(request.shape)
        if heads is None:
            heads = self._heads[request.shape] = {}
        head = heads.get(stream)
        if head is None:
            head = heads[stream] = encode_head(request.shape, stream, self._max_tokens_field)
        if tail is None:
            return join_body(head, request.conversation)
        # The user's extra_body has the last word here too.
        own = {name: value for name, value in tail.fields.items() if name not in request.shape.extra_body}
        return join_body(head, request.conversation, own)


def encode_head(shape: RequestShape, stream: bool, max_tokens_field: MaxTokensField) -> bytes:
    """All of a body up to and with the bracket that opens the messages. ``extra_body`` has the last word."""
    for name in ("messages", "stream"):
        if name in shape.extra_body:
            raise SpecError(f"extra_body cannot set {name!r}: it is what a request is made of")
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
    fields = {name: value for name, value in fields.items() if value is not None} | dict(shape.extra_body)
    try:
        return orjson.dumps(fields)[:-1] + b',"messages":['
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def encode_message(message: Message) -> bytes:
    fields: dict[str, object] = {"role": message.role, "content": content_json(message.content)}
    if message.tool_calls:
        # Content stays "" beside calls: null is what some chat templates stumble over.
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _echoed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        return orjson.dumps(fields | {"content": content_json(_sendable(message.content))})


class ChatView(MessageView):
    __slots__ = ()
    encode = staticmethod(encode_message)


def join_body(head: bytes, conversation: Conversation, fields: JsonObject | None = None) -> bytes:
    """``fields`` come last, and must be none of the head's."""
    end = b"]," + orjson.dumps(fields)[1:] if fields else b"]}"
    return b"".join((head, b",".join(conversation.view(ChatView).pieces), end))


def _sendable(content: Content) -> Content:
    """Without halves of surrogate pairs, from a file read with errors ignored: no JSON reader would take them."""
    if isinstance(content, str):
        return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return tuple(
        part.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(part, str) else part
        for part in content
    )


def _echoed(arguments: str) -> str:
    """A model's arguments as servers take them back: they parse them, and refuse a conversation with a broken one. What
    the model really wrote is in the tool's error message."""
    try:
        return arguments if isinstance(orjson.loads(arguments), dict) else "{}"
    except orjson.JSONDecodeError:
        return "{}"


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

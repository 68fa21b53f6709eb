"""The ``/chat/completions`` wire: OpenAI, and every server that speaks its dialect (vLLM, SGLang, llama.cpp, Ollama …).

This file writes requests; ``openai_answer`` reads answers, ``http`` moves the bytes. A body is joined from parts that
are each encoded once: the head per RequestShape, each message per conversation, the shared ones once for all agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self
from weakref import WeakKeyDictionary

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.http import HttpClient
from batch_agent.backends.openai_answer import AnswerStream, read_answer
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject, Message, Reply

MaxTokensField = Literal["max_tokens", "max_completion_tokens"]

# What OpenAI's strict mode is known to take; a schema with anything else is sent without it rather than refused.
_STRICT_KEYWORDS = frozenset(
    [
        "type",
        "title",
        "description",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "anyOf",
        "$ref",
        "$defs",
    ]
)


class OpenAIBackend:
    """One server at ``base_url`` (up to and without ``/chat/completions``)."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        capabilities: Capabilities | None = None,
        name: str | None = None,
        max_tokens_field: MaxTokensField = "max_tokens",
    ) -> None:
        self._http = HttpClient(base_url, api_key=api_key, headers=headers)
        self._chat = self._http.route("POST", "/chat/completions")
        self._models = self._http.route("GET", "/models")
        self._capabilities = capabilities or Capabilities()
        self._name = name or self._http.base_url
        self._max_tokens_field: MaxTokensField = max_tokens_field
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
            stream = AnswerStream(faults, turn, on_tool_call, asyncio.get_running_loop().time)
        body = self._body(request, stream is not None)
        answer = await self._http.send(self._chat, body, stream.feed if stream else None)
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

    def _body(self, request: ModelRequest, stream: bool) -> bytes:
        heads = self._heads.get(request.shape)
        if heads is None:
            heads = self._heads[request.shape] = {}
        head = heads.get(stream)
        if head is None:
            head = heads[stream] = encode_head(request.shape, stream, self._max_tokens_field)
        return b"".join((head, b",".join(request.conversation.encoded(encode_message)), b"]}"))


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
        fields["response_format"] = {"type": "json_schema", "json_schema": _response_schema(shape)}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    fields = {name: value for name, value in fields.items() if value is not None} | dict(shape.extra_body)
    try:
        return orjson.dumps(fields)[:-1] + b',"messages":['
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def encode_message(message: Message) -> bytes:
    fields: dict[str, object] = {"role": message.role, "content": message.content}
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
        # Half a surrogate pair, from a file read with errors ignored: no JSON reader would take it.
        content = message.content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return orjson.dumps(fields | {"content": content})


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


def _response_schema(shape: RequestShape) -> JsonObject:
    """The schema in the form that strict mode takes, where it has one: every object closed, every property required.
    Whatever that form accepts, the user's schema accepts too."""
    closed = _closed(shape.schema)
    strict = isinstance(closed, dict) and closed.get("type") == "object" and _strict_node(closed)
    return {"name": shape.schema_name, "schema": closed if strict else shape.schema, "strict": strict}


def _closed(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_closed(part) for part in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _closed(part) if name in ("items", "anyOf") else part for name, part in node.items()}
    closed.pop("default", None)
    for name in ("properties", "$defs"):
        if isinstance(parts := closed.get(name), dict):
            closed[name] = {key: _closed(part) for key, part in parts.items()}
    if isinstance(properties := closed.get("properties"), dict):
        closed["required"] = list(properties)
        closed.setdefault("additionalProperties", False)
    return closed


def _strict_node(node: JsonValue) -> bool:
    if not isinstance(node, dict) or not node.keys() <= _STRICT_KEYWORDS:
        return False
    properties, required, definitions = node.get("properties", {}), node.get("required", []), node.get("$defs", {})
    if not (isinstance(properties, dict) and isinstance(required, list) and isinstance(definitions, dict)):
        return False
    is_object = node.get("type") == "object" or "properties" in node
    if is_object and (node.get("additionalProperties") is not False or set(map(str, required)) != properties.keys()):
        return False
    alternatives = node.get("anyOf", [])
    items = [node["items"]] if "items" in node else []
    children = [*properties.values(), *definitions.values(), *items]
    return isinstance(alternatives, list) and all(map(_strict_node, [*children, *alternatives]))


def _model_names(body: bytes) -> list[str] | None:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    entries = document.get("data") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return None
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

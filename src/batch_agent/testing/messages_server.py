"""``MessagesServer``: a scripted server with Anthropic's ``/v1/messages`` that refuses what the API refuses.

Scripts and replies are those of ScriptedServer. It has a prompt cache with the API's rules, so that usage shows the
effect of a client's ``cache_control`` marks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, cast

import orjson
from pydantic import JsonValue

from batch_agent.backends.anthropic.answer import OpenBlock
from batch_agent.backends.http.wire import json_of, mapping, objects_of
from batch_agent.backends.simulated.tokens import count_tokens, encode
from batch_agent.door import RequestRefused
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.messages import JsonObject, Usage
from batch_agent.testing.replies import Say, ScriptedReply
from batch_agent.testing.server import ScriptedServer
from batch_agent.testing.wire import (
    CallPiece,
    End,
    Piece,
    ReasoningPiece,
    Request,
    Script,
    TextPiece,
    Wire,
    content_text,
)

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class MessagesRequest(Request):
    """A request of ``/v1/messages`` as a script sees it."""

    __slots__ = ()
    dialect = MessagesDialect()

    @property
    def blocks(self) -> list[list[JsonObject]]:
        """Return the blocks of each message."""
        return [blocks_of(message.get("content")) for message in self.messages]

    @property
    def text(self) -> str:
        last = self.blocks[-1] if self.blocks else []
        return "".join(content_text(block.get("content")) + str(block.get("text") or "") for block in last)


class MessagesWire(Wire):
    """The format of answers of Anthropic's ``/v1/messages``. The pieces of an answer are those of ``wire``; here they
    become blocks, one after another, and thoughts get a signature."""

    def __init__(self, request: MessagesRequest) -> None:
        super().__init__(request, model=request.model, fingerprint="scripted")
        self._index = -1  # of the open block
        self._open: JsonObject | None = None
        self._thought = ""
        self._stop = "end_turn"

    def opening(self) -> list[bytes]:
        message = self._message([], None, usage_object(Usage()))
        return [self.sse({"type": "message_start", "message": message}), self.sse({"type": "ping"})]

    def event(self, piece: Piece) -> bytes | None:
        return b"".join(map(self.sse, self._events(piece)))

    def closing(self) -> list[bytes]:
        return [self.sse({"type": "message_stop"})]

    def body(self, pieces: Iterable[Piece]) -> bytes:
        blocks: list[OpenBlock] = []
        usage: JsonValue = None
        for event in (event for piece in pieces for event in self._events(piece)):
            delta = mapping(event.get("delta"))
            if "content_block" in event:
                blocks.append(OpenBlock(mapping(event["content_block"])))
            elif "usage" in event:
                usage = event["usage"]
            elif delta:
                blocks[-1].extend(delta)
        whole = [block.whole() for block in blocks]
        content = [{**block, "input": json_of(said) or {}} if "input" in block else block for block, said in whole]
        return orjson.dumps(self._message([*content], self._stop, usage))

    def error(self, status: int, message: str, param: str | None = None) -> JsonObject:
        return error_object(status, message)

    def sse(self, value: JsonValue) -> bytes:
        kind = value.get("type") if isinstance(value, dict) else None
        return b"event: %b\ndata: %b\n\n" % (str(kind).encode(), orjson.dumps(value))

    def _message(self, content: list[JsonValue], stop: str | None, usage: JsonValue) -> JsonObject:
        told: JsonObject = {"stop_reason": stop, "stop_sequence": None, "usage": usage}
        head: JsonObject = {"id": f"msg_{self.request.number}", "type": "message", "role": "assistant"}
        return {**head, "model": self.request.model, "content": content, **told}

    def _events(self, piece: Piece) -> Iterator[JsonObject]:
        match piece:
            case TextPiece(text):
                yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningPiece(text):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._thought += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallPiece(_, arguments, call_id, name):
                if call_id is not None:
                    yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}}, again=True)
                if arguments:
                    yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            case End(reason):
                yield from self._end()
                self._stop = _STOPS.get(reason, reason)
            case Usage():
                delta: JsonObject = {"stop_reason": self._stop, "stop_sequence": None}
                yield {"type": "message_delta", "delta": delta, "usage": usage_object(piece)}

    def _begin(self, block: JsonObject, *, again: bool = False) -> Iterator[JsonObject]:
        if not again and self._open is not None and self._open["type"] == block["type"]:
            return
        yield from self._end()
        self._index += 1
        self._open = block
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _end(self) -> Iterator[JsonObject]:
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature(self._thought)})
            self._thought = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def signature(thought: str) -> str:
    """Return the signature that shows that a thought is sent back unchanged."""
    return "signed-" + hashlib.sha256(thought.encode()).hexdigest()[:24]


def error_object(status: int, message: str) -> JsonObject:
    return MessagesRequest.dialect.error(RequestRefused(status, message))


def usage_object(usage: Usage) -> JsonObject:
    """Return the usage; ``input_tokens`` excludes tokens read from or written to the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def blocks_of(content: JsonValue) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return objects_of(content)


LOOK_BACK = 20  # blocks before a mark that are searched for an older entry

VERSIONS = ("2023-06-01", "2026-10-21")
MOST_MARKS = 4
_SAMPLING = {"temperature", "top_p", "top_k"}
_FIELDS = {
    *("model", "max_tokens", "messages", "system", "tools", "tool_choice", "stop_sequences", "stream", "metadata"),
    *("thinking", "output_config", "service_tier", "cache_control", "container", "inference_geo", "speed"),
}
_BLOCKS = {
    "text": {"text", "cache_control", "citations"},
    "image": {"source", "cache_control"},
    "document": {"source", "title", "context", "citations", "cache_control"},
    "tool_use": {"id", "name", "input", "cache_control", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "server_tool_use": {"id", "name", "input", "cache_control"},
    "web_search_tool_result": {"tool_use_id", "content", "cache_control"},
}
_TOOL = {"name", "description", "input_schema", "cache_control", "type", "strict", "eager_input_streaming"}
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_UNKNOWN_KEYWORDS = re.compile(r"(min|max)(imum|Length|Properties)|exclusive\w+|multipleOf|uniqueItems|maxItems|oneOf")


class PromptCache:
    """Entries stored at marks, and found by later requests with the same prefix."""

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest
        self._kept: set[bytes] = set()

    def usage(self, body: JsonObject) -> Usage:
        """Return the tokens of the prompt: all, those found, and those newly stored."""
        digest = hashlib.sha256(str(body.get("model")).encode())
        tokens = 0
        places = []
        for block in _in_order(body):
            bare = orjson.dumps({name: part for name, part in block.items() if name != "cache_control"})
            digest.update(bare)
            tokens += count_tokens(encode(bare.decode()))
            places.append((digest.digest(), tokens, "cache_control" in block))
        marks = [place for place, (_, length, marked) in enumerate(places) if marked and length >= self._smallest]
        near = [place for mark in marks for place in range(max(0, mark - LOOK_BACK), mark + 1)]
        read = max((places[place][1] for place in near if places[place][0] in self._kept), default=0)
        self._kept |= {places[mark][0] for mark in marks}
        written = max((places[mark][1] for mark in marks), default=read)
        return Usage(prompt_tokens=tokens, cached_tokens=read, cache_write_tokens=max(0, written - read))


class MessagesServer(ScriptedServer):
    """``cached_from``: the shortest prefix that is cached, in tokens."""

    paths: ClassVar[Sequence[str]] = ("/v1/messages",)
    request_type: ClassVar[type[Request]] = MessagesRequest

    def __init__(
        self,
        script: Script | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Sequence[str] | None = None,
        api_key: str | None = None,
        metrics: Callable[[], str] | None = None,
        cached_from: int = 1024,
    ) -> None:
        super().__init__(script, host=host, port=port, models=models, api_key=api_key, metrics=metrics)
        self._cache = PromptCache(cached_from)
        self._thoughts: dict[str, list[JsonObject]] = {}  # that led to a call, by its id

    @property
    def backend_url(self) -> str:
        return f"anthropic://{self.address}"

    def check(self, request: Request) -> None:
        check_messages(cast(MessagesRequest, request), self._models, self._thoughts)

    def wire(self, request: Request) -> Wire:
        return MessagesWire(cast(MessagesRequest, request))

    def error(self, status: int, message: str, param: str | None = None) -> JsonObject:
        return error_object(status, message)

    def given_key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key") or super().given_key(headers)

    def model_card(self, name: str) -> JsonObject:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    def model_list(self, cards: list[JsonObject]) -> JsonObject:
        last = cards[-1]["id"] if cards else None
        return {"data": [*cards], "has_more": False, "first_id": cards[0]["id"] if cards else None, "last_id": last}

    async def respond(self, request: Request) -> ScriptedReply:
        reply = await super().respond(request)
        prompt = self._cache.usage(request.body)
        if not isinstance(reply, Say):
            return reply
        if reply.reasoning:
            thought: JsonObject = {"type": "thinking", "thinking": reply.reasoning}
            block = thought | {"signature": signature(reply.reasoning)}
            for index, use in enumerate(reply.calls):
                self._thoughts[use.as_call(request.number, index).id] = [block]
        said = reply.text + reply.reasoning + "".join(str(use.arguments) for use in reply.calls)
        spoken = Usage(0, 0, count_tokens(encode(said)) + 1, count_tokens(encode(reply.reasoning)))
        given: dict[str, Any] = {each.name: getattr(reply, each.name) for each in fields(Say)}  # also of CallTools
        return Say(**{**given, "usage": prompt + spoken if reply.usage is None else reply.usage})


def _in_order(body: JsonObject) -> Iterator[JsonObject]:
    """Yield the blocks in the API's order: tools, system, messages."""
    yield from blocks_of(body.get("tools"))
    yield from blocks_of(body.get("system"))
    for message in objects_of(body.get("messages")):
        for block in blocks_of(message.get("content")):
            yield {"role": message.get("role"), **block}


def check_messages(
    request: MessagesRequest, models: list[str] | None, thoughts: Mapping[str, list[JsonObject]]
) -> None:
    """Raise RequestRefused for what the API refuses. ``thoughts`` are those that led to a call, by the call's id."""
    body, version = request.body, request.headers.get("anthropic-version", "")
    if version not in VERSIONS:
        raise _wrong(f"anthropic-version: {version!r} is not a valid version")
    _check_fields(body, version)
    if models is not None and request.model not in models:
        raise RequestRefused(404, f"model: {request.model}")
    _check_tools(body)
    _check_conversation(request, thoughts)
    _check_thinking(body)
    if request.schema is not None:
        _check_schema(request.schema)


def _wrong(message: str) -> RequestRefused:
    return RequestRefused(400, message)


def _check_fields(body: JsonObject, version: str) -> None:
    allowed = _FIELDS | (_SAMPLING if version == VERSIONS[0] else set())
    for name in body:
        if name not in allowed:
            raise _wrong(f"{name}: Extra inputs are not permitted")
    for name in ("model", "max_tokens", "messages"):
        if name not in body:
            raise _wrong(f"{name}: Field required")
    limit, temperature = body["max_tokens"], body.get("temperature", 1)
    if type(limit) is not int or limit < 1:
        raise _wrong("max_tokens: Input should be greater than or equal to 1")
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 1:
        raise _wrong("temperature: range: 0..1")
    stops = body.get("stop_sequences") or []
    if not isinstance(stops, list) or any(not str(stop).strip() for stop in stops):
        raise _wrong("stop_sequences: each stop sequence must contain non-whitespace")
    marks = sum(1 for node in _nodes(body) if "cache_control" in node)
    if marks > MOST_MARKS:
        raise _wrong(f"A maximum of {MOST_MARKS} blocks with cache_control may be provided. Found {marks}.")
    system = body.get("system")
    for block in blocks_of(system) if isinstance(system, list) else []:
        if block.get("type") != "text":
            raise _wrong("system: only text blocks are allowed")
        _check_block(block, "system")


def _check_tools(body: JsonObject) -> None:
    tools = [tool for tool in blocks_of(body.get("tools")) if tool.get("type", "custom") == "custom"]
    names = [str(tool.get("name")) for tool in blocks_of(body.get("tools"))]
    for tool in tools:
        for name in tool.keys() - _TOOL:
            raise _wrong(f"tools.0.custom.{name}: Extra inputs are not permitted")
        schema = tool.get("input_schema")
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise _wrong("tools.0.custom.input_schema.type: Input should be 'object'")
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", str(tool.get("name"))):
            raise _wrong("tools.0.custom.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'")
    if len(set(names)) < len(names):
        raise _wrong("tools: Tool names must be unique.")
    choice = body.get("tool_choice")
    if choice is None:
        return
    if not names:
        raise _wrong("tool_choice may only be specified while providing tools")
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "any", "tool", "none"):
        raise _wrong("tool_choice: Input tag does not match any of the expected tags: 'any', 'auto', 'none', 'tool'")
    if choice["type"] == "tool" and choice.get("name") not in names:
        raise _wrong(f"Tool '{choice.get('name')}' not found in provided tools")


def _check_conversation(request: MessagesRequest, thoughts: Mapping[str, list[JsonObject]]) -> None:
    if not request.messages:
        raise _wrong("messages: at least one message is required")
    owed: set[str] = set()
    used: set[str] = set()
    for place, (message, blocks) in enumerate(zip(request.messages, request.blocks, strict=True)):
        where, role = f"messages.{place}", message.get("role")
        if role not in ("user", "assistant") or (place == 0 and role != "user"):
            raise _wrong(f'{where}: first message must use the "user" role, and others "user" or "assistant"')
        if not blocks:
            raise _wrong(f"{where}: all messages must have non-empty content")
        for block in blocks:
            _check_block(block, where)
        if role == "user":
            owed = _check_results(blocks, owed, where)
        elif owed:
            raise _wrong(_unanswered(where, owed))
        else:
            owed = _check_calls(blocks, used, thoughts, where)
    if owed:
        raise _wrong(_unanswered(f"messages.{len(request.messages)}", owed))
    text = request.blocks[-1][-1].get("text")
    if request.messages[-1].get("role") == "assistant" and isinstance(text, str) and text != text.rstrip():
        raise _wrong("messages: final assistant content cannot end with trailing whitespace")


def _check_results(blocks: list[JsonObject], owed: set[str], where: str) -> set[str]:
    results = [str(block.get("tool_use_id")) for block in blocks if block["type"] == "tool_result"]
    for call in results:
        if call not in owed:
            raise _wrong(f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {call}")
    if any(block["type"] != "tool_result" for block in blocks[: len(results)]) or owed - set(results):
        raise _wrong(_unanswered(where, owed))
    return set()


def _check_calls(
    blocks: list[JsonObject], used: set[str], thoughts: Mapping[str, list[JsonObject]], where: str
) -> set[str]:
    calls = [str(block.get("id")) for block in blocks if block["type"] == "tool_use"]
    for call in calls:
        if call in used or not _ID.fullmatch(call):
            raise _wrong(f"{where}: `tool_use` ids must be unique, and match '^[a-zA-Z0-9_-]+$'")
        used.add(call)
        known = thoughts.get(call, [])
        if blocks[: len(known)] != known:
            raise _wrong(f"{where}.content.0: Expected `thinking` or `redacted_thinking`, as it was, before `tool_use`")
    return set(calls)


def _unanswered(where: str, owed: set[str]) -> str:
    names = ", ".join(sorted(owed))
    return f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after: {names}"


def _check_block(block: JsonObject, where: str) -> None:
    kind = block.get("type")
    allowed = _BLOCKS.get(str(kind))
    if allowed is None:
        raise _wrong(f"{where}: Input tag {kind!r} does not match any of the expected tags")
    for name in block.keys() - allowed - {"type"}:
        raise _wrong(f"{where}.{kind}.{name}: Extra inputs are not permitted")
    if kind == "text" and not str(block.get("text") or "").strip():
        raise _wrong(f"{where}: text content blocks must be non-empty and contain non-whitespace text")
    if kind == "thinking" and block.get("signature") != signature(str(block.get("thinking"))):
        raise _wrong(f"{where}: Invalid `signature` in `thinking` block")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise _wrong(f"{where}.tool_use.input: Input should be a valid dictionary")
    if kind == "image":
        source = block.get("source")
        if not isinstance(source, dict) or source.get("type") not in ("base64", "url", "file"):
            raise _wrong(f"{where}.image.source: Input tag does not match 'base64', 'url' or 'file'")
        if source["type"] == "base64" and source.get("media_type") not in _IMAGES:
            raise _wrong(f"{where}.image.source.base64.media_type: Input should be one of {', '.join(sorted(_IMAGES))}")
    if kind == "tool_result" and isinstance(content := block.get("content"), list):
        for inner in blocks_of(content):
            _check_block(inner, f"{where}.tool_result")


def _check_thinking(body: JsonObject) -> None:
    thinking, choice = body.get("thinking"), body.get("tool_choice")
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return
    budget, limit = thinking.get("budget_tokens"), body["max_tokens"]
    if type(budget) is not int or budget < 1024:
        raise _wrong("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
    if isinstance(limit, int) and budget >= limit:
        raise _wrong("`max_tokens` must be greater than `thinking.budget_tokens`.")
    if body.get("temperature", 1) != 1:
        raise _wrong("`temperature` may only be set to 1 when thinking is enabled.")
    if isinstance(choice, dict) and choice.get("type") in ("any", "tool"):
        raise _wrong("Thinking may not be enabled when tool_choice forces tool use.")


def _check_schema(schema: JsonObject) -> None:
    for node in _nodes(schema):
        if node.get("type") == "object" and node.get("additionalProperties") is not False:
            raise _wrong("output_config.format.schema: For 'object' type, 'additionalProperties' must be false")
        if "$ref" in node and len(node.keys() - {"$defs"}) > 1:
            raise _wrong("output_config.format.schema: '$ref' stands alone")
        for name in node:
            if _UNKNOWN_KEYWORDS.fullmatch(name) and not isinstance(node[name], dict):
                raise _wrong(f"output_config.format.schema: property '{name}' is not supported")
        if node.get("minItems", 0) not in (0, 1):
            raise _wrong("output_config.format.schema: For 'array' type, 'minItems' values other than 0 or 1")


def _nodes(value: JsonValue) -> Iterator[JsonObject]:
    """Yield all objects inside, except the arguments of tool calls."""
    if isinstance(value, dict):
        yield value
        for name, part in value.items():
            if name != "input":
                yield from _nodes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nodes(part)

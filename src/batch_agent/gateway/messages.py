"""The dialect of Anthropic's ``/v1/messages``: reads requests, writes answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import echoed_object
from batch_agent.door import RequestRefused
from batch_agent.gateway.client_request import (
    BadRequest,
    ClientRequest,
    Envelope,
    RequestKind,
    is_billing,
    joined,
    mapping_of,
    number,
    objects,
    own_document,
    sse,
    string,
    texts,
    whole,
)
from batch_agent.messages import Content, Image, JsonObject, Message, Part, Reply, ToolCall, ToolSpec, Usage

STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "function_call": "tool_use", "length": "max_tokens"} | {
    "max_output_tokens": "max_tokens"
}
KNOWN_STOPS = {"end_turn", "tool_use", "max_tokens", "stop_sequence", "pause_turn", "refusal"}
SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset")  # run by the provider
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesDialect:
    wire = "anthropic"

    # Requests

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        lost: list[str] = []
        form = mapping_of(mapping_of(body.get("output_config"), "output_config").get("format"), "output_config")
        form = form or mapping_of(body.get("output_format"), "output_format")
        schema = form.get("schema")
        shape = RequestShape(
            model=string(body.get("model"), "model") or model,
            max_tokens=whole(body, "max_tokens"),
            temperature=number(body, "temperature"),
            top_p=number(body, "top_p"),
            stop=texts(body.get("stop_sequences"), "stop_sequences"),
            tools=tuple(_tools(body, lost)),
            tool_choice=_tool_choice(mapping_of(body.get("tool_choice"), "tool_choice")),
            schema=schema if isinstance(schema, dict) else None,
        )
        return RequestKind(shape, lost)

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        said = objects(body.get("messages"), "messages")
        if not said:
            raise BadRequest("messages: at least one message is required", "messages")
        return [*_system(body.get("system")), *(part for message in said for part in _messages(message, lost))]

    # Answers

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        if (own := own_document(reply, self.wire)) is not None:
            return own
        stop = STOPS.get(reply.finish_reason, reply.finish_reason)
        return {
            "id": f"msg_{envelope.name}",
            "type": "message",
            "role": "assistant",
            "model": envelope.model,
            "content": [*_blocks(reply)],
            "stop_reason": stop if stop in KNOWN_STOPS else "end_turn",
            "stop_sequence": None,
            "usage": _written_usage(reply.usage),
        }

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        usage = mapping_of(document.get("usage"), "usage")
        start = {**document, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event({"type": "message_start", "message": {**start, "usage": {**usage, "output_tokens": 0}}})
        for index, block in enumerate(objects(document.get("content"), "content")):
            opened, deltas = _opened(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": opened})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        end: JsonObject = {name: document.get(name) for name in ("stop_reason", "stop_sequence")}
        yield _event({"type": "message_delta", "delta": end, "usage": usage})
        yield _event({"type": "message_stop"})

    def error(self, refused: RequestRefused) -> JsonObject:
        status, kind = refused.status, refused.kind
        if kind not in KINDS.values():  # its clients know only these
            kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}, "request_id": None}

    def error_event(self, refused: RequestRefused) -> bytes:
        return _event(self.error(refused))


def _event(value: JsonObject) -> bytes:
    return sse(value, str(value["type"]))


# Requests


def _system(system: JsonValue) -> Iterator[Message]:
    """Yield one system message, because chat templates accept only one. A line that differs from session to session is
    removed: it would break the server's prefix cache."""
    if isinstance(system, str):
        text = system
    else:
        blocks = [block for block in objects(system, "system") if not is_billing(block)]
        text = "\n\n".join(string(block.get("text"), "system") for block in blocks)
    if text:
        yield Message("system", text)


def _messages(message: JsonObject, lost: list[str]) -> Iterator[Message]:
    """Yield the messages; tool results come first, as in the request."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"a message has the role {role!r}: it must be user or assistant", "messages")
    plain: list[JsonObject] = [{"type": "text", "text": content}] if isinstance(content, str) else []
    blocks = plain or objects(content, "content")
    parts: list[Part] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                arguments = orjson.dumps(block.get("input") or {}).decode()
                calls.append(ToolCall(string(block.get("id"), "id"), string(block.get("name"), "name"), arguments))
            case "tool_result":
                yield Message("tool", _result(block, lost), (), string(block.get("tool_use_id"), "tool_use_id"))
            case "thinking":
                thoughts.append(string(block.get("thinking"), "thinking"))
            case "redacted_thinking":
                pass  # no other wire can read it
            case _:
                parts += _parts(block, lost)
    if role == "assistant":
        yield Message("assistant", joined(parts), tuple(calls), reasoning="".join(thoughts))
    elif parts:
        yield Message("system" if role == "system" else "user", joined(parts))


def _parts(block: JsonObject, lost: list[str]) -> list[Part]:
    match block.get("type"):
        case "text":
            return [string(block.get("text"), "text")]
        case "image":
            source = mapping_of(block.get("source"), "source")
            if source.get("type") == "base64":
                kind = string(source.get("media_type"), "media_type")
                data = string(source.get("data"), "data")
                return [Image(f"data:{kind};base64,{data}")]
            if source.get("type") == "url":
                return [Image(string(source.get("url"), "url"))]
        case "document":
            source = mapping_of(block.get("source"), "source")
            if source.get("type") == "text":
                return [string(source.get("data"), "data")]
    lost.append(f"a block of the type {block.get('type')!r}")
    return []


def _result(block: JsonObject, lost: list[str]) -> Content:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part for inner in objects(content, "content") for part in _parts(inner, lost)]
    return joined(parts)


def _tools(body: JsonObject, lost: list[str]) -> Iterator[ToolSpec]:
    for tool in objects(body.get("tools"), "tools"):
        schema, name = tool.get("input_schema"), string(tool.get("name"), "name")
        if not name:
            raise BadRequest("a tool has no name", "tools")
        if isinstance(schema, dict):
            yield ToolSpec(name, string(tool.get("description"), "description"), schema)
        elif not str(tool.get("type")).startswith(SERVER_TOOLS):  # not available to other models
            lost.append(f"the tool {name} of the type {tool.get('type')!r}")


def _tool_choice(choice: JsonObject) -> JsonValue:
    kind = choice.get("type")
    if kind == "tool":
        return string(choice.get("name"), "tool_choice") or "auto"
    return CHOICES.get(kind) if isinstance(kind, str) else None


# Answers


def _blocks(reply: Reply) -> Iterator[JsonObject]:
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": ""}
    if reply.text or not reply.tool_calls:
        yield {"type": "text", "text": reply.text}
    for call in reply.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": echoed_object(call.arguments)}


def _opened(block: JsonObject) -> tuple[JsonObject, Sequence[JsonObject]]:
    """Return the start of a block, and the events that follow."""
    match block.get("type"):
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text")}] if block["text"] else []
        case "thinking":
            thought: JsonObject = {"type": "thinking_delta", "thinking": block.get("thinking")}
            signed: JsonObject = {"type": "signature_delta", "signature": block.get("signature")}
            return {**block, "thinking": "", "signature": ""}, [thought, *([signed] if block.get("signature") else [])]
        case "tool_use" | "server_tool_use":
            written = orjson.dumps(block.get("input") or {}).decode()
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
    return block, []


def _written_usage(usage: Usage) -> JsonObject:
    """Return the usage; ``input_tokens`` excludes tokens read from or written to the cache."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "output_tokens": usage.completion_tokens,
    }

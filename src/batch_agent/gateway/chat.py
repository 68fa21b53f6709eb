"""The dialect of ``/v1/chat/completions``: reads requests, writes answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.door import RequestRefused
from batch_agent.gateway.client_request import (
    BadRequest,
    ClientRequest,
    Envelope,
    RequestKind,
    mapping_of,
    number,
    objects,
    own_document,
    read_choice,
    read_content,
    read_schema,
    sse,
    string,
    texts,
    whole,
)
from batch_agent.messages import JsonObject, Message, Reply, ToolCall, ToolSpec, Usage

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "max_output_tokens": "length",
}
KINDS = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    429: "rate_limit_error",
}


class ChatDialect:
    wire = "chat"

    # Requests

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        lost = [] if body.get("n") in (None, 1) else ["n"]
        form = mapping_of(body.get("response_format"), "response_format")
        schema, name = read_schema(form, mapping_of(form.get("json_schema"), "response_format"))
        shape = RequestShape(
            model=string(body.get("model"), "model") or model,
            max_tokens=whole(body, "max_completion_tokens", "max_tokens"),
            temperature=number(body, "temperature"),
            top_p=number(body, "top_p"),
            seed=_seed(body.get("seed")),
            stop=texts(body.get("stop"), "stop"),
            tools=tuple(_tools(body, lost)),
            tool_choice=read_choice(body.get("tool_choice"), inside="function"),
            schema=schema,
            schema_name=name,
        )
        return RequestKind(shape, lost)

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        messages = objects(body.get("messages"), "messages")
        if not messages:
            raise BadRequest("messages must be a list of at least one message", "messages")
        return [_message(message, lost) for message in messages]

    # Answers

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        if (own := own_document(reply, self.wire)) is not None:
            return own
        message: JsonObject = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
        elif not reply.text:
            message["content"] = ""
        finish = FINISHES.get(reply.finish_reason, reply.finish_reason)
        return {
            "id": f"chatcmpl-{envelope.name}",
            "object": "chat.completion",
            "created": envelope.created,
            "model": envelope.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
            "usage": _written_usage(reply.usage),
        }

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        head = {name: value for name, value in document.items() if name not in ("choices", "usage")}
        head["object"] = "chat.completion.chunk"
        for choice in objects(document.get("choices"), "choices"):
            index = choice.get("index") or 0
            for delta in _deltas(mapping_of(choice.get("message"), "message")):
                yield sse({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
            end: JsonObject = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
            if choice.get("logprobs") is not None:
                end["logprobs"] = choice["logprobs"]
            yield sse({**head, "choices": [end]})
        if mapping_of(request.body.get("stream_options"), "stream_options").get("include_usage"):
            yield sse({**head, "choices": [], "usage": document.get("usage")})
        yield b"data: [DONE]\n\n"

    def error(self, refused: RequestRefused) -> JsonObject:
        status = refused.status
        kind = refused.kind or KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        code = refused.code or ("insufficient_quota" if status == 402 else None)
        return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": code}}

    def error_event(self, refused: RequestRefused) -> bytes:
        return sse(self.error(refused)) + b"data: [DONE]\n\n"


# Requests


def _message(message: JsonObject, lost: list[str]) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"a message has the role {role!r}: it must be one of {', '.join(sorted(ROLES))}", "messages")
    content = read_content(message.get("content"), lost)
    if role in ("system", "developer"):
        return Message("system", content)
    if role == "user":
        return Message("user", content)
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = tuple(_call(call) for call in objects(message.get("tool_calls"), "tool_calls"))
        return Message("assistant", content, calls, reasoning=reasoning if isinstance(reasoning, str) else "")
    call_id = string(message.get("tool_call_id"), "tool_call_id")
    return Message("tool", content, (), call_id, tool_name=string(message.get("name"), "name"))


def _call(call: JsonObject) -> ToolCall:
    function = mapping_of(call.get("function"), "function")
    name = string(function.get("name"), "name")
    arguments = string(function.get("arguments"), "arguments")
    return ToolCall(string(call.get("id"), "id"), name, arguments)


def _tools(body: JsonObject, lost: list[str]) -> Iterator[ToolSpec]:
    for tool in objects(body.get("tools"), "tools"):
        if tool.get("type", "function") != "function":
            lost.append(f"a tool of the type {tool.get('type')!r}")
            continue
        function = mapping_of(tool.get("function"), "function")
        name = string(function.get("name"), "name")
        if not name:
            raise BadRequest("a tool has no name", "tools")
        parameters = mapping_of(function.get("parameters"), "parameters") or {"type": "object", "properties": {}}
        yield ToolSpec(name, string(function.get("description"), "description"), parameters)


def _seed(value: JsonValue) -> int | None:
    if value is None or type(value) is int:
        return value
    raise BadRequest("seed must be a whole number", "seed")


# Answers


def _deltas(message: JsonObject) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": ""}
    for name, value in message.items():
        if name == "tool_calls":
            for index, call in enumerate(objects(value, "tool_calls")):
                yield {"tool_calls": [{"index": index, **call}]}
        elif name != "role" and value not in (None, "", []):
            yield {name: value}


def _written_usage(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }

"""The dialect of ``/v1/responses``: reads requests, and writes answers, whole or as numbered events. Pure.

In a request a conversation is a list of items. Text and calls of one answer are several items, but one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import echoed_object
from batch_agent.door import RequestRefused
from batch_agent.gateway.chat import ChatDialect
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
    whole,
)
from batch_agent.messages import Content, JsonObject, Message, Reply, Role, ToolCall, ToolSpec, Usage

STORED = ("previous_response_id", "conversation", "prompt")  # fields that refer to something on a server
CUT = {"length", "max_tokens", "max_output_tokens"}
ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text"),
    *("tool_choice", "tools", "top_p", "truncation", "user"),
)
DEFAULTS: JsonObject = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


class ResponsesDialect(ChatDialect):
    """Errors have the same format as in the chat dialect."""

    wire = "responses"

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        lost = [f"{name}, which refers to data stored on a server" for name in STORED if body.get(name) is not None]
        form = mapping_of(mapping_of(body.get("text"), "text").get("format"), "text.format")
        schema, name = read_schema(form, form)
        shape = RequestShape(
            model=string(body.get("model"), "model") or model,
            max_tokens=whole(body, "max_output_tokens"),
            temperature=number(body, "temperature"),
            top_p=number(body, "top_p"),
            tools=tuple(_tools(body, lost)),
            tool_choice=read_choice(body.get("tool_choice")),
            schema=schema,
            schema_name=name,
        )
        custom = frozenset(name for tool, name in _flat(body) if tool.get("type") == "custom")
        return RequestKind(shape, lost, custom, _namespaces(body))

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        said = body.get("input")
        told: list[JsonObject] = [{"role": "user", "content": said}] if isinstance(said, str) else []
        items = told or objects(said, "input")
        if not items:
            raise BadRequest("input must be a text or a list of at least one item", "input")
        messages: list[Message] = []
        if instructions := string(body.get("instructions"), "instructions"):
            messages.append(Message("system", instructions))
        for item in items:
            _add(messages, item, lost)
        return messages

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        if (own := own_document(reply, self.wire)) is not None:
            return own
        is_cut = reply.finish_reason in CUT
        echoed: JsonObject = {name: request.body.get(name, DEFAULTS.get(name)) for name in ECHOED}
        return {
            "id": f"resp_{envelope.name}",
            "object": "response",
            "created_at": envelope.created,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": envelope.model,
            "output": [*_items(reply, request, envelope.name)],
            "previous_response_id": None,
            "store": False,
            **echoed,
            "usage": _written_usage(reply.usage),
        }

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        for place, event in enumerate(_events(document)):
            yield sse({**event, "sequence_number": place}, str(event["type"]))

    def error_event(self, refused: RequestRefused) -> bytes:
        code = refused.code or ("server_error" if refused.status >= 500 else "invalid_request")
        error: JsonObject = {"code": code, "message": str(refused)}
        response: JsonObject = {"object": "response", "status": "failed", "error": error, "output": []}
        return sse({"type": "response.failed", "response": response, "sequence_number": 0}, "response.failed")


def _items(reply: Reply, request: ClientRequest, name: str) -> Iterator[JsonObject]:
    if reply.reasoning:
        summary: JsonObject = {"type": "summary_text", "text": reply.reasoning}
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [summary]}
    if reply.text or not reply.tool_calls:
        text: JsonObject = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        yield {"id": f"msg_{name}", "type": "message", "status": "completed", "role": "assistant", "content": [text]}
    for place, call in enumerate(reply.tool_calls):
        head: JsonObject = {"id": f"fc_{name}_{place}", "status": "completed", "call_id": call.id, "name": call.name}
        if call.name in request.kind.custom_tools:
            given = echoed_object(call.arguments).get("input")
            yield {**head, "type": "custom_tool_call", "input": given if isinstance(given, str) else call.arguments}
        else:
            space = request.kind.namespaces.get(call.name)
            own: JsonObject = {} if space is None else {"namespace": space[0], "name": space[1]}
            yield {**head, **own, "type": "function_call", "arguments": call.arguments}


def _events(document: JsonObject) -> Iterator[JsonObject]:
    started = {**document, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for place, item in enumerate(objects(document.get("output"), "output")):
        at: JsonObject = {"output_index": place}
        beside: JsonObject = {**at, "item_id": item.get("id")}
        opened, inner = _inside(item)
        yield {"type": "response.output_item.added", **at, "item": opened}
        for event in inner:
            yield {**event, **beside}
        yield {"type": "response.output_item.done", **at, "item": item}
    ends = {"completed", "incomplete", "failed"}
    status = document.get("status")
    yield {"type": f"response.{status if status in ends else 'completed'}", "response": document}


def _inside(item: JsonObject) -> tuple[JsonObject, Sequence[JsonObject]]:
    """Return an item as it is when it is opened, and the events that fill it."""
    begun = {**item, "status": "in_progress"} if "status" in item else item
    match item.get("type"):
        case "message":
            return {**begun, "content": []}, [*_parts(item)]
        case "reasoning":
            return {**begun, "summary": []}, [*_summary(item)]
        case "function_call":
            arguments = item.get("arguments")
            kind = "response.function_call_arguments"
            told: list[JsonObject] = [{"type": f"{kind}.delta", "delta": arguments}]
            return {**begun, "arguments": ""}, [
                *told,
                {"type": f"{kind}.done", "arguments": arguments, "name": item.get("name")},
            ]
        case "custom_tool_call":
            given, kind = item.get("input"), "response.custom_tool_call_input"
            return {**begun, "input": ""}, [
                {"type": f"{kind}.delta", "delta": given},
                {"type": f"{kind}.done", "input": given},
            ]
    return begun, []


def _parts(item: JsonObject) -> Iterator[JsonObject]:
    for index, part in enumerate(objects(item.get("content"), "content")):
        at: JsonObject = {"content_index": index}
        name = "refusal" if part.get("type") == "refusal" else "text"
        kind = "response.refusal" if name == "refusal" else "response.output_text"
        words = part.get(name)
        extra: JsonObject = {} if name == "refusal" else {"logprobs": []}
        yield {"type": "response.content_part.added", **at, "part": {**part, name: ""}}
        if words:
            yield {"type": f"{kind}.delta", **at, "delta": words, **extra}
        yield {"type": f"{kind}.done", **at, name: words, **extra}
        yield {"type": "response.content_part.done", **at, "part": part}


def _summary(item: JsonObject) -> Iterator[JsonObject]:
    kind = "response.reasoning_summary"
    for index, part in enumerate(objects(item.get("summary"), "summary")):
        at: JsonObject = {"summary_index": index}
        text = part.get("text")
        yield {"type": f"{kind}_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": f"{kind}_text.delta", **at, "delta": text}
        yield {"type": f"{kind}_text.done", **at, "text": text}
        yield {"type": f"{kind}_part.done", **at, "part": part}


def _written_usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


ROLES: dict[JsonValue, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_TOOL: JsonObject = {  # a tool with text input, as shown to a model that knows only functions
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
SERVER_TOOLS = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")


def _namespaces(body: JsonObject) -> dict[str, tuple[str, str]]:
    """Return namespace and name of tools that have one, by the name shown to the model."""
    spaces = [tool for tool in objects(body.get("tools"), "tools") if tool.get("type") == "namespace"]
    pairs = [
        (str(space.get("name")), str(tool.get("name")))
        for space in spaces
        for tool in objects(space.get("tools"), "tools")
    ]
    return {_qualified(*pair): pair for pair in pairs}


def _qualified(space: str, name: str) -> str:
    return f"{space}__{name}" if space else name


def _flat(body: JsonObject) -> Iterator[tuple[JsonObject, str]]:
    """Yield all tools with the names shown to the model."""
    for tool in objects(body.get("tools"), "tools"):
        name = string(tool.get("name"), "name")
        if tool.get("type") == "namespace":
            for inner in objects(tool.get("tools"), "tools"):
                yield inner, _qualified(name, string(inner.get("name"), "name"))
        else:
            yield tool, name


def _add(messages: list[Message], item: JsonObject, lost: list[str]) -> None:
    match item.get("type", "message"):
        case "message":
            role = ROLES.get(item.get("role"))
            if role is None:
                raise BadRequest(f"an item has the role {item.get('role')!r}", "input")
            content = read_content(item.get("content"), lost)
            if role == "assistant":
                _go_on(messages, text=content)
            else:
                messages.append(Message(role, content))
        case "reasoning":
            parts = objects(item.get("summary"), "summary") or objects(item.get("content"), "content")
            _go_on(messages, reasoning="\n\n".join(string(part.get("text"), "text") for part in parts))
        case "function_call":
            arguments = string(item.get("arguments"), "arguments")
            name = _qualified(string(item.get("namespace"), "namespace"), string(item.get("name"), "name"))
            _go_on(messages, call=ToolCall(_call_id(item), name, arguments))
        case "custom_tool_call":
            given = orjson.dumps({"input": string(item.get("input"), "input")}).decode()
            _go_on(messages, call=ToolCall(_call_id(item), string(item.get("name"), "name"), given))
        case "function_call_output" | "custom_tool_call_output":
            messages.append(Message("tool", read_content(item.get("output"), lost), (), _call_id(item)))
        case other:
            lost.append(f"an item of the type {other!r}")


def _go_on(messages: list[Message], text: Content = "", reasoning: str = "", call: ToolCall | None = None) -> None:
    """Add to the model's latest answer; start one if the latest message is not the model's."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None or (text and (last.content or last.tool_calls)) or (reasoning and last.tool_calls):
        messages.append(Message("assistant", text, () if call is None else (call,), reasoning=reasoning))
        return
    calls = last.tool_calls if call is None else (*last.tool_calls, call)
    messages[-1] = replace(last, content=last.content or text, tool_calls=calls, reasoning=last.reasoning + reasoning)


def _call_id(item: JsonObject) -> str:
    return string(item.get("call_id"), "call_id") or string(item.get("id"), "id")


def _tools(body: JsonObject, lost: list[str]) -> Iterator[ToolSpec]:
    for tool, name in _flat(body):
        kind = str(tool.get("type"))
        description = string(tool.get("description"), "description")
        if kind in ("function", "custom") and not name:
            raise BadRequest("a tool has no name", "tools")
        if kind == "function":
            parameters = mapping_of(tool.get("parameters"), "parameters") or {"type": "object", "properties": {}}
            yield ToolSpec(name, description, parameters)
        elif kind == "custom":
            yield ToolSpec(name, _with_grammar(tool, description), TEXT_TOOL)
        elif not kind.startswith(SERVER_TOOLS):  # not available to other models
            lost.append(f"a tool of the type {kind!r}")


def _with_grammar(tool: JsonObject, description: str) -> str:
    definition = mapping_of(tool.get("format"), "format").get("definition")
    return f"{description}\n\nThe input follows this grammar:\n{definition}" if definition else description

"""Reads requests of ``/v1/responses`` into messages. Pure.

There a conversation is a list of items. Text and calls of one answer are several items, but one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.gateway.client_request import (
    BadRequest,
    mapping_of,
    number,
    objects,
    read_choice,
    read_content,
    read_schema,
    string,
    whole,
)
from batch_agent.messages import Content, JsonObject, Message, Role, ToolCall, ToolSpec

ROLES: dict[JsonValue, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_TOOL: JsonObject = {  # a tool with text input, as shown to a model that knows only functions
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
SERVER_TOOLS = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")


def read_shape(body: JsonObject, model: str, lost: list[str]) -> RequestShape:
    form = mapping_of(mapping_of(body.get("text"), "text").get("format"), "text.format")
    schema, name = read_schema(form, form)
    return RequestShape(
        model=string(body.get("model"), "model") or model,
        max_tokens=whole(body, "max_output_tokens"),
        temperature=number(body, "temperature"),
        top_p=number(body, "top_p"),
        tools=tuple(_tools(body, lost)),
        tool_choice=read_choice(body.get("tool_choice")),
        schema=schema,
        schema_name=name,
    )


def custom_tools(body: JsonObject) -> frozenset[str]:
    return frozenset(name for tool, name in _flat(body) if tool.get("type") == "custom")


def namespaces(body: JsonObject) -> dict[str, tuple[str, str]]:
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


def stored(body: JsonObject) -> list[str]:
    """Return the fields that refer to something stored on a server."""
    names = ("previous_response_id", "conversation", "prompt")
    return [f"{name}, which refers to data stored on a server" for name in names if body.get(name) is not None]


def read_items(body: JsonObject, lost: list[str]) -> list[Message]:
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

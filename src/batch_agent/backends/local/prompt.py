"""Converts a conversation to plain chat messages that any chat template accepts, and a model's text to a tool call.

Tools are described in the system message and their results are user messages, because a template may support neither. A
call is repeated exactly as the model wrote it, so that turn n+1 extends turn n.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

from batch_agent.backends.base import text_only
from batch_agent.backends.local.terminals import json_text
from batch_agent.backends.local.toolgrammar import CLOSE, OPEN
from batch_agent.messages import JsonObject, Message, ToolCall, ToolSpec

ChatMessage = dict[str, str]


def chat_messages(messages: Sequence[Message], instructions: str) -> list[ChatMessage]:
    """Return the chat messages. ``instructions``, the same for all requests of a shape, follow the system message."""
    out: list[ChatMessage] = []
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{text_only(message)}\n</tool_response>")
            continue
        if results:
            out.append({"role": "user", "content": "\n".join(results)})
            results = []
        out.append({"role": message.role, "content": _content(message)})
    if results:
        out.append({"role": "user", "content": "\n".join(results)})
    return _instructed(out, instructions) if instructions else out


def _content(message: Message) -> str:
    calls = (
        f'{OPEN}{{"name": {json_text(call.name)}, "arguments": {call.arguments}}}{CLOSE}' for call in message.tool_calls
    )
    return "\n".join(part for part in (text_only(message), *calls) if part)


def _instructed(messages: list[ChatMessage], instructions: str) -> list[ChatMessage]:
    if messages and messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def describe_tools(tools: Sequence[ToolSpec]) -> str:
    lines = ["You can call these tools:"]
    lines += [f"- {tool.name}: {tool.description} Arguments: {json_text(tool.parameters)}" for tool in tools]
    lines.append(
        f'To call one, write {OPEN}{{"name": …, "arguments": …}}{CLOSE}. When you know enough, answer instead.'
    )
    return "\n".join(lines)


def describe_schema(schema: JsonObject) -> str:
    """Return the instruction for an answer whose schema no grammar enforces."""
    return f"Your answer must be JSON alone, valid against this JSON schema: {json_text(schema)}"


def read_call(text: str) -> ToolCall | None:
    """Return the tool call in ``text``, if it is one; the grammar has ensured its form."""
    body = text.strip()
    if not (body.startswith(OPEN) and body.endswith(CLOSE)):
        return None
    name, separator, rest = body[len(OPEN) : -len(CLOSE)].partition(', "arguments": ')
    name = name.strip().removeprefix('{"name": ').strip('"')
    if not separator or not rest.endswith("}"):
        return None
    return ToolCall(id=f"call_{uuid4().hex[:16]}", name=name, arguments=rest[:-1])


def split_thinking(text: str) -> tuple[str, str]:
    """Return the reasoning of the model and its answer. Qwen3 writes its reasoning between two tags."""
    thought, tag, answer = text.lstrip().partition("</think>")
    if not tag or not thought.startswith("<think>"):
        return "", text
    return thought.removeprefix("<think>").strip(), answer.lstrip()

"""The conversation in the format of the GenAI conventions. Exported only if the user enables it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import JsonValue
from pydantic_core import to_json

from batch_agent.job import AgentResult
from batch_agent.messages import Message, content_text

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
YES = ("1", "true", "yes", "on", "span_only", "span_and_event")


def wants_content(environ: Mapping[str, str]) -> bool:
    return environ.get(VARIABLE, "").strip().lower() in YES


def content_attributes(result: AgentResult[object]) -> dict[str, str]:
    """Return the attributes of a row's span: the conversation up to the last answer, and that answer."""
    system = [message for message in result.messages if message.role == "system"]
    said = [message for message in result.messages if message.role != "system"]
    answer = [said.pop()] if said and said[-1].role == "assistant" else []
    written = {
        "gen_ai.system_instructions": [part for message in system for part in _parts(message)],
        "gen_ai.input.messages": _written(said),
        "gen_ai.output.messages": _written(answer),
    }
    return {name: to_json(value).decode() for name, value in written.items() if value}


def _written(messages: Iterable[Message]) -> list[JsonValue]:
    return [{"role": message.role, "parts": _parts(message)} for message in messages]


def _parts(message: Message) -> list[JsonValue]:
    text = content_text(message.content)
    if message.role == "tool":
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": text}]
    parts: list[JsonValue] = [{"type": "text", "content": text}] if text else []
    if message.reasoning:
        parts.insert(0, {"type": "reasoning", "content": message.reasoning})
    for call in message.tool_calls:
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments})
    return parts

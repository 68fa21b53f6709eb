"""Lines of OpenAI's batch files, ``{"custom_id": …, "method": …, "url": …, "body": {…}}``, as rows.

A row gets ``id`` (the custom_id), ``system``, ``prompt`` (the last message, of the user), ``messages`` (all of them)
and ``body`` (the other options: model, temperature, …). The run sends the task of the spec, with these fields, to the
model of the spec. The row of a line that does not fit into text fields fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from batch_agent.job import UnreadableRow

KEYS = frozenset({"custom_id", "method", "url", "body"})
INSTRUCTIONS = ("system", "developer")


class _Unusable(Exception):
    """The reason why a line cannot be a row."""


def is_batch_line(value: Mapping[str, object]) -> bool:
    return "custom_id" in value and "body" in value and value.keys() <= KEYS


def from_batch_line(value: Mapping[str, object], where: str) -> dict[str, object] | UnreadableRow:
    try:
        return _row(value)
    except _Unusable as error:
        return UnreadableRow(f"{where} is an OpenAI batch line that cannot be used: {error}")


def _row(line: Mapping[str, object]) -> dict[str, object]:
    body = line["body"]
    if not isinstance(body, dict):
        raise _Unusable("its body is not an object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _Unusable(f"its body has no messages (url {line.get('url')!r}); only chat completions can be run")
    texts = [_role_and_text(number, message) for number, message in enumerate(messages, start=1)]
    role, prompt = texts[-1]
    if role != "user":
        raise _Unusable(f"its last message is the {role}'s, not the user's")
    return {
        "id": line["custom_id"],
        "system": "\n\n".join(text for role, text in texts if role in INSTRUCTIONS),
        "prompt": prompt,
        "messages": messages,
        "body": {name: option for name, option in body.items() if name != "messages"},
    }


def _role_and_text(number: int, message: object) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Unusable(f"message {number} has no role")
    if message.get("tool_calls") or message["role"] in ("tool", "function"):
        raise _Unusable(f"message {number} belongs to a tool call; a run uses only the tools of its spec")
    return message["role"], _text(number, message.get("content"))


def _text(number: int, content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise _Unusable(f"message {number} has content other than text")
    return "".join(map(str, texts))

"""The system prompt as it is sent: the user's words, without a session's preamble, with the schema once.

Some clients put header-like lines that change with every session in front of their system prompt. They would make the
prefix of each run its own, so they go; the same words further down are content and stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from batch_agent.messages import JsonObject

_PREAMBLE = re.compile(
    r"\A(?:[ \t]*\r?\n)*(?:[ \t]*x-(?:anthropic|amz)-[\w-]*:[^\n]*(?:\n|\Z)(?:[ \t]*\r?\n)*)+", re.IGNORECASE
)
_DECODER = json.JSONDecoder()


def strip_preamble(system: str) -> str:
    """Without the ``x-anthropic-*:`` and ``x-amz-*:`` lines it starts with, and the blank lines after them."""
    return _PREAMBLE.sub("", system)


def schema_instruction(json_text: str) -> str:
    return (
        "Your final answer must be JSON that is valid against this JSON schema. "
        f"Answer with the JSON alone: no code fence, no text around it.\n{json_text}"
    )


def carries_schema(text: str, schema: JsonObject) -> bool:
    """Whether the text has the schema in it already, as JSON in any layout."""
    return any(value == schema for value in _objects(text))


def _objects(text: str) -> Iterator[object]:
    """The outermost JSON objects in a text."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)

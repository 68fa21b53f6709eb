"""The system prompt as it is sent: the user's text without a session preamble, and with the schema once.

Some clients put header-like lines that change with every session before their system prompt. They would give each run
another prefix, so they are removed; the same lines further down are content and stay.
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
    """Return the text without leading ``x-anthropic-*:`` and ``x-amz-*:`` lines and the blank lines after them."""
    return _PREAMBLE.sub("", system)


def schema_instruction(json_text: str) -> str:
    return (
        "Your final answer must be JSON that is valid against this JSON schema. "
        f"Answer with the JSON alone: no code fence, no text around it.\n{json_text}"
    )


def carries_schema(text: str, schema: JsonObject) -> bool:
    """Return whether the text already contains the schema, as JSON in any layout."""
    return any(value == schema for value in _objects(text))


def _objects(text: str) -> Iterator[object]:
    """Yield the outermost JSON objects in a text."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)

"""Shortens a text: to head and tail or, for structured data, to its shape."""

from __future__ import annotations

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from batch_agent.compiler.tokens import BYTES_PER_TOKEN, estimate_tokens

HEAD = 2 / 3  # of what is left: the start of a text is the most informative
SHOWN_ITEMS = 2
SHOWN_CHARACTERS = 80
DEEPEST = 6


def shorten(text: str, most_tokens: int) -> str:
    """Return about ``most_tokens`` of a longer text; shorter ones are unchanged."""
    if estimate_tokens(text) <= most_tokens:
        return text
    if text.lstrip()[:1] in ("{", "["):
        shape = _shape_of(text)
        if shape is not None and estimate_tokens(shape) <= most_tokens:
            return shape
    return _ends(text, most_tokens)


def _ends(text: str, most_tokens: int) -> str:
    share = len(text) / max(1, estimate_tokens(text) * BYTES_PER_TOKEN)  # characters are not always bytes
    room = int(most_tokens * BYTES_PER_TOKEN * share)
    head = int(room * HEAD)
    tail = room - head
    gone = len(text) - room
    return f"{text[:head]}\n[… {gone:,} characters left out …]\n{text[len(text) - tail :]}"


def _shape_of(text: str) -> str | None:
    """Return the data with long lists and texts cut, and marked as such; None if it is not JSON."""
    try:
        value = from_json(text)
    except ValueError:
        return None
    return f"[only the shape of this] {to_json(_shape(value, 0)).decode()}"


def _shape(value: JsonValue, depth: int) -> JsonValue:
    if isinstance(value, str):
        return value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}… ({len(value):,} characters)"
    if depth >= DEEPEST and isinstance(value, dict | list):
        return f"… ({len(value):,} {'fields' if isinstance(value, dict) else 'items'})"
    if isinstance(value, dict):
        return {name: _shape(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        shown = [_shape(inner, depth + 1) for inner in value[:SHOWN_ITEMS]]
        more = len(value) - SHOWN_ITEMS
        return [*shown, f"… ({more:,} more items)"] if more > 0 else shown
    return value

"""A tool's result as the text a model reads, cut to size."""

from __future__ import annotations

import base64
import math

from pydantic_core import to_json

from batch_agent.compiler.budget import BYTES_PER_TOKEN

# What a result may have unless its tool says otherwise: some fifty pages. A conversation holds several of them, and
# every later turn sends them again.
MAX_TOKENS = 16_000


def render(value: object, max_tokens: int | None) -> str:
    """Text as it is, anything else as JSON; an object that has no JSON form as its ``str``."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, bytes | bytearray):
        text = _bytes_text(bytes(value))
    else:
        text = to_json(value, bytes_mode="base64", inf_nan_mode="strings", fallback=str).decode()
    return cut_tokens(text, max_tokens)


def _bytes_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"[{len(data)} bytes that are not text, in base64]\n{base64.b64encode(data).decode()}"


def cut_tokens(text: str, max_tokens: int | None) -> str:
    """The first ``max_tokens`` of a text, and a line that says how much is missing; the line comes on top of them.

    Of a text that is far too long only the part that is shown is ever encoded: how much is missing is then estimated.
    Lone surrogates, which a file name may contain and no request can carry, become question marks.
    """
    if max_tokens is None or len(text) <= max_tokens:
        return _encodable(text)
    limit = max_tokens * BYTES_PER_TOKEN
    head = text[:limit]  # a character is at least one byte
    data = head.encode(errors="replace")
    if len(head) == len(text) and len(data) <= limit:
        return _encodable(text)
    shown = data[:limit].decode(errors="ignore")
    total = len(data) / len(head) * len(text)
    missing = math.ceil((total - len(shown.encode())) / BYTES_PER_TOKEN)
    return (
        f"{shown}\n[cut: this is the beginning; about {missing} of {math.ceil(total / BYTES_PER_TOKEN)} tokens "
        "are left out]"
    )


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode(errors="replace").decode()

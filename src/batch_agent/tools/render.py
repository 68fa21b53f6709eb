"""A tool's result as the text a model reads, and cutting it to size."""

from __future__ import annotations

import base64

from pydantic_core import to_json

from batch_agent.compiler.budget import BYTES_PER_TOKEN


def render(value: object) -> str:
    """Text as it is, anything else as JSON; an object that has no JSON form as its ``str``."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, bytes | bytearray):
        return _render_bytes(bytes(value))
    return to_json(value, bytes_mode="base64", inf_nan_mode="strings", fallback=str).decode()


def _render_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"[{len(data)} bytes that are not text, in base64]\n{base64.b64encode(data).decode()}"


def encodable(text: str) -> str:
    """Lone surrogates, which a file name may contain and no request can carry, become question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def cut_tokens(text: str, max_tokens: int | None) -> str:
    """The first ``max_tokens`` of a text, and a line that says how much is missing; the line comes on top of them."""
    if max_tokens is None or len(text) <= max_tokens:
        return text
    data = text.encode()
    limit = max_tokens * BYTES_PER_TOKEN
    if len(data) <= limit:
        return text
    shown = data[:limit].decode(errors="ignore")
    missing = -(-(len(data) - len(shown.encode())) // BYTES_PER_TOKEN)
    total = -(-len(data) // BYTES_PER_TOKEN)
    return f"{shown}\n[cut: this is the beginning; about {missing} of {total} tokens are left out]"

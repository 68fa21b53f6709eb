"""Conversion of a tool's result to text and images for the model. The text has a maximum length."""

from __future__ import annotations

import base64
import math

from pydantic_core import to_json

from batch_agent.compiler.budget import BYTES_PER_TOKEN
from batch_agent.files.pictures import read_image
from batch_agent.foreign import encodable
from batch_agent.messages import Content, Image

# Default maximum of a result, about fifty pages. A conversation holds several results, and each later turn sends them
# again.
MAX_TOKENS = 16_000


def render_result(value: object, max_tokens: int | None) -> Content:
    """Return a text that is followed by images with its images, and any other result as text. Raises InputError for an
    image that models do not accept."""
    match value:
        case (str(text), Image(), *_):
            images = (read_image(part) for part in value[1:] if isinstance(part, Image))
            return (cut_tokens(text, max_tokens), *images)
    return render(value, max_tokens)


def render(value: object, max_tokens: int | None) -> str:
    """Return text unchanged and other values as JSON; objects without a JSON form become their ``str``."""
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
    """Return the first ``max_tokens`` of a text, plus a line that says how much is missing.

    Only the returned part of a long text is encoded, so the missing amount is an estimate. Lone surrogates become
    question marks: a file name may contain them, but a request cannot.
    """
    if max_tokens is None or len(text) <= max_tokens:
        return encodable(text)
    limit = max_tokens * BYTES_PER_TOKEN
    head = text[:limit]  # a character is at least one byte
    data = head.encode(errors="replace")
    if len(head) == len(text) and len(data) <= limit:
        return encodable(text)
    shown = data[:limit].decode(errors="ignore")
    total = len(data) / len(head) * len(text)
    missing = math.ceil((total - len(shown.encode())) / BYTES_PER_TOKEN)
    return (
        f"{shown}\n[cut: this is the beginning; about {missing} of {math.ceil(total / BYTES_PER_TOKEN)} tokens "
        "are left out]"
    )

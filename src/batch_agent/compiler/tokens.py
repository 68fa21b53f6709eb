"""Estimates the tokens of a text or a picture.

The estimate needs no tokenizer: UTF-8 bytes divided by four, rounded up. That is good enough for planning and for
rejecting hopeless rows; the server decides the rest. Amounts that may cost money use an upper bound instead: no token
is shorter than a byte.
"""

from __future__ import annotations

from batch_agent.messages import Content

BYTES_PER_TOKEN = 4


def size_bytes(text: str) -> int:
    """Return the size in UTF-8 bytes. Raises UnicodeEncodeError for text that cannot be sent because it contains half
    of a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())


def estimate_tokens(text: str) -> int:
    return -(-size_bytes(text) // BYTES_PER_TOKEN)


def content_tokens(content: Content) -> int:
    if isinstance(content, str):
        return estimate_tokens(content)
    return sum(estimate_tokens(part) if isinstance(part, str) else part.tokens for part in content)

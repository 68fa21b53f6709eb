"""Estimates the tokens of a text or a picture, and whether a job can fit the model's context.

The estimate needs no tokenizer: UTF-8 bytes divided by four, rounded up. That is good enough for planning and for
rejecting hopeless rows; the server decides the rest. Amounts that may cost money use an upper bound instead: no token
is shorter than a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.errors import Oversized
from batch_agent.messages import Content

BYTES_PER_TOKEN = 4


def size_bytes(text: str) -> int:
    """Return the bytes. Raises UnicodeEncodeError for text that cannot be sent: half of a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())


def estimate_tokens(text: str) -> int:
    return -(-size_bytes(text) // BYTES_PER_TOKEN)


def content_tokens(content: Content) -> int:
    if isinstance(content, str):
        return estimate_tokens(content)
    return sum(estimate_tokens(part) if isinstance(part, str) else part.tokens for part in content)


@dataclass(frozen=True, slots=True)
class ContextRoom:
    """The token limit of a first request: the model's context minus the tokens reserved for the answer."""

    model_max_context: int | None
    min_response_tokens: int

    @property
    def room(self) -> int | None:
        """Return the limit; None if the context is unknown, and nothing is too long."""
        return None if self.model_max_context is None else self.model_max_context - self.min_response_tokens

    def check(self, tokens: int, hint: str = "") -> None:
        room = self.room
        if room is not None and tokens > room:
            raise Oversized(
                f"about {tokens:,} tokens of system prompt, tools and message (estimated) do not fit: "
                f"model_max_context {self.model_max_context:,} less min_response_tokens "
                f"{self.min_response_tokens:,} leaves {room:,}{hint}"
            )

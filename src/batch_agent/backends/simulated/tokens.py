"""A simple substitute for a tokenizer and a chat template: four bytes are a token.

It is accurate only in what a plan needs: lengths (within a constant factor for English text), equal tokens for equal
prefixes, and equal tokens for an answer that comes back as history. Tokens are kept as bytes, four each, padded per
segment, so that counting is a division and a block is a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batch_agent.backends.base import text_only
from batch_agent.backends.http.wire import written
from batch_agent.messages import Message, ToolCall, ToolSpec

TOKEN_BYTES = 4
END = b"\x03end"  # ends a message; an answer's last token
BEGIN = b"\x02bos"
ANSWER = b"\x01ast"  # header before the model's answer
HEADERS = {"system": b"\x01sys", "user": b"\x01usr", "assistant": ANSWER, "tool": b"\x01tol"}


def encode(text: str) -> bytes:
    """Return the tokens of one segment of text."""
    data = text.encode("utf-8", "replace")
    return data + b"\x00" * (-len(data) % TOKEN_BYTES)


def count_tokens(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


def encode_call(call: ToolCall) -> bytes:
    return encode(f'<call>{{"name":"{call.name}","arguments":{call.arguments}}}</call>')


def encode_message(message: Message) -> bytes:
    body = encode(text_only(message)) + b"".join(map(encode_call, message.tool_calls))
    return HEADERS[message.role] + body + END


class PromptView:
    """The tokens of each message, as the engine caches them."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[bytes] = ()) -> None:
        self.pieces = list(pieces)

    def extend(self, messages: Sequence[Message]) -> None:
        self.pieces.extend(map(encode_message, messages))

    def fork(self) -> PromptView:
        return PromptView(self.pieces)


def encode_tools(tools: Iterable[ToolSpec]) -> bytes:
    """Return the tokens of the tools, which come first, as in most chat templates."""
    described = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]
    return encode(written(described).decode()) + END if described else b""


def chat_prompt(tools: bytes, messages: Iterable[bytes]) -> bytes:
    return b"".join((BEGIN, tools, *messages, ANSWER))


def text_prompt(text: str) -> bytes:
    return BEGIN + encode(text)

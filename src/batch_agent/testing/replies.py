"""What a scripted model can answer: values that work over HTTP and in process.

``Say`` and ``CallTools`` are answers. ``Fail``, ``Cut``, ``StreamError``, ``Malformed``, ``Body`` and ``Hang`` are the
failures of real servers. All take ``latency``: seconds before the first byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import orjson
from pydantic import JsonValue

from batch_agent.messages import TokenChance, ToolCall, Usage


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call of the model. ``arguments`` given as text is sent unchanged, valid JSON or not."""

    name: str
    arguments: Mapping[str, JsonValue] | str = field(default_factory=dict)
    id: str | None = None  # None: a unique id

    def as_call(self, request: int, index: int) -> ToolCall:
        text = self.arguments if isinstance(self.arguments, str) else orjson.dumps(dict(self.arguments)).decode()
        return ToolCall(f"call_{request}_{index}" if self.id is None else self.id, self.name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Say(Scripted):
    """A complete answer. In a stream every few characters are one chunk, ``chunk_delay`` seconds apart. ``write_bytes``
    splits JSON or stream into writes of that many bytes, ``chunk_delay`` apart, even inside a line or a character."""

    text: str
    calls: tuple[ToolUse, ...] = ()
    reasoning: str = field(default="", kw_only=True)
    finish_reason: str | None = field(default=None, kw_only=True)  # None: stop, or tool_calls
    usage: Usage | None = field(default=None, kw_only=True)  # None: estimated with four bytes per token, nothing cached
    chunk_delay: float = field(default=0.0, kw_only=True)
    write_bytes: int | None = field(default=None, kw_only=True)
    headers: Mapping[str, str] = field(default_factory=dict, kw_only=True)  # of the response: rate limits, ids
    tokens: Sequence[TokenChance] = field(default=(), kw_only=True)  # reported if the request wants log-probabilities


class SayOptions(TypedDict, total=False):
    """The keywords of Say."""

    latency: float
    reasoning: str
    finish_reason: str | None
    usage: Usage | None
    chunk_delay: float
    write_bytes: int | None
    headers: Mapping[str, str]
    tokens: Sequence[TokenChance]


class CallTools(Say):
    """An answer that calls tools: ``CallTools(ToolUse("read", {"path": "a"}), ToolUse("list"))``."""

    __slots__ = ()

    def __init__(self, *calls: ToolUse, text: str = "", **options: Unpack[SayOptions]) -> None:
        super().__init__(text, calls, **options)


@dataclass(frozen=True, slots=True)
class Fail(Scripted):
    """An error status. Without a body, it sends the error object of OpenAI-compatible servers."""

    status: int
    body: JsonValue | bytes = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut(Scripted):
    """An answer without an end: it stops after ``after_chunks`` chunks of a stream (the first one contains only the
    role), or in the middle of a JSON body. The connection is reset; with ``clean`` it is closed normally.
    ``after_chunks=0`` without ``clean`` drops the connection before any answer."""

    answer: Say = field(default_factory=lambda: Say("an answer that is never finished"))
    after_chunks: int = field(default=2, kw_only=True)
    clean: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class StreamError(Scripted):
    """Status 200, and then an error in the middle of the stream; without a stream, the error is the whole body."""

    message: str = "the engine died"
    code: int = 500
    answer: Say = field(default_factory=lambda: Say("an answer that is never finished"), kw_only=True)
    after_chunks: int = field(default=2, kw_only=True)


@dataclass(frozen=True, slots=True)
class Malformed(Scripted):
    """Sends exactly these bytes, with status 200."""

    body: bytes
    content_type: str | None = None  # None: that of a correct answer


@dataclass(frozen=True, slots=True)
class Body(Scripted):
    """Sends exactly this JSON, with status 200; for a stream, a list of events, then ``[DONE]``."""

    value: JsonValue


@dataclass(frozen=True, slots=True)
class Hang(Scripted):
    """Sends nothing until the client leaves."""


Answered = Say | Fail | Cut | StreamError | Malformed | Body
ScriptedReply = Answered | Hang

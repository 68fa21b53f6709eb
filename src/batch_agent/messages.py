"""What travels between an agent and a model: messages, tool calls, usage, and the conversation they form.

The values are neutral; how they look on a wire belongs to ``backends``. A conversation only ever grows, and each of its
messages is encoded once: turn n+1 extends turn n byte for byte, which is what an engine's prefix cache lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import JsonValue

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; ``arguments`` is JSON text, kept verbatim."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it."""

    name: str
    description: str
    parameters: JsonObject


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""  # kept for the transcript, never sent back

    def to_dict(self) -> JsonObject:
        """The message in the widely understood chat form, as transcripts are exported."""
        out: JsonObject = {"role": self.role, "content": self.content}
        if self.reasoning:
            out["reasoning"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        return out


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them. ``cached_tokens`` is a part of ``prompt_tokens``, ``reasoning_tokens`` of
    ``completion_tokens``."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """One complete answer of a model. Anything less than complete is an error, not a Reply."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    reasoning: str = ""
    first_token: float | None = None  # seconds from sending to the first token, where streamed
    finish_reason: str = "stop"
    saved: Usage | None = None  # nothing was computed: the answer was at hand, and took this when it was first given


Encoder = Callable[[Message], bytes]


class Conversation:
    """An append-only list of messages with each message's encoding remembered.

    ``parent`` is the part shared by all agents of a run: it is complete, and encoded once for all of them.
    """

    __slots__ = ("_encoded", "_encoder", "_parent", "messages")

    def __init__(self, messages: Iterable[Message] = (), parent: Conversation | None = None) -> None:
        self.messages: list[Message] = [*parent.messages, *messages] if parent is not None else list(messages)
        self._parent = parent
        self._encoder: Encoder | None = None
        self._encoded: list[bytes] = []

    def append(self, message: Message) -> None:
        self.messages.append(message)

    def encoded(self, encoder: Encoder) -> list[bytes]:
        """Each message in the wire form of ``encoder``; the caller must not change the list."""
        if encoder is not self._encoder:
            self._encoder = encoder
            self._encoded = [] if self._parent is None else self._parent.encoded(encoder).copy()
        done = self._encoded
        if len(done) < len(self.messages):
            done.extend(map(encoder, self.messages[len(done) :]))
        return done

"""The script of a peer of the contract, and what the peer heard: values that mean the same on every wire.

A peer plays each item of its script in its wire's own form, and leaves out what the wire cannot express (the test class
says which: ``ContractTerms``). It turns each request into a ``Heard``: the conversation as neutral Messages, one for
each that the wire wrote, and the options by the names of RequestShape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import Backend
from batch_agent.gateway.client_request import ClientDialect
from batch_agent.messages import JsonObject, Message, ToolCall, ToolSpec, Usage


@dataclass(frozen=True)
class Say:
    """A complete answer, in this order: reasoning, text, calls. With ``hold`` the peer continues after the first tool
    call only when the event is set."""

    text: str = ""
    calls: Sequence[ToolCall] = ()
    usage: Usage = field(default_factory=Usage)
    hold: asyncio.Event | None = None
    cut: bool = False  # ends at the token limit
    reasoning: str = ""
    sealed: str = ""  # a signature, in whatever part of an answer the wire wants back


@dataclass(frozen=True)
class Refuse:
    status: int
    message: str = "not today"
    retry_after: str | None = None
    overflow: bool = False  # the conversation is too long, in the wire's own words for it


@dataclass(frozen=True)
class Hang:
    """Begins an answer and never ends it."""


@dataclass(frozen=True)
class BreakOff:
    """The beginning of an answer, and then the end of the connection. ``clean``: the body ends as HTTP wants it (where
    it is streamed), and only the events that say 'complete' are missing."""

    text: str = "Once upon a"
    clean: bool = False
    calls: Sequence[ToolCall] = ()  # complete ones, behind the text


@dataclass(frozen=True)
class ErrorInside:
    """A 200, the beginning of an answer, and then the wire's error event for this status. Not streamed, the error is
    the whole body."""

    text: str = "Once upon a"
    status: int = 503
    message: str = "the engine is tired"


@dataclass(frozen=True)
class Disconnect:
    """Takes the request and closes the connection without an answer."""


Item = Say | Refuse | Hang | BreakOff | ErrorInside | Disconnect


@dataclass(frozen=True)
class Heard:
    """One request as the server understood it. Fields that the wire does not have keep these defaults."""

    model: str
    # The system prompt first, wherever it stood. Merged ones are taken apart; a result has its tool's name where the
    # wire tells it; ``reasoning`` and ``sealed`` stay empty.
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    tool_choice: JsonValue = None  # "auto" | "none" | "required" | a tool's name
    schema: JsonObject | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    extra: Mapping[str, JsonValue] = field(default_factory=dict)  # where extra_body lands: mostly the whole body
    seals: Sequence[str] = ()  # the signatures (``Say.sealed``) that came back, oldest first
    streamed: bool = False


def hear(dialect: ClientDialect, body: bytes, seals: Sequence[str] = ()) -> Heard:
    """Return the request in a body, read as the gateway reads this wire."""
    fields = orjson.loads(body)
    shape = dialect.read_kind(fields, "").shape
    return Heard(
        shape.model,
        [replace(message, reasoning="") for message in dialect.read_messages(fields, [])],
        tools=shape.tools,
        tool_choice=shape.tool_choice,
        schema=shape.schema,
        max_tokens=shape.max_tokens,
        temperature=shape.temperature,
        top_p=shape.top_p,
        seed=shape.seed,
        stop=shape.stop,
        seals=seals,
        extra=fields,
        streamed=fields.get("stream", False),
    )


class Peer(Protocol):
    """The server of the contract. ``requests`` are the bytes of the conversations, oldest first, as a prefix cache
    would see them: without parts that the wire moves, such as a mark at the end."""

    backend: Backend

    @property
    def requests(self) -> Sequence[bytes]: ...

    @property
    def heard(self) -> Sequence[Heard]: ...

    async def wait_until_asked(self) -> None:
        """Return when the first request has arrived."""

    async def wait_until_left(self) -> None:
        """Return when the server has noticed that the client gave a request up."""

"""From a request to the bytes of its answer, in OpenAI's dialect as vLLM speaks it. Pure, except for ``play``.

A ``Request`` is what a script sees. The script gives a reply; a ``Wire`` turns it into pieces in the order in which a
model generates them, which form one JSON body or the events of a stream, for chat and for plain completions. A
``Track`` is what is sent, with the scripted failures. ``play`` sends it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import orjson
from aiohttp import web
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import mapping, objects_of, string_of
from batch_agent.backends.simulated.answers import minimal_instance
from batch_agent.backends.simulated.tokens import count_tokens, encode
from batch_agent.dispatch.control import CONTROL_WORDS
from batch_agent.door import RequestRefused
from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.gateway.chat import ChatDialect
from batch_agent.gateway.client_request import ClientDialect, sse
from batch_agent.messages import JsonObject, Message, TokenChance, ToolCall, ToolSpec, Usage
from batch_agent.testing.replies import (
    Answered,
    Body,
    CallTools,
    Cut,
    Fail,
    Hang,
    Malformed,
    Say,
    ScriptedReply,
    StreamError,
    ToolUse,
)

CHUNK_CHARACTERS = 8  # of text and of tool arguments, in one event of a scripted stream
ECHO_CHARACTERS = 200
DONE = b"data: [DONE]\n\n"
JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """``number`` counts requests from 0 in order of arrival; ``raw`` is the original body, for tests of bytes."""

    dialect: ClassVar[ClientDialect] = ChatDialect()

    number: int
    path: str
    body: JsonObject
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain a key
    raw: bytes = field(default=b"", repr=False)

    @property
    def messages(self) -> list[JsonObject]:
        return objects_of(self.body.get("messages"))

    @property
    def turn(self) -> int:
        """Return how many answers this conversation already has."""
        return sum(1 for message in self.messages if message.get("role") == "assistant")

    @property
    def text(self) -> str:
        """Return the text of the last message, of any role."""
        return content_text(self.messages[-1].get("content")) if self.messages else self.prompts[-1]

    @property
    def is_control(self) -> bool:
        """Return whether it is a control request, which belongs to no row."""
        return CONTROL_WORDS in self.text

    @property
    def model(self) -> str:
        return str(self.body.get("model") or "")

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Return whether to send usage; without a stream it is always sent."""
        return not self.streamed or mapping(self.body.get("stream_options")).get("include_usage") is True

    @property
    def prompts(self) -> list[str]:
        """Return the prompts of ``/v1/completions``: one or several."""
        prompt = self.body.get("prompt")
        return [str(part) for part in prompt] if isinstance(prompt, list) else [str(prompt or "")]

    @property
    def max_tokens(self) -> int | None:
        return self.shape.max_tokens

    @property
    def schema(self) -> JsonObject | None:
        """Return the JSON schema that the answer must fit."""
        return self.shape.schema

    @property
    def tool_choice(self) -> JsonValue:
        """Return the tool choice: a keyword, or a tool's name."""
        return self.shape.tool_choice

    @property
    def tools(self) -> list[ToolSpec]:
        return [*self.shape.tools]

    def conversation(self) -> list[Message]:
        """Return the messages as values."""
        return self.dialect.read_messages(self.body, []) if self.messages else []

    @property
    def shape(self) -> RequestShape:
        """Return everything except the messages, by the names of RequestShape."""
        return self.dialect.read_kind(self.body, "").shape


def check_request(request: Request, models: list[str] | None) -> None:
    """Raise RequestRefused for what a real server would refuse."""
    if models is not None and request.model not in models:
        raise RequestRefused(404, f"The model `{request.model}` does not exist.", param="model")
    if request.path.endswith("/chat/completions") and not request.messages:
        raise RequestRefused(400, "messages must be a list of at least one message", param="messages")
    if request.path.endswith("/v1/completions") and not request.body.get("prompt"):
        raise RequestRefused(400, "prompt must be a text or a list of texts", param="prompt")
    limit = request.body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RequestRefused(400, f"max_tokens must be at least 1, got {limit}.", param="max_tokens")


def content_text(content: JsonValue) -> str:
    """Return a message's content, text or parts, as text."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in objects_of(content))
    return string_of(content)


Script = Sequence[ScriptedReply] | Callable[[Request], ScriptedReply | Awaitable[ScriptedReply]]


async def scripted_reply(script: Script | None, request: Request, earlier: Sequence[Request]) -> ScriptedReply:
    """Return the reply to a request that came after ``earlier`` ones. A list of replies is used in order; a function
    sees the request. A control request (``control_requests``) gets the reply that is next in the list, and leaves it
    there. Without a script the reply is minimal: a forced tool call, the smallest JSON that fits the schema, or an
    echo."""
    if script is None:
        return default_reply(request)
    if callable(script):
        reply = script(request)
        return await reply if inspect.isawaitable(reply) else reply
    place = sum(not each.is_control for each in earlier)
    if place < len(script):
        return script[place]
    # Status 400, which no client retries: the test ends at the request that was not expected.
    message = f"the script has {len(script)} replies, and this is request {place + 1}"
    return Fail(400, error_object(400, message))


async def wait_due(reply: ScriptedReply) -> Answered:
    """Wait as long as the reply says; a reply that hangs waits forever."""
    await asyncio.sleep(reply.latency)
    while isinstance(reply, Hang):
        await asyncio.get_running_loop().create_future()
    return reply


def default_reply(request: Request) -> ScriptedReply:
    forced = next((tool for tool in request.tools if request.tool_choice in ("required", tool.name)), None)
    if forced is not None:
        arguments = minimal_instance(forced.parameters)
        # A function that is forced by name ends with stop, as in vLLM.
        reason = "tool_calls" if request.tool_choice == "required" else "stop"
        return CallTools(ToolUse(forced.name, arguments if isinstance(arguments, dict) else {}), finish_reason=reason)
    if request.schema is not None:
        return Say(orjson.dumps(minimal_instance(request.schema)).decode())
    return Say(f"echo: {request.text[:ECHO_CHARACTERS]}")


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Opens the ``index``-th call if it has an ``id``; otherwise continues its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class End:
    finish_reason: str
    choice: int = 0
    tokens: Sequence[TokenChance] = ()


Piece = TextPiece | ReasoningPiece | CallPiece | End | Usage


def say_pieces(answer: Say, request: Request) -> list[Piece]:
    """Return the pieces of a scripted answer. Every prompt of a list gets the same answer."""
    pieces: list[Piece] = []
    calls = [use.as_call(request.number, index) for index, use in enumerate(answer.calls)]
    reason = answer.finish_reason or ("tool_calls" if calls else "stop")
    for choice in range(len(request.prompts)):
        pieces += [ReasoningPiece(part, choice) for part in _parts(answer.reasoning)]
        pieces += [TextPiece(part, choice) for part in _parts(answer.text)]
        pieces += [piece for index, call in enumerate(calls) for piece in call_pieces(index, call, choice)]
        pieces.append(End(reason, choice, answer.tokens if request.body.get("logprobs") else ()))
    return [*pieces, answer.usage if answer.usage is not None else counted_usage(answer, calls, request)]


def call_pieces(index: int, call: ToolCall, choice: int = 0) -> Iterator[CallPiece]:
    yield CallPiece(index, "", call.id, call.name, choice)
    for part in _parts(call.arguments):
        yield CallPiece(index, part, choice=choice)


def counted_usage(answer: Say, calls: Iterable[ToolCall], request: Request) -> Usage:
    said = answer.text + answer.reasoning + "".join(call.name + call.arguments for call in calls)
    asked = orjson.dumps(request.body.get("messages") or request.prompts).decode()
    return Usage(
        prompt_tokens=count_tokens(encode(asked)),
        completion_tokens=(count_tokens(encode(said)) + 1) * len(request.prompts),
        reasoning_tokens=count_tokens(encode(answer.reasoning)),
    )


class Wire:
    """The format of one request's answer: a chat, or a plain completion. Another wire overrides all methods."""

    def __init__(self, request: Request, *, model: str, fingerprint: str) -> None:
        self.request = request
        self._chat = request.path.endswith("/chat/completions")
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        name = request.headers.get("X-Request-Id") or str(request.number)
        self._kind = kind
        self._head: JsonObject = {
            "id": f"{prefix}-{name}",
            "object": kind,
            "created": 0,  # constant, so that answers are reproducible
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def opening(self) -> list[bytes]:
        """Return the start of a stream, before the first token."""
        return [self._chunk({"role": "assistant", "content": ""}, 0)] if self._chat else []

    def closing(self) -> list[bytes]:
        """Return the end of a stream, after the last piece."""
        return [DONE]

    def error(self, status: int, message: str, param: str | None = None) -> JsonObject:
        return error_object(status, message, param)

    def sse(self, value: JsonValue) -> bytes:
        return sse(value)

    def event(self, piece: Piece) -> bytes | None:
        """Return the event of a piece; None if this client gets none."""
        match piece:
            case TextPiece(text, choice):
                return self._chunk({"content": text}, choice)
            case ReasoningPiece(text, choice):
                return self._chunk({"reasoning": text}, choice)
            case CallPiece(index, arguments, None, _, choice):
                return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}, choice)
            case CallPiece(index, arguments, call_id, name, choice):
                function: JsonObject = {"name": name, "arguments": arguments}
                opened: JsonObject = {"index": index, "id": call_id, "type": "function", "function": function}
                return self._chunk({"tool_calls": [opened]}, choice)
            case End(reason, choice, tokens):
                return self._chunk({}, choice, reason, logprobs_object(tokens))
            case Usage():
                if not self.request.wants_usage:
                    return None
                return sse({**self._stream_head(), "choices": [], "usage": usage_object(piece)})

    def body(self, pieces: Iterable[Piece]) -> bytes:
        collected = list(pieces)
        ends = [piece for piece in collected if isinstance(piece, End)]
        choices: list[JsonValue] = [self._choice(end, collected) for end in sorted(ends, key=lambda e: e.choice)]
        usage = next((usage_object(piece) for piece in collected if isinstance(piece, Usage)), None)
        return orjson.dumps({**self._head, "choices": choices, "usage": usage})

    def _choice(self, end: End, pieces: list[Piece]) -> JsonObject:
        mine = [piece for piece in pieces if not isinstance(piece, Usage) and piece.choice == end.choice]
        text = "".join(piece.text for piece in mine if isinstance(piece, TextPiece))
        said: JsonObject = {"text": text}
        if self._chat:
            reasoning = "".join(piece.text for piece in mine if isinstance(piece, ReasoningPiece))
            calls = _whole_calls(piece for piece in mine if isinstance(piece, CallPiece))
            message: JsonObject = {"role": "assistant", "content": text, "tool_calls": calls}
            if reasoning:
                message["reasoning"] = reasoning
            said = {"message": message}
        told = logprobs_object(end.tokens)
        return {"index": end.choice, **said, "logprobs": told, "finish_reason": end.finish_reason, "stop_reason": None}

    def _chunk(
        self, delta: JsonObject, choice: int, finish_reason: str | None = None, logprobs: JsonValue = None
    ) -> bytes:
        said: JsonObject = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        whole: JsonObject = {"index": choice, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse({**self._stream_head(), "choices": [whole]})

    def _stream_head(self) -> JsonObject:
        return {**self._head, "object": f"{self._kind}.chunk"} if self._chat else self._head


def error_object(status: int, message: str, param: str | None = None) -> JsonObject:
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def logprobs_object(tokens: Sequence[TokenChance]) -> JsonValue:
    if not tokens:
        return None

    def shown(text: bytes, logprob: float | None) -> JsonObject:
        return {"token": text.decode("utf-8", "replace"), "logprob": logprob, "bytes": [*text]}

    content: list[JsonValue] = [
        shown(token.text, token.logprob) | {"top_logprobs": [shown(*other) for other in token.others]}
        for token in tokens
    ]
    return {"content": content}


def usage_object(usage: Usage) -> JsonObject:
    details: JsonObject = {"cached_tokens": usage.cached_tokens}
    if usage.cache_write_tokens:
        details["cache_write_tokens"] = usage.cache_write_tokens
    counted: JsonObject = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": details,
    }
    if usage.reasoning_tokens:
        counted["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counted


def _whole_calls(pieces: Iterable[CallPiece]) -> list[JsonValue]:
    calls: dict[int, tuple[str | None, str | None, str]] = {}
    for piece in pieces:
        call_id, name, arguments = calls.get(piece.index, (piece.id, piece.name, ""))
        calls[piece.index] = (call_id, name, arguments + piece.arguments)
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls.values()
    ]


def _parts(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Track:
    """Bytes to write one after another, ``delay`` seconds apart."""

    parts: list[bytes]
    kind: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    length: int | None = None  # announced length of the body; None: sent in chunks, without a length
    dropped: bool = False  # the connection is reset afterwards


def track_of(reply: Answered, wire: Wire) -> Track:
    match reply:
        case Fail(status, value):
            text = value.encode() if isinstance(value, str) else value
            default = wire.error(status, f"scripted failure {status}")
            body = text if isinstance(text, bytes) else orjson.dumps(default if text is None else text)
            kind = "text/plain" if isinstance(text, bytes) else JSON_TYPE
            return Track([body], kind, status=status, headers=reply.headers, length=len(body))
        case Malformed(body, kind_or_none):
            return Track([body], kind_or_none or (STREAM_TYPE if wire.request.streamed else JSON_TYPE))
        case _:
            return _stream_track(reply, wire) if wire.request.streamed else _body_track(reply, wire)


def _stream_track(reply: Say | Cut | StreamError | Body, wire: Wire) -> Track:
    match reply:
        case Say():
            parts = [part for event in _events(reply, wire) for part in _writes(event, reply.write_bytes)]
            return Track([*parts, *wire.closing()], STREAM_TYPE, headers=reply.headers, delay=reply.chunk_delay)
        case Cut(answer):
            parts = _events(answer, wire)[: reply.after_chunks]
            return Track(parts, STREAM_TYPE, delay=answer.chunk_delay, dropped=not reply.clean)
        case StreamError(message, code):
            parts = _events(reply.answer, wire)[: reply.after_chunks]
            parts += [wire.sse(wire.error(code, message)), *wire.closing()]
            return Track(parts, STREAM_TYPE, delay=reply.answer.chunk_delay)
        case Body(value):
            events = map(wire.sse, value if isinstance(value, list) else [value])
            return Track([*events, *wire.closing()], STREAM_TYPE)


def _body_track(reply: Say | Cut | StreamError | Body, wire: Wire) -> Track:
    match reply:
        case Say():
            body = wire.body(say_pieces(reply, wire.request))
            writes = _writes(body, reply.write_bytes)
            return Track(writes, JSON_TYPE, headers=reply.headers, delay=reply.chunk_delay, length=len(body))
        case Cut(answer):
            body = wire.body(say_pieces(answer, wire.request))
            half = body[: len(body) // 2] if reply.after_chunks else b""
            length = len(half) if reply.clean else len(body)
            return Track([half] if half else [], JSON_TYPE, length=length, dropped=not reply.clean)
        case StreamError(message, code):
            return Track([orjson.dumps(wire.error(code, message))], JSON_TYPE)
        case Body(value):
            return Track([orjson.dumps(value)], JSON_TYPE)


def _events(answer: Say, wire: Wire) -> list[bytes]:
    said = (wire.event(piece) for piece in say_pieces(answer, wire.request))
    return [*wire.opening(), *(event for event in said if event is not None)]


def _writes(data: bytes, size: int | None) -> list[bytes]:
    if size is None:
        return [data]
    return [data[start : start + size] for start in range(0, len(data), size)]


class Dropped(Exception):
    """The connection must be reset here."""


@dataclass(frozen=True, slots=True)
class Live:
    """An answer that is still being created. Opening it starts the work, or raises the BackendError whose status the
    client gets; closing it ends the work, finished or not."""

    open: Callable[[], AbstractContextManager[AsyncIterator[Piece]]]


async def play(reply: ScriptedReply | Live, http: web.BaseRequest, wire: Wire) -> web.StreamResponse:
    if isinstance(reply, Live):
        return await _play_live(reply, http, wire)
    return await _send(track_of(await wait_due(reply), wire), http)


async def _send(track: Track, http: web.BaseRequest) -> web.StreamResponse:
    if track.dropped and not track.parts:
        raise Dropped
    headers = {"Content-Type": track.kind, **track.headers}
    if track.length is not None:
        headers["Content-Length"] = str(track.length)
    response = web.StreamResponse(status=track.status, headers=headers)
    await response.prepare(http)
    for index, part in enumerate(track.parts):
        if index:
            await asyncio.sleep(track.delay)
        await response.write(part)
    if track.dropped:
        raise Dropped
    await response.write_eof()
    return response


async def _play_live(reply: Live, http: web.BaseRequest, wire: Wire) -> web.StreamResponse:
    try:
        with reply.open() as pieces:
            if not wire.request.streamed:
                body = wire.body([piece async for piece in pieces])
                return await _send(Track([body], JSON_TYPE, length=len(body)), http)
            response = web.StreamResponse(headers={"Content-Type": STREAM_TYPE})
            await response.prepare(http)
            for event in wire.opening():
                await response.write(event)
            async for piece in pieces:
                if (said := wire.event(piece)) is not None:
                    await response.write(said)
            for event in wire.closing():
                await response.write(event)
            await response.write_eof()
            return response
    except BackendError as error:
        status = error.status or 500
        param = "input_tokens" if isinstance(error, ContextOverflow) else None
        return await _send(track_of(Fail(status, wire.error(status, str(error), param)), wire), http)

"""The format of an OpenAI-compatible answer, as in vLLM: JSON bodies, stream events, errors. Pure.

An answer is a list of pieces in the order in which a model generates them. The same pieces form one JSON body or the
events of a stream, for chat and for plain completions; the player decides the timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import orjson
from pydantic import JsonValue

from batch_agent.backends.simulated.tokens import count_tokens, encode
from batch_agent.messages import JsonObject, ToolCall, Usage
from batch_agent.testing.replies import Say
from batch_agent.testing.request import Request

CHUNK_CHARACTERS = 8  # of text and of tool arguments, in one event of a scripted stream
DONE = b"data: [DONE]\n\n"


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


Piece = TextPiece | ReasoningPiece | CallPiece | End | Usage


def say_pieces(answer: Say, request: Request) -> list[Piece]:
    """Return a scripted answer; every prompt of a list gets the same."""
    pieces: list[Piece] = []
    calls = [use.as_call(request.number, index) for index, use in enumerate(answer.calls)]
    reason = answer.finish_reason or ("tool_calls" if calls else "stop")
    for choice in range(len(request.prompts)):
        pieces += [ReasoningPiece(part, choice) for part in _parts(answer.reasoning)]
        pieces += [TextPiece(part, choice) for part in _parts(answer.text)]
        pieces += [piece for index, call in enumerate(calls) for piece in call_pieces(index, call, choice)]
        pieces.append(End(reason, choice))
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
            case End(reason, choice):
                return self._chunk({}, choice, reason)
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
        return {"index": end.choice, **said, "logprobs": None, "finish_reason": end.finish_reason, "stop_reason": None}

    def _chunk(self, delta: JsonObject, choice: int, finish_reason: str | None = None) -> bytes:
        said: JsonObject = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        whole: JsonObject = {"index": choice, **said, "logprobs": None, "finish_reason": finish_reason}
        return sse({**self._stream_head(), "choices": [whole]})

    def _stream_head(self) -> JsonObject:
        return {**self._head, "object": f"{self._kind}.chunk"} if self._chat else self._head


def sse(value: JsonValue) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_object(status: int, message: str, param: str | None = None) -> JsonObject:
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


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

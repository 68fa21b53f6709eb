"""What a reply sends, decided in advance: a Track of bytes, with the scripted failures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from batch_agent.testing.replies import Answered, Body, Cut, Fail, Malformed, Say, StreamError
from batch_agent.testing.wire import Wire, say_pieces

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"


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

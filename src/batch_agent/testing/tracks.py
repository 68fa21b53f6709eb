"""What a reply sends, decided in advance: a Track of bytes, with the scripted failures. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import orjson
from aiohttp import web

from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.testing.replies import Answered, Body, Cut, Fail, Malformed, Say, ScriptedReply, StreamError
from batch_agent.testing.script import wait_due
from batch_agent.testing.wire import Piece, Wire, say_pieces

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

"""Sends one reply to one HTTP client, with its timing: a Track of bytes, or a Live answer, made while it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from aiohttp import web

from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.testing.replies import Fail, ScriptedReply
from batch_agent.testing.script import wait_due
from batch_agent.testing.tracks import JSON_TYPE, STREAM_TYPE, Track, track_of
from batch_agent.testing.wire import Piece, Wire


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

"""ScriptedBackend: the scripted server's replies behind the Backend protocol, without sockets.

The same code as over HTTP writes requests and reads answers, so a script means the same in both. Use it to test
everything above a backend; use a ScriptedServer to test connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Self

import orjson
from multidict import CIMultiDict

from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.http.wire import Faults, Naming, read_quota, report_calls
from batch_agent.backends.openai.chat import AnswerStream, ChatView, encode_head, end_body, join_body, read_answer
from batch_agent.http.failures import BrokenOff, ClosedEarly
from batch_agent.messages import Reply
from batch_agent.testing.wire import Request, Script, Track, Wire, scripted_reply, track_of, wait_due

FAULTS = Faults("scripted://")


class ScriptedBackend(Backend):
    """``requests``, ``inflight`` and ``peak_inflight`` are as in ScriptedServer."""

    def __init__(self, script: Script | None = None, *, capabilities: Capabilities | None = None) -> None:
        self._script = script
        self._capabilities = capabilities if capabilities is not None else Capabilities(native_schema=True, images=True)
        self.requests: list[Request] = []
        self.inflight = 0
        self.peak_inflight = 0
        self.entered = 0  # number of users that have it open
        self.health = Probe("up", models=("scripted",))  # result of ``probe``

    @property
    def name(self) -> str:
        return "scripted://"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def __aenter__(self) -> Self:
        self.entered += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.entered -= 1

    async def models(self) -> list[str]:
        return ["scripted"]

    async def probe(self, endpoint: str = "") -> Probe:
        return self.health

    def check(self, shape: RequestShape) -> None:
        encode_head(shape, False)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        naming = Naming(request.conversation.messages, FAULTS)
        stream = None
        if on_tool_call is not None and self._capabilities.streaming:
            request.said.clear()
            stream = AnswerStream(naming, on_tool_call, asyncio.get_running_loop().time, request.said)
        asked = self._request(request, stream is not None)
        self.requests.append(asked)
        self.inflight += 1
        self.peak_inflight = max(self.peak_inflight, self.inflight)
        try:
            track = await self._track(asked)
            if track.status >= 300:
                raise FAULTS.answered(track.status, CIMultiDict(track.headers), b"".join(track.parts))
            reply = await _read_stream(track, stream, request) if stream else await _read_body(track, naming)
            if stream is None:
                report_calls(reply, on_tool_call)
            quota = read_quota(CIMultiDict(track.headers)) if track.headers else None
            return reply if quota is None else replace(reply, quota=quota)
        finally:
            self.inflight -= 1

    def _request(self, request: ModelRequest, streamed: bool) -> Request:
        end = end_body({} if request.seed is None else {"seed": request.seed})
        raw = join_body(encode_head(request.shape, streamed), request.conversation.view(ChatView), end)
        return Request(len(self.requests), "/v1/chat/completions", orjson.loads(raw), raw=raw)

    async def _track(self, request: Request) -> Track:
        reply = await scripted_reply(self._script, request, self.requests[: request.number])
        return track_of(await wait_due(reply), Wire(request, model=request.model, fingerprint="scripted"))


async def _read_stream(track: Track, stream: AnswerStream, request: ModelRequest) -> Reply:
    clock = asyncio.get_running_loop().time
    for index, part in enumerate(track.parts):
        if index:
            await asyncio.sleep(track.delay)
        request.heard_at = clock()
        if request.on_begin is not None:
            request.on_begin()
        if stream.feed(part):
            break
    _check_dropped(track)
    return stream.finish()


async def _read_body(track: Track, naming: Naming) -> Reply:
    await asyncio.sleep(track.delay * (len(track.parts) - 1))
    _check_dropped(track)
    return read_answer(b"".join(track.parts), naming)


def _check_dropped(track: Track) -> None:
    if track.dropped:
        raise FAULTS.raised(BrokenOff("cut") if track.parts else ClosedEarly())

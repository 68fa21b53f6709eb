"""The scripted replies without sockets: the same script means the same to an engine."""

from __future__ import annotations

import asyncio

import pytest

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.errors import BackendError, BadResponse, ContextOverflow, RateLimited, Rejected, Truncated, Unavailable
from batch_agent.messages import Conversation, Image, Message, ToolCall, ToolSpec, Usage
from batch_agent.testing import (
    Body,
    CallTools,
    Cut,
    Fail,
    Hang,
    Malformed,
    Request,
    Say,
    ScriptedBackend,
    ScriptedServer,
    StreamError,
    ToolUse,
    virtual_clock,
)

SEARCH = ToolSpec("search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}})
SHAPE = RequestShape(model="m", tools=(SEARCH,))

OVERFLOW = {"error": {"message": "maximum context length is 9", "code": 400, "type": "", "param": "input_tokens"}}
BROKEN = [
    (Fail(429, headers={"Retry-After": "7"}), RateLimited),
    (Fail(503), Unavailable),
    (Fail(401), Rejected),
    (Fail(400, OVERFLOW), ContextOverflow),
    (Cut(), Unavailable),
    (Cut(after_chunks=0), Unavailable),
    (Cut(clean=True), BadResponse),
    (StreamError("lost", 503), Unavailable),
    (Malformed(b"\xff\x00{"), BadResponse),
    (Body({"choices": []}), BadResponse),
    (Say("to the limit", finish_reason="length"), Truncated),
    (Say("half", finish_reason="abort"), BadResponse),
]


def ask() -> ModelRequest:
    return ModelRequest(SHAPE, Conversation([Message("user", "hi")]), "job")


def test_it_is_a_backend() -> None:
    assert isinstance(ScriptedBackend(), Backend)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_is_a_reply(streamed: bool) -> None:
    usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3)
    reply = Say("Hello, wide world.", (ToolUse("search", {"query": "x"}),), reasoning="hm", usage=usage)
    seen: list[ToolCall] = []
    async with ScriptedBackend([reply]) as backend:
        got = await backend.infer(ask(), seen.append if streamed else None)
    assert (got.text, got.reasoning, got.usage, got.finish_reason) == ("Hello, wide world.", "hm", usage, "tool_calls")
    assert got.tool_calls == (ToolCall("call_0_0", "search", '{"query":"x"}'),)
    assert seen == (list(got.tool_calls) if streamed else [])
    assert backend.requests[0].streamed == streamed
    assert backend.requests[0].tools == [SEARCH]


async def test_what_is_no_answer_is_the_same_error_in_process_and_over_http() -> None:
    for reply, kind in BROKEN:
        for on_tool_call in (None, lambda call: None):
            async with ScriptedBackend([reply]) as backend:
                with pytest.raises(BackendError) as here:
                    await backend.infer(ask(), on_tool_call)
            async with ScriptedServer([reply]) as server, OpenAIBackend(server.url) as remote:
                with pytest.raises(BackendError) as there:
                    await remote.infer(ask(), on_tool_call)
            assert type(here.value) is type(there.value) is kind, (reply, on_tool_call)
            assert here.value.status == there.value.status, (reply, on_tool_call)


@virtual_clock
async def test_latency_passes_on_the_loops_clock_and_requests_in_flight_are_counted() -> None:
    async with ScriptedBackend(lambda request: Say("ok", latency=60)) as backend, asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(backend.infer(ask()))
    assert (backend.peak_inflight, backend.inflight) == (5, 0)
    assert asyncio.get_running_loop().time() == pytest.approx(60)


@virtual_clock
async def test_a_request_that_hangs_ends_with_its_timeout() -> None:
    async with ScriptedBackend([Hang()]) as backend:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await backend.infer(ask())
    assert backend.inflight == 0


async def test_a_script_can_follow_a_conversation() -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("search", {"query": "x"})) if request.turn == 0 else Say(f"saw {request.text}")

    request = ask()
    async with ScriptedBackend(script) as backend:
        first = await backend.infer(request)
        request.conversation.append(Message("assistant", first.text, first.tool_calls))
        request.conversation.append(Message("tool", "a result", tool_call_id=first.tool_calls[0].id))
        second = await backend.infer(request)
    assert second.text == "saw a result"
    assert backend.requests[1].raw.startswith(backend.requests[0].raw.removesuffix(b"]}"))


async def test_a_script_sees_the_images_it_was_shown() -> None:
    message = Message("user", ("What is this?", Image("https://host/a.png")))
    backend = ScriptedBackend([Say("a cat")])
    await backend.infer(ModelRequest(RequestShape(model="m"), Conversation([message]), "job"))
    [request] = backend.requests
    assert request.conversation() == [message]
    assert request.text == "What is this?"

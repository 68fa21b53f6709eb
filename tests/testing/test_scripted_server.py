"""The scripted server, over real sockets and with a plain HTTP client: the wire as other programs see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import jsonschema_rs
import pytest

from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.testing import (
    Body,
    CallTools,
    Cut,
    Fail,
    Hang,
    Malformed,
    Request,
    Say,
    ScriptedServer,
    StreamError,
    ToolUse,
    virtual_clock,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def chat(text: str = "hi", **fields: object) -> dict[str, object]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], **fields}


async def post(client: aiohttp.ClientSession, server: ScriptedServer, **fields: object) -> tuple[int, dict]:
    async with client.post(f"{server.url}/chat/completions", json=chat(**fields)) as response:
        return response.status, await response.json()


async def stream(client: aiohttp.ClientSession, server: ScriptedServer, **fields: object) -> list[dict | str]:
    body = chat(**{"stream": True, "stream_options": {"include_usage": True}, **fields})
    async with client.post(f"{server.url}/chat/completions", json=body) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def deltas(events: list[dict | str]) -> list[dict]:
    return [e["choices"][0]["delta"] for e in events if isinstance(e, dict) and e.get("choices")]


async def test_an_answer_as_json_has_the_shape_of_a_chat_completion(client: aiohttp.ClientSession) -> None:
    usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3, reasoning_tokens=1)
    async with ScriptedServer([Say("Hello.", reasoning="hm", usage=usage)]) as server:
        status, body = await post(client, server)
    assert status == 200
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "tool_calls": [], "reasoning": "hm"}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


async def test_a_stream_names_the_role_then_the_text_then_the_end_then_the_usage(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer([Say("Hello, wide wörld.")]) as server:
        events = await stream(client, server)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] > 0
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert deltas(events)[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas(events)) == "Hello, wide wörld."
    assert len(deltas(events)) > 3
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}


async def test_usage_is_streamed_only_to_those_who_ask(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer([Say("Hello.")]) as server:
        events = await stream(client, server, stream_options={})
    assert all("usage" not in event for event in events[:-1])


async def test_tool_calls_are_streamed_with_an_index_and_split_arguments(client: aiohttp.ClientSession) -> None:
    calls = CallTools(ToolUse("search", {"query": "first"}), ToolUse("search", {"query": "second"}, id="mine"))
    async with ScriptedServer([calls]) as server:
        events = await stream(client, server)
    parts = [delta["tool_calls"][0] for delta in deltas(events) if "tool_calls" in delta]
    opened = [part for part in parts if "id" in part]
    assert [(part["index"], part["id"], part["function"]["name"]) for part in opened] == [
        (0, "call_0_0", "search"),
        (1, "mine", "search"),
    ]
    texts = ["".join(p["function"]["arguments"] for p in parts if p["index"] == index) for index in (0, 1)]
    assert [json.loads(text) for text in texts] == [{"query": "first"}, {"query": "second"}]
    assert len(parts) > 4
    assert events[-3]["choices"][0]["finish_reason"] == "tool_calls"


async def test_replies_of_a_list_go_out_in_order_and_one_request_too_many_is_refused(
    client: aiohttp.ClientSession,
) -> None:
    async with ScriptedServer([Say("one"), Fail(503, headers={"Retry-After": "7"})]) as server:
        first = await post(client, server)
        async with client.post(f"{server.url}/chat/completions", json=chat()) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "7")
        status, body = await post(client, server)
    assert first[1]["choices"][0]["message"]["content"] == "one"
    assert status == 400
    assert "2 replies, and this is request 3" in body["error"]["message"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_sees_the_request_and_its_turn(client: aiohttp.ClientSession, is_async: bool) -> None:
    def script(request: Request) -> Say:
        return Say(f"{request.number}:{request.turn}:{request.text}:{request.headers['X-Test']}")

    async def later(request: Request) -> Say:
        await asyncio.sleep(0)
        return script(request)

    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    body = chat() | {"messages": history}
    async with (
        ScriptedServer(later if is_async else script) as server,
        client.post(f"{server.url}/chat/completions", json=body, headers={"X-Test": "yes"}) as response,
    ):
        body = await response.json()
    assert body["choices"][0]["message"]["content"] == "0:1:c:yes"
    assert server.requests[0].messages == history


async def test_a_script_that_raises_fails_the_test_that_wrote_it(client: aiohttp.ClientSession) -> None:
    def script(request: Request) -> Say:
        raise AssertionError("not what I expected")

    with pytest.raises(AssertionError, match="not what I expected"):
        async with (
            ScriptedServer(script) as server,
            client.post(f"{server.url}/chat/completions", json=chat()) as response,
        ):
            assert response.status == 500


async def test_a_cut_stream_breaks_off_after_so_many_chunks(client: aiohttp.ClientSession) -> None:
    seen = b""
    async with ScriptedServer([Cut(Say("a long answer, never finished"), after_chunks=3)]) as server:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with client.post(f"{server.url}/chat/completions", json=chat(stream=True)) as response:
                async for line in response.content:
                    seen += line
    assert seen.count(b"data: ") == 3
    assert b"[DONE]" not in seen


async def test_a_cleanly_cut_stream_ends_without_an_end(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer([Cut(after_chunks=2, clean=True)]) as server:
        events = await stream(client, server)
    assert len(events) == 2
    assert all(event["choices"][0]["finish_reason"] is None for event in events)


async def test_a_cut_json_body_is_shorter_than_it_said(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer([Cut(), Cut(clean=True), Cut(after_chunks=0)]) as server:
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(client, server)
        with pytest.raises(json.JSONDecodeError):
            await post(client, server)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(client, server)


async def test_an_error_can_come_inside_a_200(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer([StreamError("worker lost", 503), StreamError("worker lost", 503)]) as server:
        events = await stream(client, server)
        status, body = await post(client, server)
    assert events[-2]["error"] == {
        "message": "worker lost",
        "type": "InternalServerError",
        "param": None,
        "code": 503,
    }
    assert (status, body["error"]["code"]) == (200, 503)


async def test_raw_bytes_and_raw_json_are_sent_as_they_are(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer([Malformed(b"{not json"), Body({"choices": []}), Body([{"a": 1}, {"b": 2}])]) as server:
        async with client.post(f"{server.url}/chat/completions", json=chat()) as response:
            assert (response.status, await response.read()) == (200, b"{not json")
        assert await post(client, server) == (200, {"choices": []})
        assert await stream(client, server) == [{"a": 1}, {"b": 2}, "[DONE]"]


@virtual_clock
async def test_latency_and_slow_bytes_take_the_time_they_say() -> None:
    loop = asyncio.get_running_loop()
    slow = Say("übergröße", latency=5, chunk_delay=1, write_bytes=10)
    async with ScriptedServer([slow, slow]) as server, aiohttp.ClientSession() as client:
        _, body = await post(client, server)
        size = len(json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode())
        assert loop.time() == pytest.approx(5 + (size - 1) // 10)
        events = await stream(client, server)
    assert body["choices"][0]["message"]["content"] == "übergröße"
    assert "".join(delta.get("content", "") for delta in deltas(events)) == "übergröße"


async def test_a_client_that_leaves_a_hanging_request_is_noticed(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer(lambda request: Hang()) as server, asyncio.timeout(10):
        asking = asyncio.create_task(post(client, server))
        await server.wait_requests(1)
        assert server.inflight == 1
        asking.cancel()
        await server.wait_disconnects(1)
        await server.wait_idle()
        assert (server.disconnects, server.inflight) == (1, 0)


async def test_closing_the_server_cuts_off_who_still_waits(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer(lambda request: Hang()) as server:
        asking = asyncio.create_task(post(client, server))
        await server.wait_requests(1)
    with pytest.raises(aiohttp.ClientConnectionError):
        await asking
    assert server.disconnects == 0


async def test_requests_in_flight_are_counted(client: aiohttp.ClientSession) -> None:
    gate = asyncio.Event()

    async def script(request: Request) -> Say:
        await gate.wait()
        return Say("ok")

    async with ScriptedServer(script) as server, asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(post(client, server))
        await server.wait_inflight(3)
        gate.set()
        await server.wait_idle()
    assert (server.received, server.peak_inflight) == (3, 3)


async def test_wrong_requests_get_the_answers_of_a_real_server(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer(models=["known"], api_key="secret") as server:
        url, right = f"{server.url}/chat/completions", {"Authorization": "Bearer secret"}
        cases = [
            (401, {}, json.dumps(chat())),
            (401, {"Authorization": "Bearer wrong"}, json.dumps(chat())),
            (404, right, json.dumps(chat())),
            (400, right, "{"),
            (400, right, "[]"),
            (400, right, json.dumps({"model": "known", "messages": []})),
            (400, right, json.dumps(chat() | {"model": "known", "max_tokens": 0})),
            (400, right, json.dumps(chat() | {"model": "known", "tools": [{"type": "function"}]})),
            (200, right, json.dumps(chat() | {"model": "known"})),
        ]
        for status, headers, body in cases:
            async with client.post(url, data=body, headers=headers) as response:
                assert response.status == status, body
                answer = await response.json()
                assert status == 200 or (answer["error"]["code"] == status and "secret" not in json.dumps(answer))


async def test_the_other_routes_answer(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer(models=["a", "b"]) as server:
        root = server.url.removesuffix("/v1")
        async with client.get(f"{server.url}/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["a", "b"]
        async with client.get(f"{root}/metrics") as response:
            assert 'vllm:num_requests_running{engine="0",model_name="a"} 0' in await response.text()
        async with client.get(f"{root}/health") as response:
            assert response.status == 200
    assert server.backend_url == f"vllm://{server.address}"


@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
async def test_completions_give_a_choice_for_each_prompt(
    client: aiohttp.ClientSession, prompt: str | list[str]
) -> None:
    count = len(prompt) if isinstance(prompt, list) else 1
    async with ScriptedServer(lambda request: Say("text")) as server:
        url = f"{server.url}/completions"
        async with client.post(url, json={"model": "any", "prompt": prompt}) as response:
            body = await response.json()
        async with client.post(url, json={"model": "any", "prompt": prompt, "stream": True}) as response:
            events = (await response.text()).split("\n\n")
    assert body["object"] == "text_completion"
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(i, "text") for i in range(count)]
    assert events[-2] == "data: [DONE]"
    assert len(events) == 2 * count + 2


async def test_without_a_script_the_answer_fits_the_schema(client: aiohttp.ClientSession) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["low", "high"]}, "count": {"type": "integer", "minimum": 3}},
        "required": ["kind", "count"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with ScriptedServer() as server:
        _, body = await post(client, server, response_format=form)
        _, echo = await post(client, server, text="anyone there?")
    assert jsonschema_rs.is_valid(schema, json.loads(body["choices"][0]["message"]["content"]))
    assert echo["choices"][0]["message"]["content"] == "echo: anyone there?"


async def test_without_a_script_a_forced_tool_is_called(client: aiohttp.ClientSession) -> None:
    async with ScriptedServer() as server:
        _, required = await post(client, server, tools=[TOOL], tool_choice="required")
        named = {"type": "function", "function": {"name": "search"}}
        _, by_name = await post(client, server, tools=[TOOL], tool_choice=named)
        _, free = await post(client, server, tools=[TOOL])
    for body, reason in ((required, "tool_calls"), (by_name, "stop")):
        choice = body["choices"][0]
        assert choice["finish_reason"] == reason
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query":""}'}
    assert free["choices"][0]["message"]["tool_calls"] == []


async def test_a_taken_port_is_a_spec_error_that_says_so() -> None:
    async with ScriptedServer() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(SpecError, match="in use by another program"):
            async with ScriptedServer(port=port):
                pass

"""One address for many servers, on real sockets: raw ones, our own backend, and OpenAI's client where there is one."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import pytest
from tests.fleet.proxies import chat, get, nobody, post, proxy, raw, servers

from batch_agent import BatchAgent
from batch_agent.backends.engines.engine import Exposition
from batch_agent.errors import SpecError
from batch_agent.fleet.hostfile import parse_hosts
from batch_agent.fleet.proxy import LOOK_SECONDS, serve_proxy
from batch_agent.testing import Cut, Fail, Hang, Say, ScriptedServer, virtual_clock


async def test_requests_are_spread_over_the_endpoints_and_those_that_begin_alike_stay_together() -> None:
    async with AsyncExitStack() as stack:
        places = [server.address for server in await servers(stack, "a", "b", "c", "d")]
        address = await stack.enter_async_context(proxy(*places))
        told = [(await chat(address, f"question {number}"))[1] for number in range(60)]
        again = [(await chat(address, f"question {number}"))[1] for number in range(60)]
    assert again == told
    assert len(Counter(told)) == 4


async def test_all_turns_of_a_conversation_go_where_the_first_went() -> None:
    async with AsyncExitStack() as stack:
        places = [server.address for server in await servers(stack, "a", "b", "c", "d")]
        address = await stack.enter_async_context(proxy(*places))
        for number in range(8):
            messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {number}"}]
            seen = set()
            for _ in range(4):
                _, said = await chat(address, messages=messages)
                seen.add(said)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
            assert len(seen) == 1


@pytest.mark.parametrize("field", ["user", "prompt_cache_key", "x-session-id"])
async def test_what_a_client_says_belongs_together_does(field: str) -> None:
    async with AsyncExitStack() as stack:
        places = [server.address for server in await servers(stack, "a", "b", "c", "d")]
        address = await stack.enter_async_context(proxy(*places))
        told = []
        for number in range(12):
            body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
            header = f"{field}: me" if field.startswith("x-") else "X-Nothing: 1"
            body |= {} if field.startswith("x-") else {field: "me"}
            answer = await raw(address, post("/v1/chat/completions", body, header))
            told.append(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"])
    assert len(set(told)) == 1


async def test_one_beginning_that_all_share_does_not_keep_the_other_endpoints_idle() -> None:
    async with AsyncExitStack() as stack:
        hanging = [await stack.enter_async_context(ScriptedServer(lambda request: Hang())) for _ in range(4)]
        address = await stack.enter_async_context(proxy(*(server.address for server in hanging)))
        asking = [asyncio.create_task(chat(address)) for _ in range(100)]
        while sum(server.inflight for server in hanging) < 100:
            await asyncio.sleep(0.01)
        busy = sorted(server.inflight for server in hanging)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert busy[0] >= 15
    assert busy[-1] <= 45


async def test_a_stream_is_passed_on_byte_for_byte_and_as_it_comes() -> None:
    document = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    said = Say("one two three four five six")
    async with ScriptedServer(lambda request: said, models=["m"]) as server, proxy(server.address) as address:
        direct = await raw(server.address, post("/v1/chat/completions", document))
        passed = await raw(address, post("/v1/chat/completions", document))
    assert len(_events(passed)) > 6
    assert _events(passed) == _events(direct)


def _events(answer: bytes) -> list[object]:
    """Without ids and times, which each answer has of its own."""
    lines = [line.removeprefix(b"data: ").strip() for line in answer.split(b"\n") if line.startswith(b"data: ")]
    documents = [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]
    return [
        {name: value for name, value in document.items() if name not in ("id", "created")}
        if isinstance(document, dict)
        else document
        for document in documents
    ]


async def test_the_first_words_of_a_stream_are_there_before_its_last() -> None:
    slow = Say("one two three", chunk_delay=0.02)
    async with ScriptedServer(lambda request: slow, models=["m"]) as server, proxy(server.address) as address:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{address}/v1/chat/completions", json=body) as answer,
        ):
            await answer.content.readany()
            assert server.inflight == 1
            rest = await answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_dead_endpoint_costs_its_requests_nothing() -> None:
    async with AsyncExitStack() as stack:
        dying, [other] = await stack.enter_async_context(ScriptedServer(models=["m"])), await servers(stack, "other")
        address = await stack.enter_async_context(proxy(dying.address, other.address))
        await dying.__aexit__(None, None, None)
        told = [await chat(address, f"question {number}") for number in range(20)]
        _, health = await get(address, "/health")
        _, status = await get(address, "/status")
    assert told == [(200, "other")] * 20
    assert health == {"status": "ok", "up": 1, "endpoints": 2}
    [down] = [place for place in status["endpoints"] if not place["up"]]  # type: ignore[attr-defined]
    assert down["endpoint"] == f"vllm://{dying.address}"
    assert down["reason"]


async def test_a_request_that_breaks_every_server_it_meets_is_not_shown_to_all_of_them() -> None:
    async with AsyncExitStack() as stack:
        breaking = [
            await stack.enter_async_context(ScriptedServer(lambda request: Cut(after_chunks=0))) for _ in range(6)
        ]
        address = await stack.enter_async_context(proxy(*(server.address for server in breaking)))
        status, words = await chat(address)
    assert status == 502
    assert "no endpoint answered" in words
    assert sum(server.received for server in breaking) == 3


async def test_a_server_with_too_much_to_do_is_left_for_another_once() -> None:
    async with AsyncExitStack() as stack:
        full = [
            await stack.enter_async_context(ScriptedServer(lambda request: Fail(503, {"error": {"message": "full"}})))
            for _ in range(3)
        ]
        address = await stack.enter_async_context(proxy(*(server.address for server in full)))
        status, words = await chat(address)
        assert (status, sum(server.received for server in full)) == (503, 2)
        assert "full" in words


async def test_what_a_server_refuses_is_passed_on_as_it_is() -> None:
    async with ScriptedServer(models=["m"]) as server, proxy(server.address) as address:
        assert (await chat(address, model="other"))[0] == 404
        assert server.received == 1


async def test_without_any_endpoint_the_answer_says_so() -> None:
    async with proxy(nobody(), nobody()) as address:
        status, words = await chat(address)
        health, _ = await get(address, "/health")
    assert (status, health) == (503, 503)
    assert "none of the 2 endpoints is up" in words
    assert "refused" in words


async def test_a_client_that_leaves_takes_its_request_off_the_server() -> None:
    async with ScriptedServer(lambda request: Hang(), models=["m"]) as server, proxy(server.address) as address:
        asking = asyncio.create_task(chat(address))
        await server.wait_inflight(1)
        asking.cancel()
        await server.wait_disconnects(1)
        await server.wait_idle()


async def test_a_break_in_mid_answer_is_not_taken_for_its_end() -> None:
    breaking = Cut(after_chunks=3)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with ScriptedServer(lambda request: breaking, models=["m"]) as server, proxy(server.address) as address:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{address}/v1/chat/completions", json=body) as answer,
        ):
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert server.received == 1


async def test_requests_over_an_endpoints_limit_wait_in_line() -> None:
    gate = asyncio.Event()

    async def script(request: object) -> Say:
        await gate.wait()
        return Say("done")

    async with ScriptedServer(script, models=["m"]) as server, proxy(server.address, max_inflight=2) as address:
        asking = [asyncio.create_task(chat(address, str(number))) for number in range(6)]
        await server.wait_inflight(2)
        while (await get(address, "/status"))[1]["waiting"] != 4:
            await asyncio.sleep(0.01)
        asking.pop().cancel()
        gate.set()
        assert await asyncio.gather(*asking) == [(200, "done")] * 5
        assert server.peak_inflight == 2


async def test_headers_between_neighbours_are_dropped_and_keys_are_passed_on() -> None:
    async with ScriptedServer(models=["m"], api_key="secret") as server, proxy(server.address) as address:
        document = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        head = ["Authorization: Bearer secret", "Connection: X-Mine", "X-Mine: 1", "TE: trailers", "X-Kept: yes"]
        answer = await raw(address, post("/v1/chat/completions", document, *head))
        refused = await raw(address, post("/v1/chat/completions", document, "Authorization: Bearer wrong"))
        listed, models = await get(address, "/v1/models", Authorization="Bearer secret")
    assert answer.startswith(b"HTTP/1.1 200")
    assert refused.startswith(b"HTTP/1.1 401")
    headers = server.requests[0].headers
    assert headers["Host"] == server.address
    assert headers["X-Kept"] == "yes"
    assert not {"TE", "X-Mine"} & set(headers)
    assert listed == 200
    assert [card["id"] for card in models["data"]] == ["m"]  # type: ignore[attr-defined]


async def test_models_are_those_of_all_endpoints_and_requests_go_to_one_that_serves_theirs() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(ScriptedServer(lambda request: Say("first"), models=["x", "both"]))
        second = await stack.enter_async_context(ScriptedServer(lambda request: Say("second"), models=["y", "both"]))
        address = await stack.enter_async_context(proxy(first.address, second.address))
        _, models = await get(address, "/v1/models")
        told = {await chat(address, str(number), model="y") for number in range(8)}
        for _ in range(4):
            await raw(address, b"GET /v1/models/y HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        _, status = await get(address, "/status")
    assert [place["requests"] for place in status["endpoints"]] == [0, 12]  # type: ignore[attr-defined]
    assert [card["id"] for card in models["data"]] == ["x", "both", "y"]  # type: ignore[attr-defined]
    assert told == {(200, "second")}


async def test_those_who_wait_for_one_model_do_not_hold_up_another() -> None:
    async with AsyncExitStack() as stack:
        busy = await stack.enter_async_context(ScriptedServer(lambda request: Hang(), models=["x"]))
        free = await stack.enter_async_context(ScriptedServer(lambda request: Say("free"), models=["y"]))
        address = await stack.enter_async_context(proxy(busy.address, free.address, max_inflight=1))
        asking = [asyncio.create_task(chat(address, str(number), model="x")) for number in range(3)]
        while (await get(address, "/status"))[1]["waiting"] != 2:
            await asyncio.sleep(0.01)
        assert await chat(address, model="y") == (200, "free")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_large_bodies_and_other_paths_pass() -> None:
    async with (
        ScriptedServer(lambda request: Say(str(len(request.raw))), models=["m"]) as server,
        proxy(server.address) as address,
    ):
        document = {"model": "m", "messages": [{"role": "user", "content": "word " * 1_000_000}]}
        large = await raw(address, post("/v1/chat/completions", document))
        assert json.loads(large.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == str(
            len(json.dumps(document))
        )
        other = await raw(address, post("/v1/completions", {"model": "m", "prompt": "x"}))
        assert other.startswith(b"HTTP/1.1 200")
        assert (await raw(address, post("/v1/nothing?a=b%20c", {}))).startswith(b"HTTP/1.1 404")
        assert b"does not exist" in await raw(address, post("/metrics", {}))


async def test_compressed_bodies_pass_as_they_are() -> None:
    document = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    size = ScriptedServer(lambda request: Say(str(len(request.raw))), models=["m"])
    async with size as server, proxy(server.address) as address:
        packed = gzip.compress(document)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
        )
        answer = await raw(address, f"{head}Content-Length: {len(packed)}\r\n\r\n".encode() + packed)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == str(len(document))


async def test_a_taken_port_is_named() -> None:
    async with ScriptedServer() as server:
        with pytest.raises(SpecError, match="in use by another program"):
            await serve_proxy(
                parse_hosts(server.address, "test"),
                host="127.0.0.1",
                port=int(server.address.rpartition(":")[2]),
                ready=lambda url: None,
            )


@virtual_clock
async def test_an_endpoint_that_comes_back_is_used_again() -> None:
    async with AsyncExitStack() as stack:
        [server] = await servers(stack, "back")
        place, port = server.address, int(server.address.rpartition(":")[2])
        await server.__aexit__(None, None, None)
        address = await stack.enter_async_context(proxy(place))
        assert (await chat(address))[0] == 503
        await stack.enter_async_context(ScriptedServer(lambda request: Say("back"), port=port, models=["m"]))
        await asyncio.sleep(LOOK_SECONDS)
        assert await chat(address) == (200, "back")


async def test_our_own_backend_runs_through_it() -> None:
    async with AsyncExitStack() as stack:
        places = [server.address for server in await servers(stack, "a", "b")]
        address = await stack.enter_async_context(proxy(*places))
        results = await BatchAgent.run(task="{input}", inputs=[str(n) for n in range(50)], backend=f"vllm://{address}")
    assert [result.error for result in results] == [None] * 50
    assert {result.output for result in results} == {"a", "b"}


async def test_openais_own_client_runs_through_it() -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    async with AsyncExitStack() as stack:
        [server] = await servers(stack, "hello there")
        address = await stack.enter_async_context(proxy(server.address))
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="key"))
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        said = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        models = [model.id async for model in client.models.list()]
    assert whole.choices[0].message.content == "".join(said) == "hello there"
    assert models == ["m"]


async def test_prometheus_reads_how_the_endpoints_are() -> None:
    async with AsyncExitStack() as stack:
        [one] = await servers(stack, "one")
        place = await stack.enter_async_context(proxy(one.address, nobody()))
        assert await chat(place) == (200, "one")
        async with aiohttp.ClientSession() as session, session.get(f"http://{place}/metrics") as answer:
            text = await answer.text()
    samples = Exposition(text, ["batch_agent_endpoint_up", "batch_agent_proxy_requests_total"])
    assert sorted(sample.value for sample in samples.samples("batch_agent_endpoint_up")) == [0, 1]
    assert samples.total("batch_agent_proxy_requests_total") == 1
    assert "batch_agent_turn_duration_seconds_count 1\n" in text

"""A proxy among servers that hang, stop in mid-answer or never came up, and clients that send half a request."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.fleet.proxies import chat, get, post, proxy, raw, servers

from batch_agent.fleet.proxy import LOOK_SECONDS
from batch_agent.testing import Hang, Say, ScriptedServer, virtual_clock

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Stuck(ScriptedServer):
    """Answers, until ``stuck`` is set: then neither probes nor requests get another byte."""

    def __init__(self, answer: Say | Hang, *, stuck: bool = False) -> None:
        super().__init__(lambda request: answer, models=["m"])
        self.stuck = stuck

    async def _health(self, http: web.Request) -> web.Response:
        if self.stuck:
            await asyncio.get_running_loop().create_future()
        return await super()._health(http)


@virtual_clock
async def test_an_endpoint_that_never_answered_a_probe_gets_no_share_while_another_did() -> None:
    async with AsyncExitStack() as stack:
        never = await stack.enter_async_context(Stuck(Say("never"), stuck=True))
        [other] = await servers(stack, "other")
        address = await stack.enter_async_context(proxy(never.address, other.address))
        told = [await chat(address, f"question {number}") for number in range(20)]
        _, status = await get(address, "/status")
    assert told == [(200, "other")] * 20
    assert never.received == 0
    assert [(place["up"], bool(place["reason"])) for place in status["endpoints"]] == [(False, True), (True, False)]  # type: ignore[attr-defined]


@virtual_clock
async def test_endpoints_that_never_answered_a_probe_are_asked_while_none_did() -> None:
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(Stuck(Say("slow"), stuck=True)) for _ in range(2)]
        address = await stack.enter_async_context(proxy(*(server.address for server in slow)))
        assert [await chat(address, str(number)) for number in range(4)] == [(200, "slow")] * 4


@virtual_clock
async def test_a_request_at_an_endpoint_that_hangs_moves_within_seconds() -> None:
    async with AsyncExitStack() as stack:
        hung = await stack.enter_async_context(Stuck(Hang()))
        [other] = await servers(stack, "other")
        address = await stack.enter_async_context(proxy(hung.address, other.address))
        await asyncio.sleep(LOOK_SECONDS / 2)
        hung.stuck = True
        began = asyncio.get_running_loop().time()
        told = await asyncio.gather(*(chat(address, str(number)) for number in range(8)))
        took = asyncio.get_running_loop().time() - began
    assert told == [(200, "other")] * 8
    assert hung.received >= 1
    assert took < 10  # of the virtual clock


@virtual_clock
async def test_a_request_at_an_endpoint_that_hangs_and_was_removed_moves_too(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    async with AsyncExitStack() as stack:
        hung = await stack.enter_async_context(Stuck(Hang()))
        [other] = await servers(stack, "other")
        hosts.write_text(hung.address)
        address = await stack.enter_async_context(proxy(hung.address, hostfile=hosts))
        asking = asyncio.create_task(chat(address))
        await hung.wait_inflight(1)
        hung.stuck = True
        hosts.write_text(other.address)
        assert await asking == (200, "other")


@virtual_clock
async def test_an_endpoint_that_takes_long_and_answers_probes_keeps_its_requests() -> None:
    async with AsyncExitStack() as stack:
        slow = await stack.enter_async_context(ScriptedServer(lambda request: Say("slow", latency=60), models=["x"]))
        [other] = await servers(stack, "other")
        address = await stack.enter_async_context(proxy(slow.address, other.address))
        assert await chat(address, model="x") == (200, "slow")
        assert slow.received == 1


@virtual_clock
async def test_a_stream_ends_when_its_endpoint_goes_down() -> None:
    async with AsyncExitStack() as stack:
        stuck = await stack.enter_async_context(Stuck(Say("one two three four", chunk_delay=3600)))
        [other] = await servers(stack, "other")
        address = await stack.enter_async_context(proxy(stuck.address, f"{other.address} model=other"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(f"http://{address}{CHAT}", json=STREAM) as answer:
            await answer.content.readany()
            stuck.stuck = True
            async with asyncio.timeout(60):
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
        await stuck.wait_disconnects(1)


@virtual_clock
async def test_a_stream_that_still_brings_something_goes_on_while_its_endpoint_takes_nothing_new() -> None:
    async with AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(Stuck(Say("one two three four", chunk_delay=2)))
        [other] = await servers(stack, "other")
        address = await stack.enter_async_context(proxy(leaving.address, f"{other.address} model=other"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(f"http://{address}{CHAT}", json=STREAM) as answer:
            await answer.content.readany()
            leaving.stuck = True
            rest = await answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "/v1/%2E%2e/metrics",
        "/v1/.%2e/metrics",
        "/v1/x/%2e%2e%2f%2e%2e/metrics",
        "/v1/..%2Fmetrics",
        "/v1/..%5Cmetrics",
        "/v1/..\\metrics",
        "/v1/%252e%252e/metrics",
        "/v1/%25252e%25252E%25252fmetrics",
        "/v1/..;x=1/metrics",
        "/v1/models/..",
        "/v1/%2e%2e?a=b",
    ],
)
async def test_a_path_that_leads_out_of_v1_is_refused(path: str) -> None:
    async with ScriptedServer(models=["m"]) as server, proxy(server.address) as address:
        answer = await raw(address, post(path, STREAM))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"leaves /v1" in answer


async def test_dots_and_slashes_that_lead_nowhere_pass() -> None:
    async with ScriptedServer(models=["m"]) as server, proxy(server.address) as address:
        for path in ("/v1/models/org%2Fm", "/v1/a..b", "/v1/...", "/v1/100%25"):
            assert b"leaves" not in await raw(address, post(path, {}))


@pytest.mark.parametrize(
    "half",
    [
        b"",
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le".encode(),
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n".encode() + b'{"model": ',
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + b'5\r\n{"mod',
    ],
    ids=["nothing", "headers", "body", "chunks"],
)
async def test_a_request_that_is_never_completed_is_dropped(half: bytes) -> None:
    async with ScriptedServer(models=["m"]) as server, proxy(server.address, patience=0.2) as address:
        async with asyncio.timeout(20):
            answer = await raw(address, half)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408")
        assert server.received == 0
        assert (await chat(address))[0] == 200


async def test_a_body_that_comes_slowly_is_read_to_its_end() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    async with AsyncExitStack() as stack:
        [server] = await servers(stack, "read")
        address = await stack.enter_async_context(proxy(server.address, patience=2.0))
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode())
        for place in range(0, len(body), 8):
            writer.write(body[place : place + 8])
            await asyncio.sleep(0.01)
        assert b"read" in await reader.read()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
async def test_a_port_that_others_can_reach_is_warned_of(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with ScriptedServer(models=["m"]) as server, proxy(server.address, host=host):
        pass
    assert any("everyone who can reach" in message for message in caplog.messages) is warns

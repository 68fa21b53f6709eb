"""Responses that are read piece by piece (``Transport.open``)."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from yarl import URL

from batch_agent.errors import InternalError
from batch_agent.http.failures import BrokenOff, ClosedEarly, ConnectFailed
from batch_agent.http.opened import HIGH_WATER_BYTES
from batch_agent.http.transport import Transport
from batch_agent.testing.contract.wire import STREAM_HEAD, Exchange, WireServer, answer, hang, raw


async def test_the_head_comes_first_and_then_the_body_as_it_is_sent() -> None:
    go_on = asyncio.Event()

    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.event(b"one")
        await go_on.wait()
        await exchange.event(b"two")
        await exchange.send(b"0\r\n\r\n")

    async with WireServer(talk) as server, Transport() as transport, asyncio.timeout(10):
        for _ in range(2):
            async with transport.open("POST", URL(server.url) / "ask", {"X-Team": "blue"}, b"body") as response:
                assert (response.status, response.reason) == (200, "OK")
                assert response.headers["content-type"] == "text/event-stream"
                assert await response.read_some() == b"one"
                go_on.set()
                assert await response.read_some() == b"two"
                assert await response.read_some() == b""
                assert await response.read_some() == b""
            go_on.clear()
        assert server.connections == 1
    assert set(server.requests[0].headers) == {"Host", "X-Team", "Content-Length"}
    assert server.requests[0].body == b"body"


async def test_a_body_passes_as_it_is() -> None:
    packed = gzip.compress(b"text")
    async with (
        WireServer(answer(packed, 503, {"Content-Encoding": "gzip"})) as server,
        Transport() as transport,
        transport.open("GET", URL(server.url), {}) as response,
    ):
        assert response.status == 503
        assert await response.read_some() == packed


async def test_a_server_waits_for_a_reader_that_does_not_read() -> None:
    size, sent = 40 * HIGH_WATER_BYTES, 0

    async def talk(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await exchange.send(b"x" * HIGH_WATER_BYTES)
            sent += HIGH_WATER_BYTES

    async with WireServer(talk, answer(b"next")) as server, Transport() as transport, asyncio.timeout(20):
        async with transport.open("GET", URL(server.url), {}) as response:
            seen = -1
            while seen != sent:  # until nothing moves any more
                seen = sent
                await asyncio.sleep(0.05)
            assert sent < size
            total = 0
            while chunk := await response.read_some():
                assert len(chunk) < 3 * HIGH_WATER_BYTES
                total += len(chunk)
            assert total == size
        async with transport.open("GET", URL(server.url), {}) as response:
            assert await response.read_some() == b"next"
        assert server.connections == 1


async def test_leaving_a_response_early_hangs_up() -> None:
    async with WireServer(hang) as server, Transport() as transport, asyncio.timeout(10):
        async with transport.open("GET", URL(server.url), {}) as response:
            await response.read_some()
        await server.client_gone.wait()


async def test_what_came_before_a_body_broke_off_can_be_read() -> None:
    broken = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
    async with WireServer(broken) as server, Transport() as transport, asyncio.timeout(10):
        async with transport.open("GET", URL(server.url), {}) as response:
            assert await response.read_some() == b"abc"
            with pytest.raises(BrokenOff):
                await response.read_some()
        async with transport.open("GET", URL(server.url), {}) as response:
            pass  # nobody reads that it broke off


async def test_a_request_that_fails_before_its_head_raises_where_it_is_entered() -> None:
    async with Transport() as transport, asyncio.timeout(10):
        async with WireServer(answer(b"a"), raw(b"")) as server:
            async with transport.open("GET", URL(server.url), {}) as response:
                assert await response.read_some() == b"a"
                assert await response.read_some() == b""
            for stale in (True, False):  # a kept connection that the server has closed, then a new one
                with pytest.raises(ClosedEarly) as early:
                    async with transport.open("GET", URL(server.url), {}):
                        pass
                assert early.value.stale is stale
        with pytest.raises(ConnectFailed) as caught:
            async with transport.open("GET", URL(server.url), {}):
                pass
        assert caught.value.unreached


async def test_a_request_that_is_cancelled_before_its_head_hangs_up() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1)

    async with WireServer(silent) as server, Transport() as transport, asyncio.timeout(10):

        async def ask() -> None:
            async with transport.open("GET", URL(server.url), {}):
                pass

        asking = asyncio.create_task(ask())
        await server.asked.wait()
        asking.cancel()
        await server.client_gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_transport_that_was_not_entered_is_an_error_of_ours() -> None:
    with pytest.raises(InternalError, match="entered"):
        async with Transport().open("GET", URL("http://127.0.0.1:1"), {}):
            pass

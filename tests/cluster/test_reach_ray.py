"""What is said of an address at which there is no Ray cluster; Ray itself is not needed for this."""

from __future__ import annotations

import asyncio

import pytest

from batch_agent.errors import RunUnreachable
from batch_agent.ray.workers import Ray
from batch_agent.testing import Say, ScriptedServer


async def test_another_server_at_the_address_of_a_cluster_is_named_at_once() -> None:
    async with ScriptedServer(lambda request: Say("x")) as server:
        address = server.url.removeprefix("http://").split("/")[0]
        with pytest.raises(RunUnreachable, match=f"what listens at {address} is not a Ray cluster"):
            await asyncio.to_thread(Ray(address)._look)


async def test_a_server_that_speaks_http2_passes() -> None:
    async def settings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(14) == b"PRI * HTTP/2.0"
        writer.write(b"\0\0\0\4" + bytes(5))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(settings, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await asyncio.to_thread(Ray(f"127.0.0.1:{port}")._look)


async def test_an_address_at_which_nothing_listens_is_named_with_the_reason() -> None:
    with pytest.raises(RunUnreachable, match=r"the Ray cluster at 127\.0\.0\.1:1 is unreachable: .*refused"):
        await asyncio.to_thread(Ray("127.0.0.1:1")._look)

"""A proxy on a real socket, and clients of it, for the tests of this folder."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from batch_agent.door import PATIENCE_SECONDS
from batch_agent.fleet.hostfile import parse_hosts
from batch_agent.fleet.proxy import MAX_INFLIGHT, serve_proxy
from batch_agent.testing import Say, ScriptedServer


@asynccontextmanager
async def proxy(
    *lines: str,
    hostfile: Path | None = None,
    host: str = "127.0.0.1",
    max_inflight: int = MAX_INFLIGHT,
    patience: float = PATIENCE_SECONDS,
) -> AsyncIterator[str]:
    """Serves a proxy and gives its address as ``host:port``."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_proxy(
            parse_hosts("\n".join(lines), "test"),
            host=host,
            port=0,
            ready=url.set_result,
            hostfile=hostfile,
            max_inflight=max_inflight,
            patience=patience,
            environ={},
        )
    )
    await asyncio.wait([serving, url], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield (serving.result() or "") if serving.done() else url.result().removeprefix("http://")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def nobody() -> str:
    """Returns an address that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


async def servers(stack: AsyncExitStack, *names: str) -> list[ScriptedServer]:
    return [
        await stack.enter_async_context(ScriptedServer(lambda request, name=name: Say(name), models=["m"]))
        for name in names
    ]


async def chat(place: str, text: str = "hello", **more: object) -> tuple[int, str]:
    """Returns the status, and the answer's text or the error's message."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{place}/v1/chat/completions", json=body) as answer,
    ):
        document = await answer.json()
        return answer.status, (
            document["choices"][0]["message"]["content"] if answer.ok else document["error"]["message"]
        )


async def get(place: str, path: str, **headers: str) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{place}{path}", headers=headers) as answer:
        return answer.status, await answer.json()


async def raw(place: str, request: bytes) -> bytes:
    """Returns every byte that comes back until the connection ends."""
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def post(path: str, document: object, *headers: str) -> bytes:
    body = json.dumps(document).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body

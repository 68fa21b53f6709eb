"""Tools of a real MCP server over streamable HTTP, on a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from tests.tools.conftest import OpenPool
from tests.tools.mcp_tools.conftest import http_server, needs_mcp
from tests.tools.tool_calls import call

from batch_agent.errors import SpecError
from batch_agent.tools import Tool, ToolPool

pytestmark = needs_mcp


async def calls_go_at_once(pool: ToolPool) -> None:
    calls = [pool.start(call("add_line", text="a")) for _ in range(50)]
    assert all([(await one.wait()).ok for one in calls])
    assert (await pool.start(call("weather", city="Rome")).wait()).ok
    assert "longer than" in (await pool.start(call("say_much", size=9_000_000)).wait()).text


async def test_calls_go_at_once_to_a_server_without_sessions_and_streams(notes: Path, open_pool: OpenPool) -> None:
    with http_server("stateless", "json", NOTES=str(notes)) as url:
        async with open_pool(await asyncio.to_thread(Tool.mcp, url)) as pool:
            await calls_go_at_once(pool)


async def test_calls_go_at_once_and_a_server_that_comes_back_gets_a_new_session_and_no_write_twice(
    notes: Path, open_pool: OpenPool
) -> None:
    with http_server(NOTES=str(notes)) as url:
        tools = await asyncio.to_thread(Tool.mcp, url)
        pool = open_pool(tools)
        await calls_go_at_once(pool)
        died = await pool.start(call("die_writing", text="x")).wait()
        assert "outcome is unknown" in died.text
    down = await pool.start(call("add_line", text="b")).wait()
    assert "is unreachable" in down.text and "unknown" not in down.text
    with http_server(port=urlsplit(url).port or 0, NOTES=str(notes)):
        back = await pool.start(call("add_line", text="c")).wait()
        assert back.ok, back.text
        await pool.close()
    assert notes.read_text().splitlines() == ["add_line a"] * 50 + ["die_writing x", "add_line c"]


async def test_headers_are_sent_and_refusals_are_told(open_pool: OpenPool) -> None:
    seen = []

    async def refuse(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=401, text="who are you?")

    app = web.Application()
    app.router.add_route("*", "/mcp", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        [(host, port)] = [name[:2] for name in runner.addresses]
        with pytest.raises(SpecError, match="HTTP 401: who are you") as caught:
            url = f"http://{host}:{port}/mcp?key=secret"
            await asyncio.to_thread(Tool.mcp, url, headers={"Authorization": "Bearer hush"})
    finally:
        await runner.cleanup()
    assert set(seen) == {"Bearer hush"}
    assert "hush" not in str(caught.value) and "secret" not in str(caught.value)

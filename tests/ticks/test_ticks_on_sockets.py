"""Ticks against servers on real sockets: dead, late, dying, coming back."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tests.ticks.worlds import agent_in, call, registered, says, sources

from batch_agent.testing import Request, Say, ScriptedServer
from batch_agent.ticks import AgentRuntime


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_server_that_is_dead_from_the_start_is_idling_with_the_reason_for_all() -> None:
    ids = [str(number) for number in range(8)]
    for model in (None, "m"):
        runtime = registered(AgentRuntime(backend=f"vllm://127.0.0.1:{free_port()}", model=model), *ids)
        for tick in (1, 2, 3):
            actions = await runtime.process_tick(tick, dict.fromkeys(ids))
            assert list(actions) == ids
            assert all(a.tool_name == "idle" and "127.0.0.1" in str(a.reasoning) for a in actions.values())
        await runtime.stop()


async def test_a_server_that_comes_up_later_is_found() -> None:
    port = free_port()
    runtime = registered(AgentRuntime(backend=f"vllm://127.0.0.1:{port}"), "a")
    assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("fallback", None)}
    async with ScriptedServer(lambda request: says(), port=port, models=["m"]):
        assert sources(await runtime.process_tick(2, {"a": {}})) == {"a": ("answer", 2)}
        await runtime.stop()


async def test_stopping_ends_the_requests_on_the_server_too() -> None:
    async def script(request: Request) -> Say:
        await asyncio.Event().wait()
        return says()

    async with ScriptedServer(script, models=["m"]) as server:
        runtime = registered(AgentRuntime(backend=server.backend_url, deadline=0.05), "a", "b")
        await runtime.process_tick(1, {"a": {}, "b": {}})
        await runtime.stop()
        await server.wait_idle()


async def test_a_server_that_does_not_say_what_it_serves_holds_no_tick() -> None:
    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        runtime = registered(AgentRuntime(backend=f"vllm://127.0.0.1:{port}", deadline=0.05, timeout=0.1), "a")
        for tick in (1, 2, 3):
            assert sources(await runtime.process_tick(tick, {"a": {}})) == {"a": ("fallback", None)}
        await runtime.stop()


async def test_agents_share_a_fleet_and_go_on_when_one_of_its_servers_is_dead(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    ids = [str(number) for number in range(8)]

    async def script(request: Request) -> Say:
        await asyncio.sleep(0.01)
        return says(call(agent_in(request)))

    async with ScriptedServer(script, models=["m"]) as one, ScriptedServer(script, models=["m"]) as two:
        hosts.write_text("".join(f"{server.url}\n" for server in (one, two)) + f"http://127.0.0.1:{free_port()}/v1\n")
        runtime = registered(AgentRuntime(backend=f"fleet://{hosts}", model="m"), *ids)
        async with runtime:
            for tick in (1, 2, 3):
                actions = await runtime.process_tick(tick, dict.fromkeys(ids))
                assert sources(actions) == dict.fromkeys(ids, ("answer", tick))
        assert one.received and two.received and one.received + two.received == 24

"""Waiting for servers: floors, those that never come, and many at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from tests.fleet.proxies import nobody

from batch_agent.backends.http.backend import PROBE_SECONDS
from batch_agent.door import RequestRefused
from batch_agent.errors import SpecError
from batch_agent.fleet.hostfile import parse_hosts
from batch_agent.fleet.probe import Prober, Waited, needed, wait_until_ready
from batch_agent.messages import JsonObject
from batch_agent.testing import ScriptedServer, virtual_clock


async def waited_for(*lines: str, floor: int | None = None, timeout: float = 30.0) -> Waited:
    hosts = parse_hosts("\n".join(lines), "test")
    waited = Waited(hosts, needed(len(hosts), floor))
    async with Prober(environ={}) as prober:
        await wait_until_ready(waited, prober, timeout)
    return waited


def test_all_are_needed_unless_a_floor_is_given_and_both_floors_hold() -> None:
    assert needed(10) == 10
    assert needed(10, min_hosts=4) == 4
    assert needed(10, min_fraction=0.25) == 3
    assert needed(10, min_fraction=0.3) == 3
    assert needed(10, min_hosts=5, min_fraction=0.2) == 5
    assert needed(10, min_hosts=1, min_fraction=0.8) == 8


def test_a_floor_out_of_reach_and_an_empty_list_are_errors() -> None:
    with pytest.raises(SpecError, match="the hostfile lists 3"):
        needed(3, min_hosts=4)
    with pytest.raises(SpecError, match="lists none"):
        needed(0)


async def test_it_ends_when_all_are_up_in_the_order_of_the_file() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(models=["m"])) for _ in range(3)]
        waited = await waited_for(*(f"{server.address} n={n}" for n, server in enumerate(servers)))
    assert [endpoint.tags["n"] for endpoint in waited.ready] == ["0", "1", "2"]
    assert waited.enough
    assert not waited.missing


async def test_a_floor_does_not_leave_out_those_that_are_up_as_well() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(models=["m"])) for _ in range(8)]
        waited = await waited_for(*(server.address for server in servers), nobody(), floor=1)
    assert len(waited.up) == 8
    assert "refused" in waited.missing[0][1]


@virtual_clock
async def test_too_few_in_time_is_told_with_reasons() -> None:
    async with ScriptedServer(models=["m"]) as up, Empty() as empty:
        waited = await waited_for(up.address, nobody(), empty.address, timeout=7.0)
    assert not waited.enough
    assert len(waited.up) == 1
    reasons = [reason for _, reason in waited.missing]
    assert "refused" in reasons[0]
    assert "lists no model" in reasons[1]


@virtual_clock
async def test_a_server_that_comes_up_later_is_seen() -> None:
    place = nobody()

    async def start(stack: AsyncExitStack) -> None:
        await asyncio.sleep(20)
        await stack.enter_async_context(ScriptedServer(models=["m"], port=int(place.rpartition(":")[2])))

    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(start(stack))
        waited = await waited_for(place, timeout=60.0)
        await starting
    assert waited.enough


@virtual_clock
async def test_a_server_that_accepts_and_says_nothing_holds_nobody_up() -> None:
    async with ScriptedServer(models=["m"]) as server, Health(None) as silent:
        enough = await waited_for(silent.address, server.address, floor=1)
        short = await waited_for(silent.address, server.address, timeout=3 * PROBE_SECONDS)
    assert len(enough.up) == 1
    assert "no answer in 2 s" in short.missing[0][1]


async def test_many_endpoints_are_probed_at_once() -> None:
    async with ScriptedServer(models=["m"]) as server:
        host, _, port = server.address.rpartition(":")
        waited = await waited_for(*(f"{host} {port} n={number}" for number in range(300)))
    assert len(waited.up) == 300


@virtual_clock
async def test_a_server_whose_health_is_bad_is_not_ready_and_one_without_health_may_be() -> None:
    async with AsyncExitStack() as stack:
        ill = await stack.enter_async_context(Health(503))
        without = await stack.enter_async_context(Health(404))
        waited = await waited_for(ill.address, without.address, timeout=3.0)
    assert waited.up == {1}
    assert "503" in waited.missing[0][1]


class Health(ScriptedServer):
    """With None it says nothing at all."""

    def __init__(self, status: int | None) -> None:
        super().__init__(models=["m"])
        self._status = status

    async def _health(self, http: web.Request) -> web.Response:
        if self._status is None:
            await asyncio.get_running_loop().create_future()
        return self.refuse(http, RequestRefused(self._status or 200, "so it is"))


class Empty(ScriptedServer):
    def model_list(self, cards: list[JsonObject]) -> JsonObject:
        return {"object": "list", "data": []}

"""Rate limits hold per server: over all runs of the process, and for hedges too. Real sockets, virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.dispatch.world import Row, SimulatedServer, World

from batch_agent import BatchAgent
from batch_agent.backends.base import Probe
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy
from batch_agent.job import AgentResult
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.scheduler.server_state import Terms
from batch_agent.testing import Cut, Request, Say, ScriptedBackend, ScriptedServer, virtual_clock
from batch_agent.testing.replies import ScriptedReply

RPM = 12


class Clocked(ScriptedServer):
    """Notes when each request came."""

    def __init__(self, latency: float = 0.2) -> None:
        super().__init__(self._reply)
        self._latency = latency
        self.came: list[float] = []

    def _reply(self, request: Request) -> ScriptedReply:
        self.came.append(asyncio.get_running_loop().time())
        return Say("ok", latency=self._latency)

    @property
    def most_in_a_minute(self) -> int:
        return max(sum(begin <= at < begin + 60 for at in self.came) for begin in self.came)


async def finish(backend: object, rows: int, **options: Any) -> list[AgentResult[str]]:
    inputs = [str(n) for n in range(rows)]
    return list(await BatchAgent.run(task="{input}", inputs=inputs, backend=backend, model="m", rpm=RPM, **options))


@virtual_clock
async def test_two_runs_at_one_url_keep_one_rate_limit_together() -> None:
    async with Clocked() as server:
        results = await asyncio.gather(finish(server.backend_url, 20), finish(server.backend_url, 20))
    assert all(result.ok for run in results for result in run)
    assert server.most_in_a_minute <= RPM


@virtual_clock
async def test_a_run_begins_with_what_the_one_before_has_left() -> None:
    async with Clocked() as server:
        for _ in range(3):
            assert all(await finish(server.backend_url, RPM - 2))
    assert server.most_in_a_minute <= RPM


@virtual_clock
async def test_runs_at_fleets_that_share_a_server_keep_its_rate_limit_together() -> None:
    async with Clocked() as one, Clocked() as shared, Clocked() as other:
        fleets = [one.backend_url, shared.backend_url], [shared.backend_url, other.backend_url]
        results = await asyncio.gather(*(finish(list(fleet), 30) for fleet in fleets))
    assert all(result.ok for run in results for result in run)
    assert max(server.most_in_a_minute for server in (one, shared, other)) <= RPM


@virtual_clock
async def test_a_hedge_takes_its_share_of_the_rate_limit() -> None:
    async with Clocked(latency=20.0) as slow, Clocked() as fast:
        fleet = [slow.backend_url, fast.backend_url]
        assert all(await finish(fleet, 10, hedge=1.0, max_inflight=8))
        assert len(slow.came) + len(fast.came) > 10, "some rows were asked twice"
        assert all(await finish(fleet, 10, hedge=1.0, max_inflight=8))
    assert max(slow.most_in_a_minute, fast.most_in_a_minute) <= RPM


@virtual_clock
async def test_a_server_that_comes_back_when_the_rate_limit_is_used_up_is_asked_again() -> None:
    loop = asyncio.get_running_loop()
    backend = ScriptedBackend(lambda _: Say("ok") if loop.time() > 50 else Cut(after_chunks=0))
    backend.health = Probe("down")
    (result,) = await finish(backend, 1)
    assert result.output == "ok"
    assert len(backend.requests) == RPM + 2, "a control request shows that it is back, then the row is sent"


@virtual_clock
async def test_a_request_that_waited_after_it_had_its_slot_is_counted_when_it_is_sent() -> None:
    world = World([SimulatedServer("s")])
    dispatcher = Dispatcher(world, servers=world.servers, terms=Terms(rpm=1))
    slot = await dispatcher.slots.hold(dispatcher.slots.claim(AgentForecast(), 0))
    await asyncio.sleep(100)
    await dispatcher.attempt(Row(world), slot, Policy(3))
    rates, now = world.servers["s"].rates, asyncio.get_running_loop().time()
    assert rates is not None and rates.free_at(now) > now + 59
    dispatcher.slots.release(slot)
    dispatcher.close()

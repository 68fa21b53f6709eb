"""A stuck engine among servers that answer: its requests move to them within seconds. Real sockets, virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from batch_agent import BatchAgent, Fleet
from batch_agent.testing import Hang, Request, Say, ScriptedServer, virtual_clock
from batch_agent.testing.replies import ScriptedReply

SECONDS = 20  # within which the requests of a stuck engine must have moved; a turn has ten minutes


class Engine(ScriptedServer):
    """From its request number ``stuck_at`` on it hangs. ``/health`` says so, if ``tells``; the models are listed."""

    def __init__(self, stuck_at: float = float("inf"), *, tells: bool = True) -> None:
        super().__init__(self._reply)
        self._stuck_at, self._tells = stuck_at, tells
        self.hung = 0

    def _reply(self, request: Request) -> ScriptedReply:
        if request.number < self._stuck_at:
            return Say(self.address, latency=0.5)
        self.hung += 1
        return Hang()

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self.hung and self._tells else 200)


@pytest.mark.parametrize("tells", [True, False], ids=["health fails", "health is fine"])
@pytest.mark.parametrize(
    ("rows", "stuck_at"), [(120, 0), (120, 20), (6, 0)], ids=["from the start", "later", "in a small batch"]
)
def test_a_stuck_engine_loses_its_requests_to_its_siblings(rows: int, stuck_at: int, tells: bool) -> None:
    @virtual_clock
    async def scenario() -> None:
        async with Engine(stuck_at, tells=tells) as stuck, Engine() as one, Engine() as other:
            results = await BatchAgent.run(
                task="{input}",
                inputs=[str(n) for n in range(rows)],
                backend=[engine.backend_url for engine in (stuck, one, other)],
                model="m",
                max_inflight=12,
            )
            assert all(results) and stuck.hung
            assert asyncio.get_running_loop().time() < SECONDS

    scenario()


@virtual_clock
async def test_rows_at_a_stuck_engine_that_is_removed_are_freed() -> None:
    async with Engine(0) as stuck, Engine() as sibling:
        fleet = Fleet([stuck.backend_url, sibling.backend_url])

        async def remove() -> None:
            await stuck.wait_inflight(2)
            fleet.remove(stuck.backend_url)

        removing = asyncio.create_task(remove())
        results = await BatchAgent.run(
            task="{input}", inputs=[str(n) for n in range(8)], backend=fleet, model="m", max_inflight=4
        )
        await removing
        assert {result.output for result in results} == {sibling.address}
        assert asyncio.get_running_loop().time() < SECONDS

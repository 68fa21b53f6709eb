"""A server that is away for 15 seconds when too few rows are left to tell an outage from a bad row: no row fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from batch_agent import BatchAgent
from batch_agent.backends.base import Probe
from batch_agent.errors import Unavailable
from batch_agent.testing import CallTools, Cut, Fail, Request, Say, ScriptedBackend, ToolUse, virtual_clock


def refuse() -> Any:
    raise Unavailable("connection refused", unreached=True)


AWAY: dict[str, Callable[[], Any]] = {
    "500": lambda: Fail(500),
    "502": lambda: Fail(502),
    "503": lambda: Fail(503),
    "429": lambda: Fail(429),
    "reset": lambda: Cut(after_chunks=0),
    "refused": refuse,
}


class Server(ScriptedBackend):
    """Away from ``begins`` on. ``shows``: its probe fails meanwhile."""

    def __init__(self, mode: str, begins: float, *, shows: bool) -> None:
        super().__init__(self._reply)
        self._away, self._begins, self._shows = AWAY[mode], begins, shows

    @property
    def is_away(self) -> bool:
        return self._begins <= asyncio.get_running_loop().time() < self._begins + 15

    def _reply(self, request: Request) -> Any:
        if self.is_away:
            return self._away()
        if request.tools and request.turn == 0 and int(request.text) >= 18:
            return CallTools(ToolUse("look"), latency=0.1)
        return Say("ok", latency=0.1)

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("down", "it is away") if self.is_away and self._shows else Probe("up")


async def look() -> str:
    """Looks."""
    await asyncio.sleep(5)
    return "seen"


async def the_last_agents(server: Server) -> bool:
    """The last two of twenty take their second turn when the server is away."""
    results = await BatchAgent.run(task="{input}", inputs=[str(n) for n in range(20)], backend=server, tools=[look])
    return all(result.ok for result in results)


async def one_row(server: Server) -> bool:
    return all(
        result.ok for result in await BatchAgent.run(task="{input}", inputs=["18"], backend=server, tools=[look])
    )


async def two_rows(server: Server) -> bool:
    results = await BatchAgent.run(task="{input}", inputs=["18", "19"], backend=server, tools=[look])
    return all(result.ok for result in results)


async def a_reduction(server: Server) -> bool:
    results, summary = await BatchAgent.run_with_reduce(
        task="{input}", inputs=["1", "2", "3"], reduce="Sum them up", backend=server
    )
    return all(result.ok for result in results) and summary == "ok"


Situation = Callable[[Server], Any]


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("mode", AWAY)
@pytest.mark.parametrize(
    ("situation", "begins"),
    [(the_last_agents, 3.0), (one_row, 3.0), (two_rows, 3.0), (a_reduction, 0.05), (one_row, 0.0), (two_rows, 0.0)],
    ids=["the last agents", "one row", "two rows", "a reduction", "one row, still loading", "two rows, still loading"],
)
def test_no_row_fails(situation: Situation, begins: float, mode: str, shows: bool) -> None:
    @virtual_clock
    async def scenario() -> None:
        assert await situation(Server(mode, begins, shows=shows))

    scenario()


@pytest.mark.parametrize("situation", [one_row, two_rows, the_last_agents])
def test_no_row_fails_if_probes_find_the_server_up_and_down_by_turns(situation: Situation) -> None:
    class Changing(Server):
        probes = 0

        async def probe(self, endpoint: str = "") -> Probe:
            self.probes += self.is_away
            return Probe("down", "it is away") if self.is_away and self.probes % 2 == 0 else Probe("up")

    @virtual_clock
    async def scenario() -> None:
        assert await situation(Changing("502", 3.0, shows=True))

    scenario()


@virtual_clock
async def test_a_row_is_decided_while_the_inputs_wait_for_its_result() -> None:
    first_is_done = asyncio.Event()

    async def inputs() -> AsyncIterator[str]:
        yield "bad"
        await first_is_done.wait()
        yield "good"

    backend = ScriptedBackend(lambda request: Fail(500) if request.text == "bad" else Say("ok"))
    async with BatchAgent.open(task="{input}", inputs=inputs(), backend=backend) as run:
        ends = []
        async for result in run.results():
            first_is_done.set()
            ends.append((result.input, result.ok))
    assert ends == [("bad", False), ("good", True)]

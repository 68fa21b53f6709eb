"""Tools that swallow their cancellation: they hold neither an agent, nor a place, nor the end of a run."""

import asyncio
import logging

import pytest
from tests.tools.tool_calls import call, settle

from batch_agent import BatchAgent
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, run_virtual, virtual_clock
from batch_agent.tools import Tool
from batch_agent.tools.execution import ENDING_SECONDS
from batch_agent.tools.pool import ASYNC_CALLS


class Stubborn:
    """An async tool's inside that goes on until it is released, whatever happens."""

    def __init__(self) -> None:
        self.runs = self.running = 0
        self.released = False

    async def __call__(self) -> str:
        self.runs += 1
        self.running += 1
        while not self.released:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue
        self.running -= 1
        return "at last"

    def tool(self, **options: object) -> Tool:
        async def stay() -> str:
            return await self()

        return Tool.define(stay, **options)  # type: ignore[call-overload]


@virtual_clock
async def test_a_timeout_ends_the_call_for_all_who_wait_though_the_tool_goes_on(open_pool) -> None:
    stubborn = Stubborn()
    async with open_pool(stubborn.tool(effect="read", timeout=3, max_concurrent=1)) as pool:
        outcomes = [await p.wait() for p in [pool.start(call("stay")) for _ in range(2)]]
        assert [outcome.text for outcome in outcomes] == ["Error: stay timed out: it ran longer than 3 s"] * 2
        assert [outcome.seconds for outcome in outcomes] == [3, 3]
        again = pool.start(call("stay"))
        await asyncio.sleep(ENDING_SECONDS - 1)
        assert (stubborn.runs, pool.waiting) == (1, 1)  # it may yet stop
        await asyncio.sleep(2)
        assert (stubborn.runs, stubborn.running, pool.waiting) == (2, 2, 0)
        stubborn.released = True
        assert (await again.wait()).text == "at last"
        await asyncio.sleep(2)
        statistics = pool.statistics()["stay"]
    assert (statistics.runs, statistics.failures, stubborn.running) == (2, 1, 0)


@virtual_clock
async def test_what_a_tool_returns_after_its_time_is_not_kept(open_pool) -> None:
    stubborn = Stubborn()
    async with open_pool(stubborn.tool(cacheable=True, timeout=3)) as pool:
        assert not (await pool.start(call("stay")).wait()).ok
        stubborn.released = True
        await asyncio.sleep(2)
        assert (await pool.start(call("stay")).wait()).source == "run"


@virtual_clock
async def test_too_many_that_go_on_are_an_error_and_not_ever_more_of_them(open_pool) -> None:
    stubborn = Stubborn()
    async with open_pool(stubborn.tool(timeout=1)) as pool:
        for pending in [pool.start(call("stay")) for _ in range(ASYNC_CALLS)]:
            assert "timed out" in (await pending.wait()).text
        await asyncio.sleep(ENDING_SECONDS + 1)
        refused = await pool.start(call("stay")).wait()
        assert refused.text == f"Error: not started: {ASYNC_CALLS} earlier calls that were cancelled are still running"
        stubborn.released = True
        await asyncio.sleep(2)
        assert (await pool.start(call("stay")).wait()).text == "at last"


@virtual_clock
async def test_closing_names_a_tool_that_does_not_stop_and_goes_on(open_pool, caplog) -> None:
    stubborn = Stubborn()
    with caplog.at_level(logging.WARNING, "batch_agent"):
        async with open_pool(stubborn.tool()) as pool:
            pending = [pool.start(call("stay")) for _ in range(2)]
            await settle()
    assert [(await p.wait()).text for p in pending] == ["Error: the call was cancelled"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "stay does not stop when cancelled: the run ends without waiting for 2 calls"
    ]
    stubborn.released = True
    await asyncio.sleep(2)
    assert stubborn.running == 0


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
def test_a_run_and_its_event_loop_end_without_a_tool_that_does_not_stop(how: str, caplog) -> None:
    stubborn = Stubborn()

    def script(request: Request) -> Say:
        return CallTools(ToolUse("stay")) if request.turn == 0 else Say("done")

    async def main() -> list[str]:
        options = {"timeout_per_agent": 10} if how == "out of time" else {}
        backend = ScriptedBackend(script)
        ends = []
        async with BatchAgent.open(
            task="{input}", inputs=["a"], tools=[stubborn.tool()], backend=backend, **options
        ) as run:
            if how == "cancelled":
                asyncio.get_running_loop().call_later(10, run.cancel)
            async for result in run.results():
                assert result.error is not None
                ends.append(result.error.type)
        return ends

    assert run_virtual(main()) == ["Interrupted" if how == "cancelled" else "TimeoutError"]
    assert stubborn.running == 1
    assert "stay does not stop when cancelled" in caplog.text


@virtual_clock
async def test_a_tool_that_cleans_up_when_it_is_cancelled_has_the_time_to(open_pool, caplog) -> None:
    cleaned = False

    async def tidy() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(4)
            cleaned = True

    async with open_pool(tidy) as pool:
        pending = pool.start(call("tidy"))
        await settle()
        pending.abandon()
        await settle()
    assert cleaned
    assert not caplog.records

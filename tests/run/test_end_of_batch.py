"""A batch whose size is known starts its last rows before it is too late; one of unknown size reads as it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.messages import Reply
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, virtual_clock

AGENTS, TURNS, SLOTS = 16, 7, 4


@Tool.define(effect="write")
async def look() -> str:
    await asyncio.sleep(0.99)
    return "seen"


@Tool.define()
async def look_quickly() -> str:
    return "seen"


def work(request: Request) -> Say:
    if request.turn < TURNS - 1:
        return CallTools(ToolUse("look"), latency=0.5)
    return Say("done", latency=0.5)


async def begun_before_the_first_result(inputs: Iterable[str], max_agents: int | None = None) -> int:
    """How many agents had sent their first request by then."""
    backend = ScriptedBackend(work, capabilities=Capabilities(streaming=False))
    stream = BatchAgent.stream(
        task="{input}",
        inputs=inputs,
        tools=[look],
        backend=backend,
        max_inflight=SLOTS,
        max_agents=max_agents,
    )
    begun, results = 0, []
    async for result in stream:
        begun = begun or sum(1 for request in backend.requests if request.turn == 0)
        results.append(result)
    assert [result.ok for result in results] == [True] * AGENTS
    assert len(backend.requests) == AGENTS * TURNS
    return begun


@virtual_clock
async def test_the_last_rows_of_a_list_start_before_the_first_agents_end() -> None:
    assert await begun_before_the_first_result([str(number) for number in range(AGENTS)]) == AGENTS


@virtual_clock
async def test_of_a_generator_no_more_rows_start_than_keep_the_slots_busy() -> None:
    assert await begun_before_the_first_result(str(number) for number in range(AGENTS)) == 3 * SLOTS


@virtual_clock
async def test_max_agents_bounds_a_batch_that_ends() -> None:
    assert await begun_before_the_first_result([str(number) for number in range(AGENTS)], max_agents=13) == 13


@pytest.mark.parametrize(("rows", "expected"), [(9, {9}), (2, {9, 8, 7})], ids=["many", "few"])
async def test_many_agents_that_have_all_started_have_one_priority_at_the_engine(rows: int, expected: set[int]) -> None:
    """If agents near their end were served first, the others would delay the end of the batch."""
    asked: list[ModelRequest] = []

    class Engine(SimulatedBackend):
        async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
            asked.append(request)
            return await super().infer(request, on_tool_call)

    engine = Engine(EngineModel(tool_calls_per_agent=2, step_seconds=0.0001, name="m"))
    names = [str(number) for number in range(rows)]
    results = await BatchAgent.run(
        task="{input}", inputs=names, tools=[look_quickly], backend=engine, model="m", max_turns=9
    )
    assert results.ok
    assert {request.priority for request in asked} == expected

"""Nothing piles up: what waits elsewhere is a reason not to start more."""

from __future__ import annotations

import asyncio
from typing import Any

from batch_agent import BatchAgent, Tool
from batch_agent.scheduler.capacity import START
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse, virtual_clock


def look_up_then_answer(request: Request) -> Any:
    if request.turn == 0:
        return CallTools(ToolUse("look_up", {"word": request.messages[-1]["content"]}), latency=0.1)  # type: ignore[arg-type]
    return Say("ok", latency=0.1)


@virtual_clock
async def test_a_tool_that_cannot_keep_up_is_a_reason_not_to_start_more_agents() -> None:
    @Tool.define(effect="read", rate_limit="1/s")
    async def look_up(word: str) -> str:
        return word

    backend = ScriptedBackend(look_up_then_answer)
    read = 0

    def rows() -> Any:
        nonlocal read
        for number in range(10_000):
            read += 1
            yield str(number)

    done = 0
    async with BatchAgent.open(task="{input}", inputs=rows(), tools=[look_up], backend=backend, max_inflight=64) as run:
        async for _ in run.results():
            done += 1
            if done == 100:
                break
        statistics = run.statistics()
    assert len(backend.requests) <= 100 + 100 + 4 * 64
    assert statistics.started - statistics.done <= 4 * 64
    assert read <= 100 + 4 * 64


@virtual_clock
async def test_slow_callbacks_stop_the_reading_of_rows() -> None:
    open_now = most = read = 0

    async def on_result(result: object) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(10)
        open_now -= 1

    def rows() -> Any:
        nonlocal read
        for number in range(3_000):
            read += 1
            if number == 2_999:
                assert most <= 64 + 64
            yield str(number)

    backend = ScriptedBackend(lambda _: Say("ok", latency=0.1))
    results = await BatchAgent.run(task="{input}", inputs=rows(), backend=backend, max_inflight=64, on_result=on_result)
    assert (len(results), read) == (3_000, 3_000)
    assert most <= 64 + 64  # those under way when the callbacks were too many have theirs too


@virtual_clock
async def test_agents_that_back_off_want_a_slot_and_not_all_rows_run_into_the_same_wall() -> None:
    """One agent in five fails again and again; some others start in their place, however many rows there are."""
    alive = most = 0

    def watch(event: Any) -> None:
        nonlocal alive, most
        alive += type(event).__name__ == "JobStarted"
        alive -= type(event).__name__ == "JobFinished"
        most = max(most, alive)

    def script(request: Request) -> Any:
        return Fail(500) if int(request.text) % 5 == 0 else Say("ok", latency=0.05)

    async with BatchAgent.open(
        task="{input}",
        inputs=[str(n) for n in range(800)],
        backend=ScriptedBackend(script),
        max_inflight=16,
        max_retries=5,
        sinks=[watch],
    ) as run:
        results = [result async for result in run.results()]
    assert len(results) == 800
    assert most <= START + 2 * 16

"""Collecting the results of a run: by a function that is called with each, and by one that is awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batch_agent import BatchAgent
from batch_agent.job import AgentResult
from batch_agent.run.collecting import collect
from batch_agent.run.delivery import Delivery
from batch_agent.run.run import Run
from batch_agent.testing import Say, ScriptedBackend, virtual_clock


def a_run(rows: int) -> tuple[Run[str], ScriptedBackend]:
    backend = ScriptedBackend(lambda request: Say("ok", latency=float(request.number)))
    return BatchAgent.open(
        task="{input}", inputs=[f"row {number}" for number in range(rows)], backend=backend, max_inflight=2
    ), backend


@virtual_clock
async def test_a_function_gets_each_result_and_a_coroutine_is_awaited() -> None:
    called, awaited = list[int](), list[int]()

    async def take(result: AgentResult[Any]) -> None:
        await asyncio.sleep(1)
        awaited.append(result.index)

    await collect(a_run(20)[0], lambda result: called.append(result.index))
    await collect(a_run(20)[0], take)
    assert sorted(called) == sorted(awaited) == list(range(20))


@virtual_clock
async def test_what_a_consumer_raises_ends_the_run_and_reaches_its_caller() -> None:
    run, backend = a_run(1_000)

    def take(result: AgentResult[Any]) -> None:
        raise ZeroDivisionError("of the consumer")

    with pytest.raises(ZeroDivisionError, match="of the consumer"):
        await collect(run, take)
    assert len(backend.requests) < 10
    assert run.statistics().ended == "cancelled"


async def test_results_are_passed_on_in_order_also_those_that_were_ready_before() -> None:
    delivery, seen = Delivery[str](None, lambda full: None), list[object]()
    for number in range(3):
        delivery.put(number)  # type: ignore[arg-type]
    passing = asyncio.create_task(delivery.pass_to(seen.append))
    await asyncio.sleep(0)
    delivery.put(3)  # type: ignore[arg-type]
    assert seen == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="already being read"):
        await delivery.take()
    delivery.close(OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full"):
        await passing

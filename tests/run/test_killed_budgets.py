"""Runs with a budget that are killed with SIGKILL again and again: what the server bills stays within the budget.

The server is in this process and bills every request that reaches it, answered or not. The run is a process of its own.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.record.redis_servers import RedisServer, needs_redis
from tests.warm import start

from batch_agent import BatchAgent, Pipeline
from batch_agent.errors import SpecError, StoreError
from batch_agent.messages import Usage
from batch_agent.record.reader import look
from batch_agent.testing import Request, Say, ScriptedServer

USAGE = Usage(60, completion_tokens=30)
EACH = USAGE.prompt_tokens + USAGE.completion_tokens
OPTIONS: dict[str, Any] = {"model": "m", "max_inflight": 16, "resume": True}


async def plain(url: str, directory: Path, limit: int) -> None:
    inputs = map(str, range(200))
    await BatchAgent.run(
        task="{input}",
        inputs=inputs,
        backend=url,
        run_dir=directory,
        max_total_tokens=limit,
        max_tokens=40,
        **OPTIONS,
    )


async def pipeline(url: str, directory: Path, limit: int) -> None:
    stages = Pipeline(map(str, range(200))).map(name="first", task="one {input}").map(name="lock", task="two {input}")
    await stages.run(backend=url, run_dir=directory, max_total_tokens=limit, **OPTIONS)


async def timed(url: str, directory: str, limit: int) -> None:
    """A run on servers that cost $1 per second."""
    prices = {"gpu_hour": 3600.0}
    given: dict[str, Any] = {"backend": url, "run_dir": directory, "max_cost": limit, "prices": prices}
    if "://" in directory:
        given["lease"] = 1.0
    await BatchAgent.run(task="{input}", inputs=map(str, range(10_000)), **given, **OPTIONS | {"max_inflight": 1})


SHAPES: dict[str, Any] = {"plain": plain, "pipeline": pipeline, "timed": timed}


@pytest.mark.parametrize(
    ("shape", "limit", "kills"), [("plain", 2_500, 2), pytest.param("pipeline", 3_000, 3, marks=pytest.mark.soak)]
)
async def test_a_run_that_is_killed_again_and_again_never_bills_more_than_its_budget(
    shape: str, limit: int, kills: int, tmp_path: Path
) -> None:
    chance = random.Random(kills)

    def script(request: Request) -> Say:
        return Say(f"answer {request.number}", usage=USAGE, latency=chance.uniform(0.01, 0.05))

    async with ScriptedServer(script, models=["m"]) as server:
        billed: list[int] = []
        for session in range(kills + 2):
            before = server.received
            arguments = (shape, server.backend_url, str(tmp_path / "run"), str(limit))
            process = await start("-m", "tests.run.test_killed_budgets", *arguments)
            ending = asyncio.ensure_future(process.wait())
            if session < kills:
                moment = asyncio.ensure_future(server.wait_requests(before + chance.randint(1, 4)))
                await asyncio.wait([moment, ending], return_when=asyncio.FIRST_COMPLETED)
                moment.cancel()
                if not ending.done():
                    await asyncio.sleep(chance.uniform(0, 0.02))
                    process.kill()
            await ending
            billed.append(server.received * EACH)
            assert billed[-1] <= limit
    assert billed[2] > billed[0]  # a kill costs a part of the budget, not all of it
    view = look(tmp_path / "run")
    assert view.state == "out of budget"
    assert billed[-1] <= view.latest.tokens <= limit


def timed_process(server: ScriptedServer, record: str) -> tuple[str, ...]:
    return ("-m", "tests.run.test_killed_budgets", "timed", server.backend_url, record, "5")


async def killed_while_time_passes(record: str) -> None:
    """Kill a run twice while a request is pending for seconds: the time is recorded although nothing else is."""
    async with ScriptedServer(lambda _: Say("ok", latency=1000.0), models=["m"]) as server:
        for session in (1, 2):
            process = await start(*timed_process(server, record))
            while process.returncode is None and (server.received < session or spent(record) < session):
                await asyncio.sleep(0.05)
            if process.returncode is None:  # else the machine was so slow that the budget is used up
                process.kill()
                await process.wait()
    before = spent(record)
    async with ScriptedServer(lambda _: Say("ok", latency=0.05), models=["m"]) as server:
        process = await start(*timed_process(server, record))
        assert await process.wait() == 0
    assert look(record).state == "out of budget"
    assert 2.0 <= before <= spent(record)


def spent(record: str) -> float:
    try:
        return look(record).latest.cost or 0.0
    except (SpecError, StoreError):  # the run has not begun yet
        return 0.0


async def test_the_time_of_a_killed_run_is_recorded_each_second(tmp_path: Path) -> None:
    await killed_while_time_passes(str(tmp_path / "run"))


@needs_redis
async def test_the_time_of_a_killed_run_in_redis_is_recorded_each_second(redis: RedisServer) -> None:
    await killed_while_time_passes(f"{redis.url}/time")


if __name__ == "__main__":
    _, shape, url, directory, limit = sys.argv
    asyncio.run(SHAPES[shape](url, directory if shape == "timed" else Path(directory), int(limit)))

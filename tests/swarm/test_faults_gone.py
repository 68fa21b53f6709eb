"""What hurt the users of aurora_swarm and is not pinned elsewhere: slow servers, many servers, keys that wander."""

from __future__ import annotations

import asyncio
import tracemalloc

from swarm.agents import Agent, Answer, Asked, agents

from batch_agent.swarm import AgentEndpoint, AgentPool, VLLMPool


def one_at_a_time(seconds: float) -> Answer:
    turn = asyncio.Semaphore(1)

    async def work(asked: Asked) -> None:
        async with turn:
            await asyncio.sleep(seconds)

    return work  # type: ignore[return-value]


async def test_a_slow_server_gets_what_it_can_do_and_no_more() -> None:
    given = [Agent(one_at_a_time(0.016 if slow else 0.002)) for slow in (True, False, False, False)]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.send_all([str(i) for i in range(200)], dispatch="balanced")
    assert all(response.success for response in responses)
    assert [response.index for response in responses] == list(range(200))
    slow, *others = (len(agent.asked) for agent in given)
    assert slow < 25 < 50 < min(others)  # it would be 50 each


async def test_a_server_that_dies_on_the_way_costs_no_prompt() -> None:
    dying: Agent

    async def die(asked: Asked) -> None:
        if len(dying.asked) == 5:
            asyncio.get_running_loop().create_task(dying.stop())
        await asyncio.sleep(0.001 if len(dying.asked) < 5 else 60)

    dying = Agent(die)  # type: ignore[arg-type]
    async with agents(dying, Agent(), Agent()) as endpoints, VLLMPool(endpoints, dispatch="balanced") as pool:
        responses = await pool.send_all([str(i) for i in range(100)])
    assert [response.text for response in responses] == [f"<{i}>" for i in range(100)]
    assert max(response.attempts for response in responses) > 1


async def test_a_key_keeps_its_server_when_another_one_leaves() -> None:
    async def work(asked: Asked) -> None:
        await asyncio.sleep(0.005)

    keys = [f"agent {number}" for number in range(100)]

    async def homes(endpoints: list[AgentEndpoint]) -> list[int]:
        async with AgentPool(endpoints, dispatch="balanced") as pool:
            responses = await pool.send_all(keys, affinity=keys)
            return [pool.endpoints[response.agent_index].port for response in responses]

    async with agents(*(Agent(work) for _ in range(10))) as endpoints:  # type: ignore[arg-type]
        before, after = await homes(endpoints), await homes(endpoints[1:])
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    assert moved <= 25  # by i mod size it would be 90


def test_thousands_of_endpoints_are_small() -> None:
    endpoints = [AgentEndpoint(f"node{number}", 8000, {"role": "worker"}) for number in range(4000)]
    tracemalloc.start()
    pool = VLLMPool(endpoints)
    parts = [pool.by_tag("role", "worker"), *(pool.select([number, 0]) for number in range(4000))]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(parts) == 4001
    assert peak < 16 * 2**20  # it was 735 MiB for 1,000

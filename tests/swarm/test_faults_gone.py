"""What hurt the users of aurora_swarm and is not pinned elsewhere: slow servers, many servers, keys that wander."""

from __future__ import annotations

import asyncio
import tracemalloc

from tests.swarm.agents import Agent, Asked, agents, silent

from batch_agent.swarm import AgentEndpoint, AgentPool, VLLMPool
from batch_agent.testing import virtual_clock


@virtual_clock
async def test_a_slow_server_gets_what_it_can_do_and_no_more() -> None:
    most_are_done = asyncio.Event()

    async def wait(asked: Asked) -> None:
        await most_are_done.wait()

    def count(asked: Asked) -> None:
        if sum(len(agent.asked) for agent in others) == 150:
            most_are_done.set()

    slow, others = Agent(wait), [Agent(count) for _ in range(3)]  # type: ignore[arg-type]
    async with agents(slow, *others) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.send_all([str(i) for i in range(200)], dispatch="balanced")
    assert [response.text for response in responses] == [f"<{i}>" for i in range(200)]
    assert [response.index for response in responses] == list(range(200))
    assert len(slow.asked) < 40  # it would be 50 of 200


async def test_a_server_that_dies_on_the_way_costs_no_prompt() -> None:
    dying: Agent
    dies = asyncio.Event()

    async def die(asked: Asked) -> None:
        if len(dying.asked) == 5:
            asyncio.get_running_loop().create_task(dying.stop())
            dies.set()
        await asyncio.sleep(0.001 if len(dying.asked) < 5 else 60)

    async def wait(asked: Asked) -> None:
        await dies.wait()  # they must not do all of the work before

    dying, others = Agent(die), [Agent(wait), Agent(wait)]  # type: ignore[arg-type]
    async with agents(dying, *others) as endpoints, VLLMPool(endpoints, dispatch="balanced") as pool:
        responses = await pool.send_all([str(i) for i in range(100)], inflight=5)
    assert [response.text for response in responses] == [f"<{i}>" for i in range(100)]
    assert max(response.attempts for response in responses) > 1


@virtual_clock
async def test_what_a_silent_server_was_given_is_done_by_others_before_its_time_is_up() -> None:
    async def work(asked: Asked) -> None:
        await asyncio.sleep(1.0)

    given = [Agent(work), Agent(work)]  # type: ignore[arg-type]
    async with silent() as endpoint, agents(*given) as others, AgentPool([endpoint, *others], timeout=3600.0) as pool:
        responses = await pool.send_all([str(i) for i in range(60)], dispatch="balanced", deadline=600.0)
    assert [response.text for response in responses] == [f"<{i}>" for i in range(60)]


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
    assert moved <= 60  # by i mod size it would be 90; on a busy machine more keys go elsewhere


def test_thousands_of_endpoints_are_small() -> None:
    endpoints = [AgentEndpoint(f"node{number}", 8000, {"role": "worker"}) for number in range(4000)]
    tracemalloc.start()
    pool = VLLMPool(endpoints)
    parts = [pool.by_tag("role", "worker"), *(pool.select([number, 0]) for number in range(4000))]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(parts) == 4001
    assert peak < 16 * 2**20  # it was 735 MiB for 1,000

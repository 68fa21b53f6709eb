"""Requests that a server never answers: when they are given up and asked again."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.ticks.worlds import agent_in, registered, says, sources

from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend, virtual_clock
from batch_agent.ticks import Agent, AgentRuntime

IDS = ["a", "b", "c"]


def swallowing(*lost: int, latency: float = 0.1) -> ScriptedBackend:
    """A backend that never answers the requests with these numbers, counted from 1."""

    def script(request: Request) -> Say | Hang:
        return Hang() if len(backend.requests) in lost else says(latency=latency)

    backend = ScriptedBackend(script)
    return backend


async def tick_all(runtime: AgentRuntime, tick: int) -> dict[str, tuple[str, int | None]]:
    return sources(await runtime.process_tick(tick, {agent_id: {"tick": tick} for agent_id in IDS}))


@virtual_clock
async def test_a_swallowed_request_is_asked_again_after_three_deadlines_about_the_newest_observation() -> None:
    backend = swallowing(4)
    async with registered(AgentRuntime(backend=backend, deadline=0.5), *IDS) as runtime:
        await tick_all(runtime, 1)
        for tick in (2, 3, 4):
            assert (await tick_all(runtime, tick))["a"] == ("last", 1)
        assert await tick_all(runtime, 5) == dict.fromkeys(IDS, ("answer", 5))
        assert await tick_all(runtime, 6) == dict.fromkeys(IDS, ("answer", 6))
        assert backend.inflight == 0
    asked = [request for request in backend.requests if agent_in(request) == "a"]
    assert len(asked) == 4 and "'tick': 5" in asked[2].text


@virtual_clock
async def test_when_all_are_swallowed_one_agent_finds_out_that_the_server_answers_and_the_others_follow() -> None:
    backend = swallowing(4, 5, 6)
    async with registered(AgentRuntime(backend=backend, deadline=0.5), *IDS) as runtime:
        await tick_all(runtime, 1)
        found = [await tick_all(runtime, tick) for tick in range(2, 7)]
    assert [one["a"][0] for one in found] == ["last", "last", "last", "answer", "answer"]
    assert found[3]["b"][0] == "last" and found[4] == dict.fromkeys(IDS, ("answer", 6))


@virtual_clock
async def test_the_only_agent_of_a_world_is_asked_again_too() -> None:
    backend = swallowing(1)
    async with registered(AgentRuntime(backend=backend, deadline=0.5), "a") as runtime:
        found = [sources(await runtime.process_tick(tick, {"a": {}}))["a"][0] for tick in range(1, 6)]
    assert found == ["fallback", "fallback", "fallback", "answer", "answer"]


@virtual_clock
async def test_without_a_deadline_a_swallowed_request_does_not_hold_the_tick_until_the_timeout() -> None:
    backend = swallowing(4)
    async with registered(AgentRuntime(backend=backend), *IDS) as runtime:
        await tick_all(runtime, 1)
        began = asyncio.get_running_loop().time()
        assert await tick_all(runtime, 2) == dict.fromkeys(IDS, ("answer", 2))
        assert asyncio.get_running_loop().time() - began < 10
    assert len(backend.requests) == 7


@virtual_clock
async def test_an_agent_that_thinks_far_longer_than_the_others_still_gets_its_answers() -> None:
    at_work: Counter[str] = Counter()

    async def script(request: Request) -> Say:
        name = agent_in(request)
        at_work[name] += 1
        assert at_work[name] == 1
        try:
            await asyncio.sleep(6.0 if name == "a" else 0.1)
        finally:
            at_work[name] -= 1
        return says()

    backend = ScriptedBackend(script)
    async with registered(AgentRuntime(backend=backend, deadline=0.5), *IDS) as runtime:
        found = [(await tick_all(runtime, tick))["a"][0] for tick in range(1, 101)]
    assert found.count("late") >= 4
    assert sum(agent_in(request) == "a" for request in backend.requests) <= found.count("late") + 4


@virtual_clock
async def test_a_server_that_slows_down_for_all_is_not_asked_for_everything_twice() -> None:
    def script(request: Request) -> Say:
        return says(latency=0.1 if len(backend.requests) <= 20 else 8.0)

    ids = [str(number) for number in range(20)]
    backend = ScriptedBackend(script)
    async with registered(AgentRuntime(backend=backend, deadline=0.5), *ids) as runtime:
        for tick in range(1, 18):
            await runtime.process_tick(tick, {key: {"tick": tick} for key in ids})
    assert len(backend.requests) <= 20 + 20 + 4


@virtual_clock
async def test_a_request_that_the_server_refused_for_a_while_is_not_taken_for_lost() -> None:
    times: list[float] = []

    def script(request: Request) -> Say | Fail:
        times.append(asyncio.get_running_loop().time())
        return Fail(429, headers={"Retry-After": "4"}) if len(times) == 4 else says(latency=0.1)

    async with registered(AgentRuntime(backend=ScriptedBackend(script), deadline=0.5), *IDS) as runtime:
        for tick in range(1, 30):
            found = await tick_all(runtime, tick)
    during = Counter(round(at, 3) for at in times if times[3] < at < times[3] + 4)
    assert set(during.values()) == {len(IDS) - 1}  # the other agents are asked, this one is not asked twice
    assert found == dict.fromkeys(IDS, ("answer", 29))


@virtual_clock
async def test_an_agent_that_decides_by_itself_is_never_called_twice_at_once() -> None:
    calls = 0

    class Slow(Agent):
        async def decide_action(self) -> None:  # type: ignore[override]
            nonlocal calls
            calls += 1
            await asyncio.Event().wait()

    runtime = registered(AgentRuntime(backend=ScriptedBackend(lambda request: says()), deadline=0.5), "b", "c")
    runtime.register_agent(Slow("a"))
    async with runtime:
        for tick in range(1, 20):
            await tick_all(runtime, tick)
    assert calls == 1

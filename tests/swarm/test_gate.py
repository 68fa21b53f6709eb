"""Slots that are shared fairly between servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from batch_agent.errors import Timeout
from batch_agent.swarm.gate import Gate
from batch_agent.testing import virtual_clock

Start = Callable[[str, float], asyncio.Task[None]]


def starter(gate: Gate, log: list[str]) -> Start:
    async def hold(server: str, seconds: float) -> None:
        async with gate.hold(server):
            log.append(server)
            await asyncio.sleep(seconds)

    return lambda server, seconds: asyncio.get_running_loop().create_task(hold(server, seconds))


@virtual_clock
async def test_no_more_are_on_their_way_than_there_are_slots() -> None:
    log: list[str] = []
    start = starter(Gate(2), log)
    tasks = [start("a", 1.0) for _ in range(5)]
    for held in (2, 4, 5):
        await asyncio.sleep(0.5)
        assert len(log) == held
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)


@virtual_clock
async def test_a_server_that_holds_its_slots_for_ever_gets_no_more_while_another_wants_them() -> None:
    log: list[str] = []
    start = starter(Gate(4), log)
    hung, well = [], []
    for _ in range(50):
        hung.append(start("hung", 1e6))
        well.append(start("well", 0.001))
    await asyncio.wait(well[:40])
    assert log.count("hung") == 2
    for task in [*hung, *well]:
        task.cancel()
    await asyncio.wait([*hung, *well])


@virtual_clock
async def test_a_cancelled_waiter_gives_its_slot_back() -> None:
    log: list[str] = []
    gate = Gate(1)
    start = starter(gate, log)
    async with gate.hold("a"):
        second, third = start("b", 1.0), start("c", 1.0)
        await asyncio.sleep(0)
    second.cancel()  # it was granted the slot, and has not noticed
    await third
    assert log == ["c"]
    assert second.cancelled()


@virtual_clock
async def test_those_who_wait_for_a_server_that_is_given_up_are_told() -> None:
    log: list[str] = []
    gate = Gate(1)
    start = starter(gate, log)
    first, second, other = start("a", 1.0), start("a", 1.0), start("b", 1.0)
    await asyncio.sleep(0.5)
    gate.give_up("a", "it does not answer")
    with pytest.raises(Timeout, match="it does not answer"):
        await second
    await asyncio.gather(first, other)
    late = start("a", 1.0)
    await late
    assert log == ["a", "b", "a"]

"""Requests that were answered leave no entry behind until their time limit would have come."""

from __future__ import annotations

import asyncio

import pytest

from batch_agent.dispatch.slots import Deadlines
from batch_agent.testing.clock import virtual_clock


@virtual_clock
async def test_deadlines_that_are_over_are_forgotten_and_one_that_is_open_expires() -> None:
    deadlines = Deadlines()

    async def wait() -> float:
        with pytest.raises(TimeoutError), deadlines.after(5.0):
            await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    for _ in range(1_000):
        with deadlines.after(600.0):
            pass
    assert len(deadlines._live) == 1
    assert await waiting == pytest.approx(5.0)
    deadlines.close()

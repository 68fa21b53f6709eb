"""Runs of one process that share a server, on a virtual clock."""

from __future__ import annotations

import asyncio
import random

from tests.load.servers import Limits, PlainServer

from batch_agent import BatchAgent
from batch_agent.testing import run_virtual

SLOTS, ROWS = 32, 1_000


async def _finish(server: PlainServer, delay: float) -> float:
    await asyncio.sleep(delay)
    began = asyncio.get_running_loop().time()
    results = await BatchAgent.run(task="{input}", inputs=list(map(str, range(ROWS))), backend=server)
    assert all(results)
    return asyncio.get_running_loop().time() - began


def test_a_run_that_joins_another_keeps_the_number_of_requests_that_the_server_was_found_to_take() -> None:
    server = PlainServer(Limits(lambda now: SLOTS), 1)
    random.seed(1)

    async def both() -> list[float]:
        return await asyncio.gather(_finish(server, 0.0), _finish(server, 5.0))

    seconds = run_virtual(both())
    assert server.sent < 1.1 * 2 * ROWS, "it was asked for all rows at once again"
    assert max(seconds) < 1.3 * 2 * ROWS / SLOTS

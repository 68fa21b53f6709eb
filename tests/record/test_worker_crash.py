"""kill -9 of workers of users: nothing is paid twice but what was in flight, and nothing is written twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import tests.record.worker_crash as worker_crash
from tests import warm
from tests.record.worker_crash import RECEIVED, STARTED, WRITES

from batch_agent.testing import Request, Say, ScriptedServer

ROWS, KILLS = 12, 4


def answer(request: Request) -> Say:
    return Say(f"answer to {request.text}", latency=random.Random(request.number).uniform(0.001, 0.03))


async def start(server: ScriptedServer, directory: Path) -> warm.WarmProcess:
    return await warm.start(worker_crash.__file__, "--work", server.backend_url, str(directory), str(ROWS))


def lines(directory: Path, name: str) -> list[str]:
    return (directory / name).read_text().splitlines() if (directory / name).exists() else []


async def test_rows_killed_anywhere_ask_nothing_twice_that_was_answered_and_write_nothing_twice(tmp_path: Path) -> None:
    chance = random.Random(3)
    async with ScriptedServer(answer, models=["m"]) as server:
        for kill in range(KILLS + 1):
            received, before = set(lines(tmp_path, RECEIVED)), server.received
            process = await start(server, tmp_path)
            ending = asyncio.ensure_future(process.wait())
            if kill < KILLS:
                moment = asyncio.ensure_future(server.wait_requests(before + chance.randint(1, 8)))
                await asyncio.wait([moment, ending], return_when=asyncio.FIRST_COMPLETED)
                moment.cancel()
                await asyncio.sleep(chance.uniform(0.0, 0.03))
                if not ending.done():
                    process.kill()
            await ending
            assert received.isdisjoint(request.text for request in server.requests[before:])
        assert len({request.text for request in server.requests}) == 3 * ROWS
    writes = Counter(lines(tmp_path, WRITES))
    assert [what for what, count in writes.items() if count > (2 if what.endswith("twice") else 1)] == []
    results = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {result["job_id"]: result["output"] for result in results} == {
        str(row): [
            f"written {row} before",
            f"answer to row {row} left",
            f"answer to row {row} right",
            f"written {row} twice",
            f"written {row} twice",
            f"answer to row {row} last",
            f"written {row} beside",
        ]
        for row in range(ROWS)
    }
    started = lines(tmp_path, STARTED)
    async with ScriptedServer(answer, models=["m"]) as server:
        assert await (await start(server, tmp_path)).wait() == 0
        assert (server.received, lines(tmp_path, STARTED)) == (0, started)

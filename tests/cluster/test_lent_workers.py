"""Four processes at one server and one Redis: what they share holds for all of them together, also over kills."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_agent.messages import Usage
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.share.table import BUDGET
from batch_agent.testing import CallTools, Say, ScriptedServer, ToolUse
from batch_agent.testing.metrics import VllmMetrics

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from redis_servers import RedisServer, needs_redis, redis_server

in_suite = pytest.mark.skipif("BATCH_AGENT_TEST_CLUSTER" not in os.environ, reason="part of make test-cluster")
pytestmark = [needs_redis, in_suite]
WORKERS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


class Workers:
    def __init__(self, url: str, models: ScriptedServer, **given: Any) -> None:
        self.url, self.models, self.given = url, models, given
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, rows: int, **options: Any) -> asyncio.subprocess.Process:
        number = len(self.processes)
        common = {"task": "Row {n}", "backend": self.models.backend_url, "model": "m"}
        mine = {"worker": f"w{number}", "rows": rows, "first": number * 100_000}
        given = {"url": self.url, **mine, **self.given, "options": {**common, **options}}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).parent / "lent_worker.py"), json.dumps(given),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def results(self) -> list[dict[str, Any]]:
        found = []
        for process in self.processes:
            out, errors = await process.communicate()
            if process.returncode == 0:
                found.append(json.loads(out))
            else:
                assert process.returncode == -9, errors.decode()
        return found


async def test_ten_keys_over_four_workers_run_ten_times(server: RedisServer, tmp_path: Path) -> None:
    def script(request: Any) -> Say:
        if len(request.messages) > 1:
            return Say("done")
        number = int(str(request.messages[0]["content"]).split()[-1])
        return CallTools(ToolUse("find", {"key": f"k{number % 10}"}))

    log = tmp_path / "ran.txt"
    async with ScriptedServer(script) as models:
        workers = Workers(f"{server.url}/tools", models, log=str(log))
        for _ in range(WORKERS):
            await workers.start(rows=40, max_inflight=40)
        results = await workers.results()

    assert Counter(log.read_text().split()) == {f"k{number}": 1 for number in range(10)}
    assert [result["ok"] for result in results] == [40] * WORKERS
    assert sum(result["ran"]["find"] for result in results) == 10


async def test_a_worker_that_is_killed_in_the_middle_of_a_call_frees_it(server: RedisServer, tmp_path: Path) -> None:
    def script(request: Any) -> Say:
        return Say("done") if len(request.messages) > 1 else CallTools(ToolUse("find", {"key": "one"}))

    log = tmp_path / "ran.txt"
    async with ScriptedServer(script) as models:
        workers = Workers(f"{server.url}/freed", models, log=str(log), seconds=2.0, tool_seconds=600.0)
        first = await workers.start(rows=1)
        while not log.exists():
            await asyncio.sleep(0.05)
        workers.given["tool_seconds"] = 0.0
        await workers.start(rows=1)
        await models.wait_requests(2)
        first.kill()
        results = await workers.results()

    assert [result["ok"] for result in results] == [1]
    assert log.read_text().split() == ["one", "one"]


async def test_the_budget_is_never_overspent_although_workers_are_killed(server: RedisServer) -> None:
    spent = 0

    async def script(request: Any) -> Say:
        nonlocal spent
        spent += 100  # also for a client that is gone
        await asyncio.sleep(0.05)
        return Say("ok", usage=Usage(prompt_tokens=60, completion_tokens=40))

    url = f"{server.url}/budget"
    async with ScriptedServer(script) as models:
        workers = Workers(url, models, seconds=3.0)
        for _ in range(WORKERS):
            await workers.start(rows=300, max_inflight=16, max_total_tokens=40_000, max_tokens=40)
        for victim in workers.processes[:2]:
            await models.wait_until(lambda: spent > 6_000)
            victim.kill()
        results = await workers.results()
    store = RedisRunStore.at(StoreAddress.parse(url))
    table, _ = store.table()
    store.close()

    assert spent <= 40_000
    assert sum(result["tokens"] for result in results) <= spent
    assert table.spent_of(f"{BUDGET}tokens") <= 40_000
    assert sum(result["failed"] for result in results) > 0  # it ran out
    assert spent > 25_000  # most of it was used, all the same


async def test_the_rate_limit_holds_for_all_workers_together(server: RedisServer) -> None:
    times: list[float] = []

    def script(request: Any) -> Say:
        times.append(time.monotonic())
        return Say("ok")

    async with ScriptedServer(script) as models:
        workers = Workers(f"{server.url}/rates", models, seconds=3.0)
        for _ in range(WORKERS):
            await workers.start(rows=15, rpm=40)
        await models.wait_requests(30)
        workers.processes[0].kill()
        results = await workers.results()

    busiest = max(sum(start <= each < start + 60.0 for each in times) for start in times)
    assert busiest <= 40
    assert [result["ok"] for result in results] == [15] * (WORKERS - 1)


async def test_slots_are_divided_and_move_when_a_worker_is_killed(server: RedisServer) -> None:
    in_flight: Counter[int] = Counter()
    even, everything = asyncio.Event(), asyncio.Event()

    async def script(request: Any) -> Say:
        worker = int(str(request.messages[0]["content"]).split()[-1]) // 100_000
        in_flight[worker] += 1
        if in_flight[0] == in_flight[1] == 4:
            even.set()
        if even.is_set() and in_flight[1] == 8:
            everything.set()
        await asyncio.sleep(0.1)
        in_flight[worker] -= 1
        return Say("ok")

    async with ScriptedServer(script) as models:
        workers = Workers(f"{server.url}/slots", models, seconds=3.0)
        for _ in range(2):
            await workers.start(rows=20_000, max_inflight=8)
        async with asyncio.timeout(60):
            await even.wait()
            workers.processes[0].kill()
            await everything.wait()
        workers.processes[1].kill()
        await workers.results()

    # A killed worker's requests may still be at the server when its slots are free.
    assert models.peak_inflight <= 8 + 4


@pytest.mark.parametrize("reports_queue", [True, False])
async def test_a_searched_number_of_slots_is_that_of_all_workers_together(
    server: RedisServer, reports_queue: bool
) -> None:
    sequences, peaks, settled = 100, {}, {}
    for count in (1, WORKERS):
        slots = asyncio.Semaphore(sequences)

        async def script(request: Any, slots: asyncio.Semaphore = slots) -> Say:
            async with slots:
                await asyncio.sleep(1.0)
            return Say("ok")

        async with ScriptedServer(script, metrics=lambda: _queue(models.inflight, sequences)) as models:
            workers = Workers(f"{server.url}/searched-{reports_queue}-{count}", models)
            for _ in range(count):
                backend = models.backend_url if reports_queue else models.url
                await workers.start(rows=100_000, backend=backend)
            async with asyncio.timeout(120):
                await models.wait_requests(3_000)
            peaks[count], settled[count] = models.peak_inflight, models.inflight
            for process in workers.processes:
                process.kill()
            await workers.results()

    assert peaks[WORKERS] <= 1.1 * max(512, peaks[1])  # four that search alone have 1,024
    assert sequences <= settled[WORKERS] <= 1.1 * settled[1]


def _queue(inflight: int, sequences: int) -> str:
    told = VllmMetrics("m", "scripted").put("num_requests_running", "Requests that run", min(sequences, inflight))
    return str(told.put("num_requests_waiting", "Requests in the queue", max(0, inflight - sequences)))

"""Four worker processes of one run, at one server and one Redis: what they share holds for all of them together, also
over kills."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.cluster.harness import MODULES, environment
from tests.cluster.modules.cluster_notes import find

from batch_agent import BatchAgent
from batch_agent.messages import Usage
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.results import Results
from batch_agent.share.table import BUDGET, SLOTS, Table
from batch_agent.testing import CallTools, Say, ScriptedServer, ToolUse
from batch_agent.testing.server import VllmMetrics

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import RedisServer, needs_redis, redis_server

in_suite = pytest.mark.skipif("BATCH_AGENT_TEST_CLUSTER" not in os.environ, reason="part of make test-cluster")
pytestmark = [needs_redis, in_suite]
WORKERS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


class Fed:
    """A run that this process feeds, and its worker processes."""

    def __init__(self, url: str, run: asyncio.Task[Results[Any]]) -> None:
        self.url, self.run = url, run
        self.workers: list[asyncio.subprocess.Process] = []

    async def start(self, count: int = 1, **variables: str) -> None:
        for _ in range(count):
            words = (sys.executable, "-m", "batch_agent", "work", self.url, "--import-from", str(MODULES))
            self.workers.append(
                await asyncio.create_subprocess_exec(
                    *words, env={**environment(), **variables}, stderr=asyncio.subprocess.PIPE
                )
            )

    async def results(self) -> Results[Any]:
        """The results of the run, when the workers that were not killed have left."""
        async with asyncio.timeout(300):
            results = await self.run
            for worker in self.workers:
                _, said = await worker.communicate()
                assert worker.returncode in (0, -9), said.decode()
        return results

    def table(self) -> Table:
        store = RedisRunStore.at(StoreAddress.parse(self.url))
        try:
            return store.table()[0]
        finally:
            store.close()


@asynccontextmanager
async def fed(url: str, models: ScriptedServer, rows: int, **options: Any) -> AsyncIterator[Fed]:
    common = {"task": "Row {n}", "backend": models.backend_url, "model": "m", "run_dir": url, "lease": 3.0}
    inputs = [{"n": row} for row in range(rows)]
    run = asyncio.create_task(BatchAgent.run(**common | options, inputs=inputs, feed_only=True, progress=False))
    scene = Fed(url, run)
    try:
        yield scene
    finally:
        run.cancel()
        await asyncio.wait([run])
        for worker in scene.workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def test_ten_keys_over_four_workers_run_ten_times(server: RedisServer, tmp_path: Path) -> None:
    def script(request: Any) -> Say:
        if len(request.messages) > 1:
            return Say("done")
        number = int(str(request.messages[0]["content"]).split()[-1])
        return CallTools(ToolUse("find", {"key": f"k{number % 10}"}))

    log = tmp_path / "ran.txt"
    async with (
        ScriptedServer(script) as models,
        fed(f"{server.url}/tools", models, 160, tools=[find], max_inflight=160) as run,
    ):
        await run.start(WORKERS, FIND_LOG=str(log), FIND_SECONDS="0.3")
        results = await run.results()

    assert Counter(log.read_text().split()) == {f"k{number}": 1 for number in range(10)}
    assert all(results) and len(results) == 160


async def test_a_worker_that_is_killed_in_the_middle_of_a_call_frees_it(server: RedisServer, tmp_path: Path) -> None:
    def script(request: Any) -> Say:
        return Say("done") if len(request.messages) > 1 else CallTools(ToolUse("find", {"key": "one"}))

    log = tmp_path / "ran.txt"
    async with ScriptedServer(script) as models, fed(f"{server.url}/freed", models, 40, tools=[find]) as run:
        await run.start(FIND_LOG=str(log), FIND_SECONDS="600")
        while not log.exists():
            await asyncio.sleep(0.05)
        await run.start(FIND_LOG=str(log))
        while len(run.table().members) < 3:  # the feeder is one
            await asyncio.sleep(0.05)
        run.workers[0].kill()
        results = await run.results()

    assert all(results) and len(results) == 40
    assert log.read_text().split() == ["one", "one"]


async def test_the_budget_is_never_overspent_although_workers_are_killed(server: RedisServer) -> None:
    spent = 0

    async def script(request: Any) -> Say:
        nonlocal spent
        spent += 100  # also for a client that is gone
        await asyncio.sleep(0.05)
        return Say("ok", usage=Usage(prompt_tokens=60, completion_tokens=40))

    async with (
        ScriptedServer(script) as models,
        fed(f"{server.url}/budget", models, 1200, max_inflight=16, max_total_tokens=40_000, max_tokens=40) as run,
    ):
        await run.start(WORKERS)
        await models.wait_until(lambda: spent > 6_000)
        for victim in run.workers[:2]:
            victim.kill()
        results = await run.results()

    assert spent <= 40_000
    assert run.table().spent_of(f"{BUDGET}tokens") <= 40_000
    assert any(not result.ok for result in results)  # it ran out
    assert spent > 25_000  # most of it was used, all the same


@pytest.mark.covers("rate limits", "Redis")
async def test_the_rate_limit_holds_for_all_workers_together(server: RedisServer) -> None:
    times: list[float] = []

    def script(request: Any) -> Say:
        times.append(time.monotonic())
        return Say("ok")

    async with ScriptedServer(script) as models, fed(f"{server.url}/rates", models, 60, rpm=40) as run:
        await run.start(WORKERS)
        await models.wait_requests(30)
        run.workers[0].kill()
        results = await run.results()

    busiest = max(sum(start <= each < start + 60.0 for each in times) for start in times)
    assert busiest <= 40
    assert all(results) and len(results) == 60


async def test_slots_are_divided_and_move_when_a_worker_is_killed(server: RedisServer) -> None:
    async def script(request: Any) -> Say:
        await asyncio.sleep(0.1)
        return Say("ok")

    def slots() -> list[int]:
        """The slots of each live worker."""
        members = [member for member in run.table().members.values() if member.until]
        held = [claim.held for each in members for name, claim in each.claims.items() if name.startswith(SLOTS)]
        return sorted(filter(None, held))

    async with ScriptedServer(script) as models, fed(f"{server.url}/slots", models, 20_000, max_inflight=8) as run:
        await run.start(2)
        async with asyncio.timeout(60):
            while slots() != [4, 4]:
                await asyncio.sleep(0.05)
            run.workers[0].kill()
            while slots() != [8]:
                await asyncio.sleep(0.05)

    # A killed worker's requests may still be at the server when its slots are free.
    assert models.peak_inflight <= 8 + 4


@pytest.mark.parametrize("reports_queue", [True, False])
async def test_a_searched_number_of_slots_is_that_of_all_workers_together(
    server: RedisServer, reports_queue: bool
) -> None:
    sequences, peaks, settled = 100, {}, {}
    for count in (1, WORKERS):
        slots, seen = asyncio.Semaphore(sequences), list[int]()

        async def script(request: Any, slots: asyncio.Semaphore = slots, seen: list[int] = seen) -> Say:
            seen.append(models.inflight)
            async with slots:
                await asyncio.sleep(1.0)
            return Say("ok")

        async with ScriptedServer(script, metrics=lambda: _queue(models.inflight, sequences)) as models:
            backend = models.backend_url if reports_queue else models.url
            url = f"{server.url}/searched-{reports_queue}-{count}"
            async with fed(url, models, 100_000, backend=backend) as run:
                await run.start(count)
                async with asyncio.timeout(120):
                    await models.wait_requests(3_000)
                peaks[count], settled[count] = models.peak_inflight, median(seen[-1_000:])

    # Four that search alone have four times as many.
    assert peaks[WORKERS] <= 1.1 * max(512, peaks[1])
    assert sequences <= settled[WORKERS] <= 1.5 * settled[1]


def _queue(inflight: int, sequences: int) -> str:
    told = VllmMetrics("m", "scripted").put("num_requests_running", "Requests that run", min(sequences, inflight))
    return str(told.put("num_requests_waiting", "Requests in the queue", max(0, inflight - sequences)))

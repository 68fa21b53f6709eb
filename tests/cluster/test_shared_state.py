"""A run in Redis with workers in processes of their own: what they share, and how they are steered."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent
from batch_agent.cli.main import main
from batch_agent.errors import Interrupted
from batch_agent.messages import Usage
from batch_agent.testing import Say, ScriptedServer

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import RedisServer, needs_redis, redis_server

in_suite = pytest.mark.skipif("BATCH_AGENT_TEST_CLUSTER" not in os.environ, reason="part of make test-cluster")
pytestmark = [needs_redis, in_suite]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@asynccontextmanager
async def worker_process(url: str, directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    directory.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batch_agent", "work", url, cwd=directory, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def answered(seconds: float = 0.05) -> Callable[[Any], Any]:
    async def script(request: Any) -> Say:
        await asyncio.sleep(seconds)
        return Say("fine", usage=Usage(prompt_tokens=60, completion_tokens=40))

    return script


async def test_a_worker_elsewhere_reads_the_hostfile_of_its_run(server: RedisServer, tmp_path: Path) -> None:
    url, hosts = f"{server.url}/hosts", tmp_path / "here" / "hosts.txt"
    hosts.parent.mkdir()
    async with ScriptedServer(answered(), models=["m"]) as one, ScriptedServer(answered(), models=["m"]) as two:
        hosts.write_text(f"{one.url}\n{two.url}\n")
        async with worker_process(url, tmp_path / "elsewhere") as worker:
            task = asyncio.create_task(
                BatchAgent.run(
                    inputs=[{"n": number} for number in range(200)],
                    task="Row {n}",
                    backend=f"fleet://{hosts}",
                    model="m",
                    run_dir=url,
                    feed_only=True,
                )
            )
            await one.wait_requests(3)
            hosts.write_text(f"{one.url}\n")  # known to the feeder alone: the worker has no such file
            results = await task
            assert await worker.wait() == 0

    assert [result.ok for result in results] == [True] * 200
    assert two.received > 0


@pytest.mark.covers("control", "Redis")
async def test_a_run_is_paused_and_drained_through_the_store(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{server.url}/steered"

    async def control(*action: str) -> dict[str, Any]:
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["control", url, *action, "--json"]) == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    async with ScriptedServer(answered()) as models, worker_process(url, tmp_path / "elsewhere") as worker:
        task = asyncio.create_task(
            BatchAgent.run(
                inputs=[{"n": number} for number in range(20_000)],
                task="Row {n}",
                backend=models.backend_url,
                model="m",
                run_dir=url,
                max_inflight=8,
                feed_only=True,
            )
        )
        await models.wait_requests(20)
        assert (await control("pause"))["state"] == "paused"
        await models.wait_idle()
        await asyncio.sleep(2.5)  # beats of both processes
        await models.wait_idle()
        quiet = models.received
        await asyncio.sleep(1.0)
        assert models.received == quiet
        assert len((await control("status"))["workers"]) == 2
        await control("resume")
        await models.wait_requests(quiet + 20)
        await control("drain")
        results = await task
        assert await worker.wait() == 0

    assert quiet < sum(result.ok for result in results) < 20_000
    assert {result.error.type for result in results if result.error is not None} == {Interrupted.__name__}


async def test_a_feeder_that_works_on_nothing_ends_when_the_budget_is_spent(
    server: RedisServer, tmp_path: Path
) -> None:
    url = f"{server.url}/spent"
    async with ScriptedServer(answered()) as models, worker_process(url, tmp_path / "elsewhere") as worker:
        results = await BatchAgent.run(
            inputs=[{"n": number} for number in range(500)],
            task="Row {n}",
            backend=models.backend_url,
            model="m",
            run_dir=url,
            max_inflight=8,
            feed_only=True,
            max_total_tokens=5_000,
            max_tokens=40,
        )
        assert await worker.wait() == 0

    done = [result for result in results if result.ok]
    assert models.received * 100 <= 5_000
    assert len(done) >= 25
    assert {result.error.type for result in results if result.error is not None} <= {Interrupted.__name__}


@pytest.mark.covers("response cache", "Redis")
async def test_with_a_cache_a_question_is_asked_once_over_all_workers(server: RedisServer, tmp_path: Path) -> None:
    url = f"{server.url}/cached"
    options: dict[str, Any] = {"task": "Row {n}", "model": "m", "temperature": 0.0}
    async with ScriptedServer(answered(0.2)) as models, worker_process(url, tmp_path / "elsewhere") as worker:
        results = await BatchAgent.run(
            inputs=[{"n": number % 10} for number in range(80)],
            backend=models.backend_url,
            run_dir=url,
            max_inflight=16,
            cache=str(tmp_path / "cache"),
            **options,
        )
        assert await worker.wait() == 0

    assert [result.output for result in results] == ["fine"] * 80
    assert models.received == 10  # each question once, whichever worker had it

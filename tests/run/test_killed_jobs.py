"""Runs over a batch API that are killed or stopped while a job is pending: in no shape is a request bought twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.record.redis_servers import RedisServer, needs_redis
from tests.run.process_work import WarmCrew

from batch_agent import BatchAgent, Pipeline
from batch_agent.record.reader import look
from batch_agent.testing import BatchJob, BatchServer, Request, Say

ROWS = ["a", "b", "c"]


def echo(request: Request) -> Say:
    return Say(f"heard {request.text}")


async def work(options: dict[str, Any]) -> None:
    given = {"model": "test-model", "resume": "run_dir" in options, **options}
    if given.pop("stages", False):
        stages = Pipeline(ROWS).map(name="first", task="one {input}").map(name="second", task="two {input}")
        outcome = await stages.run(**given)
        assert outcome.outputs == [f"heard two heard one {row}" for row in ROWS]
    else:
        results = await BatchAgent.run(task="{input}", inputs=ROWS, **given)
        assert [result.output for result in results] == [f"heard {row}" for row in ROWS]


class HeldServer(BatchServer):
    """Jobs whose requests contain ``held`` are pending, the others end when they are asked after."""

    held = ""

    async def poll(self, job: BatchJob) -> None:
        if self._is_held(job):
            job.polls += 1
        else:
            await super().poll(job)

    def _is_held(self, job: BatchJob) -> bool:
        return any(self.held in request.text for request in job.requests.values())

    @property
    def bought(self) -> Counter[str]:
        """The requests of all jobs; how many jobs there are depends on the load of the machine."""
        return Counter(request.text for job in self.jobs for request in job.requests.values())

    async def is_asked(self, ended: Callable[[], bool]) -> None:
        """Wait until all rows are in pending jobs, which are asked after from now on. Fails if the run ends before."""
        pending: list[BatchJob] = []
        while sum(len(job.requests) for job in pending) < len(ROWS):
            assert not ended()
            await asyncio.sleep(0.01)
            pending = [job for job in self.jobs if self._is_held(job)]
        for job in pending:
            job.polls = 0
        while not all(job.polls for job in pending):
            assert not ended()
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")


async def start(server: HeldServer, options: dict[str, Any]) -> asyncio.subprocess.Process:
    given = json.dumps({"backend": server.openai_url, **options})
    return await warm.start("-m", "tests.run.test_killed_jobs", given)


async def killed_and_stopped(options: dict[str, Any], first: str, last: str) -> Counter[str]:
    """Kill the run while its first jobs are pending, stop it with Ctrl-C while its last ones are, and let it end.
    Returns the requests that were bought."""
    async with HeldServer(echo) as server:
        for server.held, number in ((first, signal.SIGKILL), (last, signal.SIGINT)):
            process = await start(server, options)
            await server.is_asked(lambda: process.returncode is not None)  # noqa: B023
            process.send_signal(number)
            await process.wait()
        assert "cancelled" not in [job.status for job in server.jobs]
        server.held = "nothing"
        process = await start(server, options)
        assert await process.wait() == 0
    return server.bought


STAGES = Counter(f"one {row}" for row in ROWS) + Counter(f"two heard one {row}" for row in ROWS)


@pytest.mark.parametrize("processes", [None, pytest.param(1, marks=pytest.mark.soak)])
async def test_a_pipeline_that_is_killed_and_stopped_buys_nothing_twice(tmp_path: Path, processes: int | None) -> None:
    given = {"stages": True, "processes": processes, "run_dir": str(tmp_path / "run")}
    assert await killed_and_stopped(given, "one", "two") == STAGES
    states = {name: stage.state for name, stage in look(tmp_path / "run").stages.items()}
    assert states == {"first": "complete", "second": "complete"}


@needs_redis
async def test_a_run_in_redis_that_is_killed_and_stopped_buys_nothing_twice(redis: RedisServer) -> None:
    given = {"run_dir": f"{redis.url}/jobs", "lease": 1.0}
    assert await killed_and_stopped(given, "", "") == Counter(ROWS)


async def test_the_job_of_a_killed_worker_process_is_found_by_the_worker_that_takes_its_rows() -> None:
    async with HeldServer(echo) as server:
        crew = WarmCrew()
        running = asyncio.ensure_future(work({"backend": server.openai_url, "cluster": crew, "lease": 2.0}))
        await server.is_asked(running.done)
        os.kill(crew.pids[0], signal.SIGKILL)
        server.held = "nothing"
        await running
    assert server.bought == Counter(ROWS)


async def test_without_a_record_that_lasts_the_job_of_a_stopped_run_is_cancelled() -> None:
    async with HeldServer(echo) as server:
        running = asyncio.ensure_future(work({"backend": server.openai_url, "cluster": WarmCrew()}))
        await server.is_asked(running.done)
        running.cancel()
        await asyncio.wait([running])
    assert {job.status for job in server.jobs} == {"cancelled"}


if __name__ == "__main__":
    asyncio.run(work(json.loads(sys.argv[1])))

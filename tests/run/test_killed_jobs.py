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
from tests.backends.job_server import JobServer, ServedJob
from tests.record.redis_servers import RedisServer, needs_redis
from tests.run.test_processes import workers_of

from batch_agent import BatchAgent, Pipeline
from batch_agent.record.reader import look

ROWS = ["a", "b", "c"]


def echo(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"heard {body['messages'][-1]['content']}"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


async def work(options: dict[str, Any]) -> None:
    given = {"model": "test-model", "resume": "run_dir" in options, **options}
    if given.pop("stages", False):
        stages = Pipeline(ROWS).map(name="first", task="one {input}").map(name="second", task="two {input}")
        outcome = await stages.run(**given)
        assert outcome.outputs == [f"heard two heard one {row}" for row in ROWS]
    else:
        results = await BatchAgent.run(task="{input}", inputs=ROWS, **given)
        assert [result.output for result in results] == [f"heard {row}" for row in ROWS]


class HeldServer(JobServer):
    """Jobs whose requests contain ``held`` are pending, the others end when they are asked after."""

    held = ""

    def _look(self, job: ServedJob, *, ended: str) -> None:
        if self.held in str(job.requests):
            job.looked += 1
        else:
            super()._look(job, ended=ended)

    @property
    def url(self) -> str:
        return f"openai-batch://{self.address}/v1?tls=false&gather=0.05&look=0.01"

    @property
    def bought(self) -> Counter[str]:
        """The requests of all jobs; how many jobs there are depends on the load of the machine."""
        return Counter(str(body["messages"][-1]["content"]) for job in self.jobs for body in job.requests.values())

    async def is_asked(self, ended: Callable[[], bool]) -> None:
        """Wait until all rows are in pending jobs, which are asked after from now on. Fails if the run ends before."""
        pending: list[ServedJob] = []
        while sum(len(job.requests) for job in pending) < len(ROWS):
            assert not ended()
            await asyncio.sleep(0.01)
            pending = [job for job in self.jobs if self.held in str(job.requests)]
        for job in pending:
            job.looked = 0
        while not all(job.looked for job in pending):
            assert not ended()
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")


async def start(server: HeldServer, options: dict[str, Any]) -> asyncio.subprocess.Process:
    given = json.dumps({"backend": server.url, **options})
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.run.test_killed_jobs", given)


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


@pytest.mark.parametrize("processes", [None, 1])
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
        running = asyncio.ensure_future(work({"backend": server.url, "processes": 2, "lease": 2.0}))
        await server.is_asked(running.done)
        os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
        server.held = "nothing"
        await running
    assert server.bought == Counter(ROWS)


async def test_without_a_record_that_lasts_the_job_of_a_stopped_run_is_cancelled() -> None:
    async with HeldServer(echo) as server:
        running = asyncio.ensure_future(work({"backend": server.url, "processes": 1}))
        await server.is_asked(running.done)
        running.cancel()
        await asyncio.wait([running])
    assert {job.status for job in server.jobs} == {"cancelled"}


if __name__ == "__main__":
    asyncio.run(work(json.loads(sys.argv[1])))

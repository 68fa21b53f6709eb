"""Pipelines over a batch API that are killed with SIGKILL while a job is pending: no request is bought twice."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from batch_agent import Pipeline
from batch_agent.record.reader import look
from batch_agent.testing import BatchJob, BatchServer, Request, Say

ROWS = ["a", "b", "c"]


def echo(request: Request) -> Say:
    return Say(f"heard {request.text}")


async def work(url: str, directory: Path) -> None:
    stages = Pipeline(ROWS).map(name="first", task="one {input}").map(name="second", task="two {input}")
    outcome = await stages.run(backend=url, api_key="k", model="test-model", run_dir=directory, resume=True)
    assert outcome.outputs == [f"heard two heard one {row}" for row in ROWS]


KILLS = 4


class HeldServer(BatchServer):
    """Its first ``may_end`` jobs end when they are asked after, the others are pending."""

    may_end = 0

    async def poll(self, job: BatchJob) -> None:
        if self.jobs.index(job) < self.may_end:
            await super().poll(job)
        else:
            job.polls += 1


async def test_a_pipeline_that_is_killed_while_a_job_is_pending_buys_nothing_twice(tmp_path: Path) -> None:
    async with HeldServer(echo) as server:
        url = server.openai_url
        for kill in range(KILLS):
            server.may_end = kill * 2 // KILLS  # first the job of the first stage is pending, then that of the second
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.run.test_killed_jobs", url, str(tmp_path / "run")
            )
            while len(server.jobs) <= server.may_end or not server.jobs[-1].polls:
                assert process.returncode is None
                await asyncio.sleep(0.01)
            server.jobs[-1].polls = 0
            process.kill()
            await process.wait()
        server.may_end = 2
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.run.test_killed_jobs", url, str(tmp_path / "run")
        )
        assert await process.wait() == 0
    assert [len(job.requests) for job in server.jobs] == [3, 3]
    view = look(tmp_path / "run")
    assert {name: stage.state for name, stage in view.stages.items()} == {"first": "complete", "second": "complete"}


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2])))

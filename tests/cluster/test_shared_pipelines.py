"""Pipelines in Redis with several workers, all in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from redis_servers import RedisServer, needs_redis, redis_server

from batch_agent import Pipeline, SpecError
from batch_agent.cluster.worker import WorkReport
from batch_agent.cluster.worker import work as join
from batch_agent.testing import Request, Say, ScriptedServer

NAMES = (f"pipeline-{number}" for number in count())
HERE = Path(__file__).parent
pytestmark = needs_redis


class Paper(BaseModel):
    title: str
    claims: list[str]


class Survey(BaseModel):
    text: str


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def url(redis: RedisServer) -> str:
    return f"{redis.url}/{next(NAMES)}"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(answer, models=["m"]) as server:
        yield server


def answer(request: Request) -> Say:
    text = str(request.messages[-1]["content"])
    if text.startswith("Read"):
        title = text.split()[1]
        return Say(Paper(title=title, claims=[f"{title}-a", f"{title}-b"]).model_dump_json())
    if text.startswith("Check"):
        return Say(f"checked {text.split()[1]}")
    return Say(Survey(text=f"{text.count('output')} lines").model_dump_json())


def papers(rows: int) -> Pipeline[Any]:
    """Read each paper, leave one out, check its claims, and sum them up by threes."""
    return (
        Pipeline([{"paper": f"p{row}"} for row in range(rows)])
        .map(name="read", task="Read {paper}", output_schema=Paper)
        .filter(lambda paper: paper.title != "p1")
        .flat_map(lambda paper: paper.claims)
        .map(name="check", task="Check {input}")
        .reduce("Sum up {n} claims", name="survey", output_schema=Survey, tree=3)
    )


def options(server: ScriptedServer, run_dir: str | Path, **others: Any) -> dict[str, Any]:
    plain = {"backend": server.backend_url, "model": "m", "run_dir": run_dir, "progress": False}
    return {**plain, **({"lease": 5.0} if isinstance(run_dir, str) else {}), **others}


async def work(url: str, **others: Any) -> WorkReport:
    return await join(url, import_from=HERE, **{"wait": 20.0, **others})


async def test_a_pipeline_in_redis_gives_what_it_gives_in_a_directory(
    server: ScriptedServer, url: str, tmp_path: Path
) -> None:
    alone = await papers(6).run(**options(server, tmp_path / "run"))
    asked = server.received
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(url)) for _ in range(2)]
        feeding = tasks.create_task(papers(6).run(**options(server, url, feed_only=True)))
    shared = feeding.result()
    assert shared.outputs == alone.outputs
    for stage in ("read", "check", "survey"):
        assert [(each.index, each.input, each.output) for each in shared.results[stage]] == [
            (each.index, each.input, each.output) for each in alone.results[stage]
        ]
    assert shared.reductions["survey"].covers == alone.reductions["survey"].covers
    assert server.received == 2 * asked
    assert {worker.result().why for worker in workers} == {"done"}
    assert sum(worker.result().rows for worker in workers) == asked
    assert shared.statistics.usage == alone.statistics.usage

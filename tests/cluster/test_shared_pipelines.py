"""Pipelines in Redis with several workers, all in this process."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import needs_redis

from batch_agent import AgentContext, Pipeline, SpecError
from batch_agent.files.results import to_json
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.run.joined_worker import WorkReport
from batch_agent.run.joined_worker import work as join
from batch_agent.run.trust import sign
from batch_agent.testing import Request, Say, ScriptedServer

HERE = Path(__file__).parent
pytestmark = needs_redis


class Paper(BaseModel):
    title: str
    claims: list[str]


class Survey(BaseModel):
    text: str


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
        Pipeline([{"id": f"id-{row}", "paper": f"p{row}"} for row in range(rows)])
        .map(name="read", task="Read {paper}", output_schema=Paper, carry=["paper"], max_tokens=50)
        .filter(lambda paper: paper.title != "p1")
        .flat_map(lambda paper: paper.claims)
        .map(name="check", task="Check {input} of {paper}", max_tokens=50)
        .reduce("Sum up {n} claims", name="survey", output_schema=Survey, tree=3, max_tokens=50)
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
        assert [(each.index, each.job_id, each.input, each.output) for each in shared.results[stage]] == [
            (each.index, each.job_id, each.input, each.output) for each in alone.results[stage]
        ]
    assert [each.job_id for each in shared.results["check"]][:3] == ["id-0.0", "id-0.1", "id-2.0"]
    assert shared.reductions["survey"].covers == alone.reductions["survey"].covers
    assert server.received == 2 * asked
    assert {worker.result().why for worker in workers} == {"done"}
    assert sum(worker.result().rows for worker in workers) == asked
    assert shared.statistics.usage == alone.statistics.usage


async def name_of(paper: Paper, context: AgentContext) -> str:
    return f"{type(paper).__name__} {paper.title}"


async def test_a_worker_function_gets_instances_of_the_schema_before_it(server: ScriptedServer, url: str) -> None:
    named = Pipeline([{"paper": "p0"}]).map(name="read", task="Read {paper}", output_schema=Paper)
    outcome = await named.filter(bool).map(name="name", worker=name_of).run(**options(server, url))
    assert outcome.outputs == ["Paper p0"]


async def test_a_resumed_pipeline_asks_only_what_is_not_done(url: str) -> None:
    """The feeder, which is a worker too, is cancelled while the first stage still runs."""
    began, broken = asyncio.Event(), {"p2-a"}

    async def script(request: Request) -> Say:
        text = str(request.messages[-1]["content"])
        if text.startswith("Check"):
            began.set()
        if text.startswith("Read p4") and not began.is_set():
            await began.wait()
            await asyncio.Event().wait()
        return Say("no", finish_reason="content_filter") if text[6:].split()[0] in broken else answer(request)

    async with ScriptedServer(script, models=["m"]) as server:
        async with papers(6).open(**without_progress(options(server, url))) as flow:
            finishing = asyncio.create_task(flow.finish())
            await began.wait()
            while flow.statistics().done < 9:
                await asyncio.sleep(0.01)
            flow.cancel()
            await finishing
        first = asked_of(server)
        with pytest.raises(SpecError, match="holds a run already"):
            await papers(6).run(**options(server, url))
        second = await papers(6).run(**options(server, url, resume=True, retry_failed=False))
        assert [each.error.type for each in second.failures if each.error] == ["Rejected"]
        between = asked_of(server)
        broken.clear()
        third = await papers(6).run(**options(server, url, resume=True))
    again = {text: count for text, count in between.items() if count > 1}
    assert set(again) <= {"Read p4"} and first["Read p4"] == 1  # it was in flight
    assert third.failures == [] and third.reductions["survey"].covers == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    asked = asked_of(server) - between
    assert asked.pop("Check p2-a of p2") == 1 and all(text.startswith("Sum up") for text in asked)


async def test_what_cannot_travel_is_refused_before_anything_is_sent_and_the_stage_is_named(
    server: ScriptedServer, url: str
) -> None:
    rows = Pipeline([{"row": 1}]).map(name="first", task="Do {row}")
    refused: list[tuple[Pipeline[Any], dict[str, Any], str]] = [
        (rows.map(name="second", worker=lambda row, ctx: row), {}, "second: worker: .*<lambda> has no name"),
        (rows, {"run_dir": f"{url}/stage"}, "is a stage: give its run"),
    ]
    for pipeline, others, message in refused:
        with pytest.raises(SpecError, match=message):
            await pipeline.run(**{**options(server, url), **others})
    assert server.received == 0


async def test_the_budget_is_one_for_all_stages_and_workers(server: ScriptedServer, url: str) -> None:
    limited = options(server, url, feed_only=True, prices={"input": 1000.0, "output": 1000.0})
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(url)) for _ in range(2)]
        feeding = tasks.create_task(papers(12).run(**limited, max_cost=0.4))
    outcome = feeding.result()
    assert outcome.statistics.ended == "out of budget"
    assert outcome.statistics.cost is not None and 0.0 < outcome.statistics.cost <= 0.4
    assert {worker.result().why for worker in workers} == {"asked to leave"}
    asked = server.received
    again = await papers(12).run(**{**limited, "feed_only": False}, max_cost=40.0, resume=True)
    assert again.statistics.ended == "complete" and len(again.reductions["survey"].covers) == 22
    assert sum(result.resumed for results in again.results.values() for result in results) == asked
    assert max(asked_of(server).values()) == 1


async def test_a_worker_that_cannot_import_a_later_stage_is_refused_at_once(server: ScriptedServer, url: str) -> None:
    async with papers(2).open(**without_progress(options(server, url, feed_only=True))) as flow:
        store = RedisRunStore.at(StoreAddress.parse(url))
        while (facts := store.facts()) is None:
            await asyncio.sleep(0.01)
        specs = facts["specs"]
        assert isinstance(specs, dict) and isinstance(specs["survey"], dict)
        specs["survey"]["output_schema"] = "no_such_module:Survey"
        changed = to_json(sign(facts))
        store.connection.call(lambda client: client.execute_command("HSET", store.key("run"), "facts", changed))
        with pytest.raises(SpecError, match="no_such_module"):
            await work(url)
        with pytest.raises(SpecError, match="is a stage: give its run"):
            await work(f"{url}/read")
        store.close()
        flow.cancel()
    assert server.received == 0


def asked_of(server: ScriptedServer) -> Counter[str]:
    return Counter(str(request.messages[-1]["content"]) for request in server.requests)


def without_progress(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "progress"}

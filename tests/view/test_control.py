"""Steering a run from outside its process: over its socket, and by the command."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent

from batch_agent import BatchAgent, Pipeline, SpecError
from batch_agent.job import AgentResult
from batch_agent.record.control import NotAlive, Refused, ask, socket_of, stream
from batch_agent.run.run import Run
from batch_agent.testing import Request, Say, ScriptedServer


@asynccontextmanager
async def held(run_dir: Path, count: int = 4, **options: Any) -> AsyncIterator[tuple[Run[str], asyncio.Event]]:
    """A run at a server that answers once the event is set; two of its requests are there."""
    free = asyncio.Event()

    async def answer(request: Request) -> Say:
        await free.wait()
        return Say(f"done: {request.text}")

    async with ScriptedServer(answer, models=["m"]) as server:
        inputs = [{"id": f"r{number}"} for number in range(count)]
        spec: dict[str, Any] = {"task": "Do {id}", "inputs": inputs, "model": "m", "max_inflight": 2}
        async with BatchAgent.open(**spec, backend=server.backend_url, run_dir=run_dir, **options) as run:
            await server.wait_inflight(2)
            yield run, free


async def taken(run: Run[Any]) -> list[AgentResult[Any]]:
    return sorted([result async for result in run.results()], key=lambda result: result.index)


async def test_the_socket_is_its_owners_alone_and_gone_when_the_run_ends(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        path = socket_of(tmp_path / "run")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        free.set()
        await taken(run)
    assert not path.parent.exists()
    with pytest.raises(NotAlive, match="is not running"):
        await ask(tmp_path / "run", {"do": "status"})


async def test_a_run_directory_may_have_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    async with held(deep) as (run, free):
        answer = await ask(deep, {"do": "status"})
        free.set()
        await taken(run)
    status = answer["status"]
    assert isinstance(status, dict) and status["state"] == "running" and status["rows"]["total"] == 4


async def test_a_paused_run_sends_nothing_until_it_goes_on(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        paused = await ask(tmp_path / "run", {"do": "pause"})
        free.set()
        results = run.results()
        first = [await anext(results), await anext(results)]
        assert len(first) == 2 and run.status()["agents"]["running"] == 0
        await ask(tmp_path / "run", {"do": "resume"})
        rest = [result async for result in results]
    assert paused["status"]["state"] == "paused" and len(rest) == 2


async def test_a_cancelled_row_fails_alone_and_a_resume_does_it(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        await ask(tmp_path / "run", {"do": "cancel-row", "row": "r0"})
        free.set()
        results = await taken(run)
    assert [result.ok for result in results] == [False, True, True, True]
    assert results[0].error is not None and results[0].error.type == "Cancelled"
    async with ScriptedServer(lambda request: Say("again"), models=["m"]) as server:
        inputs = [{"id": f"r{number}"} for number in range(4)]
        again = await BatchAgent.run(
            task="Do {id}", inputs=inputs, model="m", backend=server.backend_url, run_dir=tmp_path / "run", resume=True
        )
    assert [result.output for result in again][:2] == ["again", "done: Do r1"]


async def test_a_row_that_begins_again_has_one_result(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        await ask(tmp_path / "run", {"do": "retry-row", "row": "0"})
        await asyncio.sleep(0)
        free.set()
        results = await taken(run)
    assert [result.output for result in results] == [f"done: Do r{number}" for number in range(4)]


async def test_what_cannot_be_done_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (_, _free):
        for request, why in [
            ({"do": "cancel-row", "row": "nobody"}, "row nobody is not running"),
            ({"do": "cancel-row"}, "name a row"),
            ({"do": "resize", "inflight": 0}, "above 0"),
            ({"do": "dance"}, "unknown request 'dance'"),
        ]:
            with pytest.raises(Refused, match=why):
                await ask(tmp_path / "run", request)


async def test_resizing_lets_more_requests_leave(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        await ask(tmp_path / "run", {"do": "resize", "inflight": 4})
        async with asyncio.timeout(20):
            while run.status()["agents"]["running"] != 4:
                await asyncio.sleep(0.01)
        free.set()
        assert len(await taken(run)) == 4


async def test_a_row_under_way_is_followed_to_its_end(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        news = stream(tmp_path / "run", {"do": "follow", "row": "r1"})
        first = await anext(news)
        free.set()
        await taken(run)
        with pytest.raises((Refused, StopAsyncIteration)):
            while True:
                await anext(news)
    row = first["row"]
    assert isinstance(row, dict)
    assert row["job_id"] == "r1" and row["saying"] == "" and row["messages"][-1]["content"] == "Do r1"


async def test_draining_leaves_the_rows_that_have_not_begun(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        await ask(tmp_path / "run", {"do": "drain"})
        free.set()
        assert len(await taken(run)) < 4


async def test_the_command_steers_and_says_when_a_run_is_not_alive(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        status = await batch_agent(tmp_path, "control", "run", "status", "--json")
        words = await batch_agent(tmp_path, "control", "run", "status")
        paused = await batch_agent(tmp_path, "control", "run", "pause")
        refused = await batch_agent(tmp_path, "control", "run", "cancel-row", "nobody")
        await batch_agent(tmp_path, "control", "run", "cancel")
        free.set()
        results = await taken(run)
    assert json.loads(status.stdout)["agents"]["running"] == 2 and "2 running" in words.stdout
    assert (paused.code, refused.code) == (0, 1) and "paused" in paused.stderr and "not running" in refused.stderr
    assert all(result.error is not None and result.error.type == "Interrupted" for result in results)
    dead = await batch_agent(tmp_path, "control", "run", "pause")
    nothing = await batch_agent(tmp_path, "control", "nowhere", "pause")
    assert (dead.code, nothing.code) == (4, 1) and "is not running" in dead.stderr and "holds no run" in nothing.stderr


async def test_a_pipeline_is_steered_as_one_and_its_rows_by_stage(tmp_path: Path) -> None:
    free = asyncio.Event()

    async def answer(request: Request) -> Say:
        await free.wait()
        return Say(request.text)

    async with ScriptedServer(answer, models=["m"]) as server:
        pipeline = (
            Pipeline([{"id": "a"}, {"id": "b"}])
            .map(task="First {id}", name="first")
            .map(task="Then {input}", name="then")
        )
        work = asyncio.create_task(pipeline.run(backend=server.backend_url, model="m", run_dir=tmp_path / "run"))
        await server.wait_inflight(2)
        status = (await ask(tmp_path / "run", {"do": "status"}))["status"]
        rows = (await ask(tmp_path / "run", {"do": "rows"}))["rows"]
        await ask(tmp_path / "run", {"do": "cancel-row", "row": "first/a"})
        with pytest.raises(Refused, match="STAGE/ROW"):
            await ask(tmp_path / "run", {"do": "cancel-row", "row": "a"})
        free.set()
        outcome = await work
    assert isinstance(status, dict) and isinstance(rows, list)
    assert [(stage["name"], stage["after"]) for stage in status["stages"]] == [("first", []), ("then", ["first"])]
    assert [row["stage"] for row in rows] == ["first", "first"]
    assert [result.ok for result in outcome.results["first"]] == [False, True]


async def test_a_killed_runs_pointer_is_no_life(tmp_path: Path) -> None:
    async with held(tmp_path / "run") as (run, free):
        pointer = (tmp_path / "run" / "control.json").read_bytes()
        free.set()
        await taken(run)
    (tmp_path / "run" / "control.json").write_bytes(pointer)
    with pytest.raises(NotAlive, match="it was killed"):
        await ask(tmp_path / "run", {"do": "status"})
    elsewhere = json.loads(pointer) | {"host": "another-machine"}
    (tmp_path / "run" / "control.json").write_text(json.dumps(elsewhere))
    with pytest.raises(NotAlive, match="runs on another-machine"):
        await ask(tmp_path / "run", {"do": "status"})


def test_a_run_that_has_not_begun_cannot_be_steered_by_row() -> None:
    run = BatchAgent.open(task="{x}", inputs=[{"x": 1}], model="m", backend="vllm://127.0.0.1:1")
    with pytest.raises(SpecError, match="not begun"):
        run.cancel_row(0)

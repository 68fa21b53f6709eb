"""The numbers that users see of a run are the same in every shape, also after processes were killed: real processes, a
real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.record.redis_servers import needs_redis
from tests.run.process_work import NOTES, ROOT, WarmCrew, note
from tests.run.test_processes import looks_joined, process, row_of, workers_of

from batch_agent import BatchAgent, Pipeline
from batch_agent.events import Event, TurnFinished
from batch_agent.messages import JsonObject, Usage
from batch_agent.observe.summary import summary_json
from batch_agent.record.reader import RunSnapshot, look, open_run
from batch_agent.record.redis.reading import live_status
from batch_agent.record.store import Totals
from batch_agent.run.run import Run
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedServer, ToolUse

ROWS = 8
USAGE = Usage(60, completion_tokens=30)
EACH = USAGE.prompt_tokens + USAGE.completion_tokens
PRICES = {"input": 10.0, "output": 20.0}
COST = (60 * 10.0 + 30 * 20.0) / 1e6  # of a request
SHAPES = ["local", "processes", pytest.param("Redis", marks=needs_redis)]
SHARED = SHAPES[1:]


@pytest.fixture(autouse=True)
def notes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))


@pytest.fixture
def place(shape: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("url") if shape == "Redis" else tmp_path / "run")


def options(server: ScriptedServer, shape: str, place: str, **others: Any) -> dict[str, Any]:
    given = {"task": "Do {input}", "inputs": [f"row-{n}" for n in range(ROWS)], "backend": server.backend_url}
    own = {"processes": {"cluster": WarmCrew(), "lease": 2.0}, "Redis": {"feed_only": True, "lease": 2.0}}.get(
        shape, {}
    )
    common = {"tools": [note], "max_turns": 3, "max_inflight": ROWS, "prices": PRICES}
    return {**given, **common, "model": "m", "run_dir": place, "progress": False, **own, **others}


async def two_stages(given: dict[str, Any]) -> Any:
    """Run a pipeline of two stages that do what a run with these options does."""
    rows, task = given.pop("inputs"), given.pop("task")
    tools = {"tools": given.pop("tools"), "max_turns": given.pop("max_turns")}
    given.pop("progress")
    stages = Pipeline(rows).map(name="one", task=task, **tools).map(name="two", task="Check {input}", **tools)
    return await stages.run(**given)


@asynccontextmanager
async def worker(place: str, server: ScriptedServer) -> AsyncIterator[int]:
    """A worker process of a run in Redis. Yields its process id."""
    allowed = ("--allow", "*", "--allow", server.backend_url, "--wait", "30")
    async with process("-m", "batch_agent", "work", place, "--import-from", str(ROOT), *allowed) as started:
        yield started.pid


class Script:
    """Each row has two turns: it notes something, then it answers. ``go_on`` holds the second answers."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.fails: set[str] = set()  # rows whose first request fails once

    async def __call__(self, request: Request) -> Say | Fail:
        if request.turn == 0 and row_of(request) in self.fails:
            self.fails.remove(row_of(request))
            return Fail(500, "once")
        if request.turn == 0:
            return CallTools(ToolUse("note", {"row": row_of(request)}), usage=USAGE)
        await self.go_on.wait()
        return Say(f"said {row_of(request)}", usage=USAGE)


async def until_second_turns(server: ScriptedServer, running: asyncio.Future[Any], rows: int = ROWS) -> None:
    """Wait until each row has sent its second request, so that its first turn is recorded."""
    asked = asyncio.ensure_future(
        server.wait_until(lambda: sum(request.turn > 0 for request in server.requests) >= rows)
    )
    await asyncio.wait([running, asked], return_when=asyncio.FIRST_COMPLETED)
    assert asked.done(), running


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_summary_has_the_same_numbers_in_every_shape(shape: str, place: str) -> None:
    script = Script()
    script.go_on.set()
    script.fails = {"row-1", "row-5"}
    events: list[Event] = []
    async with AsyncExitStack() as extent:
        server = await extent.enter_async_context(ScriptedServer(script, models=["m"]))
        given = options(server, shape, place, max_inflight=4, sinks=[events.append])
        running = asyncio.ensure_future(BatchAgent.run(**given))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        results = await running
    summary = summary_json(results.summary.statistics)
    assert (summary["turns"], summary["retries"]) == (2 * ROWS, 2)
    assert summary["tool_calls"] == {"run": ROWS, "shared": 0, "cached": 0, "errors": 0}
    assert {name: use.calls for name, use in results.summary.statistics.tools.items()} == {"note": ROWS}
    assert summary["tokens"] == {"prompt": 2 * ROWS * 60, "completion": 2 * ROWS * 30, "cached": 0} | {
        "cache_write": 0,
        "reasoning": 0,
    }
    assert summary["cost"] == pytest.approx(2 * ROWS * COST)
    assert 1 <= int(str(summary["peak_inflight"])) <= 4
    turns = [event for event in events if isinstance(event, TurnFinished)]
    assert len(turns) == 2 * ROWS
    assert all(turn.seconds > 0 for turn in turns), "histograms of turns are made of them"
    assert float(str(summary["inference_seconds"])) > 0
    assert look(place).summary == summary
    assert (look(place).latest.tokens, look(place).latest.cost) == (2 * ROWS * EACH, pytest.approx(2 * ROWS * COST))


@pytest.mark.parametrize("shape", SHARED)
async def test_what_a_killed_worker_recorded_is_in_the_sum_of_all_sessions(shape: str, place: str) -> None:
    """A worker is killed within a second after the first turns, which is before its next report."""
    script = Script()
    async with AsyncExitStack() as extent:
        server = await extent.enter_async_context(ScriptedServer(script, models=["m"]))
        given = options(server, shape, place)
        running = asyncio.ensure_future(BatchAgent.run(**given))
        if shape == "Redis":
            victim = await extent.enter_async_context(worker(place, server))
        await until_second_turns(server, running)
        if shape == "processes":
            victim = given["cluster"].pids[0]
        os.kill(victim, signal.SIGKILL)
        assert look(place).progress.tokens == ROWS * EACH
        script.go_on.set()
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        results = await running
    assert all(result.ok for result in results)
    found = look(place).progress
    assert (found.tokens, found.cost) == (2 * ROWS * EACH, pytest.approx(2 * ROWS * COST))
    assert sum(result.usage.prompt_tokens + result.usage.completion_tokens for result in results) == found.tokens
    statistics = results.summary.statistics
    assert (statistics.turns, statistics.usage.prompt_tokens) == (2 * ROWS, 2 * ROWS * 60)
    assert statistics.cost == pytest.approx(2 * ROWS * COST)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_session_counts_only_what_it_paid_and_the_record_everything(shape: str, place: str) -> None:
    """All processes are killed when each row has its first turn. The next session continues the rows."""
    script = Script()
    async with AsyncExitStack() as extent:
        server = await extent.enter_async_context(ScriptedServer(script, models=["m"]))
        own = {"cluster": None, "processes": 2} if shape == "processes" else {}
        given = json.dumps({**options(server, shape, place), "tools": None, **own})
        fed = await extent.enter_async_context(process("-m", "tests.run.test_numbers", given))
        running = asyncio.ensure_future(fed.wait())
        victims = [fed.pid]
        if shape == "Redis":
            victims.append(await extent.enter_async_context(worker(place, server)))
        await until_second_turns(server, running)
        for victim in (*workers_of(fed.pid), *victims):
            os.kill(victim, signal.SIGKILL)
        await running
        assert look(place).progress.tokens == ROWS * EACH
        script.go_on.set()
        again = asyncio.ensure_future(BatchAgent.run(**options(server, shape, place, resume=True)))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        results = await again
    assert all(result.ok for result in results)
    statistics = results.summary.statistics
    assert (statistics.turns, statistics.usage) == (ROWS, Usage(ROWS * 60, completion_tokens=ROWS * 30))
    assert statistics.cost == pytest.approx(ROWS * COST)
    found = look(place).progress
    assert (found.tokens, found.cost) == (2 * ROWS * EACH, pytest.approx(2 * ROWS * COST))
    assert sum(result.usage.completion_tokens for result in results) == 2 * ROWS * 30


async def taken(run: Run[Any]) -> list[bool]:
    return [result.ok async for result in run.results()]


@pytest.mark.parametrize("shape", SHARED)
async def test_a_running_run_shows_the_agents_and_the_slots_of_all_processes(shape: str, place: str) -> None:
    script = Script()
    async with AsyncExitStack() as extent:
        server = await extent.enter_async_context(ScriptedServer(script, models=["m"]))
        given = options(server, shape, place)
        given.pop("progress")
        run = await extent.enter_async_context(BatchAgent.open(**given))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        running = asyncio.ensure_future(taken(run))
        await until_second_turns(server, running)
        async with asyncio.timeout(20):
            while run.statistics().running != ROWS:  # workers report about once per second
                await asyncio.sleep(0.05)
        assert run.status()["max_inflight"] == ROWS
        with open_run(place) as reader:
            async with asyncio.timeout(20):
                while (answer := await reader.steer({"do": "status"}))["status"]["agents"]["running"] != ROWS:  # type: ignore[index,call-overload]
                    await asyncio.sleep(0.05)
        assert answer["ok"]
        script.go_on.set()
        assert await running == [True] * ROWS
        assert run.statistics().alive == 0


def test_the_rate_of_a_run_in_redis_is_that_of_its_feeder_or_of_its_workers() -> None:
    workers: list[JsonObject] = [{"rows_per_second": 2.0, "agents": {"running": 3}}, {"rows_per_second": 1.0}]
    feeder: JsonObject = {"rows_per_second": 3.0, "agents": {"running": 4}, "feeder": True}
    for reports, running in ((workers, 3), ([feeder, *workers], 4)):
        view = RunSnapshot("r", {"total": 9}, "running", 1, Totals(), workers=reports)
        status = live_status(view, paused=False)
        assert (status["rows_per_second"], status["seconds_left"], status["agents"]) == (3.0, 3.0, {"running": running})


async def test_what_was_spent_before_a_worker_joined_is_counted_once(tmp_path: Path) -> None:
    script, place = Script(), tmp_path / "run"
    async with ScriptedServer(script, models=["m"]) as server:
        running = asyncio.ensure_future(BatchAgent.run(**options(server, "local", str(place), max_inflight=4)))
        await until_second_turns(server, running, 4)
        async with process("-m", "batch_agent", "work", str(place), "--import-from", str(ROOT)) as joined:
            while not looks_joined(place, joined):
                await asyncio.sleep(0.05)
            script.go_on.set()
            results = await running
            await joined.communicate()
    assert look(place).progress.tokens == 2 * ROWS * EACH
    assert (results.summary.statistics.turns, results.summary.statistics.retries) == (2 * ROWS, 0)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_pipeline_and_its_stages_have_the_same_numbers_in_every_shape(shape: str, place: str) -> None:
    script = Script()
    script.go_on.set()
    async with AsyncExitStack() as extent:
        server = await extent.enter_async_context(ScriptedServer(script, models=["m"]))
        given = options(server, shape, place)
        running = asyncio.ensure_future(two_stages(given))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        outcome = await running
    statistics = outcome.statistics
    assert (statistics.turns, statistics.tool_runs) == (4 * ROWS, 2 * ROWS)
    assert statistics.usage == Usage(4 * ROWS * 60, completion_tokens=4 * ROWS * 30)
    assert statistics.cost == pytest.approx(4 * ROWS * COST)
    for name in ("one", "two"):
        of_stage = outcome.results[name].summary.statistics
        assert (of_stage.turns, of_stage.tool_runs) == (2 * ROWS, ROWS)
    found = look(place)
    assert (found.progress.tokens, found.progress.cost) == (4 * ROWS * EACH, pytest.approx(4 * ROWS * COST))
    assert [stage.latest.tokens for stage in found.stages.values()] == [2 * ROWS * EACH] * 2


if __name__ == "__main__":
    asyncio.run(BatchAgent.run(**{**json.loads(sys.argv[1]), "tools": [note]}))

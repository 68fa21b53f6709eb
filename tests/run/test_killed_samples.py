"""Rows with samples in every shape of a run: kill -9 in the middle of the samples, other processes, Redis, stages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.record.redis_servers import needs_redis
from tests.run.process_work import ROOT, WarmCrew
from tests.warm import start

from batch_agent import BatchAgent, Pipeline
from batch_agent.testing import Request, Say, ScriptedServer

ROWS = 6
MOODS = {"mood": "good|bad"}


def row_of(request: Request) -> str:
    text = next(message["content"] for message in request.messages if message["role"] == "user")
    return str(text).split()[-1]


def sample_of(request: Request) -> tuple[str, int]:
    return row_of(request), request.body["seed"]


def mood(request: Request) -> Say:
    """The first two samples of a row differ, so that the third decides."""
    return Say(json.dumps({"mood": "good" if request.body["seed"] % 2 else "bad"}), latency=0.01)


def options(server: ScriptedServer, **others: Any) -> dict[str, Any]:
    known = {"task": "Judge {input}", "inputs": [f"row-{n}" for n in range(ROWS)], "output_schema": MOODS}
    return {**known, "samples": 3, "seed": 10, "backend": server.backend_url, "model": "m", "progress": False, **others}


async def feed(url: str, run_dir: str, more: str) -> None:
    """The process that is killed."""
    given = {"task": "Judge {input}", "inputs": [f"row-{n}" for n in range(ROWS)], "output_schema": MOODS}
    asked = {**given, "samples": 3, "seed": 10, "model": "m", "run_dir": run_dir, "progress": False}
    await BatchAgent.run(backend=url, **asked, **json.loads(more))


def check(results: list[Any]) -> None:
    assert [result.output for result in results] == [{"mood": "bad"}] * ROWS
    assert {json.dumps(result.votes) for result in results} == {
        '{"mood": {"counts": {"bad": 2, "good": 1}, "against": 1}}'
    }


async def killed_and_resumed(place: str, before: dict[str, object], after: dict[str, Any]) -> None:
    """Kill a run whose first samples are recorded while its third ones are asked."""
    going = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.body["seed"] == 12:
            await going.wait()
        return mood(request)

    async with ScriptedServer(script, models=["m"]) as server:
        words = ("-m", "tests.run.test_killed_samples", server.backend_url, place, json.dumps(before))
        process = await start(*words, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL)
        async with asyncio.timeout(60):
            await server.wait_until(lambda: sum(request.body["seed"] == 12 for request in server.requests) == ROWS)
        process.kill()
        await process.wait()
        asked = Counter(map(sample_of, server.requests))
        going.set()
        async with asyncio.timeout(60):
            check(await BatchAgent.run(**options(server, run_dir=place, resume=True, **after)))
        again = Counter(map(sample_of, server.requests)) - asked
    assert asked == Counter({(f"row-{n}", seed): 1 for n in range(ROWS) for seed in (10, 11, 12)})
    assert again == Counter({(f"row-{n}", 12): 1 for n in range(ROWS)})  # that were in flight at the kill


async def test_a_killed_run_asks_only_the_samples_that_had_no_answer(tmp_path: Path) -> None:
    await killed_and_resumed(str(tmp_path / "run"), {}, {})


async def test_so_does_one_whose_samples_are_asked_by_other_processes(tmp_path: Path) -> None:
    await killed_and_resumed(str(tmp_path / "run"), {"processes": 1}, {"cluster": WarmCrew()})


async def test_so_does_one_in_redis(url: str) -> None:
    await killed_and_resumed(url, {"lease": 1}, {"lease": 1})


async def test_a_killed_worker_process_costs_only_the_samples_that_it_was_asking(tmp_path: Path) -> None:
    going = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.body["seed"] == 12:
            await going.wait()
        return mood(request)

    crew = WarmCrew()
    async with ScriptedServer(script, models=["m"]) as server:
        given = options(server, cluster=crew, run_dir=tmp_path / "run", lease=2.0)
        running = asyncio.ensure_future(BatchAgent.run(**given))
        async with asyncio.timeout(60):
            await server.wait_until(lambda: sum(request.body["seed"] == 12 for request in server.requests) == ROWS)
            os.kill(crew.pids[0], signal.SIGKILL)
            going.set()
            check(await running)
    asked = Counter(map(sample_of, server.requests))
    assert {number for (_, seed), number in asked.items() if seed != 12} == {1}
    assert sum(asked.values()) <= 4 * ROWS


@pytest.mark.parametrize("crew", [False, True])
async def test_the_stages_of_a_pipeline_vote(tmp_path: Path, crew: bool) -> None:
    async with ScriptedServer(mood, models=["m"]) as server:
        rows = Pipeline([f"row-{n}" for n in range(ROWS)])
        stages = rows.map(name="first", task="Judge {input}", samples=3, output_schema=MOODS)
        stages = stages.map(name="second", task="Judge again {mood}", output_schema=MOODS)
        given: dict[str, Any] = {"cluster": WarmCrew()} if crew else {}
        outcome = await stages.run(backend=server.backend_url, model="m", seed=10, run_dir=tmp_path / "run", **given)
        asked = Counter(len(request.body) for request in server.requests)
        check([*outcome.results["first"]])
        assert all(result.votes is None for result in outcome.results["second"])
        again = await stages.run(
            backend=server.backend_url, model="m", seed=10, run_dir=tmp_path / "run", resume=True, **given
        )
        check([*again.results["first"]])
    assert server.received == sum(asked.values()) == 4 * ROWS


def worst(values: list[str]) -> str:
    return "good" if "good" in values else "bad"


SHAPES = ["directory", "processes", pytest.param("redis", marks=needs_redis)]


@pytest.mark.parametrize("shape", SHAPES)
async def test_another_vote_counts_the_recorded_samples_again_and_asks_only_those_that_it_needs(
    shape: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "batch_agent")
    vote = {"mood": worst if shape == "directory" else "tests.run.test_killed_samples:worst"}
    where: dict[str, Any] = {"run_dir": tmp_path / "run", "resume": True}
    if shape == "redis":
        where["run_dir"] = request.getfixturevalue("url")
    elif shape == "processes":
        where["cluster"] = WarmCrew()

    def script(asked: Request) -> Say:  # the first row is decided by two samples
        same = row_of(asked) == "row-0"
        return Say('{"mood": "bad"}', latency=0.01) if same else mood(asked)

    async with ScriptedServer(script, models=["m"]) as server:
        async with asyncio.timeout(60):
            first = await BatchAgent.run(**options(server, **where))
            assert [result.output["mood"] for result in first] == ["bad"] * ROWS
            for _ in range(2):  # the same vote again changes nothing
                anew = await BatchAgent.run(**options(server, **where, vote=vote))
                assert [result.output["mood"] for result in anew] == ["bad"] + ["good"] * (ROWS - 1)
            back = await BatchAgent.run(**options(server, **where))
        asked = Counter(map(sample_of, server.requests))
    assert [result.output for result in back] == [result.output for result in first]
    assert asked == Counter({(f"row-{n}", seed): 1 for n in range(ROWS) for seed in (10, 11, 12)})
    if shape == "directory":
        assert f"vote: not given → {{'mood': '{worst.__module__}.worst'}}" in caplog.text


if __name__ == "__main__":
    asyncio.run(feed(*sys.argv[1:]))

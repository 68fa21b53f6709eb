"""Cascades in every shape of a run: kill -9 while the second entry is asked, other processes, Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.run import process_work
from tests.run.process_work import NOTES, ROOT, WarmCrew, note, notes
from tests.warm import start

from batch_agent import BatchAgent, Pipeline
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

ROWS = 6
MOODS = {"mood": "good|bad"}
INPUTS = [f"row-{n}" for n in range(ROWS)]


def row_of(request: Request) -> str:
    text = next(message["content"] for message in request.messages if message["role"] == "user")
    return str(text).split()[-1]


def has_told(request: Request) -> bool:
    return any(message["role"] == "tool" for message in request.messages)


def small(request: Request) -> Say | CallTools:
    """Each row writes; every other one has no valid answer then."""
    if not has_told(request):
        return CallTools(ToolUse("note", {"row": row_of(request)}))
    return Say("no json" if int(row_of(request)[-1]) % 2 else '{"mood": "good"}', latency=0.01)


def large(request: Request) -> Say | CallTools:
    """The second entry makes the same write before it answers."""
    if not has_told(request):
        return CallTools(ToolUse("note", {"row": row_of(request)}))
    return Say('{"mood": "bad"}', latency=0.01)


def entries(one: str, two: str) -> list[Any]:
    return [
        {"backend": one, "model": "small"},
        {"backend": two, "model": "large", "temperature": 0.5, "tools": [note]},
    ]


def options(one: str, two: str, **others: Any) -> dict[str, Any]:
    known = {"task": "Judge {input}", "inputs": INPUTS, "output_schema": MOODS, "tools": [note], "max_retries": 0}
    return {**known, "cascade": entries(one, two), "progress": False, **others}


async def feed(one: str, two: str, run_dir: str, more: str) -> None:
    """The process that is killed. The tool is that of the module that workers import."""
    given = options(one, two, run_dir=run_dir, **json.loads(more))
    given["tools"] = [process_work.note]
    given["cascade"][1]["tools"] = [process_work.note]
    await BatchAgent.run(**given)


def check(results: list[Any]) -> None:
    assert [result.answered_by for result in results] == ["small", "large"] * (ROWS // 2)
    assert [result.output["mood"] for result in results] == ["good", "bad"] * (ROWS // 2)
    assert [[each.name for each in result.earlier] for result in results] == [[], ["small"]] * (ROWS // 2)
    assert Counter(notes()) == Counter(INPUTS)  # the write of the second entry is not made again


@pytest.fixture(autouse=True)
def notes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))


async def killed_and_resumed(place: str, before: dict[str, object], after: dict[str, Any]) -> None:
    """Kill a run whose first entry is recorded while the second one is asked."""
    going = asyncio.Event()

    async def waits(request: Request) -> Say | CallTools:
        if has_told(request):
            await going.wait()
        return large(request)

    async with ScriptedServer(small, models=["small"]) as one, ScriptedServer(waits, models=["large"]) as two:
        words = ("-m", "tests.run.test_killed_cascades", one.backend_url, two.backend_url, place, json.dumps(before))
        process = await start(*words, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL)
        async with asyncio.timeout(60):
            await two.wait_until(lambda: sum(map(has_told, two.requests)) == ROWS // 2)
            await one.wait_until(lambda: sum(map(has_told, one.requests)) == ROWS)
        process.kill()
        await process.wait()
        asked = one.received
        going.set()
        async with asyncio.timeout(60):
            given = options(one.backend_url, two.backend_url, run_dir=place, resume=True, **after)
            check(await BatchAgent.run(**given))
            again = two.received
            check(await BatchAgent.run(**given))
    assert asked <= 2 * ROWS
    assert one.received - asked <= ROWS  # answers that were not on disk yet
    assert two.received == again <= 3 * (ROWS // 2) + ROWS // 2


async def test_a_killed_run_continues_its_rows_at_the_entry_where_they_were(tmp_path: Path) -> None:
    await killed_and_resumed(str(tmp_path / "run"), {}, {})


async def test_so_does_one_with_worker_processes(tmp_path: Path) -> None:
    await killed_and_resumed(str(tmp_path / "run"), {}, {"cluster": WarmCrew()})


async def test_so_does_one_in_redis(url: str) -> None:
    await killed_and_resumed(url, {"lease": 1.0}, {"lease": 1.0})


async def test_a_worker_that_is_killed_leaves_its_rows_at_their_entries_to_another(tmp_path: Path) -> None:
    crew, going = WarmCrew(), asyncio.Event()

    async def waits(request: Request) -> Say | CallTools:
        if has_told(request):
            await going.wait()
        return large(request)

    async with ScriptedServer(small, models=["small"]) as one, ScriptedServer(waits, models=["large"]) as two:
        given = options(one.backend_url, two.backend_url, run_dir=tmp_path / "run", cluster=crew, lease=1.0)
        running = asyncio.create_task(BatchAgent.run(**given))
        async with asyncio.timeout(60):
            await two.wait_until(lambda: sum(map(has_told, two.requests)) >= ROWS // 2)
            os.kill(crew.pids[0], signal.SIGKILL)
            going.set()
            results = await running
    check(results)
    shown = results.summary.to_json()["cascade"]
    assert [(each["name"], each["asked"], each["answered"]) for each in shown["entries"]] == [
        ("small", ROWS, ROWS // 2),
        ("large", ROWS // 2, ROWS // 2),
    ]


async def test_a_finished_run_in_redis_is_decided_again_by_a_stricter_rule(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer(small, models=["small"]) as one, ScriptedServer(large, models=["large"]) as two:
        given = options(one.backend_url, two.backend_url, run_dir=url)
        for entry in given["cascade"]:
            del entry["model"]
        check(await BatchAgent.run(**given))
        asked = one.received, two.received
        caplog.set_level("WARNING", "batch_agent")
        check(await BatchAgent.run(**given, resume=True))
        assert "changed since" not in caplog.text  # the models that the servers named are those of the record
        assert (one.received, two.received) == asked
        results = await BatchAgent.run(**given, resume=True, escalate="output.mood == 'good'")
    assert {result.answered_by for result in results} == {"large"}
    assert one.received == asked[0]
    assert Counter(notes()) == Counter(INPUTS)


async def test_an_entry_that_was_away_is_asked_by_a_resume_in_redis(url: str) -> None:
    async with ScriptedServer(small, models=["small"]) as one:
        given = options(one.backend_url, "vllm://127.0.0.1:9", run_dir=url, max_outage=1.0)
        results = await BatchAgent.run(**given, escalate="output.mood == 'good'")
        assert {result.waits_for for result in results} == {"large"}
        assert [result.ok for result in results] == [True, False] * (ROWS // 2)
        async with ScriptedServer(large, models=["large"]) as two:
            again = options(one.backend_url, two.backend_url, run_dir=url, resume=True)
            again["cascade"][1]["name"] = "large"
            results = await BatchAgent.run(**again, escalate="output.mood == 'good'")
    assert {(result.answered_by, result.waits_for) for result in results} == {("large", None)}


@pytest.mark.parametrize("crew", [False, True])
async def test_the_stage_of_a_pipeline_is_a_cascade_in_worker_processes_too(tmp_path: Path, crew: bool) -> None:
    async with ScriptedServer(small, models=["small"]) as one, ScriptedServer(large, models=["large"]) as two:
        after = ScriptedServer(lambda request: Say("told"), models=["after"])
        async with after:
            known = options(one.backend_url, two.backend_url)
            known = {name: known[name] for name in ("task", "output_schema", "tools", "max_retries", "cascade")}
            stages = Pipeline(INPUTS).map(name="judge", **known).map(name="tell", task="Tell {mood}")
            given: dict[str, Any] = {"cluster": WarmCrew()} if crew else {}
            place = {"backend": after.backend_url, "run_dir": tmp_path / "run", "progress": False}
            outcome = await stages.run(**place, **given)
            check([*outcome.results["judge"]])
            assert [result.output for result in outcome.results["tell"]] == ["told"] * ROWS
            asked = one.received, two.received, after.received
            again = await stages.run(**place, resume=True, **given)
            check([*again.results["judge"]])
    assert (one.received, two.received, after.received) == asked
    shown = again.summary.to_json()["cascade"]["entries"]
    assert [(each["name"], each["asked"]) for each in shown] == [("small", ROWS), ("large", ROWS // 2)]


if __name__ == "__main__":
    asyncio.run(feed(*sys.argv[1:]))

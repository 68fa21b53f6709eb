"""Runs inside runs: one set of slots, one budget, one journal, one view."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from batch_agent import BatchSpec, Pipeline
from batch_agent.agent.dialogue import Dialogue
from batch_agent.agent.prepare import prepare
from batch_agent.dispatch.rate_mark import FILE
from batch_agent.events import Event, JobFinished
from batch_agent.messages import Usage
from batch_agent.run.run import Run
from batch_agent.testing import Request, Say, ScriptedBackend, virtual_clock


def nested(backend: ScriptedBackend, outer: dict[str, Any], sinks: Any = ()) -> Run[Any]:
    """Each outer row asks four inner ones, in a run of their own, and its output is what they said."""
    run: Run[Any]

    async def worker(row: object, ctx: Dialogue) -> object:
        inner = prepare(BatchSpec(task="inner {input}", inputs=[f"{row}.{n}" for n in range(4)], backend=backend))
        async with Run[str](inner, within=run.shared) as inside:
            results = [result async for result in inside.results()]
        return ",".join(sorted(result.raw_text for result in results))

    spec = BatchSpec(**({"task": "outer {input}", "inputs": ["a", "b", "c"], "backend": backend} | outer))
    run = Run(prepare(spec), sinks, worker=worker)
    return run


async def finish(run: Run[Any]) -> list[Any]:
    async with run:
        return sorted([result async for result in run.results()], key=lambda result: result.index)


def echo(request: Request) -> Say:
    return Say(request.text.removeprefix("inner "), latency=1, usage=Usage(400, 0, 10))


@virtual_clock
async def test_runs_inside_a_run_share_its_slots_and_show_in_its_view() -> None:
    backend = ScriptedBackend(echo)
    events: list[Event] = []
    run = nested(backend, {"max_inflight": 2}, [events.append])
    results = await finish(run)
    assert [result.output for result in results] == [f"{row}.0,{row}.1,{row}.2,{row}.3" for row in "abc"]
    assert backend.peak_inflight == 2
    statistics = run.statistics()
    assert (statistics.total, statistics.done, statistics.ok, statistics.ended) == (15, 15, 15, "complete")
    assert statistics.usage == Usage(4_800, 0, 120)
    assert len({event.run for event in events if isinstance(event, JobFinished)}) == 4


@virtual_clock
async def test_runs_inside_a_run_spend_its_budget() -> None:
    backend = ScriptedBackend(echo)
    run = nested(backend, {"max_inflight": 1, "max_total_tokens": 3_000, "max_tokens": 10})
    await finish(run)
    statistics = run.statistics()
    assert statistics.ended == "out of budget"
    assert statistics.usage.prompt_tokens + statistics.usage.completion_tokens <= 3_000
    assert 0 < len(backend.requests) < 12


async def test_runs_inside_a_run_are_recorded_in_its_journal_and_not_asked_again(tmp_path: Path) -> None:
    outer = {"run_dir": tmp_path, "resume": True}
    backend = ScriptedBackend(lambda request: Say(request.text.removeprefix("inner ")))
    first = await finish(nested(backend, outer))
    assert len(backend.requests) == 12
    again = await finish(nested(backend, outer | {"inputs": ["a", "b", "c", "d"]}))
    assert [result.output for result in again[:3]] == [result.output for result in first]
    assert len(backend.requests) == 16
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


@virtual_clock
async def test_a_rate_limit_holds_over_a_kill_for_all_stages_of_a_pipeline(tmp_path: Path) -> None:
    """What the earlier session may have sent counts once, not also what this session has sent before a stage began."""
    (tmp_path / FILE).touch()
    seconds = []
    for directory in (tmp_path, tmp_path / "fresh"):
        backend = ScriptedBackend(lambda _: Say("ok", latency=1))
        stages = Pipeline(["a", "b"]).map(name="one", task="1 {input}").map(name="two", task="2 {input}")
        began = asyncio.get_running_loop().time()
        await stages.run(backend=backend, model="m", run_dir=directory, resume=True, rpm=100)
        seconds.append(asyncio.get_running_loop().time() - began)
    assert 60 < seconds[0] < 70
    assert seconds[1] < 5

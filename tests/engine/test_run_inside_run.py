"""Runs inside runs: one set of slots, one budget, one journal, one view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batch_agent import BatchSpec
from batch_agent.engine.agent.loop_context import LoopContext
from batch_agent.engine.run.prepare import prepare
from batch_agent.engine.run.run import Run
from batch_agent.events import Event, JobFinished
from batch_agent.messages import Usage
from batch_agent.testing import Request, Say, ScriptedBackend, virtual_clock


def nested(backend: ScriptedBackend, outer: dict[str, Any], sinks: Any = ()) -> Run[Any]:
    """Each outer row asks four inner ones, in a run of their own, and its output is what they said."""
    run: Run[Any]

    async def worker(row: object, ctx: LoopContext) -> object:
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

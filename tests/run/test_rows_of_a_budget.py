"""A budget finishes rows: only as many start as it pays for to their ends, in runs of every shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.record.redis_servers import needs_redis
from tests.run.process_work import WarmCrew, quick

from batch_agent import BatchAgent, Pipeline, Tool
from batch_agent.messages import Usage
from batch_agent.observe.statistics import Statistics
from batch_agent.scheduler.row_budget import RowBudget
from batch_agent.testing import (
    CallTools,
    Fail,
    Request,
    Say,
    ScriptedBackend,
    ScriptedServer,
    ToolUse,
    virtual_clock,
)
from batch_agent.testing.wire import Script

PRICES = {"input": 1.0, "output": 2.0}
TURN = Usage(200, completion_tokens=30)
TURN_COST = (200 * 1.0 + 30 * 2.0) / 1e6


class Number(BaseModel):
    n: int


@Tool.define(effect="read")
async def look(n: int) -> str:
    """Look something up, which takes a while."""
    await asyncio.sleep(0.5)
    return "seen"


def number_of(request: Request) -> int:
    return int(str(next(message["content"] for message in request.messages if message["role"] == "user")).split()[-1])


def turns(wanted: Callable[[int], int]) -> Script:
    """A model whose rows take as many turns as ``wanted`` says of a row's number."""

    def script(request: Request) -> Say:
        taken = sum(message["role"] == "tool" for message in request.messages)
        if taken + 1 < wanted(number_of(request)):
            return CallTools(ToolUse("look", {"n": taken}), usage=TURN, latency=1)
        return Say("done", usage=TURN, latency=1)

    return script


def in_turn(*counts: int) -> Callable[[int], int]:
    return lambda row: counts[row * 7 % len(counts)]


def repaired() -> Script:
    """Every second row gives an answer that has to be repaired."""

    def script(request: Request) -> Say:
        wrong = number_of(request) % 2 and sum(message["role"] == "user" for message in request.messages) == 1
        return Say("words" if wrong else '{"n": 1}', usage=TURN, latency=1)

    return script


def retried() -> Script:
    """Every fourth first request is refused."""
    refused: set[int] = set()
    after = turns(lambda row: 3)

    def script(request: Request) -> Say | Fail:
        row = number_of(request)
        if row % 4 == 0 and row not in refused:
            refused.add(row)
            return Fail(503)
        return after(request)

    return script


async def finish(script: Script, rows: int = 120, **options: object) -> Statistics:
    options = {"task": "Row {input}", "model": "m", "prices": PRICES, "max_tokens": 40} | options
    options |= {"inputs": [str(number) for number in range(rows)], "backend": ScriptedBackend(script)}
    async with BatchAgent.open(**options) as run:  # type: ignore[call-overload]
        async for _ in run.results():
            pass
    return run.statistics()


@pytest.mark.parametrize("max_inflight", [1, 64])
@pytest.mark.parametrize("affords", [16.7, 60])
@pytest.mark.parametrize(
    ("script", "per_row", "options"),
    [
        (lambda: turns(lambda row: 4), 4.0, {"tools": [look]}),
        (lambda: turns(in_turn(1, 2, 3, 4, 7)), 3.4, {"tools": [look]}),
        (repaired, 1.5, {"output_schema": Number}),
        (retried, 3.0, {"tools": [look]}),
    ],
    ids=["tools", "unequal rows", "repairs", "retries"],
)
@virtual_clock
async def test_a_budget_finishes_the_rows_that_it_can_pay(
    script: Callable[[], Script], per_row: float, options: dict[str, object], affords: float, max_inflight: int
) -> None:
    limit = affords * per_row * TURN_COST
    found = await finish(script(), max_cost=limit, max_inflight=max_inflight, **options)
    assert found.ended == "out of budget"
    assert found.ok >= 0.9 * int(affords)
    assert found.cost is not None and found.cost <= limit
    assert found.started - found.ok <= 0.1 * affords + 1


@virtual_clock
async def test_a_budget_of_tokens_finishes_rows_too() -> None:
    each = 4 * (TURN.prompt_tokens + TURN.completion_tokens)
    found = await finish(turns(lambda row: 4), tools=[look], max_total_tokens=int(16.7 * each), max_inflight=64)
    assert (found.ok, found.ended) == (16, "out of budget")
    assert found.reason.startswith("max_total_tokens 15,364: 14,720 are spent, and a row takes about 920")


@virtual_clock
async def test_a_budget_that_is_raised_finishes_the_rows_that_had_begun(tmp_path: Path) -> None:
    each, wanted = 4 * TURN_COST, turns(lambda row: 4)
    run = {"tools": [look], "run_dir": tmp_path / "run", "resume": True, "max_inflight": 8}
    first = await finish(wanted, max_wall_time=5, **run)
    assert first.ok == 0 and first.started > 4
    again = await finish(wanted, max_cost=20.5 * each, **run)
    assert again.ok >= 18


@virtual_clock
async def test_a_budget_that_is_far_away_changes_nothing() -> None:
    wanted = turns(in_turn(1, 2, 3, 4, 7))
    free = await finish(wanted, tools=[look], max_inflight=16)
    limited = await finish(wanted, tools=[look], max_inflight=16, max_cost=1000.0)
    assert (limited.ok, limited.elapsed) == (free.ok, free.elapsed)


@virtual_clock
async def test_the_samples_of_a_row_are_paid_for_together() -> None:
    options = {"samples": 3, "max_inflight": 64, "temperature": 1.0, "output_schema": Number}
    script = lambda request: Say(f'{{"n": {number_of(request)}}}', usage=TURN, latency=1)  # noqa: E731
    free = await finish(script, 20, **options)
    assert free.cost is not None
    found = await finish(script, max_cost=16.7 * free.cost / 20, **options)
    assert found.ok >= 15 and found.started - found.ok <= 1


@pytest.mark.parametrize("max_inflight", [1, 64])
@virtual_clock
async def test_the_rows_of_a_pipeline_reach_the_end_of_its_last_stage(max_inflight: int) -> None:
    pipeline = (
        Pipeline([str(number) for number in range(120)])
        .map(name="first", task="Row {input}", tools=[look], max_tokens=40)
        .map(name="second", task="Again, row 1 {input}: 1", max_tokens=40)
        .map(name="last", task="And again, row 1 {input}: 1", max_tokens=40)
    )
    first, later = turns(lambda row: 3), turns(lambda row: 1)

    def script(request: Request) -> Say:
        return first(request) if request.body.get("tools") else later(request)

    options = {"model": "m", "prices": PRICES, "max_inflight": max_inflight, "max_cost": 30.5 * 5 * TURN_COST}
    async with pipeline.open(backend=ScriptedBackend(script), **options) as flow:
        await flow.finish()
    found = flow.statistics()
    done = [stage.done for stage in found.stages]
    assert found.ended == "out of budget"
    assert done[2] >= 27 and done[0] <= 31, done


async def test_worker_processes_share_what_their_rows_will_cost(tmp_path: Path) -> None:
    def script(request: Request) -> Say:
        if request.turn < 2:
            return CallTools(ToolUse("quick", {"n": request.turn}), usage=TURN)
        return Say("done", usage=TURN)

    each = 3 * (TURN.prompt_tokens + TURN.completion_tokens)
    async with ScriptedServer(script, models=["m"]) as server:
        results = await BatchAgent.run(
            task="Row {input}",
            inputs=[str(number) for number in range(80)],
            backend=server.backend_url,
            tools=[quick],
            max_tokens=40,
            max_total_tokens=int(30.7 * each),
            max_inflight=32,
            run_dir=tmp_path / "run",
            cluster=WarmCrew(),
        )
    found = results.summary.statistics
    assert found.ended == "out of budget"
    assert found.ok >= 27
    assert server.received <= 30.7 * 3


@pytest.mark.parametrize("limited", [False, True])
async def test_worker_processes_end_although_each_first_request_of_a_row_fails(limited: bool) -> None:
    """Control requests fail too, because each of them is another one."""
    known: set[str] = set()

    def script(request: Request) -> Say | Fail:
        question = str(next(each["content"] for each in request.messages if each["role"] == "user"))
        if question not in known:
            known.add(question)
            return Fail(500)
        return CallTools(ToolUse("quick", {"n": 0}), usage=TURN) if request.turn < 1 else Say("done", usage=TURN)

    async with ScriptedServer(script, models=["m"]) as server, asyncio.timeout(60):
        results = await BatchAgent.run(
            task="Row {input}",
            inputs=[str(number) for number in range(12)],
            backend=server.backend_url,
            model="m",
            tools=[quick],
            max_tokens=40,
            prices=PRICES,
            max_cost=6.7 * 2 * TURN_COST if limited else None,
            max_inflight=8,
            cluster=WarmCrew(),
        )
    found = results.summary.statistics
    assert found.ended == ("out of budget" if limited else "complete") and not found.failures
    assert found.ok >= 5 if limited else found.ok == 12


@needs_redis
async def test_a_run_in_redis_finishes_the_rows_that_its_budget_pays(url: str) -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("quick", {"n": 0}), usage=TURN) if request.turn < 2 else Say("done", usage=TURN)

    each = 3 * (TURN.prompt_tokens + TURN.completion_tokens)
    async with ScriptedServer(script, models=["m"]) as server:
        results = await BatchAgent.run(
            task="Row {input}",
            inputs=[str(number) for number in range(40)],
            backend=server.backend_url,
            tools=[quick],
            max_tokens=40,
            max_total_tokens=int(20.7 * each),
            max_inflight=16,
            run_dir=url,
        )
    found = results.summary.statistics
    assert found.ended == "out of budget" and found.ok >= 18


# What is known of a row's cost


def ended(rows: RowBudget, costs: list[float], first: int = 0) -> None:
    stage = rows.stage_of("run")
    for row, cost in enumerate(costs, first):
        stage.begin(row, 0.0)
        rows.pay("run", row, cost, 0.0)
        stage.end(row, counts=True)


def test_rows_that_still_run_raise_what_is_expected_of_a_row() -> None:
    """The first rows that end are those that cost least."""
    rows = RowBudget()
    stage = rows.stage_of("run")
    for row in range(10):
        stage.begin(row, 0.0)
        rows.pay("run", row, 0.01, 0.0)
    for row in range(2):
        stage.end(row, counts=True)
    assert stage.mean > 0.04
    for row in range(2, 10):
        stage.end(row, counts=True)
    assert stage.mean == pytest.approx(0.01)


def test_what_a_row_will_still_cost_follows_from_the_rows_that_cost_more() -> None:
    rows = RowBudget()
    ended(rows, [0.01, 0.01, 0.05, 0.05])
    stage = rows.stage_of("run")
    assert stage.rest(0.0) == pytest.approx(0.03)
    assert stage.rest(0.02) == pytest.approx(0.03)
    assert stage.rest(0.08) == pytest.approx(0.04)


def test_a_row_does_not_start_beside_rows_that_will_need_the_rest() -> None:
    rows = RowBudget()
    ended(rows, [0.1] * 6)
    stage = rows.stage_of("run")
    assert rows.fits(stage, 0.6)
    for row in (10, 11):
        stage.begin(row, 0.0)
    assert rows.fits(stage, 0.6)
    stage.begin(12, 0.0)
    assert not rows.fits(stage, 0.6)
    assert not rows.is_idle(stage)


def test_a_row_of_the_first_stage_waits_for_those_that_later_stages_must_finish() -> None:
    rows = RowBudget()
    first, last = rows.stage("first", "1"), rows.stage("last", "2")
    for row in range(4):
        for run, stage in (("1", first), ("2", last)):
            stage.begin(row, 0.0)
            rows.pay(run, row, 0.05, 0.0)
            stage.end(row, counts=True)
    assert rows.cost(first) == pytest.approx(0.1)
    last.waiting = lambda: 10
    assert not rows.fits(first, 0.4)
    assert rows.fits(last, 0.4)

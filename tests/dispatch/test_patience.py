"""What is waited for and what ends a run: long Retry-After, denials of one row, of the key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent
from batch_agent.job import AgentResult
from batch_agent.observe.statistics import Statistics
from batch_agent.scheduler.numbers import N
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, virtual_clock

TWO_HOURS = 7_200


async def finish(backend: object, rows: int, **options: Any) -> tuple[list[AgentResult[str]], Statistics]:
    inputs = [str(n) for n in range(rows)]
    async with BatchAgent.open(task="{input}", inputs=inputs, backend=backend, **{"max_inflight": 8, **options}) as run:
        results = [result async for result in run.results()]
    return results, run.statistics()


def busy_from(second: float, until: float, status: int) -> ScriptedBackend:
    """Asks for two hours of patience."""

    def script(request: Request) -> Any:
        if second <= asyncio.get_running_loop().time() < until:
            return Fail(status, headers={"Retry-After": str(TWO_HOURS)})
        return Say("ok", latency=0.1)

    return ScriptedBackend(script)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("rows", "begins"), [(200, 1.0), (1, 0.0), (2, 0.0)])
def test_a_server_that_asks_for_two_hours_is_tried_every_few_minutes(rows: int, begins: float, status: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = busy_from(begins, begins + 900, status)
        _, statistics = await finish(backend, rows, max_outage=3 * TWO_HOURS, timeout_per_turn=60)
        assert (statistics.ok, statistics.ended) == (rows, "complete")
        assert len(backend.requests) < rows + 2 * 8 + 8, "few trials are sent meanwhile"
        assert begins + 900 < asyncio.get_running_loop().time() < begins + 900 + 1.5 * N.longest_hold

    scenario()


@virtual_clock
async def test_two_hours_for_one_row_alone_do_not_hold_the_run() -> None:
    def script(request: Request) -> Any:
        refused = Fail(429, headers={"Retry-After": str(TWO_HOURS)})
        return refused if request.text == "7" else Say("ok", latency=0.1)

    results, statistics = await finish(ScriptedBackend(script), 100)
    assert (statistics.ok, statistics.failed, statistics.ended) == (99, 1, "complete")
    assert [result.index for result in results if not result.ok] == [7]
    assert asyncio.get_running_loop().time() < 4 * N.longest_hold


@virtual_clock
async def test_more_patience_than_max_outage_ends_the_run_and_a_resume_finishes_it(tmp_path: Path) -> None:
    backend = busy_from(1.0, 100.0, 429)
    results, statistics = await finish(backend, 200, max_outage=600, run_dir=tmp_path)
    assert statistics.ended == "unreachable"
    assert 0 < statistics.ok < 200 and all(result.ok for result in results)
    assert asyncio.get_running_loop().time() < 600
    await asyncio.sleep(TWO_HOURS)
    _, statistics = await finish(backend, 200, max_outage=600, run_dir=tmp_path, resume=True)
    assert (statistics.ok, statistics.ended) == (200, "complete")


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("number", [300, 399], ids=["in the middle", "at the end"])
def test_one_denial_after_many_answers_does_not_end_the_run(number: int, status: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Any:
            return Fail(status) if request.number == number else Say("ok", latency=0.1)

        _, statistics = await finish(ScriptedBackend(script), 400)
        assert (statistics.ok, statistics.ended) == (400, "complete")

    scenario()


@pytest.mark.parametrize("rows", [306, 400], ids=["at the end", "in the middle"])
def test_denials_of_requests_in_flight_together_do_not_end_the_run(rows: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Any:
            if 300 <= request.number < 306:
                return Fail(401, latency=0.1 + request.number / 100_000)
            return Say("ok", latency=0.1)

        _, statistics = await finish(ScriptedBackend(script), rows)
        assert (statistics.ok, statistics.ended) == (rows, "complete")

    scenario()


@pytest.mark.parametrize("rows", [1, 2, 400])
def test_a_key_that_is_revoked_ends_the_run_and_fails_no_row(rows: int, tmp_path: Path) -> None:
    @virtual_clock
    async def scenario() -> None:
        revoked = True
        answers = min(300, rows - 1)

        def script(request: Request) -> Any:
            return Fail(401) if revoked and request.number >= answers else Say("ok", latency=0.1)

        backend = ScriptedBackend(script)
        if answers:
            results, statistics = await finish(backend, rows, max_inflight=1, run_dir=tmp_path)
            assert (statistics.ok, statistics.ended) == (answers, "failed")
            assert all(result.ok for result in results)
        else:
            with pytest.raises(ValueError, match="401"):
                await finish(backend, rows, run_dir=tmp_path)
        revoked = False
        _, statistics = await finish(backend, rows, run_dir=tmp_path, resume=True)
        assert (statistics.ok, statistics.ended) == (rows, "complete")

    scenario()


@virtual_clock
async def test_a_row_that_is_denied_each_time_while_others_are_answered_fails_alone() -> None:
    def script(request: Request) -> Any:
        return Fail(401) if request.text == "100" else Say("ok", latency=0.1)

    backend = ScriptedBackend(script)
    _, statistics = await finish(backend, 400)
    assert (statistics.ok, statistics.failures, statistics.ended) == (399, {"Rejected": 1}, "complete")
    assert len(backend.requests) == 402

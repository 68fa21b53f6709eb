"""Denials (401, 403, 404) after good answers: an outage until they have lasted a minute."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from batch_agent import BatchAgent, Fleet
from batch_agent.observe.statistics import Statistics
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, virtual_clock

STATUSES = [401, 403, 404]


def now() -> float:
    return asyncio.get_running_loop().time()


async def finish(backend: object, rows: int, **options: Any) -> Statistics:
    inputs = [str(n) for n in range(rows)]
    async with BatchAgent.open(task="{input}", inputs=inputs, backend=backend, **{"max_inflight": 8, **options}) as run:
        async for _ in run.results():
            pass
    return run.statistics()


class Denying(ScriptedBackend):
    def __init__(self, status: int, since: float, until: float, number: int = 0) -> None:
        super().__init__(self._answer)
        self._status, self._since, self._until, self._number = status, since, until, number

    @property
    def name(self) -> str:
        return f"scripted://{self._number}"

    def _answer(self, request: Request) -> Say | Fail:
        return Fail(self._status, latency=0.01) if self._since <= now() < self._until else Say("ok", latency=0.5)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("seconds", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("max_inflight", [1, 8])
def test_a_while_of_denials_after_good_answers_fails_no_row(status: int, seconds: float, max_inflight: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = Denying(status, 5.0, 5.0 + seconds)
        statistics = await finish(backend, 25 * max_inflight, max_inflight=max_inflight)
        assert (statistics.ok, statistics.ended) == (25 * max_inflight, "complete")
        assert now() < 12.5 + seconds + 6

    scenario()


@pytest.mark.parametrize("status", STATUSES)
def test_denials_that_last_a_minute_end_the_run_and_fail_no_row(status: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        statistics = await finish(Denying(status, 5.0, 1e9), 400)
        assert (statistics.ended, statistics.failures) == ("failed", {})
        assert str(status) in statistics.reason
        assert 65 <= now() < 75

    scenario()


@pytest.mark.parametrize("status", STATUSES)
def test_denials_that_roll_over_a_fleet_exclude_no_server(status: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        servers = [Denying(status, 2.0 + 1.5 * n, 3.5 + 1.5 * n, n) for n in range(4)]
        statistics = await finish(Fleet(servers), 800, max_inflight=32)
        assert (statistics.ok, statistics.ended) == (800, "complete")
        assert now() < 12.5 * 1.3
        assert all(len(server.requests) > 150 for server in servers), "each works again"

    scenario()


@pytest.mark.parametrize("row", ["100", "399"], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("status", STATUSES)
def test_a_row_that_alone_is_denied_fails_alone(row: str, status: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Say | Fail:
            return Fail(status) if request.text == row else Say("ok", latency=0.5)

        statistics = await finish(ScriptedBackend(script), 400)
        assert (statistics.ok, statistics.failures, statistics.ended) == (399, {"Rejected": 1}, "complete")

    scenario()


@pytest.mark.parametrize("row", ["0", "100", "399"])
@pytest.mark.parametrize("status", [429, 503])
def test_one_retry_after_above_max_outage_among_good_answers_does_not_end_the_run(row: str, status: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        asked = 0

        def script(request: Request) -> Say | Fail:
            nonlocal asked
            if request.text != row or asked:
                return Say("ok", latency=0.5)
            asked += 1
            return Fail(status, headers={"Retry-After": "7200"})

        statistics = await finish(ScriptedBackend(script), 400, max_outage=600)
        assert (statistics.ok, statistics.ended) == (400, "complete")
        assert now() < 40

    scenario()


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("seed", range(5, 13))  # of the pauses before trials: some end before the first good answer
def test_a_row_that_every_server_of_a_fleet_denies_fails_alone(status: int, seed: int) -> None:
    random.seed(seed)

    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Say | Fail:
            return Fail(status, latency=0.01) if request.text == "7" else Say("ok", latency=0.5)

        class Numbered(ScriptedBackend):
            number = 0

            @property
            def name(self) -> str:
                return f"scripted://{self.number}"

        servers = [Numbered(script) for _ in range(3)]
        for number, server in enumerate(servers):
            server.number = number
        statistics = await finish(Fleet(servers), 60)
        assert (statistics.ok, statistics.failed, statistics.ended) == (59, 1, "complete")
        assert now() < 30

    scenario()

"""How much at once, in whole runs: the number that is found, budgets by the minute, what engines tell, calibration."""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, Pipeline
from batch_agent.backends.base import Capabilities, Load
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.errors import SpecError, Unavailable
from batch_agent.events import Event, LimitChanged
from batch_agent.job import AgentResult
from batch_agent.messages import Usage
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend
from batch_agent.testing.clock import run_virtual


async def finish(backend: Any, rows: int, **options: Any) -> tuple[list[AgentResult[Any]], Statistics, list[Event]]:
    events: list[Event] = []
    inputs = [str(row) for row in range(rows)]
    async with BatchAgent.open(task="{input}", inputs=inputs, backend=backend, sinks=[events.append], **options) as run:
        results = [result async for result in run.results()]
        return results, run.statistics(), events


def now() -> float:
    return asyncio.get_running_loop().time()


# The number that nobody gave


def test_a_hundred_rows_are_all_in_flight_at_once_or_nearly() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=1))
    run_virtual(finish(backend, 100))
    assert backend.peak_inflight == 100


def test_the_number_is_found_and_the_run_says_how() -> None:
    async def go() -> tuple[Statistics, list[Event]]:
        _, statistics, events = await finish(SimulatedBackend(EngineModel(max_num_seqs=1024)), 2_000)
        return statistics, events

    statistics, events = run_virtual(go())
    assert (statistics.max_inflight or 0) >= 512
    limits = [event for event in events if isinstance(event, LimitChanged)]
    assert (limits[0].max_inflight, limits[0].reason) == (64, "start")
    assert {"nothing is refused", "the queue stays short"} <= {event.reason for event in limits}
    assert statistics.limits[0].before == 64
    assert any(line.strip().startswith("limit") and "64 -> " in line for line in summary_lines(statistics))
    assert summary_json(statistics)["limits"][0]["from"] == 64  # type: ignore[index,call-overload]


def test_a_number_that_a_backend_knows_is_kept() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=1), capabilities=Capabilities(default_inflight=5))
    run_virtual(finish(backend, 200))
    assert backend.peak_inflight == 5


def test_a_number_that_the_user_gives_is_never_passed_whatever_the_engine_tells() -> None:
    backend = SimulatedBackend()
    _, statistics, _ = run_virtual(finish(backend, 1_000, max_inflight=40))
    assert statistics.peak_running == 40


def test_a_server_that_takes_few_is_found_out_and_no_row_is_lost() -> None:
    running = 0

    def answer(request: Request) -> Say | Fail:
        nonlocal running
        if running >= 10:
            return Fail(429)
        running += 1
        asyncio.get_running_loop().call_later(1, leave)
        return Say("ok", latency=1)

    def leave() -> None:
        nonlocal running
        running -= 1

    retries = []
    for _ in range(3):  # waits are random
        running = 0
        results, statistics, _ = run_virtual(finish(ScriptedBackend(answer), 1_000))
        assert all(result.ok for result in results)
        assert 5 <= (statistics.max_inflight or 0) <= 20
        retries.append(statistics.retries)
    assert max(retries) <= 110


def test_a_slow_server_with_a_long_queue_gets_fewer_after_timeouts() -> None:
    free_at = 0.0

    def answer(request: Request) -> Say:  # one after another, two seconds each
        nonlocal free_at
        free_at = max(free_at, now()) + 2.0
        return Say("ok", latency=free_at - now())

    _, statistics, _ = run_virtual(finish(ScriptedBackend(answer), 100, timeout_per_turn=60, max_retries=10))
    assert statistics.max_inflight is not None
    assert 8 <= statistics.max_inflight <= 15  # what the server answers in half of the time limit


# Budgets by the minute


@pytest.mark.parametrize("options", [{"rpm": 60}, {"tpm": 6_000}])
def test_a_budget_that_is_given_holds_in_every_minute_and_is_used(options: dict[str, int]) -> None:
    came: list[float] = []

    def answer(request: Request) -> Say:
        came.append(now())
        return Say("ok", latency=1, usage=Usage(prompt_tokens=60, completion_tokens=40))

    results, _, _ = run_virtual(finish(ScriptedBackend(answer), 150, **options))
    assert all(result.ok for result in results)
    assert max(sum(1 for at in came if start <= at < start + 60) for start in came) <= 60
    assert sum(1 for at in came if at < 60) >= 55


def test_budgets_of_headers_are_kept_without_a_refusal() -> None:
    began: list[float] = []
    refused = 0

    def answer(request: Request) -> Say | Fail:
        nonlocal refused
        window = [at for at in began if at > now() - 60]
        left = 200 - len(window)
        headers = {"x-ratelimit-limit-requests": "200", "x-ratelimit-reset-requests": "60s"}
        if left < 1:
            refused += 1
            return Fail(429, headers=headers | {"x-ratelimit-remaining-requests": "0"})
        began.append(now())
        return Say("ok", latency=0.1, headers=headers | {"x-ratelimit-remaining-requests": str(left - 1)})

    results, _, _ = run_virtual(finish(ScriptedBackend(answer), 500))
    assert all(result.ok for result in results)
    assert not refused


def test_a_budget_of_tokens_in_headers_is_used_and_never_passed() -> None:
    began: list[float] = []
    refused = 0

    def answer(request: Request) -> Say | Fail:
        nonlocal refused
        left = 3_600 - 30 * sum(1 for at in began if at > now() - 60)
        resets_in = 60 - (now() - min((at for at in began if at > now() - 60), default=now()))
        headers = {"x-ratelimit-limit-tokens": "3600", "x-ratelimit-reset-tokens": f"{resets_in:.2f}s"}
        if left < 30:
            refused += 1
            return Fail(429, headers=headers | {"x-ratelimit-remaining-tokens": str(left)})
        began.append(now())
        headers |= {"x-ratelimit-remaining-tokens": str(left - 30)}
        return Say("ok", latency=0.1, headers=headers, usage=Usage(prompt_tokens=20, completion_tokens=10))

    results, _, _ = run_virtual(finish(ScriptedBackend(answer), 300))
    assert all(result.ok for result in results)
    assert not refused
    assert sum(1 for at in began if at < 60) >= 108  # of 120


def test_a_spent_budget_is_waited_for_and_halves_nothing() -> None:
    headers = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-limit-tokens": "1000"}

    def answer(request: Request) -> Say | Fail:
        if now() < 10:
            return Fail(429, headers=headers | {"x-ratelimit-reset-tokens": f"{10 - now():.3f}s"})
        return Say("ok")

    results, _, events = run_virtual(finish(ScriptedBackend(answer), 4, max_inflight=8))
    assert all(result.ok for result in results)
    assert [event.max_inflight for event in events if isinstance(event, LimitChanged)] == [8]


def test_answers_of_the_cache_take_nothing_of_a_budget(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda request: Say("ok"))
    options: dict[str, Any] = {"cache": tmp_path, "temperature": 0, "rpm": 40}

    async def twice() -> float:
        await finish(backend, 30, **options)
        began = now()
        await finish(backend, 30, **options)
        await finish(backend, 30, **options)
        return now() - began

    assert run_virtual(twice()) < 60
    assert len(backend.requests) == 30


def test_cancelling_a_run_that_waits_for_its_budget_leaves_nothing_behind() -> None:
    async def leave() -> int:
        backend = ScriptedBackend(lambda request: Say("ok", usage=Usage(prompt_tokens=900)))
        inputs = [str(row) for row in range(50)]
        async with BatchAgent.open(task="{input}", inputs=inputs, backend=backend, tpm=1_000) as run:
            await anext(run.results())
        return len(asyncio.all_tasks())

    assert run_virtual(leave()) == 1


@pytest.mark.parametrize("options", [{"rpm": 0}, {"tpm": 1.5}, {"backpressure_ceiling": -1}])
async def test_an_option_that_is_no_number_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(), **options)


# What engines tell


class Telling(ScriptedBackend):
    """Tells what ``loads`` say, one after another, and then the last for ever."""

    def __init__(self, *loads: Load | Exception | None, latency: float = 1.0) -> None:
        super().__init__(lambda request: Say("ok", latency=latency), capabilities=Capabilities(reports_load=True))
        self.loads = list(loads)
        self.read_at: list[float] = []

    async def load(self, endpoint: str = "") -> Load:
        self.read_at.append(now())
        load = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        if load is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(load, Exception):
            raise load
        assert load is not None
        return load


def test_an_engine_is_read_once_a_second_at_the_most_and_not_after_the_run() -> None:
    async def go() -> tuple[list[float], int]:
        backend = Telling(Load(running=64))
        await finish(backend, 600, max_inflight=64)
        return backend.read_at, len(asyncio.all_tasks())

    read_at, tasks = run_virtual(go())
    assert len(read_at) > 5
    assert all(later - earlier > 0.999 for earlier, later in pairwise(read_at))
    assert tasks == 1


@pytest.mark.parametrize("load", [Unavailable("no metrics here"), RuntimeError("a bug"), None])
def test_readings_that_fail_or_hang_do_the_run_no_harm(load: Exception | None) -> None:
    results, _, _ = run_virtual(finish(Telling(load), 500))
    assert all(result.ok for result in results)


def test_runs_that_share_a_limiter_share_the_readings() -> None:
    async def go() -> list[float]:
        backend = Telling(Load(running=8))
        rows = [str(row) for row in range(300)]
        pipeline = Pipeline(rows).map(task="first {input}", name="first").map(task="second {input}", name="second")
        await pipeline.run(backend=backend)
        return backend.read_at

    read_at = run_virtual(go())
    assert all(later - earlier > 0.999 for earlier, later in pairwise(read_at))


def test_new_agents_wait_while_the_queue_is_longer_than_the_ceiling() -> None:
    long, short = Load(running=8, waiting=50), Load(running=8)

    async def go() -> tuple[int, int]:
        backend = Telling(long, long, long, long, long, short, latency=2.5)
        inputs = [str(row) for row in range(200)]
        async with BatchAgent.open(
            task="{input}", inputs=inputs, backend=backend, max_inflight=8, backpressure_ceiling=20
        ) as run:
            await asyncio.sleep(4.9)
            held = run.statistics().started
            async for _ in run.results():
                pass
            return held, run.statistics().ok

    held, ok = run_virtual(go())
    assert held == 8
    assert ok == 200


def test_a_ceiling_where_nobody_tells_of_a_queue_is_said_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "batch_agent"):
        run_virtual(finish(ScriptedBackend(), 2, backpressure_ceiling=5))
    assert "backpressure_ceiling" in caplog.text


# Calibration


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path))
    return tmp_path / "capacity.json"


def starts(events: list[Event]) -> list[tuple[int | None, str]]:
    return [(event.max_inflight, event.reason) for event in events if isinstance(event, LimitChanged)][:2]


def test_the_knee_is_found_once_and_remembered(cache: Path) -> None:
    engine = EngineModel(max_num_seqs=64, first_reading_seconds=0)

    async def go(rows: int, **options: Any) -> list[Event]:
        return (await finish(SimulatedBackend(engine), rows, calibrate_backend=True, **options))[2]

    assert starts(run_virtual(go(1_500)))[1] == (8, "calibrate_backend")
    kept = json.loads(cache.read_text())
    [(where, entry)] = kept.items()
    assert "simulated" in where
    assert 32 <= entry["inflight"] <= 128
    assert starts(run_virtual(go(10)))[1] == (entry["inflight"], "found before")
    assert starts(run_virtual(go(10, max_inflight=16)))[1] == (16, "found before")


def test_another_model_is_another_entry(cache: Path) -> None:
    for name in ("a", "b"):
        engine = EngineModel(max_num_seqs=64, first_reading_seconds=0, name=name)
        run_virtual(finish(SimulatedBackend(engine), 800, calibrate_backend=True))
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"simulated://": {"inflight": "many"}}', b"\xff"])
def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(
    cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_bytes(content)
    with caplog.at_level(logging.WARNING, "batch_agent"):
        results, _, events = run_virtual(finish(SimulatedBackend(), 50, calibrate_backend=True))
    assert all(result.ok for result in results)
    assert starts(events)[1] == (8, "calibrate_backend")
    assert "capacity.json" in caplog.text


def test_without_calibration_nothing_is_kept_or_read(cache: Path) -> None:
    cache.write_text('{"simulated://simulated simulated": {"inflight": 7, "at": 99999999999}}')
    _, _, events = run_virtual(finish(SimulatedBackend(), 50))
    assert starts(events)[0] == (64, "start")


def test_a_server_that_hangs_does_not_keep_the_readings_alive() -> None:
    async def go() -> int:
        backend = Telling(Load(running=1))
        backend._script = lambda request: Hang()
        async with BatchAgent.open(task="{input}", inputs=["a"], backend=backend):
            await asyncio.sleep(5)
        return len(asyncio.all_tasks())

    assert run_virtual(go()) == 1

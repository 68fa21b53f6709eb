"""Control requests: a few tokens that show whether a row or its server is bad, where no other row can."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from batch_agent import BatchAgent, RunUnreachable
from batch_agent.backends.base import ModelRequest, OnToolCall, Probe
from batch_agent.errors import Unavailable
from batch_agent.events import ControlFinished, Event
from batch_agent.job import AgentResult
from batch_agent.messages import Reply, Usage
from batch_agent.observe.statistics import Statistics
from batch_agent.testing import Cut, Fail, Hang, Request, Say, ScriptedBackend, virtual_clock

AWAY = 20.0  # seconds


def now() -> float:
    return asyncio.get_running_loop().time()


async def finish(backend: object, rows: int, **options: Any) -> tuple[list[AgentResult[str]], Statistics]:
    inputs = [str(n) for n in range(rows)]
    async with BatchAgent.open(
        task="{input}", inputs=inputs, backend=backend, **{"max_inflight": 64, **options}
    ) as run:
        results = [result async for result in run.results()]
    return results, run.statistics()


def controls(backend: ScriptedBackend) -> int:
    return sum(request.is_control for request in backend.requests)


@pytest.mark.parametrize(("rows", "bad"), [(400, 40), (400, 120), (40, 40), (2, 2), (1, 1)])
def test_bad_rows_that_are_the_last_fail_alone(rows: int, bad: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Say | Fail:
            is_bad = not request.is_control and int(request.text) >= rows - bad
            return Fail(500, latency=0.05) if is_bad else Say("ok", latency=1.0)

        backend = ScriptedBackend(script)
        _, statistics = await finish(backend, rows)
        assert (statistics.ok, statistics.failures) == (rows - bad, {"Unavailable": bad})
        assert (statistics.ended, statistics.outages) == ("complete", ())
        assert now() < 30
        assert len(backend.requests) - controls(backend) == rows + 3 * bad, "each has its three retries"
        assert statistics.control_requests == controls(backend)

    scenario()


@pytest.mark.parametrize("rows", [1, 2, 3, 30])
@pytest.mark.parametrize("reply", [Fail(500), Fail(503), Fail(429), Cut(after_chunks=0)], ids=str)
def test_the_last_rows_wait_out_an_outage_and_notice_its_end_at_once(reply: Fail | Cut, rows: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Say | Fail | Cut:
            return reply if 1.0 <= now() < 1.0 + AWAY else Say("ok", latency=0.9)

        # The last row is sent when the others are answered, in the outage.
        _, statistics = await finish(ScriptedBackend(script), rows + 1, max_inflight=rows)
        assert (statistics.ok, statistics.ended) == (rows + 1, "complete")
        assert now() < 1.0 + AWAY + 4

    scenario()


@virtual_clock
async def test_a_server_that_answers_nothing_ends_the_run_and_fails_no_row() -> None:
    with pytest.raises(RunUnreachable, match="max_outage, 100 s"):
        await finish(ScriptedBackend(lambda request: Fail(500)), 2, max_outage=100)
    assert 100 <= now() < 130


@pytest.mark.parametrize("rows", [1, 50])
def test_a_row_that_alone_is_too_much_for_its_rate_limit_fails(rows: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> Say | Fail:
            return Fail(429) if request.text == "0" else Say("ok", latency=1.0)

        _, statistics = await finish(ScriptedBackend(script), rows)
        assert (statistics.ok, statistics.failures) == (rows - 1, {"RateLimited": 1})
        assert (statistics.ended, now() < 300) == ("complete", True)

    scenario()


@pytest.mark.parametrize("retry_after", [None, 1, 30])
def test_a_row_that_alone_is_refused_for_load_does_not_slow_the_others_down(retry_after: int | None) -> None:
    @virtual_clock
    async def scenario() -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

        def script(request: Request) -> Say | Fail:
            return Fail(429, headers=headers) if request.text == "7" else Say("ok", latency=0.3)

        inputs, ended = [str(n) for n in range(100)], []
        async for result in BatchAgent.stream(
            task="{input}", inputs=inputs, backend=ScriptedBackend(script), max_inflight=8
        ):
            ended.append((now(), result.ok))
        assert [ok for _, ok in ended] == [True] * 99 + [False]
        assert ended[-2][0] < 10, "without the row it takes 4 s"
        assert ended[-1][0] < 200

    scenario()


@pytest.mark.parametrize("retry_after", [None, 2, 20, 90])
@pytest.mark.parametrize("place", ["between others", "at the end"])
def test_many_rows_that_are_always_refused_for_load_slow_nobody_and_fail_together(
    place: str, retry_after: int | None
) -> None:
    random.seed(0)  # of the pauses between retries: with a wait of 90 s, 3 of 40 seeds take 150 s in place of 45

    @virtual_clock
    async def scenario() -> None:
        bad = {str(n) for n in (range(0, 200, 10) if place == "between others" else range(180, 200))}
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

        def script(request: Request) -> Say | Fail:
            is_bad = not request.is_control and request.text in bad
            return Fail(429, headers=headers, latency=0.02) if is_bad else Say("ok", latency=1.0)

        ended, inputs = [], [str(n) for n in range(200)]
        async for result in BatchAgent.stream(
            task="{input}", inputs=inputs, backend=ScriptedBackend(script), max_inflight=16
        ):
            ended.append((now(), result.ok))
        good = [at for at, ok in ended if ok]
        assert (len(good), len(ended)) == (180, 200)
        assert good[-1] < 45, "without the bad rows it takes 12 s"
        assert ended[-1][0] < good[-1] + 250

    scenario()


@virtual_clock
async def test_large_rows_that_share_the_tokens_of_a_minute_do_not_fail() -> None:
    taken: list[tuple[float, int]] = []  # when, and how many per cent of a minute's tokens

    def script(request: Request) -> Say | Fail:
        tokens = 30 if not request.is_control and int(request.text) >= 30 else 1
        if tokens + sum(each for at, each in taken if at > now() - 60) > 100:
            return Fail(429, latency=0.02)
        taken.append((now(), tokens))
        return Say("ok", latency=1.0)

    _, statistics = await finish(ScriptedBackend(script), 40, max_inflight=16)
    assert (statistics.ok, statistics.ended) == (40, "complete")
    assert now() < 360, "three of the ten fit into a minute"


@virtual_clock
async def test_without_control_requests_none_is_sent() -> None:
    backend = ScriptedBackend(lambda request: Fail(500))
    results, statistics = await finish(backend, 1, control_requests=False)
    assert (statistics.failures, controls(backend)) == ({"Unavailable": 1}, 0)
    assert results[0].error is not None


@virtual_clock
async def test_a_control_request_has_the_model_of_the_batch_and_nothing_of_its_content() -> None:
    backend = ScriptedBackend(lambda request: Say("OK") if request.is_control else Fail(500))
    await finish(backend, 1, model="m", system_prompt="Be brief.", output_schema=dict[str, int], temperature=0.5)
    asked = next(request for request in backend.requests if request.is_control)
    assert (asked.model, asked.max_tokens, asked.schema, asked.tools) == ("m", 16, None, [])
    assert len(asked.messages) == 1 and "Be brief." not in asked.raw.decode()


@virtual_clock
async def test_control_requests_are_counted_by_the_rate_limit_and_the_budget() -> None:
    came: list[float] = []
    usage = Usage(prompt_tokens=20, completion_tokens=4)

    def script(request: Request) -> Say | Fail:
        came.append(now())
        return Say("OK", usage=usage) if request.is_control else Fail(500)

    backend = ScriptedBackend(script)
    _, statistics = await finish(backend, 2, rpm=4, max_total_tokens=100_000)
    assert statistics.failures == {"Unavailable": 2} and controls(backend)
    assert all(sum(at - 60 < other <= at for other in came) <= 4 for at in came)


@virtual_clock
async def test_a_server_that_refuses_control_requests_is_judged_without_them() -> None:
    backend = ScriptedBackend(lambda request: Fail(400 if request.is_control else 500))
    _, statistics = await finish(backend, 1)
    assert (statistics.failures, controls(backend)) == ({"Unavailable": 1}, 1)


def first_fails(reply: Fail, latency: float = 0.2) -> Callable[[Request], Say | Fail]:
    """A server that refuses each new question once. A control request is always a new question."""
    known: set[str] = set()

    def script(request: Request) -> Say | Fail:
        if request.text not in known:
            known.add(request.text)
            return reply
        return Say("ok", usage=Usage(200, completion_tokens=30), latency=latency)

    return script


@pytest.mark.parametrize("limit", [None, 20.5 * 260e-6], ids=["no budget", "a budget for half of the rows"])
@pytest.mark.parametrize("max_inflight", [1, 4, 8, None])
@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_new_server_that_refuses_each_question_once_answers_all_rows(
    status: int, max_inflight: int | None, limit: float | None
) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = ScriptedBackend(first_fails(Fail(status)))
        money = {"max_cost": limit, "prices": {"input": 1.0, "output": 2.0}, "max_tokens": 40}
        _, statistics = await finish(backend, 40, max_inflight=max_inflight, model="m", **money)
        assert statistics.failures == {}
        assert statistics.ended == ("complete" if limit is None else "out of budget")
        assert statistics.ok == 40 if limit is None else statistics.ok >= 18
        assert now() < 60

    scenario()


@virtual_clock
async def test_a_server_that_fails_at_first_and_then_loads_its_model_is_waited_for() -> None:
    """A row is its trial beside control requests, and must not be sent again and again meanwhile."""
    ready = 200.0

    def script(request: Request) -> Say | Fail:
        return Fail(500) if now() < 5.0 else Say("ok", latency=max(0.5, ready - now()))

    backend = ScriptedBackend(script)
    _, statistics = await finish(backend, 20, max_inflight=4)
    assert (statistics.ok, statistics.ended) == (20, "complete")
    assert now() < ready + 30
    assert len(backend.requests) - controls(backend) < 20 + 25


@virtual_clock
async def test_at_most_one_control_request_is_in_flight() -> None:
    most = inflight = 0

    async def script(request: Request) -> Say | Fail:
        nonlocal most, inflight
        if not request.is_control:
            return Fail(500)
        inflight += 1
        most = max(most, inflight)
        try:
            await asyncio.sleep(8.0)
        finally:
            inflight -= 1
        return Say("OK")

    _, statistics = await finish(ScriptedBackend(script), 40)
    assert (most, statistics.failures) == (1, {"Unavailable": 40}), "a slow answer is an answer"


class Crashing(ScriptedBackend):
    """Some rows crash it. It is back after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(self._reply)
        self._seconds, self._back_at = seconds, 0.0
        self._open: set[asyncio.Task[Reply]] = set()
        self.crashes = 0

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if now() < self._back_at:
            raise Unavailable("connection refused", unreached=True)
        task = asyncio.get_running_loop().create_task(super().infer(request, on_tool_call))
        self._open.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if now() >= self._back_at:
                raise
            raise Unavailable("the server closed the connection before it answered") from None
        finally:
            self._open.discard(task)

    def _reply(self, request: Request) -> Say:
        if request.text == "7":
            self.crashes += 1
            self._back_at = now() + self._seconds
            for task in self._open:
                task.cancel()
        return Say("ok", latency=0.1)

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("down", "connection refused") if now() < self._back_at else Probe("up")


@pytest.mark.parametrize("seconds", [0.1, 2.0, 10.0])
@pytest.mark.parametrize("rows", [8, 100])
def test_a_row_that_crashes_its_server_each_time_fails_after_its_retries(rows: int, seconds: float) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = Crashing(seconds)
        _, statistics = await finish(backend, rows, max_inflight=8)
        assert (statistics.ok, statistics.failures) == (rows - 1, {"Unavailable": 1})
        assert (statistics.ended, backend.crashes <= 8) == ("complete", True)

    scenario()


@virtual_clock
async def test_control_requests_are_counted_priced_and_in_an_event() -> None:
    def script(request: Request) -> Say | Fail:
        usage = Usage(prompt_tokens=10, completion_tokens=2)
        return Say("ok", usage=usage) if request.is_control else Fail(500)

    events: list[Event] = []
    backend = ScriptedBackend(script)
    _, statistics = await finish(backend, 1, prices={"input": 1, "output": 1}, sinks=[events.append])
    told = [event for event in events if isinstance(event, ControlFinished)]
    assert len(told) == statistics.control_requests == controls(backend) > 0
    assert {(event.usage.prompt_tokens, event.error) for event in told} == {(10, "")}
    assert statistics.usage.prompt_tokens == 10 * len(told)
    assert statistics.cost == pytest.approx(12e-6 * len(told))


@virtual_clock
async def test_a_run_that_is_left_during_its_control_request_sends_nothing_more() -> None:
    backend = ScriptedBackend(lambda request: Hang() if request.is_control else Fail(429, latency=0.1))
    async with BatchAgent.open(task="{input}", inputs=["a"], backend=backend):
        while not controls(backend):
            await asyncio.sleep(0.1)
    sent = len(backend.requests)
    await asyncio.sleep(600)
    assert len(backend.requests) == sent
    assert asyncio.all_tasks() == {asyncio.current_task()}

"""Foreign code that misbehaves in unusual ways: no row is lost in silence, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from batch_agent import BatchAgent, RunRejected, RunUnreachable, SpecError
from batch_agent.backends.base import Backend, ModelRequest, OnToolCall
from batch_agent.job import AgentResult
from batch_agent.messages import Reply
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, ScriptedServer, virtual_clock


class Weird(BaseException):
    pass


@virtual_clock
async def test_a_base_exception_of_the_inputs_ends_the_run_with_it() -> None:
    def rows() -> Iterator[str]:
        yield "a"
        raise Weird

    with pytest.raises(Weird):
        await BatchAgent.run(task="{input}", inputs=rows(), backend=ScriptedBackend())


@virtual_clock
async def test_a_base_exception_of_the_callback_ends_the_run_with_it() -> None:
    def on_result(result: AgentResult[str]) -> None:
        raise Weird

    with pytest.raises(Weird):
        await BatchAgent.run(task="{input}", inputs=["a", "b"], backend=ScriptedBackend(), on_result=on_result)


@virtual_clock
async def test_a_callback_that_lets_a_cancellation_escape_loses_nothing() -> None:
    async def on_result(result: AgentResult[str]) -> None:
        raise asyncio.CancelledError

    results = await BatchAgent.run(
        task="{input}", inputs=["a", "b", "c"], backend=ScriptedBackend(), on_result=on_result, max_agents=1
    )
    assert len(results) == 3


@virtual_clock
async def test_inputs_that_let_a_cancellation_escape_end_the_run_with_an_error() -> None:
    async def rows() -> AsyncIterator[str]:
        yield "a"
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="the inputs raised CancelledError"):
        await BatchAgent.run(task="{input}", inputs=rows(), backend=ScriptedBackend())


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("no more"), GeneratorExit()], ids=repr)
async def test_inputs_that_exit_end_the_run_and_not_the_process(error: BaseException) -> None:
    async def later() -> AsyncIterator[str]:
        yield "a"
        raise error

    def at_once() -> Iterator[str]:
        raise error
        yield "a"

    for rows in (later, at_once):
        with pytest.raises(RuntimeError, match=f"the inputs raised {type(error).__name__}"):
            await BatchAgent.run(task="{input}", inputs=rows(), backend=ScriptedBackend())


class Cancelling(Backend):
    name = "cancelling://"

    async def models(self) -> list[str]:
        return ["m"]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        raise asyncio.CancelledError


@virtual_clock
async def test_a_backend_that_lets_a_cancellation_escape_fails_the_row() -> None:
    results = await BatchAgent.run(
        task="{input}", inputs=["a", "b"], backend=Cancelling(), max_agents=1, control_requests=False
    )
    assert [result.error.type for result in results if result.error] == ["Unavailable", "Unavailable"]


async def test_a_run_that_is_cancelled_before_it_began_has_no_results() -> None:
    async with BatchAgent.open(task="{input}", inputs=["a"], backend=ScriptedBackend()) as run:
        run.cancel()
        assert [result async for result in run.results()] == []


async def test_results_of_a_run_that_was_not_entered_are_refused() -> None:
    run = BatchAgent.open(task="{input}", inputs=["a"], backend=ScriptedBackend())
    with pytest.raises(RuntimeError, match="async with"):
        await anext(run.results())


async def test_leaving_a_stream_lets_not_one_more_request_leave() -> None:
    for _ in range(5):
        backend = ScriptedBackend(lambda request: Say("ok"))
        async for _ in BatchAgent.stream(task="{input}", inputs=map(str, range(10_000)), backend=backend):
            if len(backend.requests) > 200:
                break
        sent = len(backend.requests)
        await asyncio.sleep(0.01)
        assert len(backend.requests) == sent


async def test_leaving_open_lets_not_one_more_request_leave() -> None:
    backend = ScriptedBackend(lambda request: Say("ok"))
    async with BatchAgent.open(task="{input}", inputs=map(str, range(10_000)), backend=backend) as run:
        async for _ in run.results():
            if len(backend.requests) > 200:
                break
        sent = len(backend.requests)
    assert len(backend.requests) == sent


async def test_no_inputs_ask_nothing_of_a_server_that_is_not_there() -> None:
    assert await BatchAgent.run(task="{input}", inputs=[], backend="http://127.0.0.1:9") == []


async def test_the_first_row_is_checked_before_a_server_is_asked_for_its_model() -> None:
    with pytest.raises(SpecError, match="path"):
        await BatchAgent.run(task="{path}", inputs=iter([{"x": 1}]), backend="http://127.0.0.1:9")


class Sleepy(Cancelling):
    """Has no model's name to give until it is asked often enough."""

    def __init__(self, refusals: float) -> None:
        self.refusals = refusals
        self.asked = 0

    async def models(self) -> list[str]:
        self.asked += 1
        if self.asked > self.refusals:
            return ["awake"]
        await asyncio.get_running_loop().create_future()
        return []

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        return Reply(request.shape.model)


@virtual_clock
async def test_a_server_that_is_asked_for_its_model_has_as_long_as_one_that_never_answered() -> None:
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=Sleepy(6), timeout_per_turn=1, max_retries=0)
    assert result.output == "awake"
    with pytest.raises(RunUnreachable, match="no answer in timeout_per_turn"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=Sleepy(99), timeout_per_turn=1)
    assert asyncio.get_running_loop().time() < 60


@pytest.mark.parametrize(
    "options", [{"extra_body": {"messages": []}}, {"seed": 2**70}, {"max_tokens": 10**30}], ids=str
)
def test_what_could_never_be_sent_is_refused_before_the_run(options: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        BatchAgent.plan(task="{input}", inputs=["a"], backend="vllm://localhost", model="m", **options)


@virtual_clock
async def test_a_server_that_asks_to_be_left_alone_for_days_is_not_waited_for() -> None:
    backend = ScriptedBackend(lambda request: Fail(429, headers={"Retry-After": "1000000"}))
    with pytest.raises(RunUnreachable, match="429"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=backend)
    assert asyncio.get_running_loop().time() < 10


@virtual_clock
async def test_a_retry_that_was_never_sent_is_not_counted() -> None:
    backend = ScriptedBackend(lambda request: Fail(503, headers={"Retry-After": "5"}))
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, timeout_per_agent=0.5)
    assert (result.attempts, len(backend.requests)) == (1, 1)
    assert result.timings.queued <= result.timings.total == 0.5


@pytest.mark.parametrize("status", [302, 402, 405])
async def test_other_refusals_that_hold_for_every_row_stop_the_run_too(status: int) -> None:
    async with ScriptedServer(lambda request: Fail(status, headers={"Location": "http://x/"})) as server:
        with pytest.raises(RunRejected):
            await BatchAgent.run(
                task="{input}", inputs=map(str, range(500)), backend=server.url, model="m", max_inflight=4
            )
        assert len(server.requests) <= 8


@virtual_clock
async def test_statistics_use_the_clock_of_the_run() -> None:
    def script(request: Request) -> Say:
        return Say("ok", latency=5)

    async with BatchAgent.open(task="{input}", inputs=["a"], backend=ScriptedBackend(script)) as run:
        await anext(run.results())
        assert 5 <= run.statistics().elapsed < 6

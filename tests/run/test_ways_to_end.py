"""Every way a run can end: nothing hangs, nothing is left behind, not one more request is sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Capabilities, Load
from batch_agent.record.lock import is_locked
from batch_agent.run.delivery import WINDOW
from batch_agent.testing import (
    CallTools,
    Fail,
    Hang,
    Request,
    Say,
    ScriptedBackend,
    ScriptedServer,
    ToolUse,
    virtual_clock,
)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} outlived its run"


def our_tasks() -> set[asyncio.Task[object]]:
    """Tasks on this loop that are neither the test's nor the test server's."""
    others = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
    return {task for task in others if not task.get_coro().__qualname__.startswith("RequestHandler")}  # type: ignore[union-attr]


@Tool.define(effect="read")
async def wait_for_ever() -> str:
    await asyncio.get_running_loop().create_future()
    return "never"


def hang_in_tool(request: Request) -> Say:
    return CallTools(ToolUse("wait_for_ever"))


STAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "infer": (lambda request: Hang(), {}),
    "infer, streamed": (lambda request: Hang(), {"tools": [wait_for_ever]}),
    "tools": (hang_in_tool, {"tools": [wait_for_ever]}),
    "waiting for a slot": (lambda request: Hang(), {"max_inflight": 1}),
    "waiting to try again": ("retry", {}),
    "on_result": (lambda request: Say("ok"), {"on_result": "hang"}),
}


async def hang(result: object) -> None:
    await asyncio.get_running_loop().create_future()


def options_of(stage: str, server: ScriptedServer) -> dict[str, object]:
    extra = {name: hang if value == "hang" else value for name, value in STAGES[stage][1].items()}
    return {"task": "{input}", "inputs": [str(n) for n in range(6)], "backend": server.url, "model": "m"} | extra


def server_for(stage: str) -> ScriptedServer:
    script = STAGES[stage][0]
    return ScriptedServer((lambda request: Fail(429, headers={"Retry-After": "800"})) if script == "retry" else script)


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelling_a_run_that_hangs_in_any_stage_leaves_nothing(stage: str) -> None:
    async with server_for(stage) as server:
        before = our_tasks()
        run = asyncio.create_task(BatchAgent.run(**options_of(stage, server)))  # type: ignore[call-overload]
        await server.wait_requests(1)
        await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        count = len(server.requests)
        await server.wait_idle()
        await asyncio.sleep(0.02)
        assert len(server.requests) == count
        assert our_tasks() <= before


@pytest.mark.parametrize("stage", STAGES)
async def test_leaving_open_in_any_stage_leaves_nothing(stage: str) -> None:
    async with server_for(stage) as server:
        before = our_tasks()
        async with BatchAgent.open(**options_of(stage, server)):  # type: ignore[call-overload]
            await server.wait_requests(1)
            await asyncio.sleep(0.05)
        assert our_tasks() <= before
        count = len(server.requests)
        await server.wait_idle()
        assert len(server.requests) == count


async def test_breaking_out_of_a_stream_closes_what_is_in_flight() -> None:
    def script(request: Request) -> Say | Hang:
        return Say("ok") if request.number == 0 else Hang()

    async with ScriptedServer(script) as server:
        async for result in BatchAgent.stream(
            task="{input}", inputs=map(str, range(100)), backend=server.url, model="m", max_inflight=4
        ):
            assert result.ok
            break
        await server.wait_idle()
        count = len(server.requests)
        await asyncio.sleep(0.05)
        assert len(server.requests) == count <= 9


async def test_an_exception_in_the_consumer_ends_the_run() -> None:
    async with ScriptedServer(lambda request: Say("ok") if request.number == 0 else Hang()) as server:
        with pytest.raises(ZeroDivisionError):
            async with BatchAgent.open(task="{input}", inputs=map(str, range(9)), backend=server.url, model="m") as run:
                async for _ in run.results():
                    raise ZeroDivisionError
        await server.wait_idle()
        assert server.disconnects > 0


@virtual_clock
async def test_cancel_ends_the_agents_under_way_as_interrupted() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=int(request.text)))
    async with BatchAgent.open(task="{input}", inputs=["1", "50", "60"], backend=backend) as run:
        ends = []
        async for result in run.results():
            ends.append(result.error.type if result.error else "ok")
            run.cancel()
    assert ends == ["ok", "Interrupted", "Interrupted"]
    assert backend.inflight == backend.entered == 0


@virtual_clock
async def test_drain_lets_agents_under_way_finish_and_starts_no_more() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=1))
    async with BatchAgent.open(task="{input}", inputs=map(str, range(100)), backend=backend, max_inflight=5) as run:
        ends = []
        async for result in run.results():
            run.drain()
            ends.append(result.ok)
        assert run.statistics().ended == "drained"
    assert all(ends)
    assert 5 <= len(ends) <= 10


@virtual_clock
async def test_pause_sends_nothing_until_resume() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=1))
    async with BatchAgent.open(task="{input}", inputs=map(str, range(10)), backend=backend, max_inflight=2) as run:
        results = run.results()
        await anext(results)
        run.pause()
        sent = len(backend.requests)
        await asyncio.sleep(100)
        assert len(backend.requests) <= sent + 2  # two slots had been handed out already
        run.resume()
        assert len([result async for result in results]) == 9


@virtual_clock
async def test_max_inflight_can_be_lowered_and_raised_while_running() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=1))
    async with BatchAgent.open(task="{input}", inputs=map(str, range(60)), backend=backend, max_inflight=8) as run:
        results = run.results()
        await anext(results)
        run.resize(2)
        for _ in range(12):
            await anext(results)
        assert backend.inflight <= 2
        run.resize(6)
        backend.peak_inflight = 0
        for _ in range(12):
            await anext(results)
        assert backend.peak_inflight == 6
        with pytest.raises(ValueError, match="above 0"):
            run.resize(0)


@virtual_clock
async def test_a_slow_consumer_stops_the_reading_of_inputs() -> None:
    read = 0

    def rows() -> Iterator[str]:
        nonlocal read
        for read in range(100_000):
            yield str(read)

    async with BatchAgent.open(task="{input}", inputs=rows(), backend=ScriptedBackend(), max_inflight=10) as run:
        results = run.results()
        await anext(results)
        await asyncio.sleep(1000)
        assert read <= WINDOW + 20


@virtual_clock
async def test_inputs_are_read_only_as_they_are_needed() -> None:
    read = 0

    async def rows() -> AsyncIterator[str]:
        nonlocal read
        for read in range(1000):
            yield str(read)

    backend = ScriptedBackend(lambda request: Say("ok", latency=1))
    stream = BatchAgent.stream(task="{input}", inputs=rows(), backend=backend, max_inflight=4)
    async for _ in stream:
        assert read <= 12
        break


async def test_no_inputs_give_no_results_and_no_request() -> None:
    backend = ScriptedBackend()
    assert await BatchAgent.run(task="{input}", inputs=[], backend=backend) == []
    assert await BatchAgent.run(task="{input}", inputs=iter(()), backend=backend) == []
    assert backend.requests == []


async def test_a_run_is_entered_once_and_read_in_one_place() -> None:
    run = BatchAgent.open(task="{input}", inputs=["a"], backend=ScriptedBackend(lambda request: Hang()))
    async with run:
        with pytest.raises(RuntimeError, match="once"):
            await run.__aenter__()
        reading = asyncio.ensure_future(anext(run.results()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already being read"):
            await anext(run.results())
        reading.cancel()
        await asyncio.wait([reading])


@virtual_clock
async def test_two_runs_in_one_process_share_nothing() -> None:
    calls: list[str] = []

    @Tool.define(cacheable=True)
    async def fetch(key: str) -> str:
        calls.append(key)
        await asyncio.sleep(1)
        return key

    def script(request: Request) -> Say:
        return CallTools(ToolUse("fetch", {"key": "same"})) if request.turn == 0 else Say("done")

    async def one() -> None:
        await BatchAgent.run(task="{input}", inputs=["a", "b"], tools=[fetch], backend=ScriptedBackend(script))

    await asyncio.gather(one(), one())
    assert calls == ["same", "same"]


def test_run_sync_works_in_a_script() -> None:
    [result] = BatchAgent.run_sync(task="{input}", inputs=["a"], backend=ScriptedBackend([Say("hi")]))
    assert result.output == "hi"


async def test_run_sync_works_where_a_loop_is_already_running() -> None:
    [result] = BatchAgent.run_sync(task="{input}", inputs=["a"], backend=ScriptedBackend([Say("hi")]))
    assert result.output == "hi"
    with pytest.raises(ValueError, match="task"):
        BatchAgent.run_sync(inputs=["a"], backend=ScriptedBackend())


@virtual_clock
async def test_one_agents_timeout_does_not_touch_the_others_waiting_for_the_same_call() -> None:
    runs = 0

    @Tool.define(cacheable=True)
    async def slow(key: str) -> str:
        nonlocal runs
        runs += 1
        await asyncio.sleep(8)
        return "result"

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("slow", {"key": "k"}), latency=5 if request.text == "early" else 9)
        return Say("done")

    # The first agent asks at 5 s and is out of time at 12; the second joined the call at 9 and has it at 13.
    results = await BatchAgent.run(
        task="{input}",
        inputs=["early", "late"],
        tools=[slow],
        backend=ScriptedBackend(script),
        timeout_per_agent=14,
        streaming_tool_dispatch=False,
    )
    assert [result.ok for result in results] == [True, True]
    assert runs == 1


@virtual_clock
async def test_drain_does_not_wait_for_an_input_that_never_comes() -> None:
    async def rows() -> AsyncIterator[str]:
        yield "a"
        await asyncio.get_running_loop().create_future()

    async with BatchAgent.open(task="{input}", inputs=rows(), backend=ScriptedBackend([Say("ok", latency=1)])) as run:
        results = run.results()
        assert (await anext(results)).ok
        run.drain()
        assert [result async for result in results] == []


@virtual_clock
async def test_when_time_is_up_queued_sleeping_and_tool_waiting_agents_do_not_hold_the_run() -> None:
    @Tool.define(effect="read")
    async def wait_long(word: str) -> str:
        await asyncio.sleep(3_000)
        return word

    def script(request: Request) -> Any:
        if request.text == "refused":
            return Fail(429, headers={"Retry-After": "800"})
        return CallTools(ToolUse("wait_long", {"word": "x"})) if request.turn == 0 else Say("ok")

    backend = ScriptedBackend(script)
    async with BatchAgent.open(
        task="{input}",
        inputs=["a", "refused", *map(str, range(50))],
        tools=[wait_long],
        backend=backend,
        max_inflight=2,
        max_wall_time=10,
        timeout_per_tool=None,
    ) as run:
        results = [result async for result in run.results()]
        assert asyncio.get_running_loop().time() < 20
        assert run.statistics().ended == "out of budget"
    assert {result.error.type for result in results if result.error} == {"Interrupted"}


@virtual_clock
async def test_a_drain_before_the_first_row_is_not_a_complete_run(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda _: Say("ok"))
    async with BatchAgent.open(task="{input}", inputs=["a", "b"], backend=backend, run_dir=tmp_path) as run:
        run.drain()
        assert [result async for result in run.results()] == []
    assert run.statistics().ended == "drained"
    assert backend.requests == []


@virtual_clock
async def test_inputs_that_raise_let_what_runs_finish_and_the_error_carries_the_results() -> None:
    def rows() -> Iterator[str]:
        yield from ("a", "b", "c")
        raise OSError("the disk is gone")

    backend = ScriptedBackend(lambda _: Say("ok", latency=1))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        await BatchAgent.run(task="{input}", inputs=rows(), backend=backend)
    assert [result.input for result in caught.value.results] == ["a", "b", "c"]  # type: ignore[attr-defined]
    assert all(result.ok for result in caught.value.results)  # type: ignore[attr-defined]


class QueueingServer(ScriptedBackend):
    """Computes two requests at once, and reports how many others wait."""

    def __init__(self) -> None:
        super().__init__(self._answer, capabilities=Capabilities(reports_load=True))
        self._gate = asyncio.Semaphore(2)

    async def _answer(self, request: Request) -> Say:
        async with self._gate:
            await asyncio.sleep(5)
        return Say("ok")

    async def load(self, endpoint: str = "") -> Load:
        return Load(min(2, self.inflight), max(0, self.inflight - 2))


@virtual_clock
async def test_a_drain_does_not_wait_for_first_turns_in_the_queue_of_the_server() -> None:
    backend = QueueingServer()
    async with BatchAgent.open(task="{input}", inputs=map(str, range(100)), backend=backend, max_inflight=20) as run:
        ends = []
        async for result in run.results():
            run.drain()
            ends.append(result.ok)
    assert sum(ends) <= 6, "those that were computed when the run was drained"
    assert asyncio.get_running_loop().time() < 20


async def never(request: Request) -> Say:
    await asyncio.sleep(1e6)
    return Say("")


@pytest.mark.parametrize("turns", range(12))  # of the event loop between the two cancellations
async def test_leaving_a_run_that_is_being_cancelled_closes_its_directory(tmp_path: Path, turns: int) -> None:
    backend = ScriptedBackend(never)
    async with BatchAgent.open(task="{input}", inputs=["a"], backend=backend, run_dir=tmp_path) as run:
        while not backend.requests:
            await asyncio.sleep(0.001)
        run.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
    assert not is_locked(tmp_path / "run.lock")
    assert not (tmp_path / "control.json").exists()

"""One Fleet in several event loops: one after the other it works, at the same time it is a SpecError."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from batch_agent import BatchAgent, Fleet, SpecError
from batch_agent.testing import Hang, Say, ScriptedServer

TAKEN = "in use in another event loop"


@pytest.fixture
def urls() -> Iterator[list[str]]:
    with serving(Say("yes")) as first, serving(Say("yes")) as second:
        yield [first.backend_url, second.backend_url]


@contextmanager
def serving(answer: Say | Hang) -> Iterator[ScriptedServer]:
    """A server in a thread and a loop of its own, until it is left."""
    started: Future[tuple[ScriptedServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with ScriptedServer(lambda request: answer, models=["m"]) as server:
            stop = asyncio.Event()
            started.set_result((server, asyncio.get_running_loop(), stop))
            await stop.wait()

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, serve())
        server, loop, stop = started.result(20)
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(stop.set)
            ended.result(20)


def test_a_fleet_is_used_in_one_loop_after_another(urls: list[str]) -> None:
    fleet = Fleet(urls)
    for _ in range(3):
        results = BatchAgent.run_sync(task="{input}", inputs=["a", "b"], backend=fleet, model="m")
        assert [result.output for result in results] == ["yes", "yes"]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fleet_that_was_left_open_in_a_loop_that_is_closed_can_be_used_again(urls: list[str]) -> None:
    fleet = Fleet(urls)

    async def leave_open() -> None:
        await fleet.__aenter__()
        assert await fleet.models() == ["m"]

    asyncio.run(leave_open())
    asyncio.run(leave_open())
    fleet.remove(urls[0])
    results = BatchAgent.run_sync(task="{input}", inputs=["a", "b"], backend=fleet, model="m")
    assert [result.output for result in results] == ["yes", "yes"]
    gc.collect()  # the warnings of what was left open belong to this test


def test_two_loops_at_the_same_time_are_an_error_that_says_so(urls: list[str]) -> None:
    fleet, entered, done = Fleet(urls), threading.Event(), threading.Event()

    async def hold() -> list[str]:
        async with fleet:
            before = await fleet.models()
            entered.set()
            await asyncio.to_thread(done.wait, 20)
            return before + await fleet.models()

    async def enter() -> None:
        async with fleet:
            pass

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(asyncio.run, hold())
        assert entered.wait(20)
        for call in (enter, fleet.models, fleet.load):
            with pytest.raises(SpecError, match=TAKEN):
                asyncio.run(call())
        with pytest.raises(SpecError, match=TAKEN):
            BatchAgent.run_sync(task="{input}", inputs=["a"], backend=fleet, model="m")
        with pytest.raises(SpecError, match=TAKEN):
            fleet.remove(urls[0])
        done.set()
        assert holding.result(20) == ["m", "m"]
    fleet.remove(urls[0])

"""Pools in several event loops: one after the other they work, at the same time that is a SpecError."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.swarm.agents import Agent, agents

from batch_agent.errors import SpecError
from batch_agent.swarm import AgentEndpoint, AgentPool, EmbeddingPool, EmbeddingResponse, Response, VLLMPool

Pool = AgentPool | EmbeddingPool
Make = Callable[[list[AgentEndpoint]], Pool]
MAKES: list[Make] = [AgentPool, VLLMPool, lambda endpoints: EmbeddingPool(endpoints, "m")]


@pytest.fixture
def endpoints() -> Iterator[list[AgentEndpoint]]:
    """Two agents in a thread and a loop of their own."""
    started: Future[tuple[list[AgentEndpoint], asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with agents(Agent(), Agent()) as found:
            stop = asyncio.Event()
            started.set_result((found, asyncio.get_running_loop(), stop))
            await stop.wait()

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, serve())
        found, loop, stop = started.result(20)
        yield found
        loop.call_soon_threadsafe(stop.set)
        ended.result(20)


def ask(pool: Pool) -> Awaitable[list[Response] | list[EmbeddingResponse]]:
    return pool.embed_all(["a", "b"]) if isinstance(pool, EmbeddingPool) else pool.send_all(["a", "b"])


async def use(pool: Pool) -> bool:
    return all(response.success for response in await ask(pool))


@pytest.mark.parametrize("make", MAKES)
def test_a_pool_is_used_in_one_loop_after_another(make: Make, endpoints: list[AgentEndpoint]) -> None:
    pool = make(endpoints)

    async def once() -> bool:
        async with pool:
            return await use(pool) and await use(pool.slice(1, 2))

    assert [asyncio.run(once()) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_pool_that_was_left_open_in_a_loop_that_is_closed_can_be_used_and_closed(
    make: Make, endpoints: list[AgentEndpoint]
) -> None:
    pool = make(endpoints)
    assert asyncio.run(use(pool))
    assert asyncio.run(use(pool.slice(0, 1)))
    asyncio.run(pool.close())
    assert asyncio.run(use(pool))
    del pool
    gc.collect()  # the warnings of what was left open belong to this test


@pytest.mark.parametrize("make", MAKES)
def test_two_loops_at_the_same_time_are_an_error_that_says_so(make: Make, endpoints: list[AgentEndpoint]) -> None:
    pool, opened, done = make(endpoints), threading.Event(), threading.Event()

    async def hold() -> bool:
        async with pool:
            before = await use(pool)
            opened.set()
            await asyncio.to_thread(done.wait, 20)
            return before and await use(pool)

    async def enter(pool: Pool) -> None:
        async with pool:
            pass

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(asyncio.run, hold())
        assert opened.wait(20)
        for call in (use(pool), use(pool.slice(0, 1)), enter(pool), enter(pool.slice(0, 1)), pool.close()):
            with pytest.raises(SpecError, match="the pool is in use in another event loop"):
                asyncio.run(call)  # type: ignore[arg-type]
        done.set()
        assert holding.result(20)

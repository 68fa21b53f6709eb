"""Calls that wait for a tool: how many run at once, and what the pool says about those that do not."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tools.tool_calls import Counter, call, settle

from batch_agent.testing.clock import run_virtual, virtual_clock
from batch_agent.tools import Tool, ToolPool
from batch_agent.tools.pool import ASYNC_CALLS
from batch_agent.tools.threads import THREADS


class Watch:
    """What a pool says about its waiting calls."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, waiting: int) -> None:
        self.seen.append(waiting)


@virtual_clock
async def test_calls_that_wait_for_a_rate_are_counted_and_those_that_run_are_not(open_pool) -> None:
    watch, counter = Watch(), Counter()
    async with open_pool(counter.tool(rate_limit=1), on_waiting=watch) as pool:
        pending = [pool.start(call("look", n=n)) for n in range(3)]
        await settle()
        assert (counter.runs, pool.waiting) == (1, 2)
        await asyncio.sleep(1.5)
        assert (counter.runs, pool.waiting) == (2, 1)
        counter.release.set()
        for waiting in pending:
            assert (await waiting.wait()).ok
        assert pool.waiting == 0
    assert watch.seen == [1, 2, 1, 0]


@virtual_clock
async def test_agents_that_share_a_waiting_call_count_each(open_pool) -> None:
    watch, counter = Watch(), Counter()
    async with open_pool(counter.tool(effect="read", rate_limit=1), on_waiting=watch) as pool:
        pool.start(call("look", n=0))
        shared = [pool.start(call("look", n=1)) for _ in range(2)]
        await settle()
        assert pool.waiting == 2
        shared.append(pool.start(call("look", n=1)))
        assert pool.waiting == 3
        shared[0].abandon()
        assert pool.waiting == 2
        await asyncio.sleep(1.5)
        assert (counter.runs, pool.waiting) == (2, 0)
        shared[1].abandon()
        assert pool.waiting == 0
    assert watch.seen == [2, 3, 2, 0]


@virtual_clock
async def test_calls_that_are_given_up_while_they_wait_no_longer_count(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool(rate_limit=1)) as pool:
        pending = [pool.start(call("look")) for _ in range(4)]
        await settle()
        pending[1].abandon()
        pending[1].abandon()
        assert pool.waiting == 2
        await settle()
        assert not (await pending[1].wait()).ok
        assert pool.waiting == 2
    assert pool.waiting == 0
    assert counter.runs == 1


async def test_no_more_calls_of_a_tool_run_at_once_than_it_allows(open_pool) -> None:
    counter, other = Counter(), Counter()
    other_tool = Tool.define(other.__call__, name="other")
    async with open_pool(counter.tool(max_concurrent=2), other_tool) as pool:
        pending = [pool.start(call("look", n=n)) for n in range(5)] + [pool.start(call("other", n=1))]
        await settle()
        assert (counter.runs, other.runs, pool.waiting) == (2, 1, 3)
        other.release.set()
        counter.release.set()
        assert all([(await p.wait()).ok for p in pending])
    assert counter.runs == 5


@virtual_clock
async def test_waiting_for_a_tools_own_limit_is_not_part_of_its_timeout(open_pool) -> None:
    @Tool.define(max_concurrent=1, timeout=3)
    async def slow() -> str:
        await asyncio.sleep(2)
        return "done"

    async with open_pool(slow) as pool:
        pending = [pool.start(call("slow")) for _ in range(4)]
        assert [(await p.wait()).text for p in pending] == ["done"] * 4


@virtual_clock
async def test_a_rate_holds_also_when_a_tools_own_limit_has_held_calls_back(open_pool) -> None:
    starts: list[float] = []

    @Tool.define(max_concurrent=2, rate_limit="1/s")
    async def fetch(n: int) -> None:
        starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(10)

    async with open_pool(fetch) as pool:
        for pending in [pool.start(call("fetch", n=n)) for n in range(6)]:
            await pending.wait()
    assert starts == pytest.approx([0, 1, 10, 11, 20, 21], abs=0.01)


async def test_async_calls_running_at_once_are_bounded_and_threads_are_not_among_them(open_pool) -> None:
    counter = Counter()

    def quick() -> str:
        return "from a thread"

    async with open_pool(counter.tool(), quick) as pool:
        pending = [pool.start(call("look", n=n)) for n in range(ASYNC_CALLS + 10)]
        await settle()
        assert (counter.runs, pool.waiting) == (ASYNC_CALLS, 10)
        assert (await pool.start(call("quick")).wait()).text == "from a thread"
        pending[0].abandon()
        await settle()
        assert (counter.runs, pool.waiting) == (ASYNC_CALLS + 1, 9)
        counter.release.set()
        assert all([(await p.wait()).ok for p in pending[1:]])


async def test_calls_that_wait_for_a_thread_are_counted(open_pool) -> None:
    release, lock = threading.Event(), threading.Lock()
    running = peak = 0

    def work() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        release.wait()
        with lock:
            running -= 1

    async with open_pool(work) as pool:
        pending = [pool.start(call("work")) for _ in range(THREADS + 5)]
        await settle()
        assert pool.waiting == 5
        release.set()
        assert all([(await p.wait()).ok for p in pending])
    assert peak <= THREADS


async def test_a_call_that_was_given_up_leaves_its_place_to_the_next(open_pool) -> None:
    release, threads = threading.Event(), []

    @Tool.define(max_concurrent=1)
    def work(n: int) -> str:
        threads.append(threading.current_thread())
        if n == 0:
            release.wait()
        return "done"

    async with open_pool(work) as pool:
        stuck, waiting = pool.start(call("work", n=0)), pool.start(call("work", n=1))
        await settle()
        stuck.abandon()
        assert (await waiting.wait()).text == "done"
        release.set()
    for thread in threads:
        thread.join(10)


async def test_a_fault_of_ours_stops_whoever_waits_for_the_call(open_pool) -> None:
    def broken(waiting: int) -> None:
        if waiting:
            raise AssertionError("a broken invariant")

    counter = Counter()
    async with open_pool(counter.tool(max_concurrent=1), on_waiting=broken) as pool:
        pool.start(call("look"))
        with pytest.raises(AssertionError, match="a broken invariant"):
            await pool.start(call("look")).wait()


agents = st.tuples(st.integers(0, 4), st.integers(0, 3), st.none() | st.integers(0, 6))  # start, argument, patience


@given(st.lists(agents, max_size=25), st.integers(1, 3), st.booleans(), st.sampled_from([None, "1/s"]))
def test_in_any_order_of_events_limits_hold_and_nobody_is_forgotten(
    plan: list[tuple[int, int, int | None]], limit: int, stubborn: bool, rate: str | None
) -> None:
    async def main() -> None:
        running, watch = 0, Watch()

        @Tool.define(effect="read", max_concurrent=limit, rate_limit=rate, timeout=5)
        async def look(n: int) -> int:
            nonlocal running
            running += 1
            try:
                assert stubborn or running <= limit
                await asyncio.sleep(2 * n)
            except asyncio.CancelledError:
                await asyncio.sleep(stubborn * 8)
                raise
            finally:
                running -= 1
            return n

        async def agent(pool: ToolPool, start: int, n: int, patience: int | None) -> str:
            await asyncio.sleep(start)
            pending = pool.start(call("look", n=n))
            try:
                async with asyncio.timeout(patience):
                    return (await pending.wait()).text
            except TimeoutError:
                return "left"
            finally:
                pending.abandon()

        spawn = asyncio.get_running_loop().create_task
        async with ToolPool([look], timeout=None, spawn=spawn, on_waiting=watch) as pool:
            texts = await asyncio.gather(*(agent(pool, *row) for row in plan))
            await asyncio.sleep(20)
            assert (pool.waiting, pool._traffic.stuck, running, len(pool._tasks), len(pool._executions)) == (
                0,
                0,
                0,
                0,
                0,
            )
            fresh = [pool.start(call("look", n=100 + number)) for number in range(limit if rate is None else 1)]
            await settle()
            assert (running, pool.waiting) == (len(fresh), 0)
        for (_, n, patience), text in zip(plan, texts, strict=True):
            late = "Error: look timed out: it ran longer than 5 s"
            assert text in ((str(n) if n < 3 else late), *(["left"] if patience is not None else []))
        assert all(0 <= waiting <= len(plan) for waiting in watch.seen)

    run_virtual(main())

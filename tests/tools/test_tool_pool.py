import asyncio
import contextvars
import queue
import threading

import pytest
from tests.tools.tool_calls import Counter, call, settle

from batch_agent.errors import ToolError
from batch_agent.tools import PendingCall, Tool, ToolPool
from batch_agent.tools.base import resolve_tools
from batch_agent.tools.threads import THREADS

# Sharing


@pytest.mark.parametrize("options", [{"cacheable": True}, {"cacheable": False}, {"effect": "read"}])
async def test_identical_calls_in_flight_run_once(open_pool, options: dict[str, object]) -> None:
    counter = Counter()
    async with open_pool(counter.tool(**options)) as pool:
        pending = [pool.start(c) for c in (call("look"), call("look", n=0), call("look", n="0"), call("look", n=1))]
        await settle()
        assert counter.runs == 2
        counter.release.set()
        outcomes = [await p.wait() for p in pending]
    assert [o.source for o in outcomes] == ["run", "shared", "shared", "run"]
    assert outcomes[0].text == outcomes[1].text == outcomes[2].text
    assert all(o.ok and o.seconds >= 0 for o in outcomes)


@pytest.mark.parametrize("options", [{"effect": "write"}, {}])
async def test_every_call_of_a_write_runs(open_pool, options: dict[str, object]) -> None:
    counter = Counter()
    async with open_pool(counter.tool(**options)) as pool:
        pending = [pool.start(call("look")) for _ in range(3)]
        await settle()
        assert counter.runs == 3
        counter.release.set()
        assert [(await p.wait()).source for p in pending] == ["run"] * 3


@pytest.mark.parametrize(
    ("options", "runs", "source"), [({"cacheable": True}, 1, "cache"), ({"effect": "read"}, 2, "run")]
)
async def test_only_a_cacheable_result_outlives_its_run(
    open_pool, options: dict[str, object], runs: int, source: str
) -> None:
    counter = Counter()
    counter.release.set()
    async with open_pool(counter.tool(**options)) as pool:
        first = await pool.start(call("look")).wait()
        second = await pool.start(call("look")).wait()
    assert (counter.runs, first.source, second.source) == (runs, "run", source)


async def test_a_cached_result_expires(open_pool) -> None:
    counter = Counter()
    counter.release.set()
    async with open_pool(counter.tool(cacheable=True, ttl=0.001)) as pool:
        await pool.start(call("look")).wait()
        await asyncio.sleep(0.005)
        assert (await pool.start(call("look")).wait()).source == "run"


async def test_a_cache_key_decides_what_is_the_same_call(open_pool) -> None:
    counter = Counter()
    counter.release.set()
    async with open_pool(counter.tool(cacheable=True, cache_key=lambda n: n % 2)) as pool:
        await pool.start(call("look", n=1)).wait()
        assert (await pool.start(call("look", n=3)).wait()).source == "cache"
        assert (await pool.start(call("look", n=2)).wait()).source == "run"


async def test_a_failure_reaches_every_waiter_and_is_not_cached(open_pool) -> None:
    runs = 0

    @Tool.define(cacheable=True)
    async def flaky() -> str:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0)
        if runs == 1:
            raise ToolError("not today")
        return "fine"

    async with open_pool(flaky) as pool:
        pending = [pool.start(call("flaky")) for _ in range(3)]
        assert [(await p.wait()).text for p in pending] == ["Error: not today"] * 3
        assert (await pool.start(call("flaky")).wait()).text == "fine"
    assert runs == 2


async def test_two_pools_share_nothing(open_pool) -> None:
    counter = Counter()
    counter.release.set()
    tool = counter.tool(cacheable=True, rate_limit=1)
    async with open_pool(tool) as one, open_pool(tool) as two:
        await one.start(call("look")).wait()
        assert (await two.start(call("look")).wait()).source == "run"
        assert one.statistics()["look"].runs == two.statistics()["look"].runs == 1


# Leaving


async def test_a_cancelled_waiter_leaves_the_call_to_the_others(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool(effect="read")) as pool:
        first, second = pool.start(call("look")), pool.start(call("look"))
        waiter = asyncio.create_task(first.wait())
        await settle()
        waiter.cancel()
        await settle()
        first.abandon()
        counter.release.set()
        assert (await second.wait()).ok
    assert waiter.cancelled()
    assert counter.cancelled == 0


async def test_when_the_last_one_leaves_the_call_is_cancelled(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool(effect="read")) as pool:
        pending = [pool.start(call("look")) for _ in range(2)]
        await settle()
        pending[0].abandon()
        pending[0].abandon()
        await settle()
        assert counter.cancelled == 0
        pending[1].abandon()
        await settle()
        assert counter.cancelled == 1


async def test_a_new_call_does_not_join_one_that_everybody_left(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool(cacheable=True)) as pool:
        left = pool.start(call("look"))
        await settle()
        left.abandon()
        fresh = pool.start(call("look"))
        await settle()
        counter.release.set()
        assert (await fresh.wait()).ok
        assert not (await left.wait()).ok
    assert (counter.runs, counter.cancelled) == (2, 1)


async def test_a_call_abandoned_before_its_first_step_ends(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool()) as pool:
        pending = pool.start(call("look"))
        pending.abandon()
        outcome = await pending.wait()
    assert (counter.runs, outcome.ok) == (0, False)


async def test_leaving_a_finished_call_changes_nothing(open_pool) -> None:
    counter = Counter()
    counter.release.set()
    async with open_pool(counter.tool(cacheable=True)) as pool:
        pending = pool.start(call("look"))
        outcome = await pending.wait()
        pending.abandon()
        assert await pending.wait() == outcome
        assert (await pool.start(call("look")).wait()).source == "cache"


async def test_closing_cancels_what_runs_and_tells_who_waits() -> None:
    counter = Counter()
    async with asyncio.TaskGroup() as group:
        pool = ToolPool(resolve_tools([counter.tool()]), timeout=None, spawn=group.create_task)
        waiter = asyncio.create_task(pool.start(call("look")).wait())
        await settle()
        await pool.close()
        await pool.close()
        outcome = await waiter
        late = await pool.start(call("look")).wait()
    assert counter.cancelled == 1
    assert not outcome.ok
    assert late.text == "Error: the run has ended"


async def test_closing_leaves_no_thread(open_pool) -> None:
    def thread() -> str:
        return threading.current_thread().name

    async with open_pool(thread) as pool:
        name = (await pool.start(call("thread")).wait()).text
        assert name in [t.name for t in threading.enumerate()]
    assert name not in [t.name for t in threading.enumerate()]


async def test_a_group_that_takes_no_more_tasks_leaves_no_coroutine_behind() -> None:
    async with asyncio.TaskGroup() as group:
        pool = ToolPool(resolve_tools([Counter().tool()]), timeout=None, spawn=group.create_task)
    with pytest.raises(RuntimeError):
        pool.start(call("look"))
    await pool.close()


# Time


async def test_a_tool_that_takes_too_long_is_given_up(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool(effect="read", timeout=0.01)) as pool:
        outcomes = [await p.wait() for p in [pool.start(call("look")) for _ in range(2)]]
    assert counter.cancelled == 1
    for outcome in outcomes:
        assert not outcome.ok
        assert outcome.text.startswith("Error: look timed out")


async def test_a_tool_without_a_timeout_has_the_pools(open_pool) -> None:
    release, threads = threading.Event(), queue.SimpleQueue[threading.Thread]()

    def stuck() -> None:
        threads.put(threading.current_thread())
        release.wait()

    async with open_pool(stuck, timeout=0.1) as pool:
        outcome = await pool.start(call("stuck")).wait()
    release.set()
    assert not outcome.ok
    thread = await asyncio.to_thread(threads.get, timeout=10)  # on a busy machine it may begin later than the timeout
    thread.join(10)
    assert not thread.is_alive()


async def test_waiting_for_the_rate_limit_is_not_part_of_the_timeout(open_pool) -> None:
    async def quick(n: int) -> int:
        return n

    async with open_pool(Tool.define(quick, rate_limit=20, timeout=0.04)) as pool:
        pending = [pool.start(call("quick", n=n)) for n in range(24)]
        assert [(await p.wait()).text for p in pending] == [str(n) for n in range(24)]


async def test_waiting_for_a_thread_is_not_part_of_the_timeout(open_pool) -> None:
    release = threading.Event()

    def busy() -> None:
        release.wait()

    def quick() -> str:
        return "done"

    async with open_pool(busy, Tool.define(quick, timeout=0.1)) as pool:
        blocking = [pool.start(call("busy")) for _ in range(THREADS)]
        waiting = pool.start(call("quick"))
        await asyncio.sleep(0.2)
        release.set()
        assert (await waiting.wait()).text == "done"
        assert all([(await p.wait()).ok for p in blocking])


# The rest


async def test_only_reads_may_start_before_the_answer_is_complete(open_pool) -> None:
    def plain() -> None: ...

    async with open_pool(Tool.read_file, Tool.python_eval, plain) as pool:
        assert pool.can_start_early("read_file")
        assert not pool.can_start_early("python_eval")
        assert not pool.can_start_early("plain")
        assert not pool.can_start_early("no such tool")


async def test_a_tool_sees_the_context_of_the_agent_that_started_it(open_pool) -> None:
    agent: contextvars.ContextVar[int] = contextvars.ContextVar("agent")

    def who() -> int:
        return agent.get()

    async with open_pool(who) as pool:

        async def ask(n: int) -> str:
            agent.set(n)
            return (await pool.start(call("who")).wait()).text

        assert await asyncio.gather(ask(1), ask(2)) == ["1", "2"]


async def test_statistics_say_what_calls_came_to(open_pool) -> None:
    @Tool.define(cacheable=True)
    async def look(n: int) -> int:
        await asyncio.sleep(0)
        return 1 // n

    def plain(n: int) -> int:
        return n

    async with open_pool(look, plain) as pool:
        calls = [call("look", n=1), call("look", n=1), call("look", n=0), call("look"), *[call("plain", n=1)] * 3]
        for pending in [pool.start(c) for c in calls]:
            await pending.wait()
        await pool.start(call("look", n=1)).wait()
        statistics = pool.statistics()
    looks, plains = statistics["look"], statistics["plain"]
    assert (looks.calls, looks.runs, looks.shared, looks.cache_hits, looks.failures) == (5, 2, 1, 1, 2)
    assert looks.failure_reasons == (
        ("the arguments do not fit: - n: missing Expected: n (integer)", 1),
        ("ZeroDivisionError: integer division or modulo by zero", 1),
    )
    assert looks.p50 is not None and looks.p99 is not None and looks.p50 <= looks.p99
    assert (plains.runs, plains.saveable, looks.saveable) == (3, 2, 0)


async def test_a_thousand_agents_share_one_run(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool(cacheable=True)) as pool:
        pending: list[PendingCall] = [pool.start(call("look")) for _ in range(1000)]
        await settle()
        counter.release.set()
        texts = {(await p.wait()).text for p in pending}
    assert (counter.runs, len(texts)) == (1, 1)

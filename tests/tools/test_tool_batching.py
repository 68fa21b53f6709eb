"""Calls of many agents for one key each, answered together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.tools.tool_calls import call, settle

from batch_agent import BatchAgent, SpecError, Tool, ToolContext, ToolError
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.tools import ToolOutcome, ToolPool
from batch_agent.tools.base import GATHERING

OpenPool = Callable[..., ToolPool]


class Shelf:
    """What a batch function asks: notes what it is asked, and takes ``seconds`` for it."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.asked: list[list[int]] = []
        self.cancelled = 0

    async def __call__(self, keys: list[int]) -> dict[int, object]:
        self.asked.append(keys)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if -1 in keys:
            raise ValueError(f"there are no negative ones among {len(keys)}")
        return {key: {"id": key} for key in keys if key < 1000}

    def tool(self, **options: Any) -> Tool:
        @Tool.batchable(key_arg="id", batch=self.__call__, **options)
        def get(id: int) -> dict[str, int]:
            """Get a thing."""
            return {"id": id}

        return get


async def outcomes(pool: ToolPool, *keys: int) -> list[ToolOutcome]:
    pending = [pool.start(call("get", id=key)) for key in keys]
    return [await one.wait() for one in pending]


@virtual_clock
async def test_two_hundred_agents_ask_in_a_handful_of_look_ups() -> None:
    shelf = Shelf()

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("get", {"id": int(request.text)}), latency=0.001 * (int(request.text) % 7))
        return Say(request.text)

    async with BatchAgent.open(
        task="{input}",
        inputs=[str(n) for n in range(200)],
        tools=[shelf.tool()],
        backend=ScriptedBackend(script),
        max_inflight=None,
    ) as run:
        results = [result async for result in run.results()]
        statistics, [tool] = run.statistics(), run.tool_statistics().values()
    assert len(shelf.asked) <= 3 and sorted(key for keys in shelf.asked for key in keys) == list(range(200))
    for result in results:
        [told] = [message.content for message in result.messages if message.role == "tool"]
        assert told == f'{{"id":{result.input}}}'
    assert (tool.calls, tool.runs, tool.shared) == (200, len(shelf.asked), 200 - len(shelf.asked))
    assert (statistics.tool_runs, statistics.tool_shared) == (tool.runs, tool.shared)


@virtual_clock
async def test_keys_gather_for_a_moment_and_then_until_the_batch_before_is_back() -> None:
    shelf = Shelf(seconds=1.0)
    async with ToolPool([shelf.tool()], timeout=30, spawn=asyncio.get_running_loop().create_task) as pool:
        pending = []
        for key in range(10):
            pending.append(pool.start(call("get", id=key)))
            await asyncio.sleep(GATHERING / 4)
        assert all([(await one.wait()).ok for one in pending])
    assert len(shelf.asked) == 2 and shelf.asked[0] + shelf.asked[1] == list(range(10))


@virtual_clock
async def test_more_look_ups_at_once_where_the_tool_says_so() -> None:
    shelf, loop = Shelf(seconds=1.0), asyncio.get_running_loop()
    async with ToolPool([shelf.tool(max_concurrent=2, max_batch=3)], timeout=30, spawn=loop.create_task) as pool:
        await outcomes(pool, *range(6))
        assert shelf.asked == [[0, 1, 2], [3, 4, 5]] and loop.time() < 2


@virtual_clock
async def test_the_rate_counts_look_ups_and_not_keys() -> None:
    shelf, loop = Shelf(seconds=0), asyncio.get_running_loop()
    async with ToolPool([shelf.tool(rate_limit="1/min")], timeout=30, spawn=loop.create_task) as pool:
        first = [pool.start(call("get", id=key)) for key in range(3)]
        assert [(await one.wait()).ok for one in first] == [True] * 3
        assert pool.waiting == 0
        later = [pool.start(call("get", id=key)) for key in range(3, 9)]
        await asyncio.sleep(1)
        assert pool.waiting == 6
        assert [(await one.wait()).ok for one in later] == [True] * 6
    assert shelf.asked == [[0, 1, 2], [3, 4, 5, 6, 7, 8]] and loop.time() >= 60


async def test_a_key_that_is_not_there_is_reported_as_such(open_pool: OpenPool) -> None:
    async with open_pool(Shelf(0).tool()) as pool:
        there, missing = await outcomes(pool, 1, 5000)
        assert there.text == '{"id":1}'
        assert missing.ok and missing.text == "Nothing was found for id 5000."


async def test_identical_keys_share_a_call_and_a_cacheable_one_is_kept(open_pool: OpenPool) -> None:
    shelf = Shelf(0)
    async with open_pool(shelf.tool(cacheable=True)) as pool:
        first = await outcomes(pool, 1, 2, 1)
        assert [one.source for one in first] == ["run", "shared", "shared"]
        assert [one.source for one in await outcomes(pool, 2, 3)] == ["cache", "run"]
    assert shelf.asked == [[1, 2], [3]]


async def test_results_are_cut_to_size_each_by_itself(open_pool: OpenPool) -> None:
    @Tool.batchable(key_arg="id", batch=lambda keys: {key: "word " * 10 * key for key in keys}, max_tokens=20)
    def get(id: int) -> str:
        return ""

    async with open_pool(get) as pool:
        short, long = await outcomes(pool, 1, 100)
        assert short.text == "word " * 10 and "[cut: this is the beginning" in long.text


@virtual_clock
async def test_one_bad_key_fails_alone() -> None:
    shelf, loop = Shelf(0), asyncio.get_running_loop()
    async with ToolPool([shelf.tool()], timeout=30, spawn=loop.create_task) as pool:
        found = await outcomes(pool, *range(50), -1, *range(50, 100))
        bad = found.pop(50)
        assert all(one.ok for one in found)
        assert bad.text == "Error: get failed: ValueError: there are no negative ones among 1"
        assert len(shelf.asked) < 20
        assert pool.statistics()["get"].failures == 1


async def test_an_error_that_no_key_is_to_blame_for_is_not_looked_for_key_by_key(open_pool: OpenPool) -> None:
    asked = 0

    def refuse(keys: list[int]) -> dict[int, str]:
        nonlocal asked
        asked += 1
        raise ConnectionError("the server is gone")

    @Tool.batchable(key_arg="id", batch=refuse)
    def get(id: int) -> str:
        return ""

    async with open_pool(get) as pool:
        found = await outcomes(pool, *range(256))
    assert {one.text for one in found} == {"Error: get failed: ConnectionError: the server is gone"}
    assert asked <= 10


async def test_an_exception_in_the_place_of_a_result_is_that_keys_alone(open_pool: OpenPool) -> None:
    answers = {1: "one", 2: ToolError("2 is secret"), 3: KeyError("x")}

    @Tool.batchable(key_arg="id", batch=lambda keys: answers)
    def get(id: int) -> str:
        return ""

    async with open_pool(get) as pool:
        texts = [one.text for one in await outcomes(pool, 1, 2, 3)]
        assert texts == ["one", "Error: 2 is secret", "Error: KeyError: 'x'"]


async def test_a_batch_function_that_returns_no_mapping_says_so(open_pool: OpenPool) -> None:
    @Tool.batchable(key_arg="id", batch=lambda keys: ["a"])
    def get(id: int) -> str:
        return ""

    async with open_pool(get) as pool:
        [only] = await outcomes(pool, 1)
        assert not only.ok and "returned list, not a mapping from key to result" in only.text


@pytest.mark.parametrize(
    ("given", "found", "texts"),
    [
        ([1, 2], {"1": "one", "2": "two"}, ["one", "two"]),  # keys of JSON are texts
        (["AB", "cd"], {"ab": "x", "cd  ": "y"}, ["x", "y"]),  # as some databases compare
        (["AB", "ab"], {"ab": "x"}, ["Nothing was found for id AB.", "x"]),  # another key's is not to be had
    ],
)
async def test_a_key_that_comes_back_in_another_form_is_known(
    open_pool: OpenPool, given: Sequence[object], found: dict[object, str], texts: list[str]
) -> None:
    @Tool.batchable(key_arg="id", batch=lambda keys: found)
    def get(id: int | str) -> str:
        return ""

    async with open_pool(get) as pool:
        pending = [pool.start(call("get", id=key)) for key in given]
        assert [(await one.wait()).text for one in pending] == texts


@virtual_clock
async def test_a_look_up_that_takes_too_long_fails_its_batch_and_not_the_next() -> None:
    shelf, loop = Shelf(seconds=10), asyncio.get_running_loop()
    async with ToolPool([shelf.tool(timeout=2)], timeout=None, spawn=loop.create_task) as pool:
        slow = [pool.start(call("get", id=key)) for key in range(3)]
        await asyncio.sleep(1)
        shelf.seconds = 0.5
        next_ones = [pool.start(call("get", id=key)) for key in range(3, 5)]
        assert {(await one.wait()).text for one in slow} == {"Error: get timed out: it ran longer than 2 s"}
        assert [(await one.wait()).ok for one in next_ones] == [True, True]
        assert pool.statistics()["get"].failures == 1


@virtual_clock
async def test_who_leaves_a_batch_leaves_the_others_alone_and_the_last_one_cancels_it() -> None:
    shelf, loop = Shelf(seconds=10), asyncio.get_running_loop()
    async with ToolPool([shelf.tool()], timeout=None, spawn=loop.create_task) as pool:
        first, second = pool.start(call("get", id=1)), pool.start(call("get", id=2))
        await asyncio.sleep(1)
        first.abandon()
        await asyncio.sleep(1)
        assert shelf.cancelled == 0
        again = pool.start(call("get", id=1))  # which the batch under way no longer answers
        assert (await second.wait()).ok
        assert (await again.wait()).ok and shelf.asked == [[1, 2], [1]]
        last = pool.start(call("get", id=3))
        await asyncio.sleep(1)
        last.abandon()
        await settle()
        assert shelf.cancelled == 1
        assert [one.ok for one in await outcomes(pool, 3)] == [True]


@virtual_clock
async def test_a_batch_that_everybody_left_while_it_gathered_is_never_sent() -> None:
    shelf, loop = Shelf(), asyncio.get_running_loop()
    async with ToolPool([shelf.tool()], timeout=None, spawn=loop.create_task) as pool:
        for pending in [pool.start(call("get", id=key)) for key in range(5)]:
            await settle()
            pending.abandon()
        await asyncio.sleep(1)
        assert shelf.asked == []
        assert [one.ok for one in await outcomes(pool, 7)] == [True]


@virtual_clock
async def test_closing_ends_batches_under_way() -> None:
    shelf, loop = Shelf(seconds=100), asyncio.get_running_loop()
    async with ToolPool([shelf.tool()], timeout=None, spawn=loop.create_task) as pool:
        pending = [pool.start(call("get", id=key)) for key in range(3)]
        await asyncio.sleep(1)
    assert {(await one.wait()).text for one in pending} == {"Error: the call was cancelled"}
    assert shelf.cancelled == 1


async def test_a_plain_batch_function_runs_in_a_thread(open_pool: OpenPool) -> None:
    names = set()

    def batch(keys: list[int]) -> dict[int, int]:
        names.add(threading.current_thread().name)
        return dict(zip(keys, keys, strict=True))

    @Tool.batchable(key_arg="id", batch=batch)
    def get(id: int) -> str:
        return ""

    async with open_pool(get) as pool:
        assert [one.text for one in await outcomes(pool, 1, 2)] == ["1", "2"]
    assert all(name.startswith("batch-agent-tool") for name in names)


def test_a_batchable_tool_is_still_its_function() -> None:
    assert Shelf().tool()(id=3) == {"id": 3}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs batch_query and connection, or batch"),
        ({"batch": dict, "connection": object()}, "not both"),
        ({"batch": 5}, "batch must be a function"),
        ({"batch_query": "SELECT 1", "connection": print}, r"batch_query has no \{ids\}"),
        ({"batch_query": "SELECT {ids}", "connection": 5}, "connection must be a database connection"),
        ({"batch": dict, "max_batch": 0}, "max_batch is 0"),
    ],
)
def test_what_batchable_needs_is_checked_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Tool.batchable(key_arg="id", **options)


def no_such(key: int) -> str:
    return ""


def with_more(id: int, more: int) -> str:
    return ""


def with_default(id: int = 1) -> str:
    return ""


def with_context(id: int, context: ToolContext) -> str:
    return ""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_such, "key_arg is 'id', but its parameters are: key"),
        *((function, "this must be its only parameter") for function in (with_more, with_default, with_context)),
    ],
)
def test_a_key_is_all_that_a_batchable_tool_takes(function: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Tool.batchable(key_arg="id", batch=dict)(function)

"""One request goes ahead of the others where a long prefix is shared, and nobody waits for it in vain."""

from __future__ import annotations

import asyncio
from typing import Any

from batch_agent import BatchAgent
from batch_agent.agent import prefix_leader as lead
from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import Capabilities
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedBackend, virtual_clock

LEADING = Capabilities(prefix_leader=True)
ROWS = list("abcdefghijklmnop")
LONG = "You are a careful clerk. " * (4 * lead.LEAST_TOKENS // 20)


class Timed(ScriptedBackend):
    """Keeps when each request came."""

    def __init__(self, script: Any, capabilities: Capabilities = LEADING) -> None:
        super().__init__(script, capabilities=capabilities)
        self.times: list[float] = []

    async def infer(self, request: Any, on_tool_call: Any = None) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        return await super().infer(request, on_tool_call)


def slowly(request: Request) -> Say:
    """First token after a second, ten more for the whole answer."""
    return Say("one two three four five", latency=1, chunk_delay=1)


async def run(backend: ScriptedBackend, **options: Any) -> list[Any]:
    known: dict[str, Any] = {"task": "{input}", "inputs": ROWS, "system_prompt": LONG, "max_retries": 0}
    return await BatchAgent.run(backend=backend, **{**known, **options})


@virtual_clock
async def test_the_others_go_when_the_first_answer_begins_and_not_when_it_ends() -> None:
    backend = Timed(slowly)
    results = await run(backend)
    assert all(result.ok for result in results)
    began = backend.times[0]
    assert [time - began for time in backend.times[1:]] == [1.0] * 15
    assert [request.streamed for request in backend.requests] == [True] + [False] * 15


@virtual_clock
async def test_nothing_is_sent_that_is_not_an_agents_own_request() -> None:
    backend = Timed(slowly)
    await run(backend)
    assert sorted(request.text for request in backend.requests) == ROWS


@virtual_clock
async def test_a_leader_that_fails_lets_the_others_go_at_once() -> None:
    backend = Timed(lambda request: Fail(400, latency=1) if request.text == "a" else Say("ok"))
    results = await run(backend)
    assert [result.ok for result in results] == [False] + [True] * 15
    assert {time - backend.times[0] for time in backend.times[1:]} == {1.0}


@virtual_clock
async def test_a_leader_that_never_answers_holds_the_others_only_for_a_while() -> None:
    backend = Timed(lambda request: Hang() if request.text == "a" else Say("ok"))
    results = await run(backend, timeout_per_turn=1000)
    assert [result.ok for result in results] == [False] + [True] * 15
    assert all(time - backend.times[0] <= lead.LONGEST for time in backend.times[1:16])


@virtual_clock
async def test_a_lost_leader_holds_the_others_no_longer_than_the_slowest_answer_so_far() -> None:
    for usual, held in ((0.4, 0.4), (60.0, lead.LONGEST), (0.0, lead.LONGEST)):
        began = asyncio.get_running_loop().time()
        await lead.PrefixLeader(100_000, usual).wait()
        assert asyncio.get_running_loop().time() - began == held


@virtual_clock
async def test_a_short_prefix_few_rows_or_a_backend_that_shares_by_itself_need_no_leader() -> None:
    for options in ({"system_prompt": "Be brief."}, {"inputs": ROWS[:15]}):
        backend = Timed(slowly)
        await run(backend, **options)
        assert set(backend.times) == {backend.times[0]}
        assert not any(request.streamed for request in backend.requests)
    backend = Timed(slowly, Capabilities())
    await run(backend)
    assert set(backend.times) == {backend.times[0]}


@virtual_clock
async def test_a_worker_of_the_users_own_is_not_waited_for() -> None:
    backend = Timed(lambda request: Say("ok"))

    async def work(row: object, ctx: Any) -> object:
        await asyncio.sleep(5)
        return (await ctx.ask()).text

    spec = BatchSpec(task="{input}", inputs=ROWS, system_prompt=LONG, backend=backend, model="m")
    async with Run(prepare(spec), worker=work) as running:
        assert len([result async for result in running.results()]) == 16
    assert set(backend.times) == {backend.times[0]}


@virtual_clock
async def test_leaving_the_run_while_the_leader_is_out_leaves_nothing_behind() -> None:
    backend = Timed(lambda request: Hang())
    async with BatchAgent.open(task="{input}", inputs=ROWS, system_prompt=LONG, backend=backend):
        await asyncio.sleep(0.5)
    assert (len(backend.requests), backend.inflight) == (1, 0)

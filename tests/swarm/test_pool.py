"""AgentPool on real sockets: the wire, the order, sub-pools, bounds, and every fault as a Response."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.swarm.agents import Agent, Asked, CountedSockets, agents, dead, hang

from batch_agent.errors import SpecError
from batch_agent.swarm import AgentEndpoint, AgentPool, Response, VLLMPool
from batch_agent.swarm.patterns.broadcast import broadcast_and_reduce
from batch_agent.swarm.patterns.pipeline import Stage, fan_out_fan_in, run_pipeline
from batch_agent.swarm.patterns.tree_reduce import tree_reduce
from batch_agent.testing import virtual_clock


def test_a_response_has_the_known_fields_first() -> None:
    names = [each.name for each in fields(Response)]
    assert names == [
        *("success", "text", "error", "agent_index"),
        *("usage", "finish_reason", "latency", "attempts", "parsed"),
    ]
    assert Response(True, "x") == Response(success=True, text="x", error=None, agent_index=-1)


def test_a_pool_has_the_known_arguments_and_defaults() -> None:
    parameters = inspect.signature(AgentPool).parameters
    known = {name: each.default for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert known == {
        "endpoints": inspect.Parameter.empty,
        "concurrency": 512,
        "connector_limit": 1024,
        "timeout": 120.0,
    }


async def test_a_prompt_is_posted_to_generate_and_nothing_else_is_in_the_body() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await pool.post(0, "hello", max_tokens=5)
    assert [(asked.path, asked.body) for asked in agent.asked] == [("/generate", {"prompt": "hello"})]
    assert (response.success, response.text, response.error, response.agent_index) == (True, "<hello>", None, 0)
    assert response.attempts == 1
    assert response.latency is not None and response.latency > 0


@pytest.mark.parametrize("field", ["response", "text"])
async def test_the_answer_is_read_from_either_field(field: str) -> None:
    async with agents(Agent(lambda asked: {field: "yes"})) as endpoints, AgentPool(endpoints) as pool:
        assert (await pool.post(0, "?")).text == "yes"


async def test_prompt_i_goes_to_agent_i_mod_size_and_answers_come_in_order() -> None:
    async def slow_for_the_first(asked: Asked) -> None:
        await asyncio.sleep(0.05 if asked.body["prompt"] == "0" else 0)

    given = [Agent(slow_for_the_first), Agent(), Agent()]  # type: ignore[arg-type]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.send_all([str(i) for i in range(10)])
        batched = await pool.send_all_batched(["a", "b"])
    assert [response.text for response in responses] == [f"<{i}>" for i in range(10)]
    assert [response.agent_index for response in responses] == [i % 3 for i in range(10)]
    assert [response.index for response in responses] == list(range(10))
    assert [sorted(agent.prompts[:4]) for agent in given[1:]] == [["1", "4", "7", "b"], ["2", "5", "8"]]
    assert [response.text for response in batched] == ["<a>", "<b>"]


async def test_a_broadcast_asks_each_agent_once() -> None:
    given = [Agent(name=name) for name in "abc"]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.broadcast_prompt("hi")
    assert [response.text for response in responses] == ["a<hi>", "b<hi>", "c<hi>"]
    assert [agent.prompts for agent in given] == [["hi"]] * 3


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_a_status_is_a_failed_response_and_is_not_sent_again(status: int) -> None:
    agent = Agent(lambda asked: web.json_response({"text": "not this"}, status=status))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        (response,) = await pool.send_all(["x"])
    assert not response.success
    assert (response.text, len(agent.asked)) == ("", 1)
    assert str(status) in (response.error or "")


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"response": 5}', b'{"error": "overloaded"}'])
async def test_an_answer_that_is_none_is_a_failed_response(body: bytes) -> None:
    agent = Agent(lambda asked: web.Response(body=body, content_type="application/json"))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await pool.post(0, "x")
    assert not response.success
    assert response.error


@virtual_clock
async def test_a_refused_connection_fails_by_itself_while_others_answer() -> None:
    told: list[int] = []
    async with agents(Agent()) as endpoints, AgentPool([*endpoints, dead()], concurrency=1) as pool:
        responses = await pool.send_all(["0", "1", "2", "3"], on_result=lambda response: told.append(response.index))
    assert [response.success for response in responses] == [True, False, True, False]
    assert told[:2] == [0, 2]  # retries hold no slot
    assert all("refused" in (response.error or "") for response in responses[1::2])


@virtual_clock
async def test_a_connection_that_breaks_is_tried_again() -> None:
    breaks = iter([True, True, False])

    def answer(asked: Asked) -> None:
        if next(breaks):
            raise web.HTTPServiceUnavailable

    agent = Agent(answer)  # type: ignore[arg-type]
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await pool.post(0, "x")
    assert (response.success, response.attempts, len(agent.asked)) == (True, 3, 3)


@virtual_clock
@pytest.mark.parametrize("headers", [{}, {"Retry-After": "2"}])
async def test_a_server_that_stays_overloaded_gets_five_requests_of_a_prompt(headers: dict[str, str]) -> None:
    agent = Agent(lambda asked: web.json_response({}, status=503, headers=headers))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await pool.post(0, "x")
    assert (response.success, response.attempts, len(agent.asked)) == (False, 5, 5)
    assert "503" in (response.error or "")


async def test_a_server_that_asks_for_a_long_pause_gets_one_request() -> None:
    agent = Agent(lambda asked: web.json_response({}, status=429, headers={"Retry-After": "60"}))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await pool.post(0, "x")
    assert (response.success, len(agent.asked)) == (False, 1)


@virtual_clock
async def test_a_prompt_that_breaks_every_connection_gets_five_requests_and_others_are_answered() -> None:
    async def crash(asked: Asked) -> None:
        if asked.body["prompt"] == "bad":
            asked.close()

    agent = Agent(crash)  # type: ignore[arg-type]
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        bad, good = await pool.send_all(["bad", "good"])
    assert (bad.success, bad.attempts, good.success) == (False, 5, True)
    assert agent.prompts.count("bad") in range(5, 11)  # the client may send each attempt twice


async def test_a_hung_server_costs_its_time_limit_and_no_slot_of_the_others() -> None:
    hung, well, told = Agent(hang), Agent(), list[int]()
    async with agents(hung, well) as endpoints, AgentPool(endpoints, concurrency=4, timeout=0.2) as pool:
        responses = await pool.send_all([str(i) for i in range(40)], on_result=lambda each: told.append(each.index))
    assert [response.success for response in responses] == [bool(i % 2) for i in range(40)]
    assert told[:20] == [i for i in range(40) if i % 2]
    assert len(hung.asked) <= 4
    assert "no complete answer in 0.2 s" in (responses[0].error or "")
    assert "not sent" in (responses[38].error or "")


async def test_concurrency_bounds_the_whole_tree_of_pools() -> None:
    async def wait(asked: Asked) -> None:
        await asyncio.sleep(0.01)

    agent = Agent(wait)  # type: ignore[arg-type]
    async with agents(agent) as endpoints, AgentPool(endpoints * 4, concurrency=3) as pool:
        await asyncio.gather(
            pool.send_all(["a"] * 8), pool.slice(0, 2).send_all(["b"] * 8), pool.select([3]).broadcast_prompt("c")
        )
    assert agent.peak == 3


@pytest.mark.parametrize(("concurrency", "limit"), [(64, 6), (3, 6)])
async def test_connector_limit_bounds_the_open_sockets_of_the_whole_tree_of_pools(concurrency: int, limit: int) -> None:
    sockets = CountedSockets()
    async with sockets.serve(8) as endpoints, VLLMPool(endpoints, "m", 1, **bounds(concurrency, limit)) as pool:
        for _ in range(2):
            responses = await asyncio.gather(
                pool.send_all(["a"] * 120), pool.slice(0, 2).send_all(["b"] * 60), pool.select([7]).send_all(["c"] * 30)
            )
            assert all(response.success for some in responses for response in some)
        balanced = await pool.send_all(["d"] * 60, dispatch="balanced")
        assert all(response.success for response in balanced)
    assert min(concurrency, limit) <= sockets.peak <= limit


def bounds(concurrency: int, limit: int) -> Any:
    return {"concurrency": concurrency, "connector_limit": limit}


async def test_sub_pools_count_from_0_and_share_the_connections_of_their_parent() -> None:
    given = [Agent(name=name) for name in "abcd"]
    async with agents(*given) as endpoints:
        tagged = [
            AgentEndpoint(endpoint.host, endpoint.port, {"role": "critic" if place % 2 else "worker"})
            for place, endpoint in enumerate(endpoints)
        ]
        async with AgentPool(tagged, timeout=7.0) as pool:
            critics = pool.by_tag("role", "critic")
            async with critics:
                assert [r.text for r in await critics.broadcast_prompt("x")] == ["b<x>", "d<x>"]
            assert [r.agent_index for r in await critics.send_all(["x", "y", "z"])] == [0, 1, 0]
            assert (critics.size, critics.timeout, critics.endpoints) == (2, 7.0, [tagged[1], tagged[3]])
            assert pool.slice(1, 3).endpoints == tagged[1:3]
            assert pool.select([3, 0]).endpoints == [tagged[3], tagged[0]]
            assert (await pool.select([3, 0]).post(0, "x")).text == "d<x>"
            assert sorted(pool.sample(9).endpoints, key=tagged.index) == tagged
            assert pool.sample(2).size == 2
            assert pool.by_tag("role", "none").size == 0
            assert type(pool.slice(0, 1)) is AgentPool


async def test_a_pool_needs_not_be_entered_and_can_be_used_after_it_was_closed() -> None:
    async with agents(Agent()) as endpoints:
        pool = AgentPool([(endpoints[0].host, endpoints[0].port)])
        assert (await pool.post(0, "a")).success
        await pool.close()
        await pool.close()
        assert (await pool.post(0, "b")).success
        await pool.close()


async def test_what_a_pool_has_not_answered_when_it_is_closed_is_a_failed_response() -> None:
    agent = Agent(hang)
    async with agents(agent) as endpoints:
        pool = AgentPool(endpoints, concurrency=1)
        asking = asyncio.create_task(pool.send_all(["a", "b"]))
        while not agent.asked:
            await asyncio.sleep(0)
        await pool.close()
        async with asyncio.timeout(5):
            first, second = await asking
    assert (first.success, second.success) == (False, False)
    assert "the pool was closed" in (second.error or "") and first.error


@pytest.mark.parametrize("pool", [AgentPool([]), VLLMPool([]), AgentPool([dead()]).by_tag("role", "none")])
async def test_a_pool_without_agents_answers_with_a_failed_response_for_each_prompt(pool: AgentPool) -> None:
    async with pool:
        one = await pool.post(0, "x")
        several = [
            await pool.send_all(["x", "y"]),
            await pool.send_all_batched(["x", "y"]),
            await pool.send_all(["x", "y"], dispatch="balanced", deadline=5.0),
        ]
        if isinstance(pool, VLLMPool):
            several.append(await pool.post_batch(0, ["x", "y"]))
        assert await pool.broadcast_prompt("x") == []
        summed = await broadcast_and_reduce(pool, "x", "{responses}")
        reduced = await tree_reduce(pool, "{item}", "{responses}", items=["x", "y"])
    assert [len(responses) for responses in several] == [2] * len(several)
    for response in [one, *(each for responses in several for each in responses)]:
        assert not response.success
        assert "the pool has no agents" in (response.error or "")
    assert (summed.success, reduced.success) == (False, False)


async def test_a_text_in_place_of_a_list_is_an_error() -> None:
    async with AgentPool([dead()]) as pool:
        with pytest.raises(SpecError, match="prompts is one text"):
            await pool.send_all("hello")


async def test_a_prompt_that_is_no_text_is_an_error_that_names_it_and_nothing_is_sent() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        with pytest.raises(SpecError, match=r"prompts\[1\] is of type NoneType: give texts"):
            await pool.send_all(["a", None])  # type: ignore[list-item]
    assert agent.asked == []


async def test_prompts_may_be_a_column_of_a_table() -> None:
    async with agents(Agent()) as endpoints, AgentPool(endpoints) as pool:
        column = np.array(["a", "b"])
        assert [response.text for response in await pool.send_all(column)] == ["<a>", "<b>"]  # type: ignore[arg-type]


async def test_an_agent_that_is_not_there_is_a_failed_response() -> None:
    async with AgentPool([dead()]) as pool:
        response = await pool.post(5, "x")
        assert (response.success, response.agent_index) == (False, 5)
        assert "there is no agent 5: the pool has 1" in (response.error or "")
        with pytest.raises(SpecError, match="there is no agent 2"):
            pool.select([0, 2])


async def test_the_proxies_of_the_environment_are_not_for_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{dead().port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with agents(Agent()) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.send_all(["x"] * 4)
    assert all(response.success for response in responses)


async def test_a_subclass_that_posts_in_its_own_way_is_asked_through_it() -> None:
    class Echo(AgentPool):
        async def post(self, agent_index: int, prompt: str, max_tokens: int | None = None) -> Response:  # type: ignore[override]
            return Response(True, f"{prompt}!", agent_index=agent_index)

    pool = Echo([dead(), dead()])
    assert [response.text for response in await pool.send_all(["a", "b", "c"])] == ["a!", "b!", "c!"]
    assert [response.agent_index for response in await pool.broadcast_prompt("a")] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"connector_limit": 0}, "connector_limit is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"dispatch": "random"}, "round_robin or balanced"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"n": 0}, "n is 0"),
        ({"deadline": 0}, "deadline is 0"),
        ({"deadline": "5"}, "deadline is '5': give seconds above 0"),
        ({"concurrency": "8"}, "concurrency is '8': give a whole number"),
        ({"connector_limit": 2.5}, "connector_limit is 2.5"),
        ({"timeout": "5"}, "timeout is '5'"),
        ({"n": "2"}, "n is '2'"),
        ({"inflight": True, "dispatch": "balanced"}, "inflight is True"),
        ({"hedge": "1", "dispatch": "balanced"}, "hedge is '1'"),
        ({"extra_body": "x"}, "extra_body is 'x'"),
        ({"extra_body": {"prompt": "x"}}, "extra_body cannot set 'prompt'"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_an_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        AgentPool([("host", 1)], **arguments)  # type: ignore[arg-type]


async def test_a_number_of_the_wrong_type_is_an_error_of_the_call_too() -> None:
    async with AgentPool([dead()]) as pool:
        calls = [
            lambda: pool.post("0", "x"),  # type: ignore[arg-type]
            lambda: pool.send_all(["x"], deadline="5"),  # type: ignore[arg-type]
            lambda: broadcast_and_reduce(pool, "x", "{responses}", deadline="5"),  # type: ignore[arg-type]
            lambda: tree_reduce(pool, "x", "{responses}", fanin="5"),  # type: ignore[arg-type]
            lambda: fan_out_fan_in(pool, "x", "{responses}", n_workers="5"),  # type: ignore[arg-type]
            lambda: run_pipeline(pool, [Stage("one", "{input}", "5")], "x"),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(SpecError, match="give"):
                await call()
        with pytest.raises(SpecError, match="give a whole number"):
            pool.sample("3")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [5, ("host",), ("", 8000), ("host", 0), ("host", 99999), AgentEndpoint("host", -4)])
def test_an_endpoint_that_is_none_is_an_error_before_anything_is_sent(given: object) -> None:
    with pytest.raises(SpecError, match="is not an endpoint"):
        AgentPool([("other", 8000), given])  # type: ignore[list-item]

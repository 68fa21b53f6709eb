"""VLLMPool on real sockets: bodies, token limits, lists, and what becomes of a list with something wrong in it."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from aiohttp import web
from tests.swarm.agents import Agent, Asked, Body, agents, answer, dead, hang, refuse, silent

from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.swarm import AgentEndpoint, VLLMPool
from batch_agent.testing import virtual_clock

MODEL = "openai/gpt-oss-120b"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_TOKENS", "MAX_TOKENS_AGGREGATION", "MODEL_MAX_CONTEXT", "TIMEOUT_PER_SEQUENCE"):
        monkeypatch.delenv(f"AURORA_SWARM_{name}", raising=False)


def test_a_pool_has_the_known_arguments_in_their_order_and_their_defaults() -> None:
    parameters = inspect.signature(VLLMPool).parameters
    known = {name: each.default for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert list(known.items()) == [
        ("endpoints", inspect.Parameter.empty),
        ("model", MODEL),
        ("max_tokens", None),
        ("max_tokens_aggregation", None),
        ("model_max_context", None),
        ("buffer", 512),
        ("use_batch", True),
        ("concurrency", 512),
        ("connector_limit", 1024),
        ("timeout", 300.0),
        ("batch_concurrency", 256),
        ("timeout_per_sequence", None),
        ("batch_timeout_cap", None),
    ]


async def test_a_post_is_one_chat_request_with_nothing_else_in_it() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        response = await pool.post(0, "hello")
    (asked,) = agent.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 512}
    assert list(asked.body) == ["model", "messages", "max_tokens"]
    assert (response.success, response.text, response.agent_index) == (True, "<hello>", 0)
    assert (response.usage, response.finish_reason, response.attempts) == (Usage(10, 0, 5), "stop", 1)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "said", "reasoning_content": "thought"}, "said"),
        ({"content": None, "reasoning_content": "thought"}, "thought"),
        ({"content": "", "reasoning": "thought"}, "thought"),
        ({"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}, "in parts"),
        ({"content": None}, ""),
        ({"content": {"odd": 1}, "reasoning": "thought"}, "thought"),
        ({}, ""),
    ],
)
async def test_the_text_is_what_was_said_else_what_was_thought(message: Body, text: str) -> None:
    agent = Agent(lambda asked: {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        response = await pool.post(0, "?")
    assert (response.success, response.text, response.usage) == (True, text, None)


async def test_an_answer_that_was_cut_says_so() -> None:
    cut = {"choices": [{"index": 0, "message": {"content": "I thi"}, "finish_reason": "length"}]}
    async with agents(Agent(lambda asked: cut)) as endpoints, VLLMPool(endpoints) as pool:
        response = await pool.post(0, "?")
    assert (response.success, response.text, response.finish_reason) == (True, "I thi", "length")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "has no choices"),
        ({"choices": []}, "has no choices"),
        ({"choices": [{"index": 0}]}, "has no text"),
        ({"choices": "none"}, "has no choices"),
        ({"error": {"message": "no such luck"}}, "no such luck"),
        ({"choices": [{"index": 0, "message": {"content": "ha"}, "finish_reason": "abort"}]}, "aborted the answer"),
    ],
)
async def test_an_answer_without_a_choice_is_a_failed_response(body: Body, why: str) -> None:
    async with agents(Agent(lambda asked: body)) as endpoints, VLLMPool(endpoints) as pool:
        response = await pool.post(0, "?")
    assert not response.success
    assert why in (response.error or "")


# Token limits


async def tokens_for(prompt: str, context: int | None = 8192, ask: Any = None, **arguments: Any) -> int:
    agent = Agent(context=context)
    async with agents(agent) as endpoints, VLLMPool(endpoints, **arguments) as pool:
        await (pool.post(0, prompt) if ask is None else ask(pool))
    tokens: int = agent.asked[-1].body["max_tokens"]
    return tokens


async def test_the_token_limit_is_what_the_context_leaves_and_at_most_max_tokens() -> None:
    assert await tokens_for("x" * 40) == 512
    assert await tokens_for("x" * 40, max_tokens=9000) == 8192 - 10 - 512
    assert await tokens_for("x" * 40, max_tokens=9000, buffer=100) == 8192 - 10 - 100
    assert await tokens_for("x" * 4 * 9000) == 128
    assert await tokens_for("x" * 40, ask=lambda pool: pool.post(0, "x", 7)) == 7
    assert await tokens_for("x" * 40, model_max_context=700) == 700 - 10 - 512
    assert await tokens_for("x" * 40, context=None, max_tokens=500_000) == 131_072 - 10 - 512


async def test_arguments_come_before_the_environment_and_that_before_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AURORA_SWARM_MAX_TOKENS", "300")
    pool = VLLMPool([dead()])
    assert (pool.answer_tokens, pool.aggregation_tokens) == (300, 600)
    assert await tokens_for("x") == 300
    assert await tokens_for("x", max_tokens=200) == 200
    monkeypatch.setenv("AURORA_SWARM_MAX_TOKENS_AGGREGATION", "700")
    monkeypatch.setenv("AURORA_SWARM_MODEL_MAX_CONTEXT", "760")
    assert VLLMPool([dead()]).aggregation_tokens == 700
    assert VLLMPool([dead()], max_tokens_aggregation=900).aggregation_tokens == 900
    assert await tokens_for("x" * 40) == 760 - 10 - 512
    assert await tokens_for("x" * 40, model_max_context=770) == 770 - 10 - 512


@pytest.mark.parametrize("value", ["many", "-1", "0", "1.5"])
def test_a_variable_that_is_no_number_is_an_error_that_names_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AURORA_SWARM_MAX_TOKENS", value)
    with pytest.raises(SpecError, match=r"(?i)max_tokens"):
        VLLMPool([dead()])


async def test_each_server_is_asked_for_its_context_once_and_has_its_own() -> None:
    small, large = Agent(context=700), Agent(context=4000)
    async with agents(small, large) as endpoints, VLLMPool(endpoints, max_tokens=3500) as pool:
        await pool.send_all(["x" * 40] * 20)
        await pool.send_all_batched(["x" * 40] * 20)
        await pool.slice(0, 1).post(0, "x")
    assert (small.model_questions, large.model_questions) == (1, 1)
    assert {asked.body["max_tokens"] for asked in small.asked[:-1]} == {700 - 10 - 512}
    assert {asked.body["max_tokens"] for asked in large.asked} == {4000 - 10 - 512}


async def test_a_server_that_keeps_its_context_waiting_is_asked_once_and_answers_all_the_same() -> None:
    agent = Agent()
    agent.tells_models.clear()
    async with agents(agent) as endpoints, VLLMPool(endpoints, timeout=0.4) as pool:
        assert [(await pool.post(0, "a")).text, (await pool.post(0, "b")).text] == ["<a>", "<b>"]
    assert agent.model_questions == 1


async def test_a_caller_that_leaves_while_it_asks_for_a_context_leaves_the_question_to_the_next() -> None:
    agent = Agent(context=700)
    agent.tells_models.clear()
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        first, second = [asyncio.create_task(pool.post(0, "x" * 40)) for _ in range(2)]
        while not agent.model_questions:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        agent.tells_models.set()
        assert (await second).success and first.cancelled()
    assert agent.model_questions == 2
    assert [asked.body["max_tokens"] for asked in agent.asked] == [700 - 10 - 512]


@virtual_clock
async def test_an_unreachable_server_is_asked_for_its_context_once_by_all_that_wait_and_again_by_later_ones() -> None:
    agent = Agent(context=700)
    await agent.start()
    await agent.stop()
    async with VLLMPool([agent.endpoint]) as pool:
        assert not any(response.success for response in await pool.send_all(["x" * 40] * 20))
        assert pool._servers[0].context_asked == 1
        await agent.start()
        assert (await pool.post(0, "x" * 40)).success
        await agent.stop()
    assert [asked.body["max_tokens"] for asked in agent.asked] == [700 - 10 - 512]


@pytest.mark.parametrize("way", ["send_all", "send_all_batched"])
async def test_a_pool_that_is_closed_during_the_question_for_a_context_sends_no_prompt(way: str) -> None:
    agent = Agent()
    agent.tells_models.clear()
    async with agents(agent) as endpoints:
        pool = VLLMPool(endpoints)
        asking = asyncio.create_task(getattr(pool, way)(["x", "y"]))
        while not agent.model_questions:
            await asyncio.sleep(0)
        await pool.close()
        async with asyncio.timeout(5):
            responses = await asking
    assert all("the pool was closed" in (response.error or "") for response in responses)
    assert agent.asked == []


async def test_nobody_is_asked_for_a_context_that_is_given() -> None:
    agent = Agent()
    async with agents(agent) as endpoints:
        async with VLLMPool(endpoints, model_max_context=5000) as pool:
            await pool.send_all_batched(["x"] * 3)
        async with VLLMPool(endpoints) as pool:
            await pool.post(0, "x", max_tokens=5)
    assert agent.model_questions == 0


# Lists


async def test_a_list_is_one_request_in_this_form() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.post_batch(0, ["a", "b", "c"])
        assert await pool.post_batch(0, []) == []
        await pool.post_batch(0, ["a"], 9)
    assert [asked.path for asked in agent.asked] == ["/v1/completions"] * 2
    assert agent.asked[0].body == {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 512}
    assert agent.asked[1].body == {"model": MODEL, "prompt": ["a"], "max_tokens": 9}
    assert [response.text for response in responses] == ["<a>", "<b>", "<c>"]
    assert [response.usage for response in responses] == [Usage(10, 0, 5)] * 3


async def test_a_scatter_sends_each_agent_one_list_and_keeps_the_order() -> None:
    given = [Agent(name=name) for name in "xyz"]
    prompts = [str(i) for i in range(8)]
    async with agents(*given) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.send_all_batched(prompts)
        assert await pool.send_all_batched([]) == []
    assert [[asked.body["prompt"] for asked in agent.asked] for agent in given] == [
        [["0", "3", "6"]],
        [["1", "4", "7"]],
        [["2", "5"]],
    ]
    assert [response.text for response in responses] == [f"{'xyz'[i % 3]}<{i}>" for i in range(8)]
    assert [response.agent_index for response in responses] == [i % 3 for i in range(8)]
    assert [response.index for response in responses] == list(range(8))


async def test_without_lists_they_are_chat_requests_and_the_token_limit_is_kept() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints, use_batch=False) as pool:
        await pool.send_all_batched(["a", "b"], max_tokens=33)
    assert [asked.path for asked in agent.asked] == ["/v1/chat/completions"] * 2
    assert [asked.body["max_tokens"] for asked in agent.asked] == [33, 33]


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_one_prompt_that_is_refused_fails_alone(status: int) -> None:
    def refuses_long(asked: Asked) -> web.Response | None:
        return refuse(status, "maximum context length") if any("long" in prompt for prompt in asked.prompts) else None

    agent = Agent(refuses_long)  # type: ignore[arg-type]
    prompts = [f"long {i}" if i in (17, 60) else str(i) for i in range(100)]
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.send_all_batched(prompts)
    assert [place for place, response in enumerate(responses) if not response.success] == [17, 60]
    assert "maximum context length" in (responses[17].error or "")
    assert [r.text for r in responses if r.success] == [f"<{i}>" for i in range(100) if i not in (17, 60)]
    assert len(agent.asked) < 40


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_refusal_that_concerns_all_of_a_list_is_asked_for_once(status: int) -> None:
    agent = Agent(lambda asked: refuse(status))
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.post_batch(0, ["a", "b"])
    assert [(response.success, response.text, bool(response.error)) for response in responses] == [
        (False, "", True)
    ] * 2
    assert len(agent.asked) == 1


async def test_a_part_of_a_list_may_fail_in_another_way_than_the_whole() -> None:
    def moody(asked: Asked) -> web.Response:
        return refuse(400 if len(asked.prompts) > 2 else 404, f"{len(asked.prompts)} of them")

    async with agents(Agent(moody)) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.post_batch(0, ["a", "b", "c", "d"])
    assert [response.success for response in responses] == [False] * 4
    assert all("2 of them" in (response.error or "") for response in responses)


async def test_choices_are_taken_by_their_index_and_a_short_list_loses_only_what_it_lacks() -> None:
    def backwards(asked: Asked) -> Body:
        said = answer(asked)
        said["choices"] = [choice for choice in reversed(said["choices"]) if choice["text"] != "<b>"]
        return said

    async with agents(Agent(backwards)) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.post_batch(0, ["a", "b", "c"])
    assert [response.text for response in responses] == ["<a>", "", "<c>"]
    assert [response.success for response in responses] == [True, False, True]
    assert "no choice for this prompt" in (responses[1].error or "")


async def test_token_limits_are_of_each_prompt_not_of_their_average() -> None:
    agent = Agent(context=2000)
    long = "y" * 4 * 1200
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.post_batch(0, ["a", long, "b"])
    sent = {tuple(asked.body["prompt"]): asked.body["max_tokens"] for asked in agent.asked}
    assert sent == {("a", "b"): 512, (long,): 2000 - 1200 - 512}
    assert [response.text for response in responses] == ["<a>", f"<{long}>", "<b>"]


@virtual_clock
async def test_a_list_for_a_server_that_comes_up_four_seconds_later_is_answered_and_holds_up_no_other() -> None:
    late, told = Agent(name="late"), list[str]()
    await late.start()
    await late.stop()  # the port is known, and refuses connections

    async def come_up() -> None:
        await asyncio.sleep(4)
        told.append("up")
        await late.start()

    async with agents(Agent()) as [other], VLLMPool([late.endpoint, other], model_max_context=8192) as pool:
        coming = asyncio.create_task(come_up())
        responses = await pool.send_all_batched(list("abcd"), on_result=lambda response: told.append(response.text))
        await coming
        await late.stop()
    assert [response.text for response in responses] == ["late<a>", "<b>", "late<c>", "<d>"]
    assert told[:3] == ["<b>", "<d>", "up"]
    assert responses[0].attempts == 2  # meanwhile the server is probed


@virtual_clock
async def test_a_server_that_never_comes_up_is_given_up_after_a_while() -> None:
    began = asyncio.get_running_loop().time()
    async with VLLMPool([dead()], batch_timeout_cap=30.0) as pool:
        responses = await pool.post_batch(0, ["a", "b", "c"])
    assert [(response.success, response.agent_index) for response in responses] == [(False, 0)] * 3
    assert all("refused" in (response.error or "") for response in responses)
    assert 5 < asyncio.get_running_loop().time() - began <= 12  # of the virtual clock


@pytest.mark.parametrize(
    ("prompts", "arguments", "seconds"),
    [
        (3, {}, 300.0),
        (257 * 5, {}, 360.0),
        (10, {"timeout": 5.0, "batch_concurrency": 4, "timeout_per_sequence": 3.0}, 9.0),
        (10, {"timeout": 5.0, "batch_concurrency": 4, "timeout_per_sequence": 3.0, "batch_timeout_cap": 6.5}, 6.5),
        (3, {"batch_timeout_cap": 20.0}, 20.0),
    ],
)
def test_a_list_has_time_for_its_waves(prompts: int, arguments: dict[str, Any], seconds: float) -> None:
    assert VLLMPool([dead()], **arguments)._list_limit(prompts) == seconds


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_concurrency": "8"},
        {"batch_timeout_cap": "8"},
        {"timeout_per_sequence": "8"},
        {"max_tokens": "8"},
        {"buffer": "8"},
        {"batch_timeout_cap": 0},
        {"batch_concurrency": 0},
        {"timeout_per_sequence": -1},
    ],
)
def test_a_number_that_cannot_be_meant_is_an_error(arguments: dict[str, Any]) -> None:
    [(name, value)] = arguments.items()
    with pytest.raises(SpecError, match=f"{name} is {value!r}: give"):
        VLLMPool([dead()], **arguments)


def test_the_time_of_a_sequence_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AURORA_SWARM_TIMEOUT_PER_SEQUENCE", "200")
    assert VLLMPool([dead()])._list_limit(257) == 400.0


async def test_a_list_at_a_hung_server_ends_with_its_time() -> None:
    async with agents(Agent(hang), Agent()) as endpoints, VLLMPool(endpoints, batch_timeout_cap=0.1) as pool:
        responses = await pool.send_all_batched(["a", "b", "c"])
    assert [response.success for response in responses] == [False, True, False]
    assert "no complete answer in" in (responses[0].error or "")


@pytest.mark.parametrize("way", ["send_all", "send_all_batched"])
async def test_a_server_that_says_nothing_at_all_costs_its_time_once(way: str) -> None:
    async with silent() as endpoint, VLLMPool([endpoint], timeout=0.1, batch_timeout_cap=0.1) as pool:
        async with asyncio.timeout(9):  # the question for its context alone might take ten
            responses = await getattr(pool, way)(["a", "b"])
    assert [response.success for response in responses] == [False, False]
    assert "no complete answer in" in (responses[0].error or "")


async def test_a_path_that_ends_in_v1_is_not_doubled() -> None:
    agent = Agent()
    async with agents(agent) as endpoints:
        endpoint = AgentEndpoint(endpoints[0].host, endpoints[0].port, path="/v1")
        async with VLLMPool([endpoint]) as pool:
            assert (await pool.post(0, "x")).success


@pytest.mark.parametrize("dispatch", ["round_robin", "balanced"])
async def test_half_of_a_surrogate_pair_is_sent_as_what_can_be(dispatch: Any) -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints, dispatch=dispatch) as pool:
        responses = await pool.send_all_batched(["a\ud83d", "b"])
    assert sorted(agent.prompts) == ["a\ufffd", "b"]
    assert all(response.success for response in responses)


async def test_half_of_a_surrogate_pair_in_an_answer_is_read() -> None:
    text = b'{"choices": [{"index": 0, "message": {"content": "a\\ud83d"}}]}'
    agent = Agent(lambda asked: web.Response(body=text, content_type="application/json"))
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        response = await pool.post(0, "x")
    assert (response.success, response.text) == (True, "a\ufffd")


async def test_a_key_is_sent_and_never_shown() -> None:
    agent = Agent(lambda asked: refuse(401, "the key secret-key is wrong"))
    async with agents(agent) as endpoints, VLLMPool(endpoints, api_key="secret-key") as pool:
        response = await pool.post(0, "x")
    assert agent.asked[0].headers["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in repr(response)

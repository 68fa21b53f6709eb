"""What is asked for by name, on pools and calls: templates, sampling, samples, schemas, deadlines, routing, records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import BaseModel
from tests.swarm.agents import Agent, Asked, Body, agents, answer, dead, hang, refuse

from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.swarm import AgentPool, Response, VLLMPool
from batch_agent.testing import virtual_clock


class City(BaseModel):
    name: str


# The chat template


async def test_a_chat_list_is_one_request_where_the_server_takes_it() -> None:
    agent = Agent(has_batch=True)
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        responses = await pool.send_all_batched(["a", "b"], chat=True, system="Be brief.")
    (asked,) = agent.asked
    assert asked.path == "/v1/chat/completions/batch"
    system = {"role": "system", "content": "Be brief."}
    assert asked.body == {
        "model": "openai/gpt-oss-120b",
        "messages": [[system, {"role": "user", "content": "a"}], [system, {"role": "user", "content": "b"}]],
        "max_tokens": 512,
    }
    assert [response.text for response in responses] == ["<a>", "<b>"]


async def test_where_it_does_not_they_are_chat_requests_and_it_is_not_asked_for_again() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints, chat=True) as pool:
        responses = await pool.send_all_batched(["a", "b", "c"])
        assert not pool._servers[0].takes_chat_lists
        await pool.send_all_batched(["d", "e"])
    assert [asked.path for asked in agent.asked] == ["/v1/chat/completions"] * 5
    assert [response.text for response in responses] == ["<a>", "<b>", "<c>"]


async def test_one_conversation_that_is_refused_fails_alone() -> None:
    def picky(asked: Asked) -> web.Response | None:
        return refuse(400) if "bad" in asked.prompts else None

    agent = Agent(picky, has_batch=True)  # type: ignore[arg-type]
    async with agents(agent) as endpoints, VLLMPool(endpoints, chat=True) as pool:
        responses = await pool.send_all_batched(["a", "b", "bad", "c"])
    assert [response.success for response in responses] == [True, True, False, True]


async def test_generate_has_no_chat_and_no_system_prompt() -> None:
    async with AgentPool([dead()]) as pool:
        for options in ({"chat": True}, {"system": "x"}):
            with pytest.raises(SpecError, match="use a VLLMPool"):
                await pool.send_all(["a"], **options)  # type: ignore[arg-type]


# Sampling


async def test_sampling_options_are_in_the_body_and_a_call_has_the_last_word() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints, temperature=0.5, top_p=0.9) as pool:
        await pool.post(0, "a", temperature=0.0, stop=["END"], seed=3, extra_body={"top_k": 5})
        await pool.send_all_batched(["a"], seed=4)
    body = agent.asked[0].body
    assert body["messages"] == [{"role": "user", "content": "a"}]
    assert {name: value for name, value in body.items() if name not in ("model", "messages", "max_tokens")} == {
        "temperature": 0.0,
        "top_p": 0.9,
        "stop": ["END"],
        "seed": 3,
        "top_k": 5,
    }
    assert (agent.asked[1].body["seed"], agent.asked[1].body["temperature"]) == (4, 0.5)


async def test_each_prompt_may_have_its_own_seed() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        await pool.send_all(["a", "b"], seed=[7, 8])
        await pool.send_all_batched(["a", "b", "c"], seed=[1, 2, 1])
        with pytest.raises(SpecError, match="seed has 2 numbers for 3 prompts"):
            await pool.send_all(["a", "b", "c"], seed=[1, 2])
    sent = [(asked.prompts, asked.body["seed"]) for asked in agent.asked]
    assert sorted(sent[:2]) == [(["a"], 7), (["b"], 8)]
    assert sorted(sent[2:]) == [(["a", "c"], 1), (["b"], 2)]


@pytest.mark.parametrize("way", ["send_all", "send_all_batched"])
async def test_n_samples_stand_one_behind_the_other(way: str) -> None:
    def numbered(asked: Asked) -> Body:
        said = answer(asked)
        for choice in said["choices"]:
            text = f"sample {choice['index']}"
            choice |= {"text": text} if "text" in choice else {"message": {"content": text}}
        return said

    agent = Agent(numbered)
    async with agents(agent) as endpoints, VLLMPool(endpoints * 2) as pool:
        responses: list[Response] = await getattr(pool, way)(["a", "b", "c"], n=2)
    assert {asked.body["n"] for asked in agent.asked} == {2}
    assert [(each.index, each.agent_index) for each in responses] == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 0), (2, 0)]
    expected = {"send_all": [0, 1, 0, 1, 0, 1], "send_all_batched": [0, 1, 0, 1, 2, 3]}[way]
    assert [each.text for each in responses] == [f"sample {number}" for number in expected]


async def test_the_samples_of_a_pool_are_for_its_lists() -> None:
    async with agents(Agent()) as endpoints, VLLMPool(endpoints, n=2) as pool:
        assert len(await pool.send_all(["a"])) == 2
        assert (await pool.post(0, "a")).success


async def test_generate_is_asked_once_for_each_sample() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.broadcast_prompt("a", n=3)
        with pytest.raises(SpecError, match="post returns one answer"):
            await pool.post(0, "a", n=3)
    assert [asked.body for asked in agent.asked] == [{"prompt": "a"}] * 3
    assert len(responses) == 3


# Schemas


async def test_a_schema_is_sent_and_the_answer_is_its_value() -> None:
    def say(asked: Asked) -> Body:
        text = '{"name": "Oslo"}' if asked.prompts[0] == "good" else "Oslo"
        return {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}

    agent = Agent(say)
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        good, bad = await pool.send_all(["good", "bad"], schema=City)
        as_json = await pool.post(0, "good", schema={"type": "object", "required": ["name"]})
    form = agent.asked[0].body["response_format"]
    assert (form["type"], form["json_schema"]["name"]) == ("json_schema", "City")
    assert (good.success, good.parsed) == (True, City(name="Oslo"))
    assert (bad.success, bad.text, bad.parsed) == (False, "Oslo", None)
    assert "does not fit the schema" in (bad.error or "")
    assert as_json.parsed == {"name": "Oslo"}


# As they come, and until when


async def test_answers_are_told_of_as_they_come() -> None:
    async def later(asked: Asked) -> None:
        await asyncio.sleep(0.05 * (asked.body["prompt"] == "a"))

    told: list[str] = []

    async def note(response: Response) -> None:
        told.append(response.text)
        raise RuntimeError("of the user's own")

    async with agents(Agent(later)) as endpoints, AgentPool(endpoints) as pool:  # type: ignore[arg-type]
        responses = await pool.send_all(["a", "b"], on_result=note)
        seen = [response.index async for response in pool.as_completed(["a", "b", "c"])]
    assert told == ["<b>", "<a>"]
    assert [response.text for response in responses] == ["<a>", "<b>"]
    assert (sorted(seen), seen[-1]) == ([0, 1, 2], 0)


async def test_leaving_the_loop_cancels_what_is_left() -> None:
    agent = Agent(lambda asked: answer(asked) if asked.body["prompt"] == "a" else hang(asked))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        stream = pool.as_completed(["a", "b", "c"])
        assert (await anext(stream)).text == "<a>"
        await stream.aclose()
        while agent.inflight:
            await asyncio.sleep(0)


async def test_as_completed_raises_what_is_wrong_with_the_call() -> None:
    async with AgentPool([dead()]) as pool:
        with pytest.raises(SpecError, match="deadline is 0"):
            _ = [response async for response in pool.as_completed(["a"], deadline=0)]


@virtual_clock
@pytest.mark.parametrize("options", [{}, {"dispatch": "balanced"}])
async def test_at_the_deadline_what_is_there_is_kept_and_the_rest_says_so(options: dict[str, str]) -> None:
    agent = Agent(lambda asked: answer(asked) if asked.body["prompt"] == "a" else hang(asked))
    async with agents(agent) as endpoints, AgentPool(endpoints * 2) as pool:
        responses = await pool.send_all(["a", "b", "c"], deadline=0.1, **options)  # type: ignore[arg-type]
        one = await pool.post(1, "b", deadline=0.05)
    assert [response.success for response in responses] == [True, False, False]
    assert "not finished by the deadline, 0.1 s" in (responses[1].error or "")
    assert (one.success, one.agent_index) == (False, 1)


# Routing


async def test_a_balanced_answer_says_who_gave_it() -> None:
    given = [Agent(name="a"), Agent(name="b")]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        responses = await pool.send_all([str(i) for i in range(30)], dispatch="balanced")
    assert [response.text[1:] for response in responses] == [f"<{i}>" for i in range(30)]
    assert [response.agent_index for response in responses] == [int(r.text.startswith("b")) for r in responses]
    assert {response.agent_index for response in responses} == {0, 1}


async def test_inflight_is_how_many_balanced_requests_a_server_has_at_once() -> None:
    full = asyncio.Event()

    async def wait(asked: Asked) -> None:
        if all(agent.inflight == 20 for agent in given):
            full.set()
        await full.wait()

    given = [Agent(wait), Agent(wait)]  # type: ignore[arg-type]
    async with agents(*given) as endpoints, AgentPool(endpoints, dispatch="balanced") as pool:
        await pool.send_all([str(i) for i in range(40)], inflight=20)
    assert [agent.peak for agent in given] == [20, 20]


@pytest.mark.parametrize("way", ["send_all", "send_all_batched"])
async def test_what_fails_at_one_server_is_done_by_another(way: str) -> None:
    given = [Agent(lambda asked: refuse(500), name="ill"), Agent(name="well")]
    async with agents(*given) as endpoints, VLLMPool([*endpoints, dead()], dispatch="balanced") as pool:
        responses: list[Response] = await getattr(pool, way)([str(i) for i in range(30)])
    assert [response.text for response in responses] == [f"well<{i}>" for i in range(30)]
    assert {response.agent_index for response in responses} == {1}
    path = "/v1/chat/completions" if way == "send_all" else "/v1/completions"
    assert {asked.path for asked in given[1].asked} == {path}


@pytest.mark.parametrize("options", [{"affinity": ["k"]}, {"hedge": 1.0}, {"inflight": 2}])
async def test_what_is_about_where_a_prompt_goes_needs_a_choice(options: dict[str, object]) -> None:
    async with AgentPool([dead()]) as pool:
        with pytest.raises(SpecError, match="needs dispatch='balanced'"):
            await pool.send_all(["a"], **options)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="a key for each of 2 prompts"):
            await pool.send_all(["a", "b"], dispatch="balanced", affinity=["k"])


async def test_balanced_where_nobody_takes_it_is_a_failed_response_for_each() -> None:
    agent = Agent(lambda asked: refuse(404, "no such model"))
    async with agents(agent) as endpoints, VLLMPool(endpoints, dispatch="balanced") as pool:
        responses = await pool.send_all(["a", "b", "c"])
    assert [response.success for response in responses] == [False] * 3
    assert all("no such model" in (response.error or "") for response in responses)


async def test_balanced_answers_keep_what_came_with_them() -> None:
    cut = {
        "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
    async with agents(Agent(lambda asked: cut)) as endpoints, VLLMPool(endpoints, dispatch="balanced") as pool:
        (response,) = await pool.send_all(["a"])
    assert (response.success, response.text, response.finish_reason) == (True, "", "length")
    assert (response.usage, response.attempts, response.agent_index) == (Usage(3, 0, 4), 1, 0)
    assert response.latency is not None


async def test_balanced_answers_are_read_by_their_schema() -> None:
    texts = iter(['{"name": "Oslo"}', "Oslo"])
    agent = Agent(lambda asked: {"choices": [{"index": 0, "message": {"content": next(texts)}}]})
    async with agents(agent) as endpoints, VLLMPool(endpoints, dispatch="balanced", concurrency=1) as pool:
        responses = await pool.send_all(["a", "b"], schema=City)
    assert [response.parsed for response in responses] == [City(name="Oslo"), None]
    assert [response.success for response in responses] == [True, False]
    assert len(agent.asked) == 2


async def test_balanced_samples_have_a_seed_each() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints, dispatch="balanced") as pool:
        responses = await pool.send_all(["a", "b"], n=2, seed=[10, 20])
    assert sorted(asked.body["seed"] for asked in agent.asked) == [10, 11, 20, 21]
    assert [response.index for response in responses] == [0, 0, 1, 1]


# The record


@pytest.mark.parametrize("options", [{}, {"dispatch": "balanced"}])
async def test_a_scatter_with_a_run_dir_asks_nothing_twice(options: dict[str, str], tmp_path: Path) -> None:
    ill = True

    def fails_at_first(asked: Asked) -> web.Response | None:
        return refuse(400) if ill and "b" in asked.prompts else None

    agent = Agent(fails_at_first)  # type: ignore[arg-type]
    prompts = ["a", "b", "c", "a"]
    async with agents(agent) as endpoints, VLLMPool(endpoints * 2, **options) as pool:  # type: ignore[arg-type]
        first = await pool.send_all(prompts, run_dir=tmp_path / "run")
        ill = False
        again = await pool.send_all(prompts, run_dir=tmp_path / "run")
        other = await pool.send_all(["a"], run_dir=tmp_path / "other", temperature=0.0)
    assert [response.success for response in first] == [True, False, True, True]
    assert [response.text for response in again] == ["<a>", "<b>", "<c>", "<a>"]
    if not options:
        assert [response.agent_index for response in again] == [0, 1, 0, 1]
    assert sorted(agent.prompts) == ["a", "a", "a", "b", "b", "c"]
    assert other[0].success


async def test_a_record_made_with_other_options_is_not_taken_for_this_one(tmp_path: Path) -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        await pool.send_all(["a"], run_dir=tmp_path)
        await pool.send_all(["a"], run_dir=tmp_path, temperature=0.1)
        await pool.send_all(["a"], 99, run_dir=tmp_path, temperature=0.1)
        await pool.send_all(["a"], 99, run_dir=tmp_path, temperature=0.1)
        assert len(agent.asked) == 3
        await pool.send_all_batched(["a"], 99, run_dir=tmp_path, temperature=0.1)
    assert [asked.path for asked in agent.asked[2:]] == ["/v1/chat/completions", "/v1/completions"]

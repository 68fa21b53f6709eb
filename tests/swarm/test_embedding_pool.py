"""EmbeddingPool on real sockets."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from tests.swarm.agents import Agent, Asked, Body, agents, answer, dead, refuse

from batch_agent.errors import SpecError
from batch_agent.swarm import EmbeddingPool, EmbeddingResponse
from batch_agent.swarm.patterns.embedding import scatter_gather_embeddings


def test_the_known_names_and_defaults() -> None:
    assert [each.name for each in fields(EmbeddingResponse)] == ["success", "embedding", "error", "agent_index"]
    assert EmbeddingResponse(False, None) == EmbeddingResponse(False, None, None, -1)
    parameters = inspect.signature(EmbeddingPool).parameters
    assert {name: each.default for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD} == {
        "endpoints": inspect.Parameter.empty,
        "model": inspect.Parameter.empty,
        "concurrency": 512,
        "timeout": 60.0,
    }


async def test_each_text_is_a_request_to_the_agent_whose_turn_it_is() -> None:
    given = [Agent(), Agent()]
    async with agents(*given) as endpoints, EmbeddingPool(endpoints, "bge") as pool:
        one = await pool.embed_one(1, "abc")
        responses = await scatter_gather_embeddings(pool, ["a", "bb", "ccc"])
    assert given[1].asked[0].path == "/v1/embeddings"
    assert given[1].asked[0].body == {"model": "bge", "input": ["abc"]}
    assert one == EmbeddingResponse(True, [3.0, 1.0], None, 1)
    assert [(each.embedding, each.agent_index) for each in responses] == [
        ([1.0, 1.0], 0),
        ([2.0, 1.0], 1),
        ([3.0, 1.0], 0),
    ]
    assert [len(agent.asked) for agent in given] == [2, 2]


async def test_texts_go_in_batches_where_that_is_asked_for() -> None:
    given = [Agent(), Agent()]
    async with agents(*given) as endpoints, EmbeddingPool(endpoints, "bge") as pool:
        responses = await pool.embed_all([str(i) for i in range(9)], batch_size=2)
        with pytest.raises(SpecError, match="batch_size is 0"):
            await pool.embed_all(["a"], batch_size=0)
    assert [asked.body["input"] for asked in given[0].asked] == [["0", "2"], ["4", "6"], ["8"]]
    assert [response.agent_index for response in responses] == [i % 2 for i in range(9)]


async def test_a_text_that_is_refused_fails_alone_and_vectors_are_taken_by_their_index() -> None:
    def say(asked: Asked) -> Body:
        if "bad" in asked.prompts:
            return refuse(400, "too long")  # type: ignore[return-value]
        said = answer(asked)
        said["data"].reverse()
        return said

    async with agents(Agent(say)) as endpoints, EmbeddingPool(endpoints, "bge") as pool:
        responses = await pool.embed_all(["a", "bad", "ccc", "dddd"], batch_size=4)
    assert [each.embedding and each.embedding[0] for each in responses] == [1.0, None, 3.0, 4.0]
    assert "too long" in (responses[1].error or "")


@pytest.mark.parametrize("data", [None, [], [{"index": 0, "embedding": []}], [{"index": 0, "embedding": ["x"]}]])
async def test_an_answer_without_a_vector_is_a_failed_response(data: object) -> None:
    async with agents(Agent(lambda asked: {"data": data})) as endpoints, EmbeddingPool(endpoints, "bge") as pool:
        response = await pool.embed_one(0, "a")
    assert (response.success, response.embedding) == (False, None)
    assert response.error


async def test_a_selection_without_endpoints_answers_with_a_failed_response_for_each_text() -> None:
    async with EmbeddingPool([dead()], "bge") as pool:
        assert "no agent 3" in ((await pool.embed_one(3, "a")).error or "")
        assert await pool.embed_all([]) == []
        nobody = pool.by_tag("role", "embed")
        responses = [*await nobody.embed_all(["a", "b"]), await nobody.embed_one(0, "c")]
    assert [response.success for response in responses] == [False] * 3
    assert all("the pool has no agents" in (response.error or "") for response in responses)


def test_numbers_of_the_wrong_type_are_errors() -> None:
    with pytest.raises(SpecError, match="concurrency is '8'"):
        EmbeddingPool([dead()], "bge", concurrency="8")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="timeout is '8'"):
        EmbeddingPool([dead()], "bge", timeout="8")  # type: ignore[arg-type]


async def test_a_text_that_is_none_is_an_error_that_names_it() -> None:
    async with EmbeddingPool([dead()], "m") as pool:
        with pytest.raises(SpecError, match=r"texts\[0\] is of type int: give texts"):
            await pool.embed_all([5])  # type: ignore[list-item]
        with pytest.raises(SpecError, match="texts is one text"):
            await pool.embed_all("hello")

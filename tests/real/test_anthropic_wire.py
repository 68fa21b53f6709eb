"""Anthropic's wire against a real server that speaks it:
BATCH_AGENT_TEST_VLLM=vllm://127.0.0.1:8000 python -m pytest tests/real/test_anthropic_wire.py

The server of test_vllm.py does: vLLM serves ``/v1/messages`` beside its chat.
"""

from __future__ import annotations

import os

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, RunRejected, Tool
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.registry import open_backend
from batch_agent.errors import ContextOverflow, Truncated
from batch_agent.messages import Conversation, Message, ToolCall

URL = os.environ.get("BATCH_AGENT_TEST_VLLM", "").replace("vllm://", "anthropic://")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not URL, reason="set BATCH_AGENT_TEST_VLLM to the URL of a real vLLM server"),
]

SHARED = "You are a careful clerk who answers in few words. " * 120


class Verdict(BaseModel):
    positive: bool


@Tool.define(cacheable=True)
def population(city: str) -> int:
    """How many people live in a city.

    Args:
        city: the city's name
    """
    return 1_000_000 + len(city)


async def test_siblings_read_a_shared_prompt_from_the_cache() -> None:
    results = await BatchAgent.run(
        **{"system_prompt": SHARED, "task": "Name a colour. {input}", "inputs": [f"Question {n}." for n in range(4)]},
        **{"backend": URL, "max_inflight": 1, "max_tokens": 40, "stop": ["."], "temperature": 0},
    )
    assert [result.error for result in results] == [None] * 4
    assert all(result.usage.cached_tokens > 0.9 * result.usage.prompt_tokens for result in results[1:])
    assert all(
        result.usage.cached_tokens + result.usage.cache_write_tokens <= result.usage.prompt_tokens for result in results
    )


async def test_a_schema_is_kept_natively_where_the_user_says_that_it_is() -> None:
    results = await BatchAgent.run(
        **{"system_prompt": "Judge the review.", "task": "{input}", "inputs": ["I love it", "I hate it"]},
        **{"output_schema": Verdict, "backend": f"{URL}?native_schema=true", "max_tokens": 200, "temperature": 0},
    )
    assert [type(result.output) for result in results] == [Verdict] * 2
    assert all("JSON schema" not in result.messages[0].content for result in results)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_forced_call_is_read_and_its_result_is_taken(streamed: bool) -> None:
    seen: list[ToolCall] = []
    backend, _ = open_backend(URL, model=None, api_key=None)
    async with backend:
        [model] = await backend.models()
        shape = RequestShape(model, max_tokens=200, tools=(population.spec,), tool_choice="population", temperature=0)
        talk = Conversation([Message("system", "Use the tool."), Message("user", "How many people live in Rome?")])
        reply = await backend.infer(ModelRequest(shape, talk, "0"), seen.append if streamed else None)
        assert [call.name for call in reply.tool_calls] == ["population"]
        assert seen == (list(reply.tool_calls) if streamed else [])
        talk.append(reply.message())
        for call in reply.tool_calls:
            talk.append(Message("tool", "2800000", tool_call_id=call.id, tool_name=call.name))
        free = RequestShape(model, max_tokens=8, tools=(population.spec,), tool_choice="none", temperature=0)
        try:
            text = (await backend.infer(ModelRequest(free, talk, "0"), seen.append if streamed else None)).text
        except Truncated as error:  # a small model does not know when to stop
            text = error.text
        assert text


async def test_what_is_too_long_and_what_is_not_there_is_said() -> None:
    backend, _ = open_backend(URL, model=None, api_key=None)
    async with backend:
        [model] = await backend.models()
        with pytest.raises(ContextOverflow):
            talk = Conversation([Message("user", "word " * 200_000)])
            await backend.infer(ModelRequest(RequestShape(model, max_tokens=8), talk, "0"))
    with pytest.raises(RunRejected, match="nonexistent"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=URL, model="nonexistent", max_tokens=8)

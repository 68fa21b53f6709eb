"""Against a real vLLM server: BATCH_AGENT_TEST_VLLM=vllm://127.0.0.1:8000 python -m pytest tests/real/test_vllm.py

Any instruct model will do; it needs --enable-auto-tool-choice, --tool-call-parser and --enable-prompt-tokens-details.
"""

from __future__ import annotations

import os

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, RunRejected, Tool

URL = os.environ.get("BATCH_AGENT_TEST_VLLM", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not URL, reason="set BATCH_AGENT_TEST_VLLM to the URL of a real vLLM server"),
]

SHARED = "You are a careful clerk who answers in few words. " * 20


class Verdict(BaseModel):
    positive: bool


@Tool.define(cacheable=True)
def population(city: str) -> int:
    """How many people live in a city.

    Args:
        city: the city's name
    """
    return 1_000_000 + len(city)


async def test_text_answers_come_with_usage_and_a_shared_prefix_is_computed_once() -> None:
    results = await BatchAgent.run(
        system_prompt=SHARED,
        task="Name a colour. {input}",
        inputs=[f"Question {n}." for n in range(6)],
        backend=URL,
        max_inflight=1,
        max_tokens=40,
        stop=["\n", "."],
        temperature=0,
    )
    assert [result.error for result in results] == [None] * 6
    assert all(result.usage.prompt_tokens > 200 for result in results)
    assert all(result.usage.cached_tokens > 100 for result in results[1:])


async def test_a_schema_is_kept_natively() -> None:
    backend = f"{URL}"
    results = await BatchAgent.run(
        system_prompt="Judge the review.",
        task="{input}",
        inputs=["I love it", "I hate it", "It broke at once"],
        output_schema=Verdict,
        backend=backend,
        max_tokens=200,
        temperature=0,
    )
    assert [type(result.output) for result in results] == [Verdict] * 3
    assert all("JSON schema" not in result.messages[0].content for result in results)


async def test_an_agent_calls_a_tool_and_reads_its_result() -> None:
    results = await BatchAgent.run(
        task="How many people live in {city}?",
        inputs=[{"city": "Lima"}, {"city": "Lima"}],
        tools=[population],
        tool_choice="required",
        backend=URL,
        max_tokens=300,
        max_turns=4,
        temperature=0,
    )
    for result in results:
        roles = [message.role for message in result.messages]
        assert roles[:3] == ["user", "assistant", "tool"]
        assert result.messages[1].tool_calls[0].name == "population"
        assert result.turns >= 2 or result.error is not None


async def test_a_constrained_turn_without_tools_follows_a_free_answer_that_does_not_validate() -> None:
    [result] = await BatchAgent.run(
        task="Is this praise? {input}",
        inputs=["I love it"],
        tools=[population],
        tool_choice="none",
        output_schema=Verdict,
        backend=URL,
        max_tokens=300,
        temperature=0,
    )
    assert isinstance(result.output, Verdict)


async def test_an_unknown_model_stops_the_run_at_its_first_request() -> None:
    with pytest.raises(RunRejected, match="404"):
        await BatchAgent.run(task="{input}", inputs=["a"] * 100, backend=URL, model="no-such-model")


async def test_a_prompt_over_the_context_is_a_context_overflow() -> None:
    [result] = await BatchAgent.run(task="{input}", inputs=["word " * 20_000], backend=URL, max_retries=0)
    assert result.error is not None
    assert (result.error.type, result.error.retryable) == ("ContextOverflow", False)


async def test_an_answer_that_runs_into_its_limit_is_truncated() -> None:
    [result] = await BatchAgent.run(task="Count: {input}", inputs=["1 2 3 4 5"], backend=URL, max_tokens=3)
    assert result.error is not None
    assert result.error.type == "Truncated"
    assert result.raw_text

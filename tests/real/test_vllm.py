"""Against a real vLLM server. ``python -m tests.real vllm`` sets one up on a CPU, starts it and runs this; or, for one
that is there: BATCH_AGENT_TEST_VLLM=vllm://127.0.0.1:8000 python -m pytest tests/real/test_vllm.py

Any instruct model will do; it needs --enable-auto-tool-choice, --tool-call-parser and --enable-prompt-tokens-details,
for the order of priorities also --scheduling-policy priority, VLLM_SERVER_DEV_MODE=1 and --max-num-seqs 8.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, RunRejected, Tool
from batch_agent.backends.base import Load, ModelRequest, RequestShape
from batch_agent.backends.engines.vllm import VllmBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import ContextOverflow, Truncated
from batch_agent.messages import Conversation, Message, Reply, ToolSpec

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


async def test_an_unknown_model_stops_the_run_at_its_first_request() -> None:
    with pytest.raises(RunRejected, match="404"):
        await BatchAgent.run(task="{input}", inputs=["a"] * 100, backend=URL, model="no-such-model")


async def test_a_prompt_over_the_context_is_a_context_overflow() -> None:
    [result] = await BatchAgent.run(task="{input}", inputs=["word " * 20_000], backend=URL, max_retries=0)
    assert result.error is not None
    assert (result.error.type, result.error.retryable) == ("ContextOverflow", False)


async def test_an_answer_that_runs_into_its_limit_is_truncated() -> None:
    asked = {"task": "Count: {input}", "inputs": ["1 2 3 4 5"], "backend": URL, "max_tokens": 3}
    [kept] = await BatchAgent.run(**asked)
    assert kept.truncated and kept.output
    [failed] = await BatchAgent.run(**asked, truncated="fail")
    assert failed.error is not None
    assert failed.error.type == "Truncated"


# The adapter alone


@pytest.fixture
async def backend() -> AsyncIterator[VllmBackend]:
    found, _ = open_backend(URL, model=None, api_key=None)
    assert isinstance(found, VllmBackend)
    async with found:
        found.patience = 60.0  # the first to ask for the server's configuration waits for it
        yield found


@pytest.fixture
async def shape(backend: VllmBackend) -> RequestShape:
    [model] = await backend.models()
    return RequestShape(model, temperature=0.0, extra_body={"ignore_eos": True})


async def wait_until(backend: VllmBackend, holds: Callable[[Load], bool]) -> Load:
    async with asyncio.timeout(60):
        while not holds(load := await backend.load()):
            await asyncio.sleep(0.05)
    return load


def asked(shape: RequestShape, words: str, tokens: int, **fields: Any) -> ModelRequest:
    return ModelRequest(replace(shape, max_tokens=tokens), Conversation([Message("user", words)]), words, **fields)


async def infer(backend: VllmBackend, request: ModelRequest) -> None:
    [_] = await asyncio.gather(backend.infer(request), return_exceptions=True)  # cut at its last token, as it must be


async def test_of_32_agents_that_start_together_nine_tenths_of_what_they_share_is_computed_once(
    backend: VllmBackend,
) -> None:
    system = f"{secrets.token_hex(8)} " + SHARED * 5
    shared = await backend.count_tokens([Message("system", system), Message("user", "")])
    assert shared > 900
    results = await BatchAgent.run(
        system_prompt=system,
        task="Name a colour. {input}",
        inputs=[f"Question {n}." for n in range(32)],
        backend=URL,
        max_inflight=32,
        max_tokens=8,
        temperature=0,
        max_retries=0,
        extra_body={"min_tokens": 1},
    )
    cached = sum(result.usage.cached_tokens for result in results)
    print(f"{cached} of {32 * shared} shared tokens were cached: {cached / (32 * shared):.1%}")
    assert cached >= 0.9 * 32 * shared


async def test_a_constrained_turn_that_shows_the_tools_finds_the_turn_before_it_in_the_cache(
    backend: VllmBackend, shape: RequestShape
) -> None:
    look = ToolSpec("look", "Look a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
    free = replace(shape, tools=(look,), max_tokens=4)
    told = Conversation([Message("system", f"{secrets.token_hex(8)} {SHARED}"), Message("user", "Praise? I love it")])
    [cut] = await asyncio.gather(backend.infer(ModelRequest(free, told, "0")), return_exceptions=True)
    assert isinstance(cut, Truncated)
    assert cut.usage is not None
    told.append(Message("assistant", cut.text))
    told.append(Message("user", "Answer as JSON."))
    kept = replace(free, schema=Verdict.model_json_schema(), tool_choice="none", max_tokens=60, extra_body={})
    reply = await backend.infer(ModelRequest(kept, told, "0"))
    Verdict.model_validate_json(reply.text)
    print(f"{reply.usage.cached_tokens} tokens cached, of {cut.usage.prompt_tokens} of the turn before")
    assert reply.usage.cached_tokens >= 0.85 * cut.usage.prompt_tokens


async def test_siblings_share_their_prefix(backend: VllmBackend) -> None:
    found = await backend.verify_prefix_sharing()
    print(found)
    assert found.share is not None
    assert found.share > 0.8


async def test_the_context_is_told_and_tokens_are_counted_as_they_are_sent(
    backend: VllmBackend, shape: RequestShape
) -> None:
    facts = await backend.facts(shape.model)
    assert facts.context is not None
    assert facts.context > 1000
    look = ToolSpec("look", "Look.", {"type": "object", "properties": {"page": {"type": "integer"}}})
    free = replace(shape, max_tokens=2, extra_body={})
    for tools in ((), (look,)):
        with_tools = replace(free, tools=tools)
        count = await backend.count_tokens("How are you?", with_tools)
        request = ModelRequest(with_tools, Conversation([Message("user", "How are you?")]), "0")
        [end] = await asyncio.gather(backend.infer(request), return_exceptions=True)
        assert end.usage.prompt_tokens == count


async def test_who_is_nearest_its_end_goes_first(backend: VllmBackend, shape: RequestShape) -> None:
    await backend.facts(shape.model)
    order: list[int] = []

    async def ask(left: int) -> None:
        await infer(backend, asked(shape, f"left {left}", 1, priority=left, run="run", agent=left, turn=1))
        order.append(left)

    async with asyncio.TaskGroup() as tasks:
        for slot in range(8):  # they end one after another, and with each one slot is free
            tasks.create_task(infer(backend, asked(shape, f"slot {slot}", 24 + 12 * slot, run="run", agent=slot)))
        await wait_until(backend, lambda load: load.running == 8)
        for left in (5, 2, 4, 1, 3):
            tasks.create_task(ask(left))
        await wait_until(backend, lambda load: load.waiting == 5)
    assert order == [1, 2, 3, 4, 5]


async def test_a_request_that_is_given_up_ends_at_the_server(backend: VllmBackend, shape: RequestShape) -> None:
    await wait_until(backend, lambda load: load.running == 0)
    task = asyncio.create_task(backend.infer(asked(shape, "Talk for ever.", 2000)))
    await wait_until(backend, lambda load: load.running == 1)
    task.cancel()
    load = await wait_until(backend, lambda load: load.running == 0)
    assert load.waiting == 0


async def test_many_prompts_go_in_lists_and_a_bad_one_fails_alone(backend: VllmBackend, shape: RequestShape) -> None:
    short = replace(shape, max_tokens=40, extra_body={}, stop=("\n", "."))
    prompts = [f"Name a colour, number {n}." for n in range(6)]
    replies = await backend.generate_batch([*prompts[:3], "word " * 20_000, *prompts[3:]], short)
    assert [isinstance(reply, ContextOverflow) for reply in replies] == [False] * 3 + [True] + [False] * 3
    assert sum(isinstance(reply, Reply) for reply in replies) >= 4
    assert backend.capabilities.batch


async def test_the_same_server_is_spoken_to_on_anthropics_wire(shape: RequestShape) -> None:
    place = URL.partition("://")[2]
    results = await BatchAgent.run(
        system_prompt=SHARED,
        task="Name a colour. {input}",
        inputs=["One.", "Two."],
        backend=f"anthropic://{place}?tls=false",
        api_key="none",
        model=shape.model,
        max_tokens=60,
        stop=["."],
        temperature=0,
    )
    assert [result.error for result in results] == [None, None]
    assert all(result.usage.prompt_tokens > 200 for result in results)

"""Against a real Dynamo frontend with simulated workers, which say random tokens up to ``max_tokens``.

``python -m tests.real dynamo`` sets it up, starts it and runs this.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.engines.dynamo import DynamoBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import Truncated
from batch_agent.messages import Conversation, Message, Usage

URL = os.environ.get("BATCH_AGENT_TEST_DYNAMO", "")
WORKERS = [int(pid) for pid in os.environ.get("BATCH_AGENT_TEST_DYNAMO_WORKERS", "").split(",") if pid]
pytestmark = [pytest.mark.real, pytest.mark.skipif(not URL, reason="python -m tests.real dynamo starts the server")]
MODEL = "smollm2"


@Tool.define(cacheable=True)
def look(page: int) -> str:
    """Look at a page.

    Args:
        page: its number
    """
    return f"page {page}"


@pytest.fixture
async def backend() -> AsyncIterator[DynamoBackend]:
    found, _ = open_backend(URL, model=MODEL, api_key=None)
    assert isinstance(found, DynamoBackend)
    async with found:
        yield found


def asked(conversation: Conversation, tokens: int, **fields: Any) -> ModelRequest:
    return ModelRequest(RequestShape(MODEL, max_tokens=tokens), conversation, "job", run="run", **fields)


async def said(backend: DynamoBackend, request: ModelRequest) -> tuple[str, Usage]:
    """A simulated worker never ends by itself: its answers are cut, and whole all the same."""
    with pytest.raises(Truncated) as cut:
        await backend.infer(request)
    assert cut.value.usage is not None
    return cut.value.text, cut.value.usage


async def test_a_run_with_all_hints_options_and_sessions_is_refused_nothing() -> None:
    results = await BatchAgent.run(
        system_prompt="You are a clerk.",
        task="{input}",
        inputs=[f"Question {n}" for n in range(8)],
        tools=[look],
        output_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        backend=f"{URL}?cache_salt=tenant",
        model=MODEL,
        max_tokens=10,
        temperature=0.5,
        top_p=0.9,
        seed=1,
        stop=["never said"],
        max_retries=0,
    )
    assert {result.error.type for result in results if result.error is not None} <= {"Truncated"}
    assert all(result.usage.completion_tokens == 10 for result in results)


async def test_turns_of_one_session_go_to_one_worker_and_sessions_to_several(backend: DynamoBackend) -> None:
    workers: dict[int, set[int]] = {}
    async with aiohttp.ClientSession() as session:
        for turn in range(4):
            for agent in range(6):
                fields, headers = backend.own_part(asked(Conversation(), 2, agent=agent, turn=turn, priority=9))
                words = f"{secrets.token_hex(8)} " * 40  # nothing that any worker could have in its cache
                body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": words}]}
                body |= {"max_tokens": 2, "nvext": {**dict(fields["nvext"]), "extra_fields": ["worker_id"]}}
                async with session.post(backend._chat.url, json=body, headers=headers) as answer:
                    told = await answer.json()
                assert answer.status == 200, told
                workers.setdefault(agent, set()).add(told["nvext"]["worker_id"]["decode_worker_id"])
    assert all(len(one) == 1 for one in workers.values())
    assert len(set.union(*workers.values())) > 1


async def second_turn(backend: DynamoBackend, agent: int, *, hints: bool) -> Usage:
    history = Conversation([Message("user", f"{secrets.token_hex(8)} " + "Look at this. " * 80)])
    text, _ = await said(backend, asked(history, 120, agent=agent, turn=1, priority=5, hints=hints))
    await asyncio.sleep(1.0)  # a tool would run now
    history.append(Message("assistant", text))
    history.append(Message("user", "Go on."))
    _, usage = await said(backend, asked(history, 2, agent=agent, turn=2, priority=4, hints=hints, last=True))
    return usage


async def test_what_an_agent_said_is_in_the_cache_when_its_next_turn_comes(backend: DynamoBackend) -> None:
    told = [await second_turn(backend, 100 + n, hints=True) for n in range(3)]
    untold = [await second_turn(backend, 200 + n, hints=False) for n in range(3)]
    sums = [sum(each, Usage()) for each in (told, untold)]
    shares = [usage.cached_tokens / usage.prompt_tokens for usage in sums]
    print(f"cached of the second prompt: {shares[0]:.1%} with hints, {shares[1]:.1%} without")
    assert shares[0] > shares[1] + 0.05


async def test_how_busy_it_is_can_be_read(backend: DynamoBackend) -> None:
    before = await backend.load()
    await said(backend, asked(Conversation([Message("user", "hi")]), 2))
    after = await backend.load()
    assert (after.prefix_queries or 0) > (before.prefix_queries or 0)
    assert (after.running, after.waiting) == (0, 0)


async def test_a_worker_that_is_killed_costs_no_row() -> None:
    async with BatchAgent.open(
        task="{input}",
        inputs=[f"{secrets.token_hex(8)} " * 20 for _ in range(24)],
        backend=URL,
        model=MODEL,
        max_inflight=12,
        max_tokens=300,
        max_retries=5,
    ) as run:
        await asyncio.sleep(0.7)
        os.killpg(WORKERS[0], signal.SIGKILL)
        results = [result async for result in run.results()]
    assert len(results) == 24
    # A simulated worker never ends by itself: whole is what has all its tokens.
    assert {result.error.type for result in results if result.error is not None} <= {"Truncated"}
    print(f"sent again: {sum(result.attempts - 1 for result in results)}")

"""The simulated engine behind the Backend protocol, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import jsonschema_rs
import pytest

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.errors import ContextOverflow, Rejected, SpecError, Truncated
from batch_agent.messages import Conversation, Message, Reply, ToolCall, ToolSpec
from batch_agent.testing import run_virtual, virtual_clock

SEARCH = ToolSpec(
    "search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
)
PLAIN = RequestShape(model="simulated")
WITH_TOOL = RequestShape(model="simulated", tools=(SEARCH,))


def ask(text: str, shape: RequestShape = PLAIN, system: str = "You are careful. " * 40) -> ModelRequest:
    return ModelRequest(shape, Conversation([Message("system", system), Message("user", text)]), "job")


async def agent(backend: Backend, text: str, shape: RequestShape = WITH_TOOL) -> list[Reply]:
    request = ask(text, shape)
    replies = []
    while not replies or replies[-1].tool_calls:
        reply = await backend.infer(request, lambda call: None)
        replies.append(reply)
        request.conversation.append(Message("assistant", reply.text, reply.tool_calls))
        for call in reply.tool_calls:
            request.conversation.append(Message("tool", "found it", tool_call_id=call.id))
    return replies


@virtual_clock
async def test_the_same_request_gets_the_same_answer_and_others_get_others() -> None:
    async with SimulatedBackend() as backend:
        first, again, other = [await backend.infer(ask(text)) for text in ("a", "a", "b")]
    assert first.text == again.text != other.text
    assert first.text.startswith("simulated ")
    assert first.usage.completion_tokens == EngineModel().answer_tokens


@virtual_clock
async def test_an_answer_takes_its_prefill_and_its_decode_time() -> None:
    model = EngineModel(step_seconds=0.5, sequence_seconds=0.0, prefill_tokens_per_second=100, answer_tokens=10)
    async with SimulatedBackend(model) as backend:
        reply = await backend.infer(ask("hello"), lambda call: None)
    prefill = reply.usage.prompt_tokens / 100
    assert reply.first_token == pytest.approx(0.5 + prefill)
    assert asyncio.get_running_loop().time() == pytest.approx(10 * 0.5 + prefill)


@virtual_clock
async def test_each_turn_finds_the_turn_before_in_the_cache() -> None:
    async with SimulatedBackend(EngineModel(tool_calls_per_agent=2)) as backend:
        replies = await agent(backend, "hello")
    assert [len(reply.tool_calls) for reply in replies] == [1, 1, 0]
    for before, after in itertools.pairwise(replies):
        history = before.usage.prompt_tokens + before.usage.completion_tokens
        assert after.usage.cached_tokens > history - 2 * EngineModel().block_size


@virtual_clock
async def test_agents_that_run_together_share_their_prefix_and_their_steps() -> None:
    async with SimulatedBackend() as backend:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(agent(backend, f"task {n}")) for n in range(32)]
        alone = 2 * EngineModel().answer_tokens * EngineModel().step_seconds
        assert asyncio.get_running_loop().time() < 4 * alone
        assert all(task.result()[-1].text for task in tasks)
        counters = backend.runner.engine.counters
    assert counters.prefix_hits > 0.9 * counters.prefix_queries
    assert len({task.result()[0].tool_calls[0].arguments for task in tasks}) > 16


@virtual_clock
async def test_a_schema_is_kept() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}, "required": ["n"]}
    async with SimulatedBackend() as backend:
        reply = await backend.infer(ask("x", RequestShape(model="simulated", schema=schema)))
    assert jsonschema_rs.is_valid(schema, json.loads(reply.text))


@virtual_clock
async def test_a_callback_that_raises_fails_its_own_request_only() -> None:
    def broken(call: ToolCall) -> None:
        raise RuntimeError("mine")

    async with SimulatedBackend() as backend, asyncio.TaskGroup() as group:
        other = group.create_task(backend.infer(ask("y", WITH_TOOL)))
        with pytest.raises(RuntimeError, match="mine"):
            await backend.infer(ask("x", WITH_TOOL), broken)
        assert (await other).tool_calls


@virtual_clock
async def test_a_cancelled_request_leaves_the_engine_and_the_others_go_on() -> None:
    async with SimulatedBackend() as backend:
        engine = backend.runner.engine
        left = asyncio.create_task(backend.infer(ask("left")))
        stays = asyncio.create_task(backend.infer(ask("stays")))
        await asyncio.sleep(0.1)
        assert len(engine.running) == 2
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert len(engine.running) == 1
        assert (await stays).text
    assert (engine.counters.aborted, engine.pool.held) == (1, 0)


def test_one_backend_serves_one_event_loop_after_another_and_keeps_its_cache() -> None:
    backend = SimulatedBackend()

    async def once() -> int:
        async with backend, asyncio.timeout(3600):
            return (await backend.infer(ask("hello"))).usage.cached_tokens

    async def broken_off() -> None:
        async with backend:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await backend.infer(ask("hello"))

    assert run_virtual(once()) == 0
    run_virtual(broken_off())
    assert run_virtual(once()) > 100


@virtual_clock
async def test_an_answer_cut_at_max_tokens_is_an_error_and_a_text_that_fits_is_not() -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 100}}, "required": ["text"]}
    async with SimulatedBackend() as backend:
        with pytest.raises(Truncated) as caught:
            await backend.infer(ask("x", RequestShape(model="simulated", schema=schema, max_tokens=5)))
        short = await backend.infer(ask("x", RequestShape(model="simulated", max_tokens=5)))
        least = await backend.infer(ask("x", RequestShape(model="simulated", max_tokens=1)))
    assert len(caught.value.text) == 20
    assert (short.usage.completion_tokens, short.finish_reason) == (5, "stop")
    assert least.text == ""


@virtual_clock
async def test_what_a_server_would_refuse_is_refused() -> None:
    async with SimulatedBackend(EngineModel(context_tokens=128)) as backend:
        with pytest.raises(ContextOverflow):
            await backend.infer(ask("x" * 1000))
        with pytest.raises(Rejected, match="serves 'simulated', not 'gpt'"):
            await backend.infer(ask("x", RequestShape(model="gpt")))


@virtual_clock
async def test_an_instant_engine_takes_no_time() -> None:
    async with SimulatedBackend(replace(EngineModel.instant(), answer_tokens=1000)) as backend:
        reply = await backend.infer(ask("x"))
    assert reply.usage.completion_tokens == 1000
    assert asyncio.get_running_loop().time() == 0.0


def test_a_forced_or_forbidden_tool_choice_is_obeyed() -> None:
    async def choices() -> list[int]:
        async with SimulatedBackend(EngineModel(tool_calls_per_agent=0)) as backend:
            return [
                len(
                    (
                        await backend.infer(ask("x", RequestShape("simulated", tools=(SEARCH,), tool_choice=c)))
                    ).tool_calls
                )
                for c in (None, "auto", "none", "required", "search", {"function": {"name": "search"}})
            ]

    assert run_virtual(choices()) == [0, 0, 0, 1, 1, 1]


def test_a_url_spells_the_parameters() -> None:
    backend = SimulatedBackend(
        EngineModel.from_url("simulated://?prefill=1000&decode=0.1&kv=65536&policy=priority&prefix_caching=false")
    )
    assert backend.model == EngineModel(
        prefill_tokens_per_second=1000, step_seconds=0.1, kv_tokens=65536, policy="priority", prefix_caching=False
    )
    assert EngineModel.from_url("simulated://instant") == EngineModel.instant()
    assert backend.name.startswith("simulated://")


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("simulated://?kvv=1", "did you mean 'kv'"),
        ("simulated://?zzz=1", "Known: prefill"),
        ("simulated://?kv=many", "kv_tokens: .*integer"),
        ("simulated://?kv=1024", "raise kv_tokens or lower context_tokens"),
        ("simulated://?decode=-1", "step_seconds must be 0 or more"),
        ("simulated://?prefill=0", "must be above 0"),
        ("simulated://?policy=random", "policy: .*fcfs"),
        ("simulated://gpu-1:8000", "has no host"),
    ],
)
def test_a_wrong_url_is_a_spec_error_that_says_what_is_allowed(url: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        EngineModel.from_url(url)

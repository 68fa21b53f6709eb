"""Requests through the gateway as model calls of their row: slots, outages, budget, record and resume."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from batch_agent import AgentContext, BatchAgent, BlockingContext
from batch_agent.backends.registry import open_backend
from batch_agent.messages import JsonObject
from batch_agent.testing import CallTools, Cut, Fail, Hang, Request, Say, ScriptedServer, ToolUse, virtual_clock

DIALECTS = ("chat/completions", "responses", "messages")


async def ask(ctx: AgentContext, text: str, dialect: str = "chat/completions", **more: Any) -> tuple[int, JsonObject]:
    """The status and the document of an answer."""
    said = [{"role": "user", "content": text}]
    body = {"model": ctx.model, "input": text, "messages": said, "max_tokens": 50, **more}
    head = {"Authorization": f"Bearer {ctx.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{ctx.base_url}/{dialect}", json=body, headers=head) as answer,
    ):
        return answer.status, (await answer.json() if not more.get("stream") else {"text": await answer.text()})


def words(request: Request) -> Say:
    return Say(f"to {request.text}")


@virtual_clock
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_text_is_streamed_while_the_model_speaks_and_calls_follow_when_they_are_recorded(dialect: str) -> None:
    async def work(row: str, ctx: AgentContext) -> list[tuple[str, int]]:
        body = {"model": "m", "input": row, "messages": [{"role": "user", "content": row}], "max_tokens": 50}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {ctx.api_key}"}) as session,
            session.post(f"{ctx.base_url}/{dialect}", json={**body, "stream": True}) as answer,
        ):
            return [(chunk.decode(), server.inflight) async for chunk in answer.content.iter_any()]

    said = CallTools(ToolUse("look_up", {"word": "x"}), text="I look it up. One moment.", chunk_delay=5.0)
    async with ScriptedServer(lambda _: said, models=["m"]) as server:
        [result] = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url)
    early, late = ("".join(text for text, busy in result.output if busy is known) for known in (1, 0))
    assert "I look" in early and "look_up" not in early
    assert "look_up" in late
    assert result.usage.prompt_tokens > 0


@virtual_clock
@pytest.mark.parametrize(("second", "end"), [("one two three and more", "and more"), ("another text", "other words")])
async def test_after_a_break_a_stream_goes_on_or_says_that_the_next_answer_differs(second: str, end: str) -> None:
    async def work(row: str, ctx: AgentContext) -> str:
        return str((await ask(ctx, row, stream=True))[1]["text"])

    script = [Cut(Say("one two three"), after_chunks=2), Say(second)]
    async with ScriptedServer(script, models=["m"]) as server:
        [result] = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url)
    assert result.output.count('"one') == 1
    assert end in result.output.replace('"}', "")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_request_counts_as_a_model_call_of_its_row(dialect: str) -> None:
    async def work(row: str, ctx: AgentContext) -> str:
        _, first = await ask(ctx, f"{row} one", dialect)
        _, second = await ask(ctx, f"{row} two", dialect, stream=True)
        return str(first) + str(second)

    async with ScriptedServer(words, models=["m"]) as server:
        results = await BatchAgent.run(worker=work, inputs=["a", "b"], backend=server.backend_url)
    for row, result in zip("ab", results, strict=True):
        assert f"to {row} one" in result.output and f"to {row} two" in result.output
        assert result.turns == 2
        assert result.usage.prompt_tokens > 0
        assert result.messages[-1].content == f"to {row} two"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_resumed_worker_gets_recorded_answers_and_the_server_nothing_twice(
    dialect: str, streamed: bool, tmp_path: Path
) -> None:
    stopped = asyncio.Event()

    async def work(row: str, ctx: AgentContext) -> list[str]:
        answers = await asyncio.gather(
            *(ask(ctx, f"{row} {n}", dialect, stream=streamed, user=str(id(ctx))) for n in "xy")
        )
        if not stopped.is_set():
            stopped.set()
            await asyncio.sleep(3600)
        last = await ask(ctx, f"{row} last", dialect, stream=streamed)
        return ["to" in str(document) for _, document in (*answers, last)]  # type: ignore[misc]

    async with ScriptedServer(words, models=["m"]) as server:
        options: dict[str, Any] = {
            "worker": work,
            "inputs": ["a"],
            "backend": server.backend_url,
            "run_dir": tmp_path / "r",
        }
        async with BatchAgent.open(**options) as run:
            await stopped.wait()
            run.cancel()
        results = await BatchAgent.run(**options, resume=True)
        assert results[0].output == [True] * 3
        asked = Counter(str(request.body["messages"][-1]["content"]) for request in server.requests)  # type: ignore[index,call-overload]
    assert asked == {"a x": 1, "a y": 1, "a last": 1}
    assert results[0].turns == 3


async def test_arguments_of_a_call_come_back_to_the_server_as_it_wrote_them() -> None:
    """Anthropic's format has no text of arguments, so a client returns them in a form of its own."""
    call = CallTools(ToolUse("look", '{ "b":1,  "a": 2 }', id="call_1"))

    async def work(row: str, ctx: AgentContext) -> None:
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        _, answer = await ask(ctx, "hi", "messages", tools=tools)
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "seen"}
        said = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]
        await ask(ctx, "", "messages", messages=said, tools=tools)

    script = lambda request: Say("done") if len(request.messages) > 1 else call  # noqa: E731
    async with ScriptedServer(script, models=["m"]) as server:
        results = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url)
    assert results[0].ok, results[0].error
    [_, second] = server.requests
    assert second.conversation()[1].tool_calls[0].arguments == '{ "b":1,  "a": 2 }'


async def test_no_budget_left_is_a_status_that_clients_do_not_retry() -> None:
    statuses = []

    async def work(row: str, ctx: AgentContext) -> str:
        for number in range(100):
            status, document = await ask(ctx, f"{row} {number}")
            if status != 200:
                statuses.append((status, str(document["error"])))
                return "the worker cannot make up for it"
        return "no limit"

    async with ScriptedServer(words, models=["m"]) as server:
        results = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url, max_total_tokens=500)
    [(status, told)] = statuses
    assert status == 402
    assert "max_total_tokens" in told
    assert results[0].error is not None and results[0].error.type == "Interrupted"


async def test_a_client_waits_while_the_server_is_down() -> None:
    async with ScriptedServer(words, models=["m"]) as gone:
        address, port = gone.backend_url, int(gone.address.rpartition(":")[2])

    async def work(row: str, ctx: AgentContext) -> int:
        asking = asyncio.ensure_future(ask(ctx, row))
        await asyncio.sleep(0.2)
        async with ScriptedServer(words, models=["m"], port=port):
            return (await asking)[0]

    results = await BatchAgent.run(worker=work, inputs=["a"], backend=address, model="m")
    assert [result.output for result in results] == [200]


async def test_a_client_that_leaves_gives_its_slot_back() -> None:
    async def work(row: str, ctx: AgentContext) -> int:
        hanging = asyncio.ensure_future(ask(ctx, "hang"))
        await server.wait_inflight(1)
        hanging.cancel()
        return (await ask(ctx, "answer"))[0]

    script = lambda request: Hang() if "hang" in request.text else Say("ok")  # noqa: E731
    async with ScriptedServer(script, models=["m"]) as server:
        results = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url, max_inflight=1)
        assert [result.output for result in results] == [200]
        await server.wait_idle()


async def test_what_the_server_refuses_is_the_clients_and_the_row_goes_on() -> None:
    async def work(row: str, ctx: AgentContext) -> list[int]:
        return [(await ask(ctx, "bad"))[0], (await ask(ctx, "good"))[0]]

    script = lambda request: Fail(422) if "bad" in request.text else Say("ok")  # noqa: E731
    async with ScriptedServer(script, models=["m"]) as server:
        results = await BatchAgent.run(worker=work, inputs=["a"], backend=server.backend_url)
    assert [result.output for result in results] == [[422, 200]]


async def test_a_key_ends_with_its_row_and_a_task_that_was_left_behind_gets_nothing() -> None:
    left: list[asyncio.Task[Any]] = []
    places: list[tuple[str, str]] = []

    async def work(row: str, ctx: AgentContext) -> str:
        if row == "a":
            places.append((ctx.base_url, ctx.api_key))
            left.append(asyncio.ensure_future(ask(ctx, "hang")))
            await server.wait_inflight(1)
            return row
        while not places or not left[0].done():
            await asyncio.sleep(0.01)
        url, key = places[0]
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            answer = await session.post(f"{url}/chat/completions", json={})
            return str(answer.status)

    async with ScriptedServer(lambda request: Hang(), models=["m"]) as server:
        results = await BatchAgent.run(worker=work, inputs=["a", "b"], backend=server.backend_url)
        await server.wait_idle()
    assert [result.output for result in results] == ["a", "401"]
    with pytest.raises(aiohttp.ClientError):
        await left[0]


def test_a_plain_function_with_a_blocking_client() -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

    def work(row: str, ctx: BlockingContext) -> str:
        with openai.OpenAI(base_url=ctx.env["OPENAI_BASE_URL"], api_key=ctx.env["OPENAI_API_KEY"]) as client:
            answer = client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": row}])
            return str(answer.choices[0].message.content)

    results = BatchAgent.run_sync(worker=work, inputs=["a", "b"], backend="simulated://")
    assert all(result.ok and result.output for result in results), results[0].error


async def test_openai_takes_requests_of_both_its_formats_as_they_are() -> None:
    """Whatever the model: it serves all of them at /responses, and most at /chat/completions."""
    async with open_backend("openai://127.0.0.1:1", api_key="k")[0] as backend:
        assert backend.wires >= {"chat", "responses"}
    fleet, _ = open_backend(["vllm://127.0.0.1:1", "anthropic://127.0.0.1:2"])
    assert fleet.wires == frozenset()

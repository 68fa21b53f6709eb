"""The real ``openai`` client as a judge of our servers of tests: what it can run a tool loop on is the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.backends.responses_wire import as_bytes, document, events_of, refuse_wrong

from batch_agent.messages import ToolCall, Usage
from batch_agent.testing import CallTools, ScriptedServer, ToolUse
from batch_agent.testing import Say as Told
from batch_agent.testing.contract.backend import Say
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer, stream

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = ToolCall("call_1", "weather", '{"city":"Oslo"}')


def playing(*script: Say) -> Step:
    """Answers request n with item n, and has no mercy with what the API would refuse."""
    items = iter(script)

    async def step(exchange: Exchange) -> None:
        refuse_wrong(exchange.json)
        say = next(items)
        parts = as_bytes(events_of(say))
        await (stream(*parts, done=False) if exchange.json.get("stream") else answer(document(say)))(exchange)

    return step


def client_of(openai: Any, server: WireServer | ScriptedServer) -> Any:
    return openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0)


async def ask_responses(client: Any, streamed: bool, **options: Any) -> Any:
    if not streamed:
        return await client.responses.create(**options)
    async with client.responses.stream(**options) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_runs_a_tool_loop_on_the_responses_wire(openai: Any, streamed: bool) -> None:
    first = Say("", [CALL], usage=Usage(10, 4, 3, 2), reasoning="Oslo, then.", sealed="gAAAA")
    options = {
        "model": "o3-pro",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}],
    }
    async with WireServer(playing(first, Say("Rain."))) as server, client_of(openai, server) as client:
        talk: list[Any] = [{"role": "user", "content": "Weather?"}]
        reply = await ask_responses(client, streamed, input=talk, **options)
        [reasoning, call] = reply.output
        assert (reasoning.encrypted_content, call.name) == ("gAAAA", "weather")
        assert json.loads(call.arguments) == {"city": "Oslo"}
        assert reply.usage.input_tokens_details.cached_tokens == 4
        talk += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        assert (await ask_responses(client, streamed, input=talk, **options)).output_text == "Rain."


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_runs_a_tool_loop_on_the_chat_wire(openai: Any, streamed: bool) -> None:
    script = [CallTools(ToolUse("weather", {"city": "Oslo"})), Told("Rain.")]
    options: dict[str, Any] = {
        "model": "gpt-4o",
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
    }
    async with ScriptedServer(script) as server, client_of(openai, server) as client:
        talk: list[Any] = [{"role": "user", "content": "Weather?"}]
        message = await ask_chat(client, streamed, messages=talk, **options)
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        function = {"name": call.function.name, "arguments": call.function.arguments}
        talk.append({"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]})
        talk.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        assert (await ask_chat(client, streamed, messages=talk, **options)).content == "Rain."


async def ask_chat(client: Any, streamed: bool, **options: Any) -> Any:
    if not streamed:
        return (await client.chat.completions.create(**options)).choices[0].message
    async with client.chat.completions.stream(**options) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0].message

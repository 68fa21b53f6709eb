"""OpenAI's and Anthropic's own clients through the gateway, whole and streamed, to servers of either wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.backends.responses_wire import document
from tests.gateway.rows import BackendRow, gateway_to

from batch_agent.backends.openai.responses import ResponsesBackend
from batch_agent.gateway.gateway import Gateway
from batch_agent.messages import JsonObject
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse
from batch_agent.testing.contract.peer import Say as Told
from batch_agent.testing.contract.wire import WireServer, answer
from batch_agent.testing.messages_server import MessagesServer

SCHEMA: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def script(request: Request) -> Say:
    """Asks for the weather, then says what it was told."""
    results = [message for message in request.conversation() if message.role == "tool"]
    if not results:
        return CallTools(ToolUse("weather", {"city": "Oslo"}), text="Let me look.", reasoning="Where is it?")
    return Say(f"It is {results[0].content}.")


@asynccontextmanager
async def served(kind: str) -> AsyncIterator[tuple[str, str, ScriptedServer]]:
    server = (ScriptedServer if kind == "chat" else MessagesServer)(script, models=["m"])
    async with server, gateway_to(server.backend_url) as (gateway, key, _):
        yield gateway.url, key, server


both = pytest.mark.parametrize("kind", ["chat", "messages"])
streamed_or_not = pytest.mark.parametrize("streamed", [False, True])


@both
@streamed_or_not
async def test_a_tool_loop_of_openais_chat_client(openai: Any, kind: str, streamed: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}]
    messages: list[object] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}]
    async with served(kind) as (url, key, server), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        answers = []
        for _ in range(2):
            if streamed:
                async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                    answer = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            answers.append(answer)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                assert call.function.arguments.replace(" ", "") == '{"city":"Oslo"}'
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "cold"})
        models = [model.id async for model in client.models.list()]
    assert [answer.choices[0].finish_reason for answer in answers] == ["tool_calls", "stop"]
    assert answers[1].choices[0].message.content == "It is cold."
    assert streamed or answers[1].usage.prompt_tokens > 0
    assert models == ["m"]
    assert server.received == 2


@both
@streamed_or_not
async def test_a_tool_loop_of_openais_responses_client(openai: Any, kind: str, streamed: bool) -> None:
    tools = [{"type": "function", "name": "weather", "description": "", "parameters": SCHEMA, "strict": False}]
    items: list[object] = [{"role": "user", "content": "Oslo?"}]
    async with served(kind) as (url, key, server), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        for _ in range(2):
            options = {"model": "m", "input": items, "tools": tools, "instructions": "Be brief."}
            if streamed:
                async with client.responses.stream(**options) as stream:
                    async for _event in stream:
                        pass
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(**options)
            assert answer.status == "completed"
            for item in answer.output:
                items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "cold"})
    assert answer.output_text == "It is cold."
    assert answer.usage.input_tokens > 0
    assert server.received == 2


@both
@streamed_or_not
async def test_a_tool_loop_of_anthropics_client(anthropic: Any, kind: str, streamed: bool) -> None:
    tools = [{"name": "weather", "description": "", "input_schema": SCHEMA}]
    messages: list[object] = [{"role": "user", "content": "Oslo?"}]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: session=1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    async with served(kind) as (url, key, server), anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
        for _ in range(2):
            options = {"model": "m", "max_tokens": 99, "messages": messages, "tools": tools, "system": system}
            if streamed:
                async with client.messages.stream(**options) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**options)
            messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "cold"}]}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or "Thanks."})
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Oslo?"}])
    assert (answer.content[-1].text, answer.stop_reason) == ("It is cold.", "end_turn")
    assert answer.usage.output_tokens > 0
    assert counted.input_tokens > 0
    assert server.received == 2
    told = server.requests[0].body
    assert ("cache_control" in str(told)) is (kind == "messages")
    assert ("billing" in str(told)) is (kind == "messages")


async def test_a_request_in_the_backends_own_format_is_forwarded_with_all_its_fields(openai: Any) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi", "name": "ann"}],
        "logit_bias": {"5": 1},
        "made_up": [1],
        "max_tokens": 1,
    }
    async with (
        ScriptedServer([Say("cut he", finish_reason="length")]) as server,
        gateway_to(server.backend_url) as (gateway, key, _),
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key) as client,
    ):
        answer = await client.chat.completions.create(model="m", messages=body["messages"], extra_body=body)
    sent = server.requests[0].body
    assert {name: sent[name] for name in body} == body
    assert "stream" not in sent
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint == "scripted"  # a field that only the server itself knows


@streamed_or_not
async def test_responses_go_to_a_server_of_their_own_format_as_they_are(openai: Any, streamed: bool) -> None:
    told = document(Told("hello", reasoning="Hm.", sealed="secret", cut=True)) | {"safety": {"level": 3}}
    tools = [{"type": "web_search"}]
    async with (
        WireServer(answer(told)) as server,
        ResponsesBackend(server.url) as backend,
        Gateway() as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.admit(BackendRow(backend))) as client,
    ):
        options = {"model": "test-model", "input": "hi", "tools": tools, "previous_response_id": "resp_0"}
        if streamed:
            stream = await client.responses.create(**options, stream=True)
            said = [event async for event in stream][-1].response
        else:
            said = await client.responses.create(**options)
    assert (said.status, said.output_text, said.id) == ("incomplete", "hello", "resp_1")
    assert said.output[0].encrypted_content == "secret"
    assert said.model_extra == {"safety": {"level": 3}}
    assert server.requests[0].json == options

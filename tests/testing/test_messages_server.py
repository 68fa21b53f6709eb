"""MessagesServer, judged by Anthropic's own client, and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from batch_agent.messages import Usage
from batch_agent.testing import CallTools, Fail, MessagesServer, Say, StreamError, ToolUse

TOOLS = [
    {
        "name": "search",
        "description": "Search.",
        "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    }
]
LOOP = [
    CallTools(
        ToolUse("search", {"query": "x"}), ToolUse("search", {"query": "y"}), text="Let me look.", reasoning="Hm, é."
    ),
    Say("Found it.", usage=Usage(100, 60, 7, 0, 30)),
]
USER = {"role": "user", "content": "Look for x."}
OLD = {"anthropic-version": "2023-06-01", "x-api-key": "k"}


def client_of(anthropic: Any, server: MessagesServer, key: str = "k") -> Any:
    return anthropic.AsyncAnthropic(api_key=key, base_url=f"http://{server.address}", max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropics_own_client_runs_a_tool_loop_against_it(anthropic: Any, streamed: bool) -> None:
    async with MessagesServer(LOOP, models=["m"], api_key="k") as server, client_of(anthropic, server) as client:
        messages: list = [USER]
        while True:
            asked = {"model": "m", "max_tokens": 2000, "tools": TOOLS, "messages": messages}
            asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            assert message.stop_reason == "tool_use"
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "found"} for call in calls]
            messages.append({"role": "user", "content": results})
    first = messages[1]["content"]
    assert [block.type for block in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first[0].thinking, first[1].text, first[2].input) == ("Hm, é.", "Let me look.", {"query": "x"})
    assert (message.content[0].text, message.stop_reason) == ("Found it.", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (10, 60, 30)
    assert usage.output_tokens == 7
    assert server.requests[1].turn == 1
    assert [tool.name for tool in server.requests[0].tools] == ["search"]


async def test_anthropics_own_client_lists_its_models_and_reads_its_errors(anthropic: Any) -> None:
    script = [Fail(529), Fail(429, headers={"Retry-After": "3"}), StreamError("tired", 529)]
    async with MessagesServer(script, models=["a", "b"], api_key="k") as server:
        async with client_of(anthropic, server) as client:
            assert [model.id async for model in client.models.list()] == ["a", "b"]
            asked = {"model": "a", "max_tokens": 9, "messages": [USER]}
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(**asked)
            assert caught.value.type == "overloaded_error"
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**asked)
            with pytest.raises(anthropic.APIStatusError, match="tired"):
                async with client.messages.stream(**asked) as stream:
                    await stream.get_final_message()
        async with client_of(anthropic, server, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**asked)


async def test_anthropics_own_client_gets_an_answer_of_a_schema(anthropic: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    async with MessagesServer() as server, client_of(anthropic, server) as client:
        asked = {"model": "m", "max_tokens": 9, "messages": [USER]}
        message = await client.messages.create(**asked, output_config={"format": form})
        assert message.content[0].text == '{"n":0}'
        forced = await client.messages.create(**asked, tools=TOOLS, tool_choice={"type": "any"})
        assert [block.name for block in forced.content if block.type == "tool_use"] == ["search"]


@pytest.fixture
async def server() -> AsyncIterator[MessagesServer]:
    async with MessagesServer(models=["m"]) as server:
        yield server


async def refused(server: MessagesServer, headers: dict = OLD, **fields: object) -> str:
    body = {"model": "m", "max_tokens": 100, "messages": [USER]} | fields
    body = {name: value for name, value in body.items() if value is not None}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/messages", json=body, headers=headers) as response,
    ):
        said = await response.json()
        assert (response.status, said["type"]) == (400, "error"), said
        return str(said["error"]["message"])


def text(words: str, **more: object) -> dict:
    return {"type": "text", "text": words, **more}


MARKED = {"cache_control": {"type": "ephemeral"}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "search", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "found"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "forged"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1}, "seed: Extra inputs are not permitted"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [" "]}, "stop_sequences"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "assistant", "content": "Hello"}]}, "first message"),
        ({"messages": [{"role": "user", "content": []}]}, "non-empty content"),
        ({"messages": [{"role": "user", "content": ""}]}, "non-empty"),
        ({"messages": [{"role": "user", "content": [text(" \n")]}]}, "non-whitespace"),
        ({"messages": [{"role": "user", "content": [text("a", name="b")]}]}, "name: Extra inputs"),
        ({"messages": [{"role": "user", "content": [text("a", **MARKED) for _ in range(5)]}]}, "maximum of 4"),
        ({"messages": [USER, CALL]}, "without `tool_result`"),
        ({"messages": [USER, CALL, USER]}, "without `tool_result`"),
        ({"messages": [USER, CALL, {"role": "user", "content": [text("and"), RESULT]}]}, "without `tool_result`"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "unexpected `tool_use_id`"),
        ({"messages": [USER, {"role": "assistant", "content": [THOUGHT]}, USER]}, "signature"),
        ({"messages": [USER, {"role": "assistant", "content": "Well "}]}, "trailing whitespace"),
        ({"tool_choice": {"type": "any"}}, "while providing tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "look"}}, "not found"),
        ({"tools": [*TOOLS, *TOOLS]}, "unique"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "must be greater"),
        (
            {
                "max_tokens": 4000,
                "thinking": {"type": "enabled", "budget_tokens": 2000},
                "tools": TOOLS,
                "tool_choice": {"type": "any"},
            },
            "forces tool use",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}}}},
            "additionalProperties",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer", "minimum": 1}}}},
            "minimum",
        ),
    ],
)
async def test_it_refuses_what_the_api_refuses(server: MessagesServer, fields: dict, words: str) -> None:
    assert words in await refused(server, **fields)


async def test_the_new_version_refuses_sampling_at_its_defaults_too(server: MessagesServer) -> None:
    headers = {"anthropic-version": "2026-10-21", "Authorization": "Bearer k"}
    for name in ("temperature", "top_p", "top_k"):
        assert await refused(server, headers, **{name: 1}) == f"{name}: Extra inputs are not permitted"
    assert "anthropic-version" in await refused(server, {})


async def test_thoughts_that_led_to_a_call_must_come_back(anthropic: Any) -> None:
    async with MessagesServer([CallTools(ToolUse("search", {}, id="a"), reasoning="Hm.")]) as server:
        async with client_of(anthropic, server) as client:
            await client.messages.create(model="m", max_tokens=9, tools=TOOLS, messages=[USER])
        without = [USER, CALL, {"role": "user", "content": [RESULT]}]
        assert "Expected `thinking`" in await refused(server, messages=without)


async def test_its_cache_keeps_what_is_marked_and_long_enough(anthropic: Any) -> None:
    system = [text("word " * 2000, **MARKED)]
    async with MessagesServer(lambda request: Say("ok")) as server, client_of(anthropic, server) as client:

        async def usage(**fields: object) -> tuple[int, int]:
            asked = {"model": "m", "max_tokens": 9, "messages": [USER], "system": system} | fields
            told = (await client.messages.create(**asked)).usage
            return told.cache_creation_input_tokens, told.cache_read_input_tokens

        written, read = await usage()
        assert written > 2000 and read == 0
        assert await usage(messages=[{"role": "user", "content": "Something else."}]) == (0, written)
        assert await usage(system=[text("short", **MARKED)]) == (0, 0)
        assert await usage(system=[text("word " * 2000)]) == (0, 0), "without a mark nothing is looked for"

"""anthropic:// against a server that is as strict as the API: who asks, agents, caches, pauses, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from batch_agent import BatchAgent, Tool
from batch_agent.backends.anthropic.messages import AnthropicBackend
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, BadResponse, ContextOverflow, RateLimited, Rejected, SpecError, Unavailable
from batch_agent.messages import Conversation, Message, Sealed, Usage
from batch_agent.testing import Body, CallTools, Fail, MessagesServer, Request, Say, StreamError, ToolUse
from batch_agent.testing.contract.wire import Exchange, WireServer, answer

KEY = {"ANTHROPIC_API_KEY": "sk-ant-secret"}
LONG = "Some of the rules are these. " * 400  # about 2,900 tokens


def opened(backend: object, environ: dict[str, str] | None = None, **options: object) -> AnthropicBackend:
    found, _ = open_backend(backend, **{"model": None, "api_key": None, **options}, environ=environ or {})
    assert isinstance(found, AnthropicBackend)
    return found


def asked(*messages: Message, **options: object) -> ModelRequest:
    shape = RequestShape(**{"model": "m", **options})  # type: ignore[arg-type]
    return ModelRequest(shape, Conversation(messages or [Message("user", "Hello")]), "job-0")


# Where it is, and who asks


@pytest.mark.parametrize(
    ("given", "environ", "url", "name"),
    [
        ("anthropic://", {}, "https://api.anthropic.com/v1", "anthropic://api.anthropic.com"),
        ("anthropic://", {"ANTHROPIC_BASE_URL": "http://gw:1/"}, "http://gw:1/v1", "anthropic://gw:1"),
        ("anthropic://", {"ANTHROPIC_BASE_URL": "https://gw/a/v1"}, "https://gw/a/v1", "anthropic://gw/a/v1"),
        ("anthropic://host:8000", {}, "http://host:8000/v1", "anthropic://host:8000"),
        ("anthropic://host:8000/v1/messages", {}, "http://host:8000/v1", "anthropic://host:8000/v1/messages"),
        ("anthropic://host:8443?tls=true", {}, "https://host:8443/v1", "anthropic://host:8443"),
        ("anthropic://gateway.example/team", {}, "https://gateway.example/team/v1", "anthropic://gateway.example/team"),
        ("anthropic://host?tls=false", {"ANTHROPIC_BASE_URL": "https://gw"}, "http://host/v1", "anthropic://host"),
    ],
)
def test_a_url_leads_to_its_server(given: str, environ: dict[str, str], url: str, name: str) -> None:
    backend = opened(given, KEY | environ)
    assert str(backend._chat.url) == url + "/messages"
    assert backend.name == name


@pytest.mark.parametrize(
    ("given", "environ", "options", "headers"),
    [
        ("{}", KEY, {}, {"x-api-key": "sk-ant-secret", "anthropic-version": "2023-06-01"}),
        (
            "{}?version=2026-10-21",
            KEY,
            {},
            {"Authorization": "Bearer sk-ant-secret", "anthropic-version": "2026-10-21"},
        ),
        ("{}", {"ANTHROPIC_AUTH_TOKEN": "tok-en"}, {}, {"Authorization": "Bearer tok-en"}),
        ("{}", KEY | {"ANTHROPIC_AUTH_TOKEN": "tok-en"}, {"api_key": "given"}, {"x-api-key": "given"}),
        ("{}", {}, {}, {}),
    ],
)
async def test_the_key_reaches_the_server_where_the_version_wants_it(
    given: str, environ: dict, options: dict, headers: dict
) -> None:
    async with WireServer(answer({"data": [{"id": "m"}]})) as server:
        url = "anthropic://" + given.format(f"127.0.0.1:{server.port}")
        async with opened(url, environ, **options) as backend:
            assert await backend.models() == ["m"]
        sent = {
            name: value for name, value in server.requests[0].headers.items() if name in ("x-api-key", "Authorization")
        }
    assert sent == {name: value for name, value in headers.items() if name != "anthropic-version"}
    assert server.requests[0].headers["anthropic-version"] == headers.get("anthropic-version", "2023-06-01")


def test_what_is_wrong_with_an_address_is_said_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match="ANTHROPIC_API_KEY"):
        opened("anthropic://", {"ANTHROPIC_API_KEY": " "})
    with pytest.raises(SpecError, match="2023-06-01, 2026-10-21"):
        opened("anthropic://?version=2024-01-01", KEY)
    with pytest.raises(SpecError, match="did you mean 'version'"):
        opened("anthropic://?versoin=2023-06-01", KEY)
    with pytest.raises(SpecError, match="ANTHROPIC_BASE_URL"):
        opened("anthropic://", KEY | {"ANTHROPIC_BASE_URL": "gateway:80"})
    assert "secret" not in repr(opened("anthropic://", KEY))


def test_a_provider_before_the_model_leads_here() -> None:
    backend, model = open_backend(None, model="anthropic/claude-sonnet-4-5", api_key=None, environ=KEY)
    assert (backend.name, model) == ("anthropic://api.anthropic.com", "claude-sonnet-4-5")


@pytest.mark.parametrize(
    ("url", "native", "with_tools"),
    [
        ("anthropic://", True, True),
        ("anthropic://gateway.example", True, True),
        ("anthropic://host:8000", False, False),
        ("anthropic://host:8000?native_schema=true", True, False),
        ("anthropic://?native_schema=false", False, False),
    ],
)
def test_a_server_of_ones_own_is_not_known_to_keep_to_schemas(url: str, native: bool, with_tools: bool) -> None:
    can = opened(url, KEY).capabilities
    assert (can.native_schema, can.schema_with_tools) == (native, with_tools)


async def test_models_are_read_page_by_page_without_those_that_are_retired() -> None:
    pages = {
        "": {"data": [{"id": "a"}, {"id": "old", "lifecycle": "retired"}], "has_more": True, "last_id": "old"},
        "old": {"data": [{"id": "b"}], "has_more": True, "last_id": "b"},
        "b": {"data": [{"id": "b"}], "has_more": True, "last_id": "b"},
    }

    async def serve(exchange: Exchange) -> None:
        _, _, after = exchange.path.partition("after_id=")
        await answer(pages[after])(exchange)

    async with WireServer(serve) as server, opened(f"anthropic://127.0.0.1:{server.port}") as backend:
        assert await backend.models() == ["a", "b"]
    assert len(server.requests) == 3, "a server that says the same again is not asked for ever"


async def test_what_is_no_list_of_models_is_said() -> None:
    async with WireServer(answer({"models": []})) as server, opened(f"anthropic://127.0.0.1:{server.port}") as backend:
        with pytest.raises(BadResponse, match="not a list of models"):
            await backend.models()


# Agents


@Tool.define(effect="read")
async def look_up(word: str) -> str:
    """Look a word up."""
    return f"about {word}"


class Found(BaseModel):
    answer: str
    sure: float = Field(ge=0, le=1)


def look_then_answer(request: Request) -> Say:
    if request.turn == 0:
        uses = [ToolUse("look_up", {"word": word}) for word in ("é", "b")]
        return CallTools(*uses, text="Let me look.", reasoning="Which words?")
    return Say('{"answer": "it", "sure": 0.5}')


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_agents_use_tools_and_answer_by_a_schema(version: str, streaming: bool) -> None:
    async with MessagesServer(look_then_answer, models=["m"], api_key="k") as server:
        results = await BatchAgent.run(
            **{"task": "{input}", "inputs": ["a", "b", "c"], "tools": [look_up], "output_schema": Found, "model": "m"},
            **{"backend": f"{server.backend_url}?version={version}&native_schema=true", "api_key": "k"},
            streaming_tool_dispatch=streaming,
        )
    assert [result.output for result in results] == [Found(answer="it", sure=0.5)] * 3
    assert all(result.turns == 2 for result in results)
    assert [message.content for message in server.requests[-1].conversation()[-2:]] == ["about é", "about b"]


async def test_signed_thoughts_come_back_after_a_resume(tmp_path: Path) -> None:
    def breaks_off(request: Request) -> Say | Fail:
        return look_then_answer(request) if request.turn == 0 else Fail(503)

    async def run(server: MessagesServer) -> bool:
        [result] = await BatchAgent.run(
            **{"task": "{input}", "inputs": ["a"], "tools": [look_up], "model": "m", "backend": server.backend_url},
            **{"run_dir": tmp_path, "resume": True, "max_retries": 0},
        )
        return result.ok

    async with MessagesServer(breaks_off) as server:
        port = int(server.address.rpartition(":")[2])
        assert not await run(server)
        thoughts = server._thoughts
    async with MessagesServer(look_then_answer, port=port) as server:
        server._thoughts |= thoughts
        assert await run(server)
    [request] = server.requests
    assert request.messages[1]["content"][0]["thinking"] == "Which words?"


async def test_a_schema_that_the_api_has_no_form_for_is_told_and_kept_all_the_same() -> None:
    script = [Say("Sorry?"), Say("[1, 2]")]
    async with MessagesServer(script) as server:
        [result] = await BatchAgent.run(
            **{"task": "{input}", "inputs": ["a"], "output_schema": list[int], "model": "m"},
            backend=f"{server.backend_url}?native_schema=true",
        )
    assert result.output == [1, 2]
    assert "JSON schema" in server.requests[0].conversation()[0].content


async def test_siblings_read_what_the_first_wrote_and_each_turn_what_the_one_before_did() -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("look_up", {"word": LONG})) if request.turn < 2 else Say("done")

    async with MessagesServer(script) as server:
        results = await BatchAgent.run(
            **{"task": "{input}", "inputs": ["a", "b", "c"], "tools": [look_up], "system_prompt": LONG, "model": "m"},
            **{"backend": server.backend_url, "max_inflight": 1, "prices": {"input": 1, "output": 1, "cached": 0.1}},
        )
    first, second, third = (result.usage for result in results)
    assert first.cached_tokens > 10_000, "its own turns"
    for usage in (second, third):
        assert usage.cached_tokens - first.cached_tokens > 2500, "the shared prompt, on the first turn too"
        assert usage.cached_tokens + usage.cache_write_tokens <= usage.prompt_tokens
    fresh = second.prompt_tokens - second.cached_tokens
    cost = fresh + 0.1 * second.cached_tokens + second.completion_tokens
    assert results[1].cost == pytest.approx(cost / 1e6)


async def test_an_end_more_than_twenty_blocks_away_is_found_too() -> None:
    def script(request: Request) -> Say:
        many = [ToolUse("look_up", {"word": f"{request.turn} {number}"}) for number in range(15)]
        return CallTools(*many) if request.turn < 2 else Say("done")

    async with MessagesServer(script) as server:
        [result] = await BatchAgent.run(
            **{"task": LONG + "{input}", "inputs": ["a"], "tools": [look_up], "model": "m", "no_hoist": True},
            backend=server.backend_url,
        )
    assert result.usage.cached_tokens > 2 * 2800, "the task, on the second and on the third turn"


async def test_rows_of_one_turn_are_not_written_to_the_cache() -> None:
    async with MessagesServer(lambda request: Say("ok")) as server:
        results = await BatchAgent.run(
            task="{input}", inputs=[LONG + "a", LONG + "b"], model="m", backend=server.backend_url
        )
    assert all(result.usage.cache_write_tokens == 0 for result in results)


# Pauses


PAUSED = {
    "type": "message",
    "content": [
        {"type": "text", "text": "Let me search. "},
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}},
    ],
    "stop_reason": "pause_turn",
    "usage": {"input_tokens": 10, "output_tokens": 5},
}
SEARCH = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}


async def test_a_paused_answer_is_sent_back_until_it_is_whole() -> None:
    script = [Body(PAUSED), Say("Found it.", usage=Usage(prompt_tokens=20, completion_tokens=3))]
    async with MessagesServer(script) as server, opened(server.backend_url) as backend:
        reply = await backend.infer(asked(extra_body=SEARCH))
    assert (reply.text, reply.finish_reason) == ("Let me search. Found it.", "end_turn")
    assert reply.usage == Usage(prompt_tokens=30, completion_tokens=8)
    assert reply.sealed == Sealed("anthropic", [*PAUSED["content"], {"type": "text", "text": "Found it."}])
    assert server.requests[1].messages[-1] == {"role": "assistant", "content": PAUSED["content"]}


async def test_what_a_pause_cost_is_on_the_error_that_followed_and_there_is_an_end_to_pausing() -> None:
    async with MessagesServer([Body(PAUSED), Fail(529)]) as server, opened(server.backend_url) as backend:
        with pytest.raises(Unavailable) as caught:
            await backend.infer(asked(extra_body=SEARCH))
        assert caught.value.usage == Usage(prompt_tokens=10, completion_tokens=5)
        assert caught.value.overload
    async with MessagesServer(lambda request: Body(PAUSED)) as server, opened(server.backend_url) as backend:
        with pytest.raises(BadResponse, match="paused"):
            await backend.infer(asked(extra_body=SEARCH))


# Errors


def error(kind: str, message: str = "no", **more: object) -> dict:
    return {"type": "error", "error": {"type": kind, "message": message, **more}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, error("invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"), ContextOverflow),
        (
            400,
            error(
                "invalid_request_error", "input length and `max_tokens` exceed context limit: 190000 + 16000 > 200000"
            ),
            ContextOverflow,
        ),
        (400, error("invalid_request_error", "Your credit balance is too low"), Rejected),
        (413, error("request_too_large"), Rejected),
        (429, error("rate_limit_error"), RateLimited),
        (429, error("rate_limit_error", details={"error_code": "enforced_spend_limit_reached"}), Rejected),
        (500, error("api_error"), Unavailable),
        (529, error("overloaded_error", "Overloaded"), Unavailable),
    ],
)
async def test_a_refusal_is_an_error_of_its_type(status: int, body: dict, kind: type[BackendError]) -> None:
    async with MessagesServer([Fail(status, body)]) as server, opened(server.backend_url) as backend:
        with pytest.raises(BackendError) as caught:
            await backend.infer(asked())
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.overload) == (status, status in (429, 529) and kind is not Rejected)
    assert body["error"]["message"] in str(caught.value)


async def test_a_key_that_is_refused_is_not_shown() -> None:
    async with MessagesServer(api_key="right") as server, opened(server.backend_url, KEY) as backend:
        with pytest.raises(Rejected, match="ANTHROPIC_API_KEY") as caught:
            await backend.infer(asked())
    assert "secret" not in str(caught.value)


async def test_what_the_headers_say_of_budgets_is_passed_on() -> None:
    limits = {"anthropic-ratelimit-requests-limit": "50", "anthropic-ratelimit-requests-remaining": "49"}
    script = [Say("ok", headers=limits), Fail(429, headers=limits | {"Retry-After": "3"})]
    async with MessagesServer(script) as server, opened(server.backend_url) as backend:
        reply = await backend.infer(asked())
        assert reply.quota is not None and reply.quota.requests is not None
        assert (reply.quota.requests.limit, reply.quota.requests.remaining) == (50, 49)
        with pytest.raises(RateLimited) as caught:
            await backend.infer(asked())
    assert caught.value.quota == reply.quota
    assert caught.value.retry_after == 3.0


async def test_an_overload_in_the_middle_of_an_answer_is_tried_again() -> None:
    async with MessagesServer([StreamError("Overloaded", 529), Say("ok")]) as server:
        [result] = await BatchAgent.run(task="{input}", inputs=["a"], model="m", backend=server.backend_url)
    assert (result.output, len(server.requests)) == ("ok", 2)

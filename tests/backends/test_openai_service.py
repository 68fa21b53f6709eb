"""OpenAI itself and Azure: which wire a model is asked on, what its models refuse, keys and addresses."""

from __future__ import annotations

import pytest
from tests.backends.chat_contract import whole
from tests.backends.responses_wire import document

from batch_agent import BatchAgent
from batch_agent.backends.base import Backend, RequestShape
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.openai.providers import needs_responses, reasons
from batch_agent.backends.registry import open_backend
from batch_agent.errors import Rejected, SpecError
from batch_agent.messages import Conversation, Message
from batch_agent.testing.contract.backend import SEARCH, Say, ask
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer


def opened(backend: str, model: str | None = None, **environ: str) -> Backend:
    return open_backend(backend, model=model, api_key=None, environ=environ)[0]


def openai_at(server: WireServer, query: str = "") -> Backend:
    return opened(f"openai://{query}", OPENAI_API_KEY="k-1", OPENAI_BASE_URL=server.url)


async def either_wire(exchange: Exchange) -> None:
    say = Say('{"answer": [1]}')
    body = document(say) if exchange.path.startswith("/v1/responses") else whole(say)
    await answer(body)(exchange)


@pytest.mark.parametrize(
    ("model", "query", "path"),
    [
        ("gpt-4o", "", "/v1/chat/completions"),
        ("gpt-5", "", "/v1/chat/completions"),
        ("o3-pro", "", "/v1/responses"),
        ("gpt-5-codex", "", "/v1/responses"),
        ("gpt-5.2-pro-2025-12-11", "", "/v1/responses"),
        ("o4-mini-deep-research", "", "/v1/responses"),
        ("gpt-4o", "?api=responses", "/v1/responses"),
        ("o3-pro", "?api=chat", "/v1/chat/completions"),
    ],
)
async def test_a_model_is_asked_on_the_wire_that_it_needs(model: str, query: str, path: str) -> None:
    shape = RequestShape(model, schema={"type": "array", "items": {"type": "integer"}})
    async with WireServer(either_wire) as server, openai_at(server, query) as backend:
        backend.check(shape)
        reply = await backend.infer(ask(shape=shape))
    assert server.requests[0].path == path
    assert server.requests[0].headers["Authorization"] == "Bearer k-1"
    assert reply.text == "[1]"


async def test_a_list_comes_out_of_a_run_as_a_list_and_its_transcript_shows_no_wrapper() -> None:
    async with WireServer(either_wire) as server:
        results = await BatchAgent.run(
            task="Numbers",
            inputs=[{}],
            output_schema=list[int],
            model="gpt-4o",
            backend=openai_at(server),
        )
    assert results[0].output == [1]
    assert results[0].messages[-1].content == "[1]"
    assert "answer" not in server.requests[0].json["messages"][0]["content"]


def test_names_tell_what_a_model_is() -> None:
    for name in ("o1", "o3-mini", "o4-mini-2025-04-16", "gpt-5", "gpt-5-mini", "gpt-5.2", "gpt-6", "codex-mini-latest"):
        assert reasons(name), name
    for name in ("gpt-4o", "gpt-4.1", "gpt-35-turbo", "gpt-5-chat-latest", "gpt-5.2-chat-latest", "gpt-oss-20b"):
        assert not reasons(name), name
    assert not needs_responses("gpt-4o-mini")
    assert not needs_responses("gpt-5.2-chat-latest")


@pytest.mark.parametrize("option", [{"temperature": 0.0}, {"top_p": 0.5}, {"stop": ("END",)}])
@pytest.mark.parametrize("model", ["o3-mini", "gpt-5-nano", "gpt-5.2", "o3-pro"])
def test_what_a_reasoning_model_refuses_is_an_error_before_anything_is_sent(model: str, option: dict) -> None:
    backend = opened("openai://", OPENAI_API_KEY="k")
    [name] = option
    with pytest.raises(SpecError, match=f"{model} is a reasoning model and takes no {name}: leave it out"):
        backend.check(RequestShape(model, **option))


def test_a_model_that_is_told_not_to_reason_takes_them_all() -> None:
    backend = opened("openai://", OPENAI_API_KEY="k")
    backend.check(RequestShape("gpt-5.2", temperature=0.0, extra_body={"reasoning_effort": "none"}))
    with pytest.raises(SpecError, match="temperature"):
        backend.check(RequestShape("gpt-5", temperature=0.0, extra_body={"reasoning_effort": "none"}))
    backend.check(RequestShape("gpt-5-chat-latest", temperature=0.0))
    backend.check(RequestShape("gpt-5", max_tokens=5, seed=7))


async def test_a_run_with_an_option_that_its_model_refuses_sends_nothing() -> None:
    async with WireServer(either_wire) as server:
        with pytest.raises(SpecError, match="o3 is a reasoning model and takes no temperature"):
            await BatchAgent.run(task="x", inputs=[{}], model="o3", temperature=0, backend=openai_at(server))
        assert server.requests == []


async def test_agents_that_begin_alike_have_one_cache_key() -> None:
    async def keys(*talks: Conversation, shape: RequestShape) -> list[str]:
        async with WireServer(either_wire) as server, openai_at(server) as backend:
            for talk in talks:
                await backend.infer(ask(shape=shape, conversation=talk))
            return [request.json["prompt_cache_key"] for request in server.requests]

    def talk(system: str, user: str) -> Conversation:
        return Conversation([Message("system", system), Message("user", user)])

    shape = RequestShape("gpt-4o")
    one, two, other = await keys(talk("Be brief.", "a"), talk("Be brief.", "b"), talk("Be long.", "a"), shape=shape)
    assert one == two != other
    assert [one] == await keys(talk("Be brief.", "c"), shape=RequestShape("gpt-4o", temperature=0.5))
    assert [one] != await keys(talk("Be brief.", "c"), shape=RequestShape("gpt-4o", tools=(SEARCH,)))
    assert len(one) <= 64
    own = RequestShape("gpt-4o", extra_body={"prompt_cache_key": "mine"})
    assert await keys(talk("Be brief.", "a"), shape=own) == ["mine"]


# Azure


def azure_at(server: WireServer, query: str = "", **environ: str) -> Backend:
    own = {"AZURE_OPENAI_API_KEY": "k-azure", "AZURE_OPENAI_ENDPOINT": f"http://127.0.0.1:{server.port}/"} | environ
    return opened(f"azure://resource/my-deployment{query}", **own)


@pytest.mark.parametrize(
    ("query", "environ", "path"),
    [
        ("", {}, "/openai/deployments/my-deployment/chat/completions?api-version=2024-10-21"),
        (
            "",
            {"AZURE_OPENAI_API_VERSION": "2025-01-01-preview"},
            "/openai/deployments/my-deployment/chat/completions?api-version=2025-01-01-preview",
        ),
        ("", {"AZURE_OPENAI_API_VERSION": "v1"}, "/openai/v1/chat/completions"),
        ("", {"AZURE_OPENAI_API_VERSION": "preview"}, "/openai/v1/chat/completions?api-version=preview"),
        ("?api=responses", {}, "/openai/v1/responses"),
    ],
)
async def test_azure_is_asked_at_the_path_of_its_version(query: str, environ: dict, path: str) -> None:
    async def step(exchange: Exchange) -> None:
        await answer(document(Say("ok")) if "responses" in exchange.path else whole(Say("ok")))(exchange)

    async with WireServer(step) as server, azure_at(server, query, **environ) as backend:
        assert await backend.models() == ["my-deployment"]
        await backend.infer(ask(shape=RequestShape("gpt-4o")))
    [request] = server.requests
    assert request.path == path
    assert request.headers["api-key"] == "k-azure"
    assert "Authorization" not in request.headers
    assert request.json["model"] == "my-deployment"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("azure://acme/dep", "https://acme.openai.azure.com/openai/deployments/dep"),
        ("azure://acme.openai.azure.us/dep", "https://acme.openai.azure.us/openai/deployments/dep"),
        ("azure://acme.services.ai.azure.com/a b", "https://acme.services.ai.azure.com/openai/deployments/a%20b"),
    ],
)
def test_a_resource_is_a_name_or_a_host(url: str, base: str) -> None:
    backend = opened(url, AZURE_OPENAI_API_KEY="k")
    assert isinstance(backend, OpenAIBackend)
    assert str(backend._chat.url).startswith(f"{base}/chat/completions?api-version=")


@pytest.mark.parametrize("url", ["azure://", "azure://acme", "azure://acme/", "azure:///dep", "azure://acme/a/b"])
def test_an_address_that_is_not_both_says_the_form(url: str) -> None:
    with pytest.raises(SpecError, match="azure://resource/deployment"):
        opened(url, AZURE_OPENAI_API_KEY="k")


def test_azure_without_a_key_names_the_variable() -> None:
    with pytest.raises(SpecError, match="AZURE_OPENAI_API_KEY"):
        opened("azure://acme/dep")
    assert "k-azure" not in repr(opened("azure://acme/dep", AZURE_OPENAI_API_KEY="k-azure"))


async def test_a_token_of_azure_is_a_bearer() -> None:
    environ = {"AZURE_OPENAI_API_KEY": "", "AZURE_OPENAI_AD_TOKEN": "t-1"}
    async with WireServer(answer(whole(Say("ok")))) as server, azure_at(server, **environ) as backend:
        await backend.infer(ask())
    assert server.requests[0].headers["Authorization"] == "Bearer t-1"


async def test_a_filtered_prompt_fails_its_row_alone() -> None:
    def filtered(step: Step) -> Step:
        async def judged(exchange: Exchange) -> None:
            if b"forbidden" in exchange.body:
                inner = {"code": "ResponsibleAIPolicyViolation", "content_filter_result": {}}
                error = {"message": "filtered", "type": None, "param": "prompt", "code": "content_filter"}
                await answer({"error": error | {"innererror": inner, "status": 400}}, 400)(exchange)
            else:
                await step(exchange)

        return judged

    async with WireServer(filtered(answer(whole(Say("ok"))))) as server, azure_at(server) as backend:
        with pytest.raises(Rejected, match="filtered") as caught:
            await backend.infer(ask(Message("user", "forbidden")))
        assert caught.value.status is None, "a status would make many of them a refusal of the whole run"
        rows = [{"word": "forbidden"}] * 30 + [{"word": "fine"}]
        results = await BatchAgent.run(task="Say {word}", inputs=rows, backend=backend, max_inflight=1)
    assert [result.ok for result in results] == [False] * 30 + [True]
    assert server.requests[-1].json["model"] == "my-deployment", "no model was named, and none asked for"

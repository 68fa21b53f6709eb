"""Providers by name: where each is found, what it is sent, and what is said where something is wrong."""

from __future__ import annotations

import pytest
from tests.backends.chat_contract import whole

from batch_agent.backends.base import RequestShape
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.openai.providers import PROVIDERS, base_variable
from batch_agent.backends.registry import open_backend
from batch_agent.errors import Rejected, SpecError
from batch_agent.testing.contract.backend import CALLS, SEARCH, Say, ask, go_on
from batch_agent.testing.contract.wire import Exchange, WireServer, answer, stream


def opened(backend: object, model: str | None = None, **environ: str) -> OpenAIBackend:
    found, _ = open_backend(backend, model=model, api_key=None, environ=environ)
    assert isinstance(found, OpenAIBackend)
    return found


def chat_url(backend: OpenAIBackend) -> str:
    return str(backend._chat.url).removesuffix("/chat/completions")


def keys(name: str) -> dict[str, str]:
    key = PROVIDERS[name].key
    return {key: "k-1"} if key else {}


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_provider_is_found_by_scheme_and_before_a_models_name(name: str) -> None:
    assert chat_url(opened(f"{name}://", **keys(name))) == PROVIDERS[name].base_url
    backend, model = open_backend(None, model=f"{name}/vendor/model-1", api_key=None, environ=keys(name))
    assert (chat_url(backend), model) == (PROVIDERS[name].base_url, "vendor/model-1")
    assert backend.name.startswith(f"{name}://")


@pytest.mark.parametrize("name", PROVIDERS)
async def test_a_variable_says_where_a_provider_is_and_its_key_goes_there(name: str) -> None:
    async with WireServer(answer({"data": [{"id": "m"}]})) as server:
        environ = keys(name) | {base_variable(name): server.url}
        async with opened(f"{name}://", **environ) as backend:
            assert await backend.models() == ["m"]
        expected = "Bearer k-1" if PROVIDERS[name].key else None
        assert server.requests[0].headers.get("Authorization") == expected


@pytest.mark.parametrize("name", [name for name, known in PROVIDERS.items() if known.key])
def test_a_missing_key_names_its_variable(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}://.*{PROVIDERS[name].key}"):
        opened(None, f"{name}/model")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("ollama://", "http://localhost:11434/v1"),
        ("ollama://gpu-1", "http://gpu-1:11434/v1"),
        ("llamacpp://gpu-1", "http://gpu-1:8080/v1"),
        ("lmstudio://gpu-1:5", "http://gpu-1:5/v1"),
        ("lmstudio://gpu-1?tls=true", "https://gpu-1/v1"),
        ("groq://proxy.example/openai/v1?tls=true", "https://proxy.example/openai/v1"),
    ],
)
def test_a_server_of_ones_own_has_its_usual_port(given: str, url: str) -> None:
    assert chat_url(opened(given, GROQ_API_KEY="k")) == url


def test_a_base_that_is_no_url_names_its_variable() -> None:
    with pytest.raises(SpecError, match="GROQ_BASE_URL"):
        opened("groq://", GROQ_API_KEY="k", GROQ_BASE_URL="localhost:1")


async def sent_to(name: str, shape: RequestShape, streamed: bool = False) -> dict:
    server = WireServer(answer(whole(Say("ok"))))
    async with server, opened(f"{name}://", **keys(name), **{base_variable(name): server.url}) as backend:
        await backend.infer(ask(shape=shape), (lambda call: None) if streamed else None)
        return server.requests[0].json


async def test_each_is_sent_what_it_takes() -> None:
    shape = RequestShape("m", max_tokens=5, seed=7)
    assert (await sent_to("groq", shape))["max_completion_tokens"] == 5
    mistral = await sent_to("mistral", shape, streamed=True)
    assert (mistral["max_tokens"], mistral["random_seed"]) == (5, 7)
    assert mistral.keys().isdisjoint(("seed", "stream_options"))
    assert (await sent_to("together", shape))["seed"] == 7


def test_an_option_that_a_provider_refuses_is_an_error_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match=r"gemini://.*takes no seed"):
        opened("gemini://", GEMINI_API_KEY="k").check(RequestShape("m", seed=7))


def test_what_is_known_of_schemas_is_in_the_capabilities() -> None:
    groq = opened("groq://", GROQ_API_KEY="k").capabilities
    assert (groq.native_schema, groq.schema_proven) == (True, False)
    assert not opened("deepseek://", DEEPSEEK_API_KEY="k").capabilities.native_schema


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_signature_beside_a_call_goes_back_with_it(streamed: bool) -> None:
    document = whole(Say("", CALLS))
    signature = {"google": {"thought_signature": "AY89"}}
    document["choices"][0]["message"]["tool_calls"][0]["extra_content"] = signature
    if streamed:
        document["choices"][0]["delta"] = document["choices"][0].pop("message")
        first = stream(document)
    else:
        first = answer(document)
    server = WireServer(first, answer(whole(Say("Done."))))
    async with server, opened("gemini://", GEMINI_API_KEY="k", GEMINI_BASE_URL=server.url) as backend:
        request = ask(shape=RequestShape("m", tools=(SEARCH,)))
        go_on(request, await backend.infer(request, (lambda call: None) if streamed else None), "here", "there")
        await backend.infer(request)
    [one, two] = server.requests[1].json["messages"][2]["tool_calls"]
    assert one["extra_content"] == signature
    assert "extra_content" not in two


async def test_reasoning_goes_back_to_the_one_that_wants_it() -> None:
    for name, wants in (("deepseek", True), ("groq", False)):
        server = WireServer(answer(whole(Say("", CALLS[:1], reasoning="Hm."))), answer(whole(Say("Done."))))
        environ = keys(name)
        async with server, opened(f"{name}://", **environ, **{base_variable(name): server.url}) as backend:
            request = ask(shape=RequestShape("m", tools=(SEARCH,)))
            go_on(request, await backend.infer(request), "here")
            await backend.infer(request)
        said = server.requests[1].json["messages"][2]
        assert said.get("reasoning_content") == ("Hm." if wants else None)


def lacking(status: int, message: str) -> object:
    asked: list[str] = []

    async def step(exchange: Exchange) -> None:
        if exchange.method == "GET":
            asked.append(exchange.path)
            names = ["llama-3.3-70b", "llama-3.1-8b", "whisper-1"]
            await answer({"data": [{"id": name} for name in names]})(exchange)
        else:
            await answer({"error": {"message": message, "code": "model_not_found"}}, status)(exchange)

    return step, asked


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "no"), (400, "Model Not Exist"), (400, "Invalid model: llama-3.3-7b"), (400, "x is not a valid model ID")],
)
async def test_a_model_that_is_not_there_is_said_with_what_there_is(status: int, message: str) -> None:
    step, asked = lacking(status, message)
    async with WireServer(step) as server, OpenAIBackend(server.url, name="groq://here") as backend:
        for _ in range(3):
            with pytest.raises(Rejected) as caught:
                await backend.infer(ask(shape=RequestShape("llama-3.3-7b")))
    assert caught.value.status == 404
    assert str(caught.value).startswith(
        "there is no model 'llama-3.3-7b' at groq://here (did you mean 'llama-3.3-70b'?); it has llama-3.3-70b, "
    )
    assert "whisper-1" in str(caught.value)
    assert len(asked) == 1


async def test_a_refusal_that_is_not_for_want_of_the_model_is_left_as_it_is() -> None:
    step, asked = lacking(404, "there is nothing here")
    async with WireServer(step) as server, OpenAIBackend(server.url) as backend:
        with pytest.raises(Rejected, match="nothing here") as caught:
            await backend.infer(ask(shape=RequestShape("whisper-1")))
    assert "there is no model" not in str(caught.value)
    async with WireServer(answer({"error": {"message": "no"}}, 404)) as server, OpenAIBackend(server.url) as backend:
        with pytest.raises(Rejected, match="answered 404: no"):
            await backend.infer(ask())
    assert len(asked) == 1


def test_a_provider_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(SpecError, match="did you mean groq/llama"):
        open_backend(None, model="grok/llama", api_key=None, environ={})
    with pytest.raises(SpecError, match="did you mean 'ollama'"):
        open_backend("olama://", model=None, api_key=None, environ={})

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

import pytest

from batch_agent.backends.address import Address
from batch_agent.backends.base import Backend
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import SpecError
from batch_agent.testing.contract.wire import WireServer, answer

KEY = {"OPENAI_API_KEY": "sk-env"}


def opened(backend: object, environ: dict[str, str] | None = None, **options: object) -> OpenAIBackend:
    found, _ = open_backend(backend, **{"model": None, "api_key": None, **options}, environ=environ or {})
    assert isinstance(found, OpenAIBackend)
    return found


def chat_url(backend: OpenAIBackend) -> str:
    return str(backend._chat.url)


@pytest.mark.parametrize(
    ("given", "url", "name"),
    [
        ("vllm://gpu-1", "http://gpu-1:8000/v1", "vllm://gpu-1"),
        ("vllm://gpu-1:9000", "http://gpu-1:9000/v1", "vllm://gpu-1:9000"),
        ("vllm://gpu-1:9000/", "http://gpu-1:9000/v1", "vllm://gpu-1:9000"),
        ("vllm://gpu-1/models/a", "http://gpu-1:8000/models/a/v1", "vllm://gpu-1/models/a"),
        ("vllm://gpu-1:9000/v1", "http://gpu-1:9000/v1", "vllm://gpu-1:9000/v1"),
        ("vllm://gpu-1:/", "http://gpu-1:8000/v1", "vllm://gpu-1:"),
        ("vllm://[::1]:9000", "http://[::1]:9000/v1", "vllm://[::1]:9000"),
        ("vllm://[::1]", "http://[::1]:8000/v1", "vllm://[::1]"),
        ("vllm://gpu-1?tls=true", "https://gpu-1/v1", "vllm://gpu-1"),
        ("vllm://gpu-1:9000?tls=1", "https://gpu-1:9000/v1", "vllm://gpu-1:9000"),
        ("sglang://gpu-1", "http://gpu-1:30000/v1", "sglang://gpu-1"),
        ("http://host", "http://host/v1", "http://host"),
        ("https://host:8443/", "https://host:8443/v1", "https://host:8443"),
        ("http://host:11434/api/openai/", "http://host:11434/api/openai", "http://host:11434/api/openai"),
        ("http://h/v1/chat/completions", "http://h/v1", "http://h/v1/chat/completions"),
        ("HTTP://host", "http://host/v1", "http://host"),
        (" http://host ", "http://host/v1", "http://host"),
        ("http://user:pa@ss@host:80", "http://host/v1", "http://host:80"),
    ],
)
def test_a_url_leads_to_its_server(given: str, url: str, name: str) -> None:
    backend = opened(given)
    assert chat_url(backend) == url + "/chat/completions"
    assert backend.name == name


def test_openai_takes_its_key_and_base_from_the_environment() -> None:
    assert chat_url(opened("openai://", KEY)) == "https://api.openai.com/v1/chat/completions"
    assert opened("openai://", KEY).name == "openai://api.openai.com"
    other = KEY | {"OPENAI_BASE_URL": "http://localhost:9/base/"}
    assert chat_url(opened("openai://", other)) == "http://localhost:9/base/chat/completions"
    assert chat_url(opened("openai://eu.example", other)) == "https://eu.example/v1/chat/completions"
    assert chat_url(opened("openai://", api_key="sk-given")) == "https://api.openai.com/v1/chat/completions"


def test_openai_without_a_key_names_the_variable() -> None:
    for environ in ({}, {"OPENAI_API_KEY": "  "}, {"BATCH_AGENT_API_KEY": "x"}):
        with pytest.raises(SpecError, match="OPENAI_API_KEY"):
            opened("openai://", environ)


@pytest.mark.parametrize(
    ("url", "native", "with_tools"),
    [
        ("vllm://h", True, False),
        ("sglang://h", True, False),
        ("vllm://h?native_schema=false", False, False),
        ("http://h", True, False),
        ("http://h?native_schema=true", True, False),
        ("openai://", True, True),
        ("openai://?native_schema=false", False, False),
    ],
)
def test_each_scheme_knows_what_it_can_do(url: str, native: bool, with_tools: bool) -> None:
    can = opened(url, KEY).capabilities
    assert (can.native_schema, can.schema_with_tools) == (native, with_tools)


@pytest.mark.parametrize(
    ("backend", "environ", "options", "sent"),
    [
        ("http://{}", {"BATCH_AGENT_API_KEY": "env "}, {}, "Bearer env"),
        ("vllm://{}", {"BATCH_AGENT_API_KEY": "env"}, {"api_key": "given"}, "Bearer given"),
        ("http://me:pw@{}", {"BATCH_AGENT_API_KEY": "env"}, {}, "Basic bWU6cHc="),
        ("openai://{}?tls=false", KEY, {}, "Bearer sk-env"),
        ({"url": "sglang://{}", "api_key": "mapped"}, {}, {}, "Bearer mapped"),
        ({"url": "http://{}", "headers": {"Authorization": "Token t"}}, {}, {"api_key": "given"}, "Token t"),
        ("http://{}", KEY, {}, None),
    ],
)
async def test_the_key_reaches_the_server(backend: object, environ: dict, options: dict, sent: str | None) -> None:
    async with WireServer(answer({"data": [{"id": "m"}]})) as server:
        place = f"127.0.0.1:{server.port}"
        if isinstance(backend, dict):
            backend = backend | {"url": backend["url"].format(place)}
        else:
            backend = str(backend).format(place)
        async with opened(backend, environ, **options) as found:
            assert await found.models() == ["m"]
        assert server.requests[0].headers.get("Authorization") == sent


def test_a_provider_before_the_model_is_a_backend_only_where_none_is_given() -> None:
    def name_for(backend: object, model: str, environ: dict[str, str]) -> tuple[str, str | None]:
        found, name = open_backend(backend, model=model, api_key=None, environ=environ)
        return found.name, name

    assert name_for(None, "openai/gpt-4o-mini", KEY) == ("openai://api.openai.com", "gpt-4o-mini")
    assert name_for("vllm://h", "openai/gpt-oss-20b", KEY) == ("vllm://h", "openai/gpt-oss-20b")
    here = KEY | {"BATCH_AGENT_BACKEND": "vllm://h"}
    assert name_for(None, "openai/gpt-oss-20b", here) == ("vllm://h", "openai/gpt-oss-20b")


@pytest.mark.parametrize("model", [None, "smollm2"])
def test_without_a_backend_the_embedded_engine_answers_or_says_how_to_install_it(model: str | None) -> None:
    if importlib.util.find_spec("openvino_genai") is None:
        with pytest.raises(SpecError, match=r"pip install openvino-genai.*backend="):
            open_backend(None, model=model, api_key=None, environ={})
    else:
        backend, name = open_backend(None, model=model, api_key=None, environ={})
        assert (backend.name, name) == ("local://smollm2", None)


@pytest.mark.parametrize("model", ["gpt-4o-mini", "Qwen/Qwen2.5-32B-Instruct", "openai/"])
def test_no_backend_is_an_error_that_says_what_to_give(model: str | None) -> None:
    with pytest.raises(SpecError, match=r"vllm://host:8000.*openai/"):
        open_backend(None, model=model, api_key=None, environ=KEY)


def test_a_backend_object_is_taken_as_it_is() -> None:
    backend: Backend = OpenAIBackend("http://h")
    assert open_backend(backend, model="a/b", api_key=None, environ={}) == (backend, "a/b")
    with pytest.raises(SpecError, match="api_key"):
        open_backend(backend, model="m", api_key="k", environ={})


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("localhost:8000", "not a URL"),
        ("me:hidden@localhost:8000", "not a URL"),
        ("vlm://host", "did you mean 'vllm'"),
        ("gopher://host", "Known: local, "),
        ("vllm://", "no host"),
        ("vllm://:8000", "no host"),
        ("http://me:hidden@", "no host"),
        ("http://host:port", "host:port"),
        ("http://me:hidden@host:99999", "host:port"),
        ("http://[::1", "brackets"),
        ("vllm://host?native_shema=true", "did you mean 'native_schema'"),
        ("http://host?tls=true", "Known: native_schema"),
        ("vllm://host?tls=maybe", "true or false"),
        ({"uri": "http://host"}, "did you mean 'url'"),
        ({"headers": {}}, "without a url"),
        ({"url": 5}, "without a url"),
        ({"url": "http://h", "api_key": 5}, "api_key"),
        ({"url": "http://h", "headers": {"A": 5}}, "headers"),
        ({"url": "http://h", "headers": ["A"]}, "headers"),
        (5, "int"),
        (OpenAIBackend, "the class OpenAIBackend"),
    ],
)
def test_what_is_wrong_with_a_backend_is_said_without_its_password(backend: object, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        opened(backend)
    assert "hidden" not in str(caught.value)


def test_options_are_true_or_false_or_texts_and_each_scheme_has_its_own() -> None:
    def address(url: str) -> Address:
        return Address(urlsplit(url), None, {}, {})

    assert address("vllm://h?tls=1&native_schema=False").options == {"tls": True, "native_schema": False}
    local = address("local://?threads=2&kv_gb=")
    assert (local.options, local.text("threads"), local.text("max_seqs")) == ({}, "2", None)
    with pytest.raises(SpecError, match="kv_gb is empty"):
        local.text("kv_gb")
    with pytest.raises(SpecError, match="Known: native_schema"):
        address("http://h?threads=2").text("threads")


def test_two_keys_are_an_error() -> None:
    with pytest.raises(SpecError, match="give the key once"):
        opened({"url": "http://h", "api_key": "a"}, api_key="b")

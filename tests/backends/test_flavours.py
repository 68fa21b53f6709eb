"""The contract for everything that speaks the chat wire, opened as users open it, and for what wraps a backend."""

from __future__ import annotations

from typing import ClassVar

from backends.chat_contract import ChatContract
from batch_agent.backends.base import Backend, Facts, Load
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.registry import open_backend
from batch_agent.cli.output.request_log import LoggedBackend
from batch_agent.messages import JsonObject


class FlavourContract(ChatContract):
    url: ClassVar[str]

    def backend(self, url: str) -> Backend:
        place = url.removeprefix("http://").removesuffix("/v1")
        backend, _ = open_backend(self.url.format(place), model="test-model", api_key="sk-test", environ={})
        return backend


class TestHttp(FlavourContract):
    url = "http://{}/v1"


class TestOpenAI(FlavourContract):
    url = "openai://{}?tls=false"


class TestAzure(ChatContract):
    def backend(self, url: str) -> Backend:
        environ = {"AZURE_OPENAI_API_KEY": "k", "AZURE_OPENAI_ENDPOINT": url.removesuffix("/v1")}
        return open_backend("azure://resource/test-model", model=None, api_key=None, environ=environ)[0]


class TestGroq(FlavourContract):
    url = "groq://{}?tls=false"


class TestMistral(FlavourContract):
    """Whose name for a seed is another."""

    url = "mistral://{}?tls=false"
    drops = ChatContract.drops | {"seed"}


class TestGemini(FlavourContract):
    url = "gemini://{}?tls=false"
    refuses = frozenset({"seed"})


class TestVllm(FlavourContract):
    url = "vllm://{}"


class TestSglang(FlavourContract):
    url = "sglang://{}"


class TestDynamo(FlavourContract):
    url = "dynamo://{}"


class TestLoggedBackend(ChatContract):
    def backend(self, url: str) -> Backend:
        told: list[JsonObject] = []
        return LoggedBackend(OpenAIBackend(url), [told.append])


async def test_what_is_logged_tells_its_load_and_its_context_all_the_same() -> None:
    class Busy(OpenAIBackend):
        async def load(self, endpoint: str = "") -> Load:
            return Load(running=3)

        async def facts(self, model: str) -> Facts:
            return Facts(context=4096)

    wrapped = LoggedBackend(Busy("http://host/v1"), [])
    assert (await wrapped.load(), await wrapped.facts("m")) == (Load(running=3), Facts(context=4096))

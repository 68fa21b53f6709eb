"""Everything that speaks the chat wire, opened as users open it, and what wraps a backend: what may differ there."""

from __future__ import annotations

from typing import ClassVar

from tests.backends.chat_contract import ChatContract

from batch_agent.backends.base import Backend
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.registry import open_backend
from batch_agent.cli.output.request_log import LoggedBackend
from batch_agent.fleet.backend import Fleet
from batch_agent.messages import JsonObject
from batch_agent.testing.contract.backend import smoke


class FlavourContract(ChatContract):
    url: ClassVar[str]

    def backend(self, url: str) -> Backend:
        place = url.removeprefix("http://").removesuffix("/v1")
        backend, _ = open_backend(self.url.format(place), model="test-model", api_key="sk-test", environ={})
        return backend


@smoke
class TestHttp(FlavourContract):
    url = "http://{}/v1"


@smoke
class TestOpenAI(FlavourContract):
    url = "openai://{}?tls=false"


@smoke
class TestAzure(ChatContract):
    def backend(self, url: str) -> Backend:
        environ = {"AZURE_OPENAI_API_KEY": "k", "AZURE_OPENAI_ENDPOINT": url.removesuffix("/v1")}
        return open_backend("azure://resource/test-model", model=None, api_key=None, environ=environ)[0]


@smoke
class TestGroq(FlavourContract):
    url = "groq://{}?tls=false"


@smoke
class TestMistral(FlavourContract):
    """Whose name for a seed is another."""

    url = "mistral://{}?tls=false"
    drops = ChatContract.drops | {"seed"}


@smoke
class TestGemini(FlavourContract):
    url = "gemini://{}?tls=false"
    refuses = frozenset({"seed"})


@smoke
class TestVllm(FlavourContract):
    url = "vllm://{}"


@smoke
class TestSglang(FlavourContract):
    url = "sglang://{}"


@smoke
class TestDynamo(FlavourContract):
    url = "dynamo://{}"


@smoke
class TestLoggedBackend(ChatContract):
    def backend(self, url: str) -> Backend:
        told: list[JsonObject] = []
        return LoggedBackend(OpenAIBackend(url), told.append)


@smoke
class TestFleet(ChatContract):
    def backend(self, url: str) -> Backend:
        return Fleet([url])

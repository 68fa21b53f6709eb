"""The server that is examined: requests through its own backend class, and raw requests through our HTTP client.

Raw requests exist for the ``/chat/completions`` wire only, because only there the questions know the format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import Backend, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.engines.engine import EngineBackend, Sharing, at
from batch_agent.backends.http.backend import HttpBackend, HttpClient
from batch_agent.errors import BackendError, SpecError, Truncated
from batch_agent.http.connection import SSEParser
from batch_agent.messages import Conversation, JsonObject, Message, Reply, ToolSpec, Usage

Wording = Callable[[str, str], str]  # takes the id of a question and its prompt, and returns the prompt to send

FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "key": "--api-key KEY",
            "tools": "--enable-auto-tool-choice --tool-call-parser NAME",
            "arguments": "--tool-strict-level parameter",
            "cached": "--enable-prompt-tokens-details",
            "cache": "start it without --no-enable-prefix-caching",
            "priority": "--scheduling-policy priority, and ?priority=true behind the address",
            "load": "start it without --disable-log-stats",
            "reasoning": "--reasoning-parser NAME",
            "concurrency": "--max-num-seqs N",
            "embeddings": "a server of its own, with an embedding model",
            "whitespace": "--structured-outputs-config '{\"disable_any_whitespace\": true}'",
        },
        "sglang": {
            "key": "--api-key KEY",
            "tools": "--tool-call-parser NAME",
            "arguments": "--tool-call-parser NAME, and --grammar-backend xgrammar",
            "cached": "--enable-cache-report",
            "cache": "start it without --disable-radix-cache",
            "priority": "--enable-priority-scheduling",
            "load": "--enable-metrics",
            "reasoning": "--reasoning-parser NAME",
            "concurrency": "--max-running-requests N",
            "embeddings": "a server of its own, with --is-embedding",
            "seed": "--enable-deterministic-inference",
            "whitespace": "--constrained-json-disable-any-whitespace",
        },
        "llamacpp": {
            "key": "--api-key KEY",
            "tools": "--jinja",
            "load": "--metrics",
            "reasoning": "--jinja --reasoning-format deepseek",
            "concurrency": "--parallel N, with --ctx-size N times the context of one request",
            "embeddings": "--embeddings, in a server of its own",
        },
        "ollama": {
            "key": "a proxy in front of it: it has no keys",
            "tools": "a model whose template has tools (ollama show MODEL)",
            "overflow": "OLLAMA_CONTEXT_LENGTH=N, and model_max_context=N in the run",
            "concurrency": "OLLAMA_NUM_PARALLEL=N",
            "embeddings": "an embedding model, such as nomic-embed-text",
        },
    }
)
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "ollama": "Ollama", "dynamo": "Dynamo"}

ANSWER_TOKENS = 48  # the limit of most answers
SENTENCE = "You are a careful clerk who answers in few words and never guesses. "
WEATHER = ToolSpec(
    "weather",
    "Report the weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "name of the city"},
            "days": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
CLOCK = ToolSpec(
    "clock",
    "Report the time in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """A response as it was received. ``events`` are the events of a stream, with their arrival times."""

    headers: Mapping[str, str]
    document: JsonObject
    events: tuple[JsonObject, ...] = ()
    done: bool = False  # the stream ended with [DONE]
    times: tuple[float, ...] = ()

    def choice(self) -> JsonObject:
        choices = self.document.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        return first if isinstance(first, dict) else {}

    def message(self) -> JsonObject:
        message = self.choice().get("message")
        return message if isinstance(message, dict) else {}


class NotChat(Exception):
    """Raised if a question needs the wire of ``/chat/completions`` and the backend uses another one."""


class Subject:
    """The server. ``engine`` is its kind: vllm, sglang, llamacpp, ollama, or "" if it is unknown."""

    def __init__(self, backend: Backend, model: str, wording: Wording | None = None) -> None:
        self.backend = backend
        self.model = model
        self.engine, self.version = "", ""
        self.context: int | None = None
        self.question = ""  # id of the current one, for the wording
        self.requests = 0
        self.usage = Usage()
        self._wording = wording or (lambda question, text: text)
        self._sharing: Sharing | None = None

    # Requests of the product

    async def hear(
        self,
        prompt: str | list[Message],
        *,
        streamed: bool = False,
        on_tool_call: OnToolCall | None = None,
        on_begin: Callable[[], None] | None = None,
        shape: RequestShape | None = None,
        **options: object,
    ) -> Reply:
        """Return the model's answer. An answer that reached the token limit has the finish reason ``length``; every
        other failure raises a BackendError."""
        request = self.request(prompt, shape or self.shape(**options))
        request.on_begin = on_begin
        listener = on_tool_call or ((lambda call: None) if streamed else None)
        self.requests += 1
        try:
            reply = await self.backend.infer(request, listener)
        except Truncated as cut:
            reply = Reply(cut.text, usage=cut.usage or Usage(), finish_reason="length")
        self.usage += reply.usage
        return reply

    async def timed(self, prompt: str, **options: object) -> tuple[Reply, float]:
        """Return the answer, and how many seconds it took."""
        began = time.perf_counter()
        return await self.hear(prompt, shape=self.shape(**options)), time.perf_counter() - began

    def request(self, prompt: str | list[Message], shape: RequestShape) -> ModelRequest:
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        last = max(index for index, message in enumerate(messages) if message.role == "user")
        if isinstance(content := messages[last].content, str):
            said = replace(messages[last], content=self._wording(self.question, content))
            messages = [*messages[:last], said, *messages[last + 1 :]]
        return ModelRequest(shape, Conversation(messages), f"doctor-{self.question}")

    def shape(self, **options: object) -> RequestShape:
        """Return a request shape for a short answer. It sets no temperature if the model refuses one."""
        given: dict[str, object] = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "model": self.model, **options}
        shape = RequestShape(**given)  # type: ignore[arg-type]
        try:
            self.backend.check(shape)
        except SpecError:
            shape = replace(shape, temperature=None)
        return shape

    async def sharing(self) -> Sharing:
        """Return how much of a long prompt the second of two siblings found in the cache. Measured once."""
        if self._sharing is None:
            self._sharing = await self._measured_sharing()
        return self._sharing

    async def _measured_sharing(self) -> Sharing:
        if isinstance(self.backend, EngineBackend):
            self.requests += 2
            return await self.backend.verify_prefix_sharing(self.model)
        system = Message("system", f"Trial {time.time_ns()}. {SENTENCE * 100}")
        await self.hear([system, Message("user", "Name a colour.")], max_tokens=1)
        heard = await self.hear([system, Message("user", "Count to three.")], max_tokens=1)
        cached = heard.usage.cached_tokens or None
        return Sharing(heard.usage.prompt_tokens, cached, in_answer=cached is not None)

    # Raw requests

    @property
    def is_chat(self) -> bool:
        return isinstance(self.backend, HttpBackend) and self.backend.wire == "chat"

    @property
    def client(self) -> HttpClient | None:
        return self.backend.client if isinstance(self.backend, HttpBackend) else None

    async def raw(
        self,
        prompt: str,
        changes: Mapping[str, JsonValue] | None = None,
        *,
        streamed: bool = False,
        headers: Mapping[str, str] | None = None,
        **options: object,
    ) -> RawAnswer:
        """Send the body that the backend would send, with ``changes``, and return the response as it was received.
        Raises NotChat if the backend has another wire."""
        if not isinstance(self.backend, HttpBackend) or not self.is_chat:
            raise NotChat
        request = self.request(prompt, self.shape(**options))
        body: JsonObject = {**orjson.loads(self.backend.body_of(request)), **(changes or {})}
        if streamed:
            body.update(stream=True, stream_options={"include_usage": True})
        got: dict[str, str] = {}
        parser = SSEParser()
        events = list[JsonObject]()
        times = list[float]()
        done = False

        def take(found: list[tuple[str, bytes]]) -> None:
            nonlocal done
            for _, data in found:
                if data.strip() == b"[DONE]":
                    done = True
                else:
                    events.append(json_object(data))
                    times.append(time.perf_counter())

        def receive(chunk: bytes) -> bool:
            take(parser.feed(chunk))
            return done

        self.requests += 1
        route = self.backend.route_of(request, streamed)
        client = self.backend.client
        answer = await client.send(route, orjson.dumps(body), receive if streamed else None, headers, got.update)
        if answer is None:
            take(parser.close())
            return RawAnswer(got, {}, tuple(events), done, tuple(times))
        document = json_object(answer)
        self.usage += Usage(_count(document, "prompt_tokens"), 0, _count(document, "completion_tokens"))
        return RawAnswer(got, document)

    async def get(self, path: str) -> bytes | None:
        """Return the body of a page beside the API; None if there is none."""
        if self.client is None:
            return None
        try:
            async with asyncio.timeout(5):
                return await self.client.send(self.client.route("GET", path, beside=True))
        except (BackendError, TimeoutError):
            return None

    async def post(self, path: str, fields: JsonObject, *, beside: bool = False) -> JsonObject:
        """Return the JSON object of another route of the server. Raises BackendError, or NotChat like ``raw``."""
        if self.client is None or not self.is_chat:
            raise NotChat
        self.requests += 1
        route = self.client.route("POST", path, beside=beside)
        return json_object(await self.client.send(route, orjson.dumps(fields)) or b"")


def json_object(body: bytes | None) -> JsonObject:
    """Return the JSON object of a body; {} if it is something else."""
    try:
        value = orjson.loads(body or b"")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _count(document: JsonObject, name: str) -> int:
    value = at(document.get("usage"), name)
    return value if isinstance(value, int) else 0


def flag(subject: Subject, name: str) -> str:
    """Return the command-line flag of this engine for a setting; "" if it has none."""
    return FLAGS.get(subject.engine, {}).get(name, "")


async def identify(subject: Subject) -> None:
    """Find the kind and the version of the server, from pages that cost nothing."""
    scheme = subject.backend.name.partition("://")[0]
    subject.engine = scheme if scheme in NAMES else ""
    pages = (
        ("ollama", "/api/version", "version"),
        ("sglang", "/server_info", "version"),
        ("llamacpp", "/props", "build_info"),
        ("vllm", "/version", "version"),
    )
    for engine, page, field in pages:
        if subject.engine not in ("", engine):
            continue
        told = json_object(await subject.get(page)).get(field)
        if isinstance(told, str) and told:
            subject.engine, subject.version = engine, told
            return


def engine_name(subject: Subject) -> str:
    name = NAMES.get(subject.engine) or subject.backend.name.partition("://")[0]
    return f"{name} {subject.version}" if subject.version else f"{name}, version unknown"

"""Common base of the inference engines: self-hosted servers with plain http and a port of their own.

They enforce schemas with grammars, cache prefixes, and report their load beside the API.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import Address
from batch_agent.backends.base import Answers, Capabilities, Load, ModelRequest, RequestShape, caught, only_model
from batch_agent.backends.http.backend import Route
from batch_agent.backends.http.wire import Faults, Naming, object_of
from batch_agent.backends.openai.chat import OpenAIBackend, Tail, read_answer
from batch_agent.errors import BackendError, Truncated
from batch_agent.messages import Conversation, JsonObject, Message, Reply, ToolSpec, Usage
from batch_agent.value_type import lazy_property

ABLE = Capabilities(native_schema=True, images=True, reports_load=True, reports_context=True)


_LOOK = ToolSpec("look_up", "Look a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
_SENTENCE = "You are a careful clerk who answers in few words and never guesses. "
_SENTENCES = 40


@dataclass(frozen=True, slots=True)
class Sharing:
    """The cached tokens of the second of two requests with the same prefix."""

    prompt_tokens: int
    cached_tokens: int | None  # None: not reported
    in_answer: bool = True  # reported in the answer itself, not in the server's metrics

    @property
    def share(self) -> float | None:
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


class EngineBackend(OpenAIBackend):
    patience = 2.0  # seconds for optional facts

    def __init__(self, address: Address, *, port: int, capabilities: Capabilities = ABLE) -> None:
        native = address.options.get("native_schema", True)
        beside = native and capabilities.schema_beside_tools
        super().__init__(
            address.base_url(port),
            api_key=address.key(),
            headers=address.headers,
            capabilities=replace(capabilities, native_schema=native, schema_beside_tools=beside),
            name=address.name,
            tail=self.own_part,
            transport=address.transport,
        )

    @lazy_property
    def _metrics(self) -> Route:
        return self._http.route("GET", "/metrics", beside=True)

    @abstractmethod
    def own_part(self, request: ModelRequest) -> Tail:
        """Return the fields that only this engine understands."""

    @abstractmethod
    async def load(self, endpoint: str = "") -> Load: ...

    async def state(self, sharing: Sharing) -> EngineState | None:
        """Return what the engine offers agents, given two requests that share a prefix; None if unknown."""
        return None

    async def verify_prefix_sharing(self, model: str | None = None) -> Sharing:
        """Measure whether requests with the same prefix, tools included, share the server's cache. It sends one request
        and then a sibling, and reads the server's own count. The prefix is new, so no earlier trial can be cached."""
        shape = RequestShape(model or await only_model(self), max_tokens=1, temperature=0.0, tools=(_LOOK,))
        shared = Conversation([Message("system", f"Trial {secrets.token_hex(8)}. {_SENTENCE * _SENTENCES}")])
        await self._prompt_usage(shape, shared, "Name a colour.")
        before = await self._prefix_hits()
        usage = await self._prompt_usage(shape, shared, "Count to three.")
        if usage.cached_tokens:
            return Sharing(usage.prompt_tokens, usage.cached_tokens)
        after = await self._prefix_hits()
        told = None if before is None or after is None else min(after - before, usage.prompt_tokens)
        return Sharing(usage.prompt_tokens, told, in_answer=False)

    async def _prompt_usage(self, shape: RequestShape, shared: Conversation, question: str) -> Usage:
        request = ModelRequest(shape, Conversation([Message("user", question)], shared), question)
        try:
            return (await self.infer(request)).usage
        except Truncated as cut:  # expected, after one token
            return cut.usage or Usage()

    async def _prefix_hits(self) -> int | None:
        """Return the server's total of cached tokens, for a server that does not report them per request."""
        try:
            return (await self.load()).prefix_hits
        except BackendError:
            return None

    async def read_metrics(self, names: Collection[str]) -> Exposition:
        text = await self._http.send(self._metrics) or b""
        return Exposition(text.decode("utf-8", "replace"), names)

    async def ask(self, route: Route, question: bytes | None = None) -> JsonObject:
        """Call one of the engine's own routes. Returns the JSON object of its answer."""
        return object_of(await self._http.send(route, question) or b"", route.faults)

    async def ask_if_there(self, route: Route) -> JsonObject:
        """Like ``ask``, but returns {} if the server has no such route or does not answer soon."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(self.patience):
                return await self.ask(route)
        return {}

    async def context_of(self, model: str, field: str = "max_model_len") -> int | None:
        """Return the context length in the list of models; None if the server does not report it."""
        entries = (await self.ask_if_there(self._models)).get("data")
        for entry in entries if isinstance(entries, list) else ():
            if at(entry, "id") == model:
                return whole(at(entry, field))
        return None


def shares(sharing: Sharing) -> bool | None:
    """Return whether two requests showed that the prefix cache works; None if the server does not report it."""
    return None if sharing.share is None else sharing.share >= SHARED


def at(document: JsonValue, *path: str) -> JsonValue:
    """Return the value at the end of the path; None if it is missing."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def whole(value: JsonValue) -> int | None:
    """Return a count above 0, given as a number or as text."""
    try:
        number = int(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str]


class Exposition:
    """The values with these names in Prometheus text. A server is polled about once a second, and most of its text is
    histogram buckets. So lines of other metrics are skipped without parsing, and unreadable lines are ignored."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for name, sample in _read(text, names):
            self._samples.setdefault(name, []).append(sample)

    def samples(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels, for the first of the names that exists; None if none does."""
        for name in names:
            if samples := self.samples(name):
                return sum(sample.value for sample in samples)
        return None

    def mean(self, *names: str) -> float | None:
        for name in names:
            if samples := self.samples(name):
                return sum(sample.value for sample in samples) / len(samples)
        return None

    def count(self, *names: str) -> int | None:
        """Return ``total`` as an integer."""
        total = self.total(*names)
        return None if total is None else int(total)


def _read(text: str, names: Collection[str]) -> Iterator[tuple[str, Sample]]:
    for line in text.splitlines():
        name = re.split(r"[{\s]", line, maxsplit=1)[0]
        if name not in names:
            continue
        rest = line[len(name) :]
        labels, brace, behind = rest.rpartition("}")
        try:
            value = float((behind if brace else rest).split()[0])
        except (ValueError, IndexError):
            continue
        if value - value == 0:  # finite
            pairs = _LABEL.findall(labels)
            yield name, Sample(value, {label: _ESCAPED.sub(_unescape, text) for label, text in pairs})


def _unescape(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


T = TypeVar("T")
NOT_THERE = frozenset([404, 405, 501])  # status codes of a server without the route


async def infer_in_lists(
    asked: Sequence[T],
    most: int,
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    """Send requests in lists of at most ``most``, and return the answers and whether the server supports lists.
    ``ask_list`` returns the answers of a list, or raises for all of it. A refused list is split in halves, so that the
    bad request fails alone. Without list support each request is sent alone."""
    lists = [asked[start : start + most] for start in range(0, len(asked), most)]
    answered = await asyncio.gather(*(_ask_list(part, ask_list, ask_one) for part in lists))
    return [answer for answers, _ in answered for answer in answers], all(there for _, there in answered)


def read_each(bodies: Iterable[Mapping[str, object]], faults: Faults) -> Answers:
    """Return the answers of a list whose items have the form of single answers."""
    answers: Answers = []
    for body in bodies:
        try:
            answers.append(read_answer(orjson.dumps(body), Naming((), faults)))
        except BackendError as error:
            answers.append(error)
    return answers


async def _ask_list(
    asked: Sequence[T],
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    if len(asked) == 1:
        return [await caught(ask_one(asked[0]))], True
    try:
        return await ask_list(asked), True
    except BackendError as error:
        if error.retryable:
            return [copy(error) for _ in asked], True
        status = error.status
    if status in NOT_THERE:
        answers = await asyncio.gather(*(caught(ask_one(each)) for each in asked))
        # A missing model looks like a missing route, but then single requests fail too.
        return answers, not any(isinstance(answer, Reply) for answer in answers)
    return await infer_in_lists(asked, -(-len(asked) // 2), ask_list, ask_one)


SHARED = 0.5  # the least part of a prompt that two requests share where the prefix cache works


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine offers, as far as it was seen. None: the server does not say."""

    engine: str  # as in FLAGS
    prefix_caching: bool | None = None
    reports_cached: bool | None = None  # each answer says how much of its prompt was cached
    by_priority: bool | None = None  # schedules by the priority of a request
    offloads: bool | None = None  # keeps evicted contexts in the memory of the host
    pins: bool | None = None  # keeps contexts of agents in tool waits (batch_agent.vllm_pin)
    kv_tokens: int | None = None  # that its cache holds


@dataclass(frozen=True, slots=True)
class Advice:
    lack: str
    flag: str
    worth: str

    def __str__(self) -> str:
        return f"{self.lack}: {self.flag} ({self.worth})"

    def to_json(self) -> JsonObject:
        return {"lack": self.lack, "flag": self.flag, "worth": self.worth}


FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "prefix_caching": "start it without --no-enable-prefix-caching",
            "reports_cached": "--enable-prompt-tokens-details",
            "by_priority": "--scheduling-policy priority, and ?priority=true behind the address",
            "offloads": "--kv-offloading-size GIB, at least as large as the GPU's KV cache",
            "kv_tokens": "--gpu-memory-utilization, --kv-cache-dtype fp8, or --kv-offloading-size GIB",
        },
        "sglang": {
            "prefix_caching": "start it without --disable-radix-cache",
            "reports_cached": "--enable-cache-report",
            "by_priority": "--enable-priority-scheduling",
            "offloads": "--enable-hierarchical-cache --hicache-ratio 2",
            "kv_tokens": "--mem-fraction-static, --kv-cache-dtype fp8_e5m2, or --enable-hierarchical-cache",
        },
    }
)
LACKS = {
    "prefix_caching": "the prefix cache is off, so every turn computes its whole history",
    "reports_cached": "answers do not say how many prompt tokens were cached, so evicted contexts are not noticed",
    "by_priority": "requests are not scheduled by priority, so agents near their end wait like new ones",
    "offloads": "evicted contexts are computed again, because none are kept in the host's memory",
}
_BY_PRIORITY = "no gain was measured for a batch alone; for an engine that other clients use"
_REPORTS_CACHED = "admission works without; it then learns nothing from evictions"
# Measured on the same engine; docs/kv.md and benchmarks/engines.md say how.
WORTH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "prefix_caching": "32 requests with a shared prefix of 1,000 tokens: 159 s without, 17 s with; 2 CPU cores",
            "reports_cached": _REPORTS_CACHED,
            "by_priority": _BY_PRIORITY,
            "offloads": "24 agents that overflow the cache, in a plain loop: 75.7 s without, 40.0 s with (H200, "
            "vLLM 0.26)",
            "kv_tokens": "24 agents with contexts of up to 12k tokens, 32B shape, H200: 59.8 s with 98k of KV, "
            "45.9 s with 200k",
        },
        "sglang": {
            "prefix_caching": "not measured on SGLang",
            "reports_cached": _REPORTS_CACHED,
            "by_priority": f"{_BY_PRIORITY}: behind 700 requests, preferred ones waited 1.7 s, others 12.5 s (H200, "
            "SGLang 0.5.16)",
            "offloads": "24 agents that overflow the cache: 76.9 s in a plain loop without, 53.5 s with; 56.5 and "
            "47.0 s with admission (H200, SGLang 0.5.16)",
            "kv_tokens": "24 agents with contexts of up to 12k tokens and 98k of KV, 32B shape: 76.9 s if all run at "
            "once, 56.5 s with admission (H200, SGLang 0.5.16)",
        },
    }
)


def advice(state: EngineState, *, agents: int | None = None, context_tokens: int | None = None) -> Iterator[Advice]:
    """Yield what an engine lacks for agents, with the flag that sets it and what it is worth; the most valuable first.
    ``agents`` with contexts of ``context_tokens`` are to run at once. The worth was measured on that engine
    (docs/kv.md, benchmarks/engines.md)."""
    flags, worth = FLAGS[state.engine], WORTH[state.engine]
    if state.prefix_caching is False:
        yield Advice(LACKS["prefix_caching"], flags["prefix_caching"], worth["prefix_caching"])
    if state.kv_tokens and agents and context_tokens and agents * context_tokens > state.kv_tokens:
        fit = state.kv_tokens // context_tokens
        lack = (
            f"the KV cache holds {state.kv_tokens:,} tokens, {fit:,} contexts of {context_tokens:,}; "
            f"{agents:,} agents at once need {agents * context_tokens:,}"
        )
        yield Advice(lack, flags["kv_tokens"], worth["kv_tokens"])
    for name in ("reports_cached", "offloads", "by_priority"):
        if getattr(state, name) is False:
            yield Advice(LACKS[name], flags[name], worth[name])

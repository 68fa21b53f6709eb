"""Common base of the inference engines: self-hosted servers with plain http and a port of their own.

They enforce schemas with grammars, cache prefixes, and report their load beside the API.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import JsonValue

from batch_agent.backends.address import Address
from batch_agent.backends.base import Capabilities, Load, ModelRequest, RequestShape, only_model
from batch_agent.backends.engines.advice import SHARED, EngineState
from batch_agent.backends.engines.exposition import Exposition
from batch_agent.backends.http.backend import Route
from batch_agent.backends.http.wire import object_of
from batch_agent.backends.openai.chat import OpenAIBackend, Tail
from batch_agent.errors import BackendError, Truncated
from batch_agent.messages import Conversation, JsonObject, Message, ToolSpec, Usage

ABLE = Capabilities(native_schema=True, images=True, reports_load=True, reports_context=True)


_LOOK = ToolSpec("look_up", "Look a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
_SENTENCE = "You are a careful clerk who answers in few words and never guesses. "
_SENTENCES = 40


@dataclass(frozen=True, slots=True)
class Sharing:
    """Cached tokens of the second of two requests with the same prefix."""

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

    @cached_property
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

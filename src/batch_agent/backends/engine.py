"""What the adapters of inference engines have in common: a server that people run themselves, on plain http and a port
of its own, which keeps to schemas by grammars and tells beside its API how busy it is.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import Address
from batch_agent.backends.base import Capabilities, Load, ModelRequest
from batch_agent.backends.exposition import Exposition
from batch_agent.backends.http import Route
from batch_agent.backends.openai import OpenAIBackend, Tail
from batch_agent.errors import BackendError
from batch_agent.messages import JsonObject

ABLE = Capabilities(native_schema=True, images=True, load=True)


class EngineBackend(OpenAIBackend):
    patience = 2.0  # seconds for what it would be good to know

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
        )
        self._metrics = self._http.route("GET", "/metrics", beside=True)

    @abstractmethod
    def own_part(self, request: ModelRequest) -> Tail:
        """What a request to this engine has of its own."""

    @abstractmethod
    async def load(self, endpoint: str = "") -> Load: ...

    async def read_metrics(self, names: Collection[str]) -> Exposition:
        text = await self._http.send(self._metrics) or b""
        return Exposition(text.decode("utf-8", "replace"), names)

    async def ask(self, route: Route, question: JsonObject | None = None) -> JsonObject:
        """One of the engine's own routes: a JSON object in, or nothing, and one out."""
        return await self.ask_bytes(route, None if question is None else orjson.dumps(question))

    async def ask_bytes(self, route: Route, question: bytes | None) -> JsonObject:
        body = await self._http.send(route, question) or b""
        try:
            answer: JsonValue = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise route.faults.bad("the answer is not a JSON object")
        return answer

    async def ask_if_there(self, route: Route, question: JsonObject | None = None) -> JsonObject:
        """The same; nothing where the server does not have it, or does not answer it soon: nobody waits for that."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(self.patience):
                return await self.ask(route, question)
        return {}


def at(document: JsonValue, *path: str) -> JsonValue:
    """What a document has at the end of the path; None where that is not there."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def whole(value: JsonValue) -> int | None:
    """A count above 0, written as a number or as text."""
    try:
        number = int(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None

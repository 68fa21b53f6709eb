"""What asking a server of OpenAI's family has beside its wire: its dialect, what each request has of its own, and what
the server turns out not to do.

A schema that is refused or ignored is found out here, from the first answers, and remembered: the request is then made
without, and ``Capabilities`` say so. For a model that the server does not have, its list says what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Self
from weakref import WeakKeyDictionary

import orjson

from batch_agent.backends.base import Capabilities, ClientBody, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.http.backend import HttpBackend
from batch_agent.backends.http.client import HttpClient
from batch_agent.backends.http.transport import Transport
from batch_agent.backends.openai.dialect import STANDARD, Dialect
from batch_agent.backends.openai.model_list import may_be_unknown, no_such_model, read_models
from batch_agent.backends.openai.models import check_options
from batch_agent.backends.openai.schema import unwrapped
from batch_agent.backends.schema.support import blamed, is_kept
from batch_agent.errors import BackendError, Rejected, SpecError
from batch_agent.messages import JsonObject, Message, Reply, content_text

LISTING_SECONDS = 5.0  # to learn which models there are, for an error message


@dataclass(frozen=True, slots=True)
class Tail:
    """What one request has of its own beside its messages: fields of the body (a priority, hints) and headers (an id).
    It stands behind the messages, so that the prefix stays the same."""

    fields: JsonObject = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


NO_TAIL = Tail()


class OpenAIServer(HttpBackend[bytes]):
    """One server at ``base_url`` (up to and without the wire's path), as an HttpBackend but for the wire. ``tail`` says
    what each request has of its own, for servers that take hints; ``query`` stands behind every path. With ``models``
    the server is not asked which it has."""

    path: str  # of the wire

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        capabilities: Capabilities | None = None,
        name: str | None = None,
        dialect: Dialect = STANDARD,
        tail: Callable[[ModelRequest], Tail] | None = None,
        query: str = "",
        models: Sequence[str] = (),
        transport: Transport | None = None,
    ) -> None:
        http = HttpClient(base_url, api_key=api_key, headers=headers, transport=transport)
        route = http.route("POST", self.path + query)
        super().__init__(http, route, capabilities=capabilities or Capabilities(images=True), name=name)
        self._models = http.route("GET", f"/models{query}")
        self._given = list(models)
        self._served: list[str] | None = None  # None: it was not asked yet
        self._listing = asyncio.Lock()
        self._dialect = dialect
        self._tail = tail
        self._keeps_schemas = False  # an answer has shown it

    # What is known of shapes; made when it is needed, since a fleet has a thousand of these.

    @cached_property
    def _bare(self) -> WeakKeyDictionary[RequestShape, RequestShape]:
        """Each without its schema."""
        return WeakKeyDictionary()

    @cached_property
    def _wraps(self) -> WeakKeyDictionary[RequestShape, bool]:
        return WeakKeyDictionary()

    @cached_property
    def _keys(self) -> WeakKeyDictionary[RequestShape, tuple[str, str]]:
        return WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._listing = asyncio.Lock()  # of this event loop
        return self

    def check(self, shape: RequestShape) -> None:
        if self._dialect.openai_models:
            check_options(shape)
        if shape.seed is not None and self._dialect.seed_field is None:
            raise SpecError(f"{self.name} takes no seed: leave it out")
        super().check(shape)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        shape = request.shape
        if shape.schema is None or self.own_body(request) is not None:
            return await self._ask(request, on_tool_call)
        if self._capabilities.schema_note:
            return await self._ask(replace(request, shape=self._without_schema(shape)), on_tool_call)
        try:
            reply = await self._ask(request, on_tool_call)
        except Rejected as refusal:
            return await self._ask_without_schema(request, on_tool_call, refusal)
        if not self._capabilities.schema_proven and not reply.tool_calls:
            self._judge(reply.text, shape.schema)
        return reply

    def finished(self, reply: Reply, shape: RequestShape) -> Reply:
        if shape.schema is not None and self._wraps_answer(shape, shape.schema):
            return replace(reply, text=unwrapped(reply.text))
        return reply

    async def models(self) -> list[str]:
        if self._given:
            return self._given
        body = await self._http.send(self._models) or b""
        names = read_models(body)
        if names is None:
            shown = self._models.faults.clean(body.decode("utf-8", "replace"))
            raise self._models.faults.bad(f"the answer is not a list of models: {shown}")
        return names

    # One request

    async def _ask(self, request: ModelRequest, on_tool_call: OnToolCall | None) -> Reply:
        try:
            return await super().infer(request, on_tool_call)
        except Rejected as refusal:
            raise await self._explained(refusal, request.shape.model) from None

    def write_own(self, client: ClientBody, request: ModelRequest) -> tuple[JsonObject, Mapping[str, str] | None]:
        fields, headers = super().write_own(client, request)
        tail = self.tail_of(request)
        fields["model"] = self._dialect.deployment or request.shape.model
        return {**tail.fields, **fields}, {**(headers or {}), **tail.headers}

    def tail_of(self, request: ModelRequest) -> Tail:
        """What the request has of its own, but for what the user's extra_body sets: that has the last word."""
        if self._tail is None and not self._dialect.cache_key:
            return NO_TAIL  # as with most servers
        tail = NO_TAIL if self._tail is None else self._tail(request)
        fields = dict(tail.fields)
        if self._dialect.cache_key:
            fields["prompt_cache_key"] = self._cache_key(request)
        extra = request.shape.extra_body
        return Tail({name: value for name, value in fields.items() if name not in extra}, tail.headers)

    def _cache_key(self, request: ModelRequest) -> str:
        """The same for all agents that begin alike: with the same model, tools and system prompt."""
        shape, shared = request.shape, _system(request.conversation.messages)
        known = self._keys.get(shape)
        if known is None or known[0] != shared:
            tools = [[tool.name, tool.description, tool.parameters] for tool in shape.tools]
            begins = orjson.dumps([shape.model, tools]) + shared.encode("utf-8", "replace")
            known = self._keys[shape] = shared, f"batch-agent-{blake2b(begins, digest_size=12).hexdigest()}"
        return known[1]

    # What the server turns out not to do

    async def _ask_without_schema(
        self, request: ModelRequest, on_tool_call: OnToolCall | None, refusal: Rejected
    ) -> Reply:
        """The same without the schema, where that is why it was refused: another request, and no retry of the row's. A
        server of which nothing is known yet may refuse it in any words."""
        blame = blamed(refusal)
        if blame == "no" or (blame == "perhaps" and (self._capabilities.schema_proven or self._keeps_schemas)):
            raise refusal
        if blame == "surely":
            self._give_schemas_up(f"refused the output schema ({refusal})")
        try:
            reply = await self._ask(replace(request, shape=self._without_schema(request.shape)), on_tool_call)
        except Rejected:
            raise refusal from None
        self._give_schemas_up(f"refused the output schema ({refusal})")
        return reply

    def _judge(self, text: str, schema: JsonObject) -> None:
        if is_kept(text, schema):
            self._keeps_schemas = True
        else:
            self._give_schemas_up("took the output schema and did not keep to it")

    def _give_schemas_up(self, why: str) -> None:
        if not self._capabilities.schema_note:
            note = f"{self.name} {why}: answers are checked, and asked for again where they do not fit"
            self._capabilities = replace(
                self._capabilities, native_schema=False, schema_with_tools=False, schema_note=note
            )

    def _without_schema(self, shape: RequestShape) -> RequestShape:
        if (bare := self._bare.get(shape)) is None:
            bare = self._bare[shape] = replace(shape, schema=None)
        return bare

    def _wraps_answer(self, shape: RequestShape, schema: JsonObject) -> bool:
        if (wraps := self._wraps.get(shape)) is None:
            wraps = self._wraps[shape] = self._dialect.schema_form(schema).wrapped
        return wraps

    async def _explained(self, refusal: Rejected, model: str) -> Rejected:
        """A refusal that may be for want of the model, with what the server has instead."""
        if not may_be_unknown(refusal):
            return refusal
        async with self._listing:
            if self._served is None:
                self._served = []
                with suppress(BackendError, TimeoutError):
                    async with asyncio.timeout(LISTING_SECONDS):
                        self._served = await self.models()
        said = no_such_model(model, self._served, self.name)
        return refusal if said is None else Rejected(f"{said} ({refusal})", status=404)


def _system(messages: Sequence[Message]) -> str:
    return content_text(messages[0].content) if messages and messages[0].role == "system" else ""

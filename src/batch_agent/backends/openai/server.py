"""What servers of OpenAI's family share beside the wire: dialect, per-request fields, detection of missing features.

A schema that is refused or ignored is detected from the first answers and remembered: later requests omit it, and
``Capabilities`` reports it. If a server does not have a model, the error lists the models it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import orjson

from batch_agent.backends.base import Capabilities, ClientBody, ModelRequest, RequestShape
from batch_agent.backends.http.backend import HttpBackend
from batch_agent.backends.http.client import HttpClient, Route
from batch_agent.backends.openai.chat_answer import sealed_with
from batch_agent.backends.openai.model_list import may_be_unknown, no_such_model, read_models
from batch_agent.backends.openai.models import check_options
from batch_agent.backends.openai.providers import STANDARD, Dialect
from batch_agent.backends.openai.schema import unwrapped
from batch_agent.backends.schema.support import blamed, is_kept
from batch_agent.errors import BackendError, Rejected, SpecError
from batch_agent.http.transport import Transport
from batch_agent.messages import JsonObject, Message, MessageView, Reply, content_text

SCHEMA = "schema"  # the option that a server may refuse
OTHER_WIRES = ("completions", "embeddings")  # that these servers have beside their conversations
LISTING_SECONDS = 5.0  # to list the models for an error message


class Tail(NamedTuple):
    """Fields of one request beside its messages: body fields (a priority, hints) and headers (an id). They come after
    the messages, so that the prefix stays the same."""

    fields: JsonObject
    headers: Mapping[str, str] | None = None


NO_TAIL = Tail({})


class OpenAIServer(HttpBackend[bytes]):
    """One server at ``base_url`` (without the wire's path). ``tail`` returns the fields of one request, for servers
    that accept hints; ``query`` is appended to every path. With ``models`` the server is not asked for its list."""

    path: str  # of the wire
    view: type[MessageView]  # of the wire

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
        self._query = query
        self._given = list(models)
        self._served: list[str] | None = None  # None: not requested yet
        self._listing = asyncio.Lock()
        self._dialect = dialect
        self._tail = tail
        self._keeps_schemas = False  # an answer has shown it

    # Facts about shapes, created on first use, because a fleet may have a thousand of these.

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

    def learn(self, request: ModelRequest, reply: Reply, refused: Mapping[str, Rejected]) -> None:
        schema, proven = request.shape.schema, self._capabilities.schema_proven
        if refused and (refusal := refused.get(SCHEMA)) is not None:
            self._give_schemas_up(f"refused the output schema ({refusal})")
        elif not (schema is None or proven or reply.tool_calls) and self.own_body(request) is None:
            self._judge(reply.text, schema)

    async def without(self, request: ModelRequest, error: Rejected, refused: dict[str, Rejected]) -> ModelRequest:
        """Leave out the schema, if it is the reason for the refusal. A server without earlier answers may refuse a
        schema with any message."""
        refusal = await self._explained(error, request.shape.model)
        if request.shape.schema is None or self.own_body(request) is not None:
            raise refused.get(SCHEMA, refusal) from None
        blame = blamed(refusal)
        if blame == "no" or (blame == "perhaps" and (self._capabilities.schema_proven or self._keeps_schemas)):
            raise refusal from None
        if blame == "surely":
            self._give_schemas_up(f"refused the output schema ({refusal})")
        refused[SCHEMA] = refusal
        return replace(request, shape=self.without_schema(request.shape))

    def finished(self, reply: Reply, shape: RequestShape) -> Reply:
        if shape.schema is not None and self._wraps_answer(shape, shape.schema):
            reply = replace(reply, text=unwrapped(reply.text))
        if self._dialect.wants_reasoning and reply.reasoning:
            reply = replace(reply, sealed=sealed_with(reply.sealed, reply.reasoning))
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

    @property
    def wires(self) -> frozenset[str]:
        return frozenset({self.wire, *OTHER_WIRES})

    def own_route(self, wire: str) -> Route:
        return self._chat if wire == self.wire else self._http.route("POST", f"/{wire}{self._query}")

    def write_own(self, client: ClientBody, request: ModelRequest) -> tuple[JsonObject, Mapping[str, str] | None]:
        fields, headers = super().write_own(client, request)
        tail = self.tail_of(request)
        fields["model"] = self._dialect.deployment or request.shape.model
        return {**tail.fields, **fields}, {**(headers or {}), **(tail.headers or {})}

    def write_body(self, head: bytes, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        fields, headers = self.tail_of(request)
        pieces = request.conversation.view(self.view).pieces
        return b"".join((head, b",".join(pieces), end_body(fields) if fields else b"]}")), headers

    def tail_of(self, request: ModelRequest) -> Tail:
        """Return the fields of this request; the user's extra_body overrides them."""
        if self._tail is None and not self._dialect.cache_key:
            return NO_TAIL  # most servers
        fields, headers = NO_TAIL if self._tail is None else self._tail(request)
        if self._dialect.cache_key:
            fields = {**fields, "prompt_cache_key": self._cache_key(request)}
        if fields and (extra := request.shape.extra_body):
            fields = {name: value for name, value in fields.items() if name not in extra}
        return Tail(fields, headers)

    def _cache_key(self, request: ModelRequest) -> str:
        """Return a key shared by all agents with the same prefix: the same model, tools and system prompt."""
        shape, shared = request.shape, _system(request.conversation.messages)
        known = self._keys.get(shape)
        if known is None or known[0] != shared:
            tools = [[tool.name, tool.description, tool.parameters] for tool in shape.tools]
            begins = orjson.dumps([shape.model, tools]) + shared.encode("utf-8", "replace")
            known = self._keys[shape] = shared, f"batch-agent-{blake2b(begins, digest_size=12).hexdigest()}"
        return known[1]

    # Detection of missing features

    def _judge(self, text: str, schema: JsonObject) -> None:
        if is_kept(text, schema):
            self._keeps_schemas = True
        else:
            self._give_schemas_up("accepted the output schema but did not enforce it")

    def _give_schemas_up(self, why: str) -> None:
        if not self._capabilities.schema_note:
            note = f"{self.name} {why}: answers are validated, and repaired if they do not fit"
            self._capabilities = replace(
                self._capabilities, native_schema=False, schema_with_tools=False, schema_note=note
            )

    def _wraps_answer(self, shape: RequestShape, schema: JsonObject) -> bool:
        if (wraps := self._wraps.get(shape)) is None:
            wraps = self._wraps[shape] = self._dialect.schema_form(schema).wrapped
        return wraps

    async def _explained(self, refusal: Rejected, model: str) -> Rejected:
        """Return the refusal, with the models that the server has if the model may be the reason."""
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


def join_body(head: bytes, view: MessageView, end: bytes = b"]}") -> bytes:
    return b"".join((head, b",".join(view.pieces), end))


def end_body(fields: JsonObject) -> bytes:
    """Return the end of a body: what closes the messages, with the fields of this request."""
    return b"]," + orjson.dumps(fields)[1:] if fields else b"]}"


def _system(messages: Sequence[Message]) -> str:
    return content_text(messages[0].content) if messages and messages[0].role == "system" else ""

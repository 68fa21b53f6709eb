"""The path of one request over HTTP, the same for every wire: head, body, streamed or whole answer, tool call reports.

A wire defines how head and body are written and how an answer is read. It does not see the client, slots or clock.
``client`` moves the bytes; ``wire`` has other code that wires share.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from batch_agent.backends.base import (
    Backend,
    Capabilities,
    ClientBody,
    ModelRequest,
    OnToolCall,
    Probe,
    RequestShape,
)
from batch_agent.backends.http.client import HttpClient, Route
from batch_agent.backends.http.faults import Faults
from batch_agent.backends.http.probe import probe_server
from batch_agent.backends.http.wire import AnswerReader, Naming, json_of, read_quota, report_calls, written
from batch_agent.errors import Rejected, Truncated
from batch_agent.http.connection import Receive
from batch_agent.messages import JsonObject, Reply, Sealed, Usage

Head = TypeVar("Head")
_STREAMED = frozenset({"stream", "stream_options"})


class HttpBackend(Backend, Generic[Head]):
    """A Backend without its wire. ``chat`` is the route for turns; a Head is what the wire caches per shape."""

    wire = ""  # clients' own requests in this wire are sent unchanged

    def __init__(self, http: HttpClient, chat: Route, *, capabilities: Capabilities, name: str | None = None) -> None:
        self._http = http
        self._chat = chat
        self._capabilities = capabilities
        self._name = name or http.base_url
        self._heads: WeakKeyDictionary[RequestShape, dict[bool, Head]] = WeakKeyDictionary()

    @cached_property
    def _bare(self) -> WeakKeyDictionary[RequestShape, RequestShape]:
        """Each shape without its schema. Created on first use, because a fleet may have a thousand of these."""
        return WeakKeyDictionary()

    @abstractmethod
    def write_head(self, shape: RequestShape, streamed: bool) -> Head:
        """Return what all requests of a shape share. Raises SpecError for what cannot be sent."""

    @abstractmethod
    def write_body(self, head: Head, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        """Return the body of one request, and its additional headers."""

    @abstractmethod
    def read_whole(self, body: bytes, naming: Naming) -> Reply: ...

    @abstractmethod
    def read_stream(
        self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]
    ) -> AnswerReader:
        """Return a reader of one streamed answer."""

    @abstractmethod
    async def models(self) -> list[str]: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.__aexit__(*exception)

    def check(self, shape: RequestShape) -> None:
        self.write_head(shape, False)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        """Return the answer. If the server refuses an option, the request is sent again without it (``without``)."""
        refused: dict[str, Rejected] = {}
        while True:
            client = self.own_body(request)
            shape, stream, receive = request.shape, None, None
            if client is None and shape.schema is not None and self._capabilities.schema_note:
                request = replace(request, shape=(shape := self.without_schema(shape)))
            naming = Naming(request.conversation.messages, self._chat.faults)
            headers: list[Mapping[str, str]] = []  # of the answer
            try:
                if client is not None:
                    reply = await self._forward(client, request, naming, headers)
                else:
                    if on_tool_call is not None and self._capabilities.streaming:
                        request.said.clear()  # from an earlier attempt
                        clock = asyncio.get_running_loop().time
                        stream = self.read_stream(naming, on_tool_call, clock, request.said)
                        receive = _hearing(stream.feed, request, clock)
                    body, own = self.write_body(self._head(shape, stream is not None), request)
                    route = self.route_of(request, stream is not None)
                    answer = await self._http.send(route, body, receive, own, headers.append, request.traceparent)
                    if answer is None and stream is not None:
                        reply = stream.finish()
                    else:
                        # A server may also send the whole answer at once although a stream was requested.
                        reply = self.read_whole(answer or b"", naming)
                        if on_tool_call is not None:
                            report_calls(reply, on_tool_call)
                    reply = self.finished(reply, shape)
            except Rejected as error:
                request = await self.without(request, error, refused)
                continue
            if refused or not reply.tool_calls:
                self.learn(request, reply, refused)
            quota = read_quota(headers[0]) if headers else None
            return reply if quota is None else replace(reply, quota=quota)

    def learn(self, request: ModelRequest, reply: Reply, refused: Mapping[str, Rejected]) -> None:
        """Learn what the server can do from an answer without tool calls, or to a request from which refused options
        were left out."""

    async def without(self, request: ModelRequest, error: Rejected, refused: dict[str, Rejected]) -> ModelRequest:
        """Return the request without the option that the server refused, and add that to ``refused``. This is another
        request, not a retry of the row. Raises the refusal if it has another reason."""
        raise error

    @property
    def wires(self) -> frozenset[str]:
        return frozenset({self.wire} if self.wire else ())

    def own_body(self, request: ModelRequest) -> ClientBody | None:
        """Return what a client sent in this backend's wire format; None if it must be translated."""
        client = request.client
        return client if client is not None and client.wire in self.wires else None

    def write_own(self, client: ClientBody, request: ModelRequest) -> tuple[JsonObject, Mapping[str, str] | None]:
        """Return the fields of a client's request, and headers. The answer is streamed only to ``relay``."""
        if request.relay is not None:
            return dict(client.fields), client.headers
        return {name: value for name, value in client.fields.items() if name not in _STREAMED}, client.headers

    def own_route(self, wire: str) -> Route:
        """Return the route for a client's own request, on a server that has several wires."""
        return self._chat

    async def _forward(
        self, client: ClientBody, request: ModelRequest, naming: Naming, answered: list[Mapping[str, str]]
    ) -> Reply:
        """Send a client's own request. The Reply has its whole answer, even if that was cut or filtered."""
        fields, headers = self.write_own(client, request)
        relay, clock, end = request.relay, asyncio.get_running_loop().time, _StreamEnd()
        own = client.wire == self.wire
        request.said.clear()  # from an earlier attempt
        stream = self.read_stream(naming, lambda call: None, clock, request.said) if relay and own else None

        def receive(chunk: bytes) -> bool:
            request.heard_at = clock()
            if relay is not None:
                relay(chunk)
            return end.feed(chunk) if stream is None else stream.feed(chunk)

        route = self.own_route(client.wire)
        taking = None if relay is None else receive
        body = await self._http.send(route, written(fields), taking, headers, answered.append, request.traceparent)
        try:
            if body is None:
                return Reply("") if stream is None else stream.finish()
            reply = self.read_whole(body, naming) if own else read_other(body, route.faults)
        except (Truncated, Rejected) as cut:
            if cut.status is not None:
                raise
            finish = "length" if isinstance(cut, Truncated) else "content_filter"
            reply = Reply(cut.text, usage=cut.usage or Usage(), finish_reason=finish)
            if body is None:
                return reply
        return replace(reply, sealed=Sealed(f"{client.wire} document", json_of(body)))

    def finished(self, reply: Reply, shape: RequestShape) -> Reply:
        """Convert the answer for the engine, if the wire requested it in another form."""
        return reply

    def route_of(self, request: ModelRequest, streamed: bool) -> Route:
        """Return the route for a turn, on a wire that has several."""
        return self._chat

    async def probe(self, endpoint: str = "") -> Probe:
        return await probe_server(self._http)

    @property
    def client(self) -> HttpClient:
        return self._http

    @property
    def faults(self) -> Faults:
        return self._chat.faults

    def body_of(self, request: ModelRequest) -> bytes:
        """Return the body of a request that is not streamed, for callers with another transport."""
        return self.write_body(self._head(request.shape, False), request)[0]

    def without_schema(self, shape: RequestShape) -> RequestShape:
        if (bare := self._bare.get(shape)) is None:
            bare = self._bare[shape] = replace(shape, schema=None)
        return bare

    def _head(self, shape: RequestShape, streamed: bool) -> Head:
        heads = self._heads.get(shape)
        if heads is None:
            heads = self._heads[shape] = {}
        head = heads.get(streamed)
        if head is None:
            head = heads[streamed] = self.write_head(shape, streamed)
        return head


class _StreamEnd:
    """Finds the last event of a stream whose content is only passed on."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> bool:
        self._tail = (self._tail + chunk)[-32:]
        return b"data: [DONE]" in self._tail


def read_other(body: bytes, faults: Faults) -> Reply:
    """Return the answer on a wire that is not a conversation: only its usage is read."""
    document = json_of(body)
    if not isinstance(document, dict):
        raise faults.bad(f"the answer is not a JSON object: {faults.clean(body.decode('utf-8', 'replace'))}")
    usage = document.get("usage")
    counts = {name: count for name, count in (usage if isinstance(usage, dict) else {}).items() if type(count) is int}
    return Reply("", usage=Usage(counts.get("prompt_tokens", 0), 0, counts.get("completion_tokens", 0)))


def _hearing(feed: Receive, request: ModelRequest, clock: Callable[[], float]) -> Receive:
    """Wrap ``feed`` to note when bytes arrive and to call ``on_begin``: engines send nothing before the first token."""
    on_begin = request.on_begin

    def receive(chunk: bytes) -> bool:
        request.heard_at = clock()
        if on_begin is not None:
            on_begin()
        return feed(chunk)

    return receive

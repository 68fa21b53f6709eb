"""The path of one request over HTTP, the same for every wire: head, body, streamed or whole answer, tool call reports.

A wire defines how head and body are written and how an answer is read. It does not see the client, slots or clock.
``HttpClient`` moves the bytes; ``wire`` has other code that wires share.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from multidict import CIMultiDict
from yarl import URL

from batch_agent.backends.base import (
    Backend,
    Capabilities,
    ClientBody,
    ModelRequest,
    OnToolCall,
    Probe,
    RequestShape,
)
from batch_agent.backends.http.wire import (
    CHAT,
    NO_KEY,
    RATE_LIMIT,
    AnswerReader,
    Faults,
    Naming,
    Wording,
    json_of,
    read_quota,
    report_calls,
    written,
)
from batch_agent.errors import BackendError, RateLimited, Rejected, SpecError, Truncated
from batch_agent.http.connection import WRITE_BYTES, OnHead, Receive, ResponseParser
from batch_agent.http.failures import TransportError
from batch_agent.http.origin import Origin, basic_authorization
from batch_agent.http.transport import CONNECT_SECONDS, Transport, with_length, write_head, write_lines
from batch_agent.messages import JsonObject, Reply, Sealed, Usage
from batch_agent.value_type import lazy_property

MAX_ANSWER_BYTES = 64 * 1024 * 1024
LIMITED = RATE_LIMIT.encode()
STREAM_ALLOWANCE = 4  # a stream has many more bytes than its tokens, and is not kept in memory

Sign = Callable[[str, URL, Mapping[str, str], bytes], Mapping[str, str]]
"""Takes method, URL, headers and body, and returns the authentication headers. For servers that want a signature of
each request instead of a key."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route of a server, with everything that is the same in each request."""

    method: str
    url: URL
    headers: CIMultiDict[str] = field(repr=False)
    faults: Faults
    head: bytes = field(repr=False)  # of a request, without its own headers and length
    max_bytes: int = MAX_ANSWER_BYTES  # of an answer; a stream may have STREAM_ALLOWANCE times as many
    once: bool = False  # sent over a new connection, so that no failure comes from a kept one
    sign: Sign | None = field(default=None, repr=False)


class HttpClient:
    """The HTTP client of the backends: a server's address, headers and proxy, and bytes in and out. It waits for no
    slot, retries nothing and sets no time limit. Cancelling a call closes its connection, which tells the server.

    Entered once by each user; each also enters the transport, which is its own unless one is given.

    A server that wants its key in another header than ``Authorization`` gets it in ``headers``; one that wants signed
    requests, through ``sign``. ``wording`` says how the wire's servers describe errors.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        sign: Sign | None = None,
        wording: Wording = CHAT,
        transport: Transport | None = None,
    ) -> None:
        url, login = _without_login(base_url)
        if login and api_key:
            raise SpecError("give either a key or a user name in the URL, not both")
        own = {"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json", "User-Agent": "batch-agent"}
        if authorization := login or (f"Bearer {api_key}" if api_key else ""):
            own["Authorization"] = authorization
        self.base_url = str(url)
        self._base = url
        self._headers: CIMultiDict[str] = CIMultiDict(own)
        self._headers.update(headers or {})
        self._sends_traceparent = "traceparent" not in self._headers
        self._own_names: set[str] = set()  # headers that requests added, and that are not among these
        for name, value in self._headers.items():
            _check_header(name, value)
        values = [authorization, *(headers or {}).values()]
        password = URL(base_url).password or ""
        self._secrets = [password, *values, *(value.partition(" ")[2] for value in values)]
        self._sign = sign
        keyless = wording is CHAT and not (authorization or headers or sign)
        self._wording = replace(CHAT, key_hint=NO_KEY) if keyless else wording
        self._transport = Transport() if transport is None else transport
        self._proxy: URL | None = None
        self._origin = Origin.of(url)

    def route(
        self, method: str, path: str, *, beside: bool = False, max_bytes: int = MAX_ANSWER_BYTES, once: bool = False
    ) -> Route:
        """Return a route. ``beside``: next to the ``/v1`` of the address, where engines have routes outside the API. An
        answer of more than ``max_bytes`` is a BadResponse. ``once``: each request uses a new connection, because it
        creates something, or because its failure is evidence about the server."""
        base = str(self._base)
        url = URL((base.removesuffix("/v1") if beside else base) + path, encoded=True)
        faults = Faults(f"{method} {url}", self._secrets, self._wording)
        head = write_head(method, url, self._headers, None)
        return Route(method, url, self._headers, faults, head, max_bytes, once, self._sign)

    async def __aenter__(self) -> Self:
        proxy = self._transport.proxy_for(self._base)
        await self._transport.__aenter__()
        self._proxy = proxy
        self._origin = Origin.of(self._base, proxy)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._transport.__aexit__(*exception)

    async def send(
        self,
        route: Route,
        body: bytes | None = None,
        receive: Receive | None = None,
        headers: Mapping[str, str] | None = None,
        on_limits: Callable[[Mapping[str, str]], None] | None = None,
        traceparent: str = "",
    ) -> bytes | None:
        """Send a request once, and return the body of a good answer; None if ``receive`` consumed it as a stream.
        ``headers`` are added to this request, and ``traceparent``, unless the user set that header; ``on_limits`` gets
        the headers of a good answer before its body, if they name rate limits. Cancelling closes the connection."""
        pool, streamed = self._transport.pool, False
        head = self._head(route, headers, body)
        if traceparent and self._sends_traceparent:
            head += b"traceparent: %b\r\n" % traceparent.encode()
        on_head: OnHead | None = None
        if receive is not None:
            # The stream is consumed where its bytes arrive, in this task's context.
            run, taking = copy_context().run, receive

            def on_head(response: ResponseParser) -> Receive | None:
                nonlocal streamed
                if response.status >= 300 or _is_document(response):
                    return None
                if on_limits is not None and LIMITED in response.names:
                    on_limits(response.headers)
                streamed = True
                response.limit_bytes = STREAM_ALLOWANCE * route.max_bytes
                return lambda chunk: run(taking, chunk)

        try:
            connection = None if route.once else pool.take(self._origin)
            if connection is None:
                connection = await pool.connect(self._origin, CONNECT_SECONDS, fresh=route.once)
            response = ResponseParser(route.method, route.max_bytes)
            done = connection.ask(response, with_length(head, route.method, body), body or b"", on_head, pool.beat)
            try:
                if body is not None and len(body) > WRITE_BYTES:
                    await connection.upload(body)
                await done
            except BaseException as error:
                pool.failed(connection, response, done, error)
                raise
            if streamed:
                return None
            answer = response.take()
        except (TransportError, OSError) as error:
            raise route.faults.raised(error) from None
        if response.status >= 300:
            raise route.faults.answered(response.status, response.headers, answer)
        if on_limits is not None and LIMITED in response.names:
            on_limits(response.headers)
        return answer

    def _head(self, route: Route, own: Mapping[str, str] | None, body: bytes | None) -> bytes:
        if route.sign is None and self._proxy is None:
            if not own:
                return route.head
            if self._own_names.issuperset(own) or not any(name in route.headers for name in own):
                self._own_names.update(own)
                return route.head + write_lines(own.items())
        headers = route.headers.copy()
        headers.update(own or {})
        if route.sign is not None:
            headers.update(route.sign(route.method, route.url, headers, body or b""))
        return write_head(route.method, route.url, headers, self._proxy)


def _is_document(response: ResponseParser) -> bool:
    return response.headers.get("Content-Type", "").startswith(("application/json", "text/html"))


def _without_login(base_url: str) -> tuple[URL, str]:
    """Return the URL without login, and its user and password as the value of an Authorization header."""
    try:
        url = URL(base_url)
        host = url.host
    except ValueError:
        raise SpecError("the backend's address is not a valid URL") from None
    if url.scheme not in ("http", "https") or not host:
        raise SpecError("the backend's address must be of the form http://host:port/path or https://…")
    bare = URL(str(url.with_user(None).with_query(None).with_fragment(None)).rstrip("/"), encoded=True)
    return bare, basic_authorization(url)


def _check_header(name: str, value: str) -> None:
    if not (name.isascii() and name.isprintable() and name and " " not in name and ":" not in name):
        raise SpecError(f"{name!r} is not a valid header name")
    if not (value.isascii() and value.isprintable()):
        raise SpecError(f"the value of the header {name} has invalid characters (a line break or non-ASCII?)")


Head = TypeVar("Head")
_STREAMED = frozenset({"stream", "stream_options"})


class HttpBackend(Backend, Generic[Head]):
    """A Backend without its wire. ``chat`` is the route of turns. ``Head`` is what the wire keeps for each shape."""

    wire = ""  # clients' own requests in this wire are sent unchanged

    def __init__(self, http: HttpClient, chat: Route, *, capabilities: Capabilities, name: str | None = None) -> None:
        self._http = http
        self._chat = chat
        self._capabilities = capabilities
        self._name = name or http.base_url
        self._heads: WeakKeyDictionary[RequestShape, dict[bool, Head]] = WeakKeyDictionary()

    @lazy_property
    def _bare(self) -> WeakKeyDictionary[RequestShape, RequestShape]:
        """The shape without its schema, for each shape. Created on first use, because a fleet may have a thousand
        backends."""
        return WeakKeyDictionary()

    @lazy_property
    def _silent(self) -> WeakKeyDictionary[RequestShape, RequestShape]:
        """The shape without log-probabilities, for each shape. For servers that do not report them."""
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
        """Return the answer. If the server refuses an option, the request is sent again without that option
        (``without``)."""
        refused: dict[str, Rejected] = {}
        while True:
            client = None if request.client is None else self.own_body(request)
            shape = request.shape
            stream = None
            receive = None
            if client is None and shape.schema is not None and self._capabilities.schema_note:
                request = replace(request, shape=(shape := self.without_schema(shape)))
            if shape.logprobs and not self._capabilities.logprobs:
                request = replace(request, shape=(shape := self.without_logprobs(shape)))
            naming = Naming(request.conversation.messages, self._chat.faults)
            limits: list[Mapping[str, str]] = []  # headers of the answer
            try:
                if client is not None:
                    reply = await self._forward(client, request, naming, limits)
                else:
                    if on_tool_call is not None and self._capabilities.streaming:
                        request.said.clear()  # from an earlier attempt
                        clock = asyncio.get_running_loop().time
                        stream = self.read_stream(naming, on_tool_call, clock, request.said)
                        receive = _hearing(stream.feed, request, clock)
                    body, own = self.write_body(self._head(shape, stream is not None), request)
                    route = self.route_of(request, stream is not None)
                    answer = await self._http.send(route, body, receive, own, limits.append, request.traceparent)
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
            quota = read_quota(limits[0]) if limits else None
            return reply if quota is None else replace(reply, quota=quota)

    def learn(self, request: ModelRequest, reply: Reply, refused: Mapping[str, Rejected]) -> None:
        """Learn what the server can do, from an answer without tool calls or to a request from which refused options
        were left out."""

    async def without(self, request: ModelRequest, error: Rejected, refused: dict[str, Rejected]) -> ModelRequest:
        """Return the request without the option that the server refused, and add the option to ``refused``. The new
        request does not count as a retry of the row. Raises the refusal if it has another reason."""
        raise error

    @property
    def wires(self) -> frozenset[str]:
        return frozenset({self.wire} if self.wire else ())

    def own_body(self, request: ModelRequest) -> ClientBody | None:
        """Return the client's own request if it is in this backend's wire format; None if it must be translated."""
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
        self, client: ClientBody, request: ModelRequest, naming: Naming, limits: list[Mapping[str, str]]
    ) -> Reply:
        """Send a client's own request. The Reply has the whole answer, even if it was cut or filtered."""
        fields, headers = self.write_own(client, request)
        relay = request.relay
        clock = asyncio.get_running_loop().time
        end = _StreamEnd()
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
        body = await self._http.send(route, written(fields), taking, headers, limits.append, request.traceparent)
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
        """Convert an answer that the wire requested in another form than the engine needs."""
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

    def without_logprobs(self, shape: RequestShape) -> RequestShape:
        if (silent := self._silent.get(shape)) is None:
            silent = self._silent[shape] = replace(shape, logprobs=False)
        return silent

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
    """Wrap ``feed``: note when bytes arrive, and call ``on_begin`` at the first ones, because engines send nothing
    before the first token."""
    on_begin = request.on_begin

    def receive(chunk: bytes) -> bool:
        request.heard_at = clock()
        if on_begin is not None:
            on_begin()
        return feed(chunk)

    return receive


PROBE_SECONDS = 2.0  # for both requests together
NO_ACCESS = (401, 403)

Entries = Mapping[str, JsonObject]
"""The entries of a server's list of models, by name."""


async def probe_server(client: HttpClient) -> Probe:
    """Return whether the server is up, by ``/health`` beside the API and by the list of models. Neither costs a token.
    Never raises BackendError. The client must be entered.

    Engines are healthy long before they serve a model, and a stuck engine may list models while ``/health`` fails, so
    both are requested. Providers have no ``/health``, and some list no models: those are "unknown", unless they
    answered.
    """
    probe, _ = await probe_models(client)
    return probe


async def probe_models(client: HttpClient) -> tuple[Probe, Entries]:
    """Return the probe result, and the entries of the models that the server lists."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _ask(client)
    except TimeoutError:
        return Probe("down", f"no answer in {PROBE_SECONDS:g} s"), {}
    except BackendError as error:
        return Probe("down", str(error)), {}


async def _ask(client: HttpClient) -> tuple[Probe, Entries]:
    """Send both requests. Raises the BackendError of a server that is down."""
    healthy = False
    try:
        await client.send(client.route("GET", "/health", beside=True, once=True))
        healthy = True
    except (Rejected, RateLimited):
        pass  # the server is up, but has no such route for us
    models = client.route("GET", "/models", once=True)
    try:
        entries = read_entries(await client.send(models) or b"")
    except (Rejected, RateLimited) as error:
        answers = healthy or error.status in NO_ACCESS
        return Probe("up" if answers else "unknown", str(error)), {}
    if entries is None:
        raise models.faults.bad("the answer is not a list of models")
    if not entries:
        return Probe("down", f"{models.faults.where} lists no model: still loading", ()), {}
    return Probe("up", models=tuple(entries)), entries


MOST_SHOWN = 12
# The words of DeepSeek, Mistral, OpenRouter and others, with status 400.
_UNKNOWN_MODEL = re.compile(
    r"model\b.{0,80}\b(not exist|not found)|\b(invalid|unknown|no such|not a valid) model\b", re.IGNORECASE | re.DOTALL
)


def read_models(body: bytes) -> list[str] | None:
    """Return the models' names; None if the body is not a list of models."""
    entries = read_entries(body)
    return None if entries is None else list(entries)


def read_entries(body: bytes) -> dict[str, JsonObject] | None:
    """Return the entries of a list of models by name; None if the body is not a list of models."""
    document = json_of(body)
    entries = document.get("data") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return None
    found = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    return {str(entry["id"]): entry for entry in found}


def may_be_unknown(refusal: Rejected) -> bool:
    """Return whether the model's name may be the reason for a refusal."""
    return refusal.status == 404 or (refusal.status == 400 and _UNKNOWN_MODEL.search(str(refusal)) is not None)


def no_such_model(model: str, names: Sequence[str], place: str) -> str | None:
    """Return the message for a refused model; None if the server has it."""
    known = {name: name.rpartition("models/")[2] for name in names}
    if not names or model in names or model in known.values():
        return None
    near = difflib.get_close_matches(model, names, n=MOST_SHOWN, cutoff=0.5)
    shown = near + [name for name in names if name not in near][: max(0, MOST_SHOWN - len(near))]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"there is no model {model!r} at {place}{hint}; it has {', '.join(shown)}{more}"

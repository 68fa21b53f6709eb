"""A proxy: one address for many servers. It forwards each request to the endpoint that the dispatcher grants.

A request may move to another endpoint until its client has received the first byte of an answer. When a client leaves,
its request on the server is cancelled. All end-to-end headers pass through. So do clients' keys, unless the proxy has a
key of its own: then endpoints get the key of the environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

import orjson
from aiohttp import web
from multidict import CIMultiDict, MultiMapping
from pydantic import JsonValue
from yarl import URL

from batch_agent.backends.base import Probe
from batch_agent.backends.http.backend import Entries
from batch_agent.backends.http.wire import Faults
from batch_agent.backends.schemes import KEY_VARIABLE
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy, Question
from batch_agent.dispatch.request_numbers import RequestNumbers
from batch_agent.door import PATIENCE_SECONDS, Door, RequestRefused, is_loopback, json_response, read_body
from batch_agent.errors import BackendError, SpecError, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint, Hostfile, Traits, changes, free_name
from batch_agent.fleet.probe import Prober
from batch_agent.http.failures import TransportError
from batch_agent.http.opened import OpenResponse
from batch_agent.http.transport import Transport
from batch_agent.messages import JsonObject, Reply
from batch_agent.observe.exposition import Counter, metrics_response, page
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.ordering import LAST, AgentForecast
from batch_agent.scheduler.routing import Router
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState

LOOK_SECONDS = 10.0  # between two probes of an endpoint that is up
SILENCE_SECONDS = 3.0  # without a byte from an endpoint with requests, after which it is probed
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # between two probes of an endpoint that is down
FIRST_LOOK_SECONDS = 1.0  # for the first probes, before the first request is accepted
TICK_SECONDS = 0.5
MOST_PROBES = 256  # started in one tick
MISSES = 3  # probes without an answer after which an endpoint counts as down although it sends bytes


@dataclass(slots=True, eq=False)
class Upstream:
    """One endpoint, and its statistics."""

    host: AgentEndpoint
    endpoint: Endpoint
    models: Entries | None = None  # that it lists; None: unknown
    heard: float = 0.0  # when it last sent a byte, or got its first request
    probed: float = -inf  # when it was last probed
    misses: int = 0  # consecutive probes without an answer
    seen_up: bool | None = None  # as last logged; None: it was never up
    requests: int = 0
    failures: int = 0

    @property
    def address(self) -> str:
        return self.host.address

    def to_json(self) -> JsonObject:
        up = self.endpoint.is_working
        return {
            "endpoint": self.host.address,
            "tags": dict(self.host.tags),
            "up": up,
            "models": None if self.models is None else [*self.models],
            "in_flight": self.endpoint.inflight,
            "limit": self.endpoint.capacity.limit,
            "requests": self.requests,
            "failures": self.failures,
            "reason": "" if up else self.endpoint.health.reason,
        }


class Upstreams:
    """The endpoints of a proxy: the lines of the hostfile as servers of a dispatcher, and the probes that check them.
    ``max_inflight`` applies to each endpoint, times its weight.

    The dispatcher marks endpoints as down and grants slots. Each endpoint is probed here every few seconds, more often
    while it is down, or when it has requests and sends no byte. An endpoint counts as down until its first probe has
    returned.
    """

    def __init__(self, hosts: Sequence[AgentEndpoint], max_inflight: int, prober: Prober) -> None:
        self._max_inflight = max_inflight
        self._prober = prober
        self._known: dict[str, Upstream] = {}  # by endpoint name, including those that are leaving
        servers: dict[str, ServerState] = {}
        for host in hosts:
            servers[free_name(host.address, servers)] = self._server(host)
        self.dispatcher = Dispatcher(
            self, servers=servers, max_outage=inf, trust_probes=True, on_health=self._health_changed
        )
        for host, endpoint in zip(hosts, self.dispatcher.scheduler.endpoints, strict=True):
            self._begin(host, endpoint)

    @property
    def name(self) -> str:
        return "the fleet"

    @property
    def present(self) -> list[Upstream]:
        """Return the endpoints of the hostfile, in the order they were added."""
        return [upstream for upstream in self._known.values() if not upstream.endpoint.leaving]

    @property
    def up(self) -> int:
        return sum(upstream.endpoint.is_working for upstream in self._known.values())

    @property
    def models(self) -> list[JsonObject]:
        """Return the models of all endpoints that are up, without duplicates."""
        up = [upstream.models or {} for upstream in self.present if upstream.endpoint.is_working]
        return list({name: entry for models in up for name, entry in models.items()}.values())

    def __getitem__(self, name: str) -> Upstream:
        return self._known[name]

    # The hostfile

    def follow(self, hosts: Iterable[AgentEndpoint]) -> None:
        """Apply a new version of the hostfile. Running requests stay where they are."""
        kept, gone, new = changes(self.present, hosts)
        updated = [(upstream, host) for upstream, host in kept if upstream.host.tags != host.tags]
        for upstream, host in updated:
            upstream.host = host
            self._set_traits(upstream)
        for host in new:
            self._begin(host, self.dispatcher.add(free_name(host.address, self._known), self._server(host)))
        for upstream in gone:
            self.dispatcher.leave(upstream.endpoint)
        for name, upstream in tuple(self._known.items()):
            if upstream.endpoint.leaving and not upstream.endpoint.inflight:
                del self._known[name]
        if updated or new or gone:
            logger.warning("the hostfile has changed: %s endpoints", len(self.present))

    def _server(self, host: AgentEndpoint) -> ServerState:
        return Traits.read(host.tags).apply(ServerState(host.address), self._max_inflight, None)

    def _begin(self, host: AgentEndpoint, endpoint: Endpoint) -> None:
        self._known[endpoint.name] = Upstream(host, endpoint)
        endpoint.health.patient = True  # requests differ in kind: how long others took is no evidence
        self.dispatcher.endpoints.found(endpoint, Probe("down"))
        # Not an outage, after which it would be filled step by step.
        endpoint.capacity.resize(endpoint.capacity.ceiling)
        endpoint.health.reason = "no probe has been answered yet"

    def _set_traits(self, upstream: Upstream) -> None:
        """Apply what the hostfile's line and the server state about the endpoint."""
        found = None if upstream.models is None else frozenset(upstream.models)
        Traits.read(upstream.host.tags).apply(upstream.endpoint.server, self._max_inflight, found)
        self.dispatcher.retune(upstream.endpoint)

    # Probes

    async def watch(self) -> NoReturn:
        """Probe each endpoint when it is due."""
        while True:
            now = asyncio.get_running_loop().time()
            due = sorted((each for each in self.present if self._is_due(each, now)), key=lambda each: each.probed)
            for upstream in due[:MOST_PROBES]:
                self.dispatcher.endpoints.probe(upstream.endpoint)
            await asyncio.sleep(TICK_SECONDS)

    async def look(self) -> None:
        """Return when every endpoint was probed once, or its time for that is over."""
        first = [self.dispatcher.endpoints.probe(upstream.endpoint) for upstream in self.present[:MOST_PROBES]]
        await asyncio.wait([task for task in first if task is not None], timeout=FIRST_LOOK_SECONDS)

    def _is_due(self, upstream: Upstream, now: float) -> bool:
        health = upstream.endpoint.health
        if health.is_down:
            pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, (now - health.down_since) / 2))
        else:
            pause = SILENCE_SECONDS if upstream.misses or self._is_silent(upstream, now) else LOOK_SECONDS
        return now - upstream.probed >= pause

    def _is_silent(self, upstream: Upstream, now: float) -> bool:
        """Return whether the endpoint has requests and sends nothing, while another endpoint that is up could take
        them."""
        quiet = upstream.endpoint.inflight and now - upstream.heard >= SILENCE_SECONDS
        return bool(quiet) and self.dispatcher.scheduler.router.others_work(upstream.endpoint)

    async def probe(self, endpoint: str = "") -> Probe:
        """Return whether the endpoint is up. If it fails the probe while it sends bytes, it may only be busy."""
        upstream = self._known.get(endpoint)
        if upstream is None:
            return Probe("down", "it was removed from the hostfile")
        upstream.probed = asyncio.get_running_loop().time()
        found, models = await self._prober.probe(upstream.host)
        if found.state != "down":
            upstream.misses = 0
            upstream.models = models or None
            self._set_traits(upstream)
            return found
        upstream.misses += 1
        busy = upstream.endpoint.inflight and not self._is_silent(upstream, asyncio.get_running_loop().time())
        if busy and upstream.misses < MISSES and upstream.endpoint.is_working:
            return Probe("unknown", found.reason)
        return found

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        upstream, up = self._known.get(endpoint.name), endpoint.is_working
        if upstream is None or up == upstream.seen_up or (upstream.seen_up is None and not up):
            return
        if upstream.seen_up is not None:
            logger.warning("%s is %s", upstream.host.address, "up" if up else f"down: {endpoint.health.reason}")
        upstream.seen_up = up

    @property
    def outage(self) -> str:
        """Return the reason why no request can be answered."""
        present = self.present
        first = f"{present[0].host.place}: {present[0].endpoint.health.reason}"
        return f"none of the {len(present)} endpoints is up; the first of them: {first}"


logger = logging.getLogger("batch_agent")

MAX_INFLIGHT = 256  # at each endpoint
MOST_RETRIES = 2  # of a request that several servers break off: the request itself may be the cause
MOST_ENCODINGS = 4  # layers of encoding of a path
PARENT = re.compile(r"(^|[/\\])\.\.([/\\;?#\s\0]|$)")  # a .. in a decoded path, as lenient servers read it

CONNECT_SECONDS = 5.0
LONGEST_HOLD = 10.0  # the longest pause of an endpoint, even if it requests more
ELSEWHERE = frozenset({429, 502, 503, 504})  # statuses of an overloaded server
MOST_REFUSED = 2  # endpoints that may refuse a request for load; the last answer is final
MOST_REFUSAL_BYTES = 1024 * 1024
HOP_BY_HOP = frozenset(
    ("connection", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection")
) | {"te", "trailer", "transfer-encoding", "upgrade"}

FEW = 8  # with at most this many requests in flight an endpoint is never too busy for its conversations
BUSIER = 2.0  # an endpoint this many times as busy as the least busy one is too busy
MOST_KEYS = 100_000  # keys whose last endpoint is remembered
BEGINNING_CHARS = 1024  # used of a first message
SESSION_HEADER = "X-Session-Id"
KEY_FIELDS = ("prompt_cache_key", "user")


async def serve_proxy(
    hosts: Sequence[AgentEndpoint],
    *,
    host: str,
    port: int,
    ready: Callable[[str], None],
    hostfile: Path | None = None,
    max_inflight: int = MAX_INFLIGHT,
    patience: float = PATIENCE_SECONDS,
    environ: Mapping[str, str] = os.environ,
    key: str = "",
) -> None:
    """Serve until cancelled. ``ready`` gets the URL once requests can arrive. A port in use raises SpecError. A request
    that sends no byte for ``patience`` seconds before it is complete is dropped. If there is a ``key``, clients must
    send it."""
    if not is_loopback(host):
        logger.warning(
            "the proxy listens on %s: everyone who can reach the port%s can use the endpoints, and keys cross the "
            "network unencrypted",
            host or "all addresses",
            " and has its key" if key else "",
        )
    async with Transport() as transport, Prober(environ=environ) as prober:
        upstreams = Upstreams(hosts, max_inflight, prober)
        proxy = Proxy(upstreams, transport, patience, key, (environ.get(KEY_VARIABLE) or "").strip())
        server = Door(proxy.handle, _refused, host=host, port=port, key=key, keyless={"/health"}, patience=patience)
        try:
            await upstreams.look()
            async with server:
                ready(server.url)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(upstreams.watch())
                    if hostfile is not None:
                        tasks.create_task(Hostfile(hostfile).follow(upstreams.follow))
        finally:
            upstreams.dispatcher.close()


class Proxy:
    """The proxy. Clients send ``key``; endpoints get ``endpoint_key`` in its place."""

    def __init__(
        self, upstreams: Upstreams, transport: Transport, patience: float, key: str = "", endpoint_key: str = ""
    ) -> None:
        self._upstreams = upstreams
        self._transport = transport
        self._patience = patience
        self._key, self._endpoint_key = key, endpoint_key
        self._dispatcher = upstreams.dispatcher
        self._homes = Homes(self._dispatcher.scheduler.router)
        self._numbers = RequestNumbers()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the proxy's own routes, and forward everything else below /v1."""
        path = request.path
        if request.method == "GET":
            if path == "/health":
                return self._health()
            if path == "/status":
                return self._status()
            if path == "/metrics":
                return metrics_response(self._metrics())
            if path == "/v1/models" and (models := self._upstreams.models):
                return json_response({"object": "list", "data": [*models]})
        if path.startswith("/v1/"):
            return await self._forward(request)
        raise RequestRefused(404, f"{path} does not exist: the routes are /v1/…, /health, /status and /metrics")

    def _health(self) -> web.Response:
        up = self._upstreams.up
        return json_response(
            {"status": "ok" if up else "no endpoint is up", "up": up, "endpoints": len(self._upstreams.present)},
            200 if up else 503,
        )

    def _status(self) -> web.Response:
        endpoints = [upstream.to_json() for upstream in self._upstreams.present]
        waiting = self._dispatcher.scheduler.waiting
        return json_response({"up": self._upstreams.up, "waiting": waiting, "endpoints": [*endpoints]})

    def _metrics(self) -> str:
        requests = Counter("batch_agent_proxy_requests_total", "Requests sent to an endpoint.", ("endpoint",))
        failures = Counter("batch_agent_proxy_failures_total", "Requests that failed at an endpoint.", ("endpoint",))
        for upstream in self._upstreams.present:
            requests.add(upstream.requests, upstream.endpoint.name)
            failures.add(upstream.failures, upstream.endpoint.name)
        return page([requests, failures, *self._numbers.families([(self._upstreams.name, self._dispatcher)])])

    # Forwarding

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        if _leads_out(request.rel_url.raw_path):
            raise RequestRefused(400, "the path leaves /v1")
        body = await read_body(request, self._patience)
        key, model = read_ask(request.headers, body)
        model = model or request.path.partition("/v1/models/")[2]
        progress = AgentForecast(LAST, model=model)
        progress.home = self._homes.find(key, model)
        ticket = self._dispatcher.slots.claim(progress, LAST)
        forward = Forward(self._upstreams, self._transport, self._homes, request, body, key, ticket)
        if self._key:  # it is the proxy's own: endpoints must not see it
            forward.replace_key(self._endpoint_key)
        policy = Policy(MOST_RETRIES, wait_out=False, wanted=lambda error: forward.can_move)
        try:
            await self._dispatcher.ask(forward, policy, ticket=ticket, observer=self._numbers)
        except BackendError as error:
            return self._failed(request, forward, error)
        except SpecError as error:
            raise RequestRefused(400, str(error)) from None
        except ClientGone:
            pass
        return forward.answer or web.Response()

    def _failed(self, request: web.BaseRequest, forward: Forward, error: BackendError) -> web.StreamResponse:
        """Return the response to a client whose request got no good answer."""
        if forward.answer is not None and (forward.complete or not forward.begun):
            return forward.answer
        if forward.begun:
            if request.transport is not None:
                request.transport.abort()  # so that the client does not take it for a complete answer
            return web.Response()  # never sent
        if not self._upstreams.up:
            raise RequestRefused(503, self._upstreams.outage, headers={"Retry-After": "1"})
        raise RequestRefused(502, f"no endpoint answered: {error}")


def _leads_out(path: str) -> bool:
    """Return whether the path has a ``..``, in any encoding that a server might decode."""
    for _ in range(MOST_ENCODINGS):
        decoded = unquote(path)
        if decoded == path:
            return PARENT.search(path) is not None
        path = decoded
    return True


def _refused(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    """Return an error in the format of OpenAI's API."""
    error: JsonObject = {"message": str(refused), "type": "proxy_error", "param": None, "code": refused.status}
    return json_response({"error": error}, refused.status)


class Forward(Question):
    """A request that is being forwarded. ``ticket`` is its claim for a slot, ``answer`` what the client gets."""

    def __init__(
        self,
        upstreams: Upstreams,
        transport: Transport,
        homes: Homes,
        request: web.BaseRequest,
        body: bytes,
        key: str,
        ticket: Ticket,
    ) -> None:
        self._upstreams = upstreams
        self._transport = transport
        self._homes = homes
        self._request = request
        self._body = body
        self._key = key
        self._ticket = ticket
        self._headers = passing(request.headers, {"content-length"})
        self._endpoint: Endpoint | None = None  # where it was last sent
        self._refused = 0
        self.answer: web.StreamResponse | None = None
        self.begun = False  # the client has received a part of the answer
        self.complete = False

    def replace_key(self, key: str) -> None:
        """Send ``key`` to the endpoint instead of the client's; "": none."""
        for name in ("Authorization", "x-api-key"):
            self._headers.popall(name, None)
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @property
    def can_move(self) -> bool:
        """Return whether another endpoint may be tried."""
        endpoint = self._endpoint
        if self.begun or endpoint is None or self._refused >= MOST_REFUSED:
            return False
        return not self._refused or self._upstreams.dispatcher.scheduler.router.others_work(endpoint)

    async def send(self, endpoint: str) -> Reply:
        upstream, slot = self._upstreams[endpoint], self._ticket.slot
        self._endpoint = granted = upstream.endpoint
        self._homes.remember(self._key, granted)
        upstream.requests += 1
        if granted.inflight == 1:
            upstream.heard = _now()
        faults = Faults(upstream.host.address)
        try:
            await self._pass(upstream, faults)
        except (TransportError, OSError) as error:
            upstream.failures += 1
            raise faults.raised(error) from None
        except asyncio.CancelledError:
            upstream.failures += slot is not None and slot.recalled
            raise
        return Reply("")

    async def _pass(self, upstream: Upstream, faults: Faults) -> None:
        """Forward the request and return its answer. Raises a TransportError if the endpoint failed. Raises a
        BackendError for an answer that the client must not get, or that is evidence against the endpoint."""
        async with self._open(upstream) as response:
            chunk = await response.read_some()
            upstream.heard = _now()
            if response.status in ELSEWHERE:
                await self._refuse(response, chunk, faults)
            headers = passing(response.headers)
            self.answer = web.StreamResponse(status=response.status, reason=response.reason, headers=headers)
            self.begun = True
            await self._write(self.answer, None)
            while chunk:
                upstream.heard = _now()
                self._upstreams.dispatcher.endpoints.flights.heard(self._ticket, upstream.heard)
                await self._write(self.answer, chunk)
                chunk = await response.read_some()
            self.complete = True
            if response.status >= 500:
                error = Unavailable(f"{faults.where} answered {response.status}", status=response.status)
                error.second_hand = True  # the server works, but this answer says nothing about its speed
                raise error

    def _open(self, upstream: Upstream) -> OpenResponse:
        request, host = self._request, upstream.host
        url = URL(host.api + request.rel_url.raw_path_qs.removeprefix("/v1"), encoded=True)
        return self._transport.open(
            request.method,
            url,
            self._headers,
            self._body or None,
            proxy=self._transport.proxy_for(url) if host.scheme == "https" else None,
            connect_seconds=CONNECT_SECONDS,
        )

    async def _refuse(self, response: OpenResponse, chunk: bytes, faults: Faults) -> None:
        """Raise the refusal. The endpoint's answer is kept for the client, in case no other endpoint answers."""
        body = bytearray(chunk)
        while chunk and len(body) < MOST_REFUSAL_BYTES:
            chunk = await response.read_some()
            body += chunk
        self._refused += 1
        headers = passing(response.headers, {"content-length"})
        self.answer = web.Response(status=response.status, reason=response.reason, headers=headers, body=bytes(body))
        error = faults.answered(response.status, response.headers, bytes(body))
        error.retry_after = None if error.retry_after is None else min(LONGEST_HOLD, error.retry_after)
        raise error

    async def _write(self, answer: web.StreamResponse, chunk: bytes | None) -> None:
        """Write the head of the answer, or a chunk. A client that left is not a failure of the endpoint."""
        try:
            if chunk is None:
                await answer.prepare(self._request)
            else:
                await answer.write(chunk)
        except OSError as error:
            raise ClientGone from error


class ClientGone(Exception):
    """The client has closed its connection."""


def passing(headers: MultiMapping[str], own: Collection[str] = ()) -> CIMultiDict[str]:
    """Return the headers without hop-by-hop ones: the standard ones, those named in Connection, and ``own``."""
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    dropped = HOP_BY_HOP | named | set(own)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Homes:
    """Remembers the endpoint to which each key was last sent. A new conversation starts at the home endpoint of its
    key, the same in every proxy, unless another one is less busy. It stays at the endpoint that answered it, unless
    that one is clearly busier than another. So a prefix that all requests share does not leave the other endpoints
    idle."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._last: OrderedDict[str, Endpoint] = OrderedDict()

    def remember(self, key: str, endpoint: Endpoint) -> None:
        if key:
            self._last[key] = endpoint
            self._last.move_to_end(key)
            if len(self._last) > MOST_KEYS:
                self._last.popitem(last=False)

    def find(self, key: str, model: str) -> Endpoint | None:
        """Return the endpoint for a request, if it has a slot."""
        router = self._router
        best = router.best(model)
        if not key:
            return best
        last = self._last.get(key)
        few = FEW
        busier = BUSIER
        if last is None or not router.works(last) or not router.serves(last, model):
            # A new conversation.
            last = router.home(key, model)
            few = 0
            busier = 1.0
        if last is None or best is None:
            return last
        return last if _busy(last) <= max(few, busier * _busy(best)) else best


def _busy(endpoint: Endpoint) -> float:
    """Return the number of requests in flight plus one, divided by the endpoint's weight."""
    return (endpoint.inflight + 1) / endpoint.server.weight


def read_ask(headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """Return the key of requests that belong together, and the model; "" for a value that the request does not have."""
    try:
        document: JsonValue = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:  # images, forms
        document = None
    fields: Mapping[str, JsonValue] = document if isinstance(document, dict) else {}
    model = fields.get("model")
    given = [headers.get(SESSION_HEADER), *(fields.get(name) for name in KEY_FIELDS)]
    key = next((f"{value}" for value in given if value and isinstance(value, str)), "") or _beginning(fields)
    return key, model if isinstance(model, str) else ""


def _beginning(fields: Mapping[str, JsonValue]) -> str:
    """Return the text before the first user message and the beginning of that message: it is the same in all turns of a
    conversation."""
    said = next((fields[name] for name in ("messages", "prompt", "input") if fields.get(name)), None)
    if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
        return _text(said)[:BEGINNING_CHARS]
    beginning = [_text(fields.get("system") or fields.get("instructions"))]
    for message in said:
        assert isinstance(message, dict)
        text = _text(message.get("content"))
        if message.get("role") == "user":
            beginning.append(text[:BEGINNING_CHARS])
            break
        beginning.append(text)
    return "\n".join(beginning)


def _text(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()

"""The connections of a pool and all its sub-pools: one transport without proxies, one dispatcher.

A Line is one server. ``Lines.ask`` sends one request over it: the dispatcher grants a slot, applies the time limit, and
resends what never reached the server. The outcome, including errors, is an Exchange.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from batch_agent.backends.base import Probe
from batch_agent.backends.http.client import HttpClient, Route
from batch_agent.backends.http.faults import Faults
from batch_agent.backends.http.probe import probe_server
from batch_agent.backends.http.wire import written
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.flights import Flights
from batch_agent.dispatch.policy import Policy, Question
from batch_agent.dispatch.slots import Slots
from batch_agent.errors import BackendError, Interrupted, Timeout, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.one_loop import OneLoop
from batch_agent.http.transport import Transport
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.ordering import LAST
from batch_agent.scheduler.server import Server
from batch_agent.swarm.checks import whole

TRIES = 5  # attempts when the connection broke or the server was overloaded
LONGEST_PAUSE = 10.0  # seconds; a server that requests more is not retried
PATIENCE_SECONDS = 10.0  # for a server that is down: it may be starting
MANY = 1_000_000  # retries for the dispatcher, effectively unlimited: ``_Post`` counts its own


class Line:
    """One server of a pool tree."""

    def __init__(self, endpoint: AgentEndpoint, transport: Transport, api_key: str | None) -> None:
        self.endpoint = endpoint
        self.answered_at = -1.0  # on the event loop's clock
        self.asking: set[Ticket] = set()  # requests that wait for a slot or are in flight
        self.has_chat_batch = True  # until the server answers that it has no such route
        self.context: int | asyncio.Task[int | None] | None = None  # tokens, or the task that requests them
        self._transport = transport
        self._api_key = api_key
        self._client: HttpClient | None = None

    @property
    def client(self) -> HttpClient:
        """Return the client, created on first use: a pool of thousands is ready at once."""
        if self._client is None:
            base = self.endpoint.url.removesuffix("/v1") + "/v1"
            self._client = HttpClient(base, api_key=self._api_key, transport=self._transport)
        return self._client

    def route(self, method: str, path: str) -> Route:
        return self.client.route(method, path.removeprefix("/v1"), beside=not path.startswith("/v1"))


@dataclass(frozen=True, slots=True)
class Exchange:
    """The outcome of one request: a body or an error. ``faults`` creates the error for an unreadable body."""

    faults: Faults
    body: bytes = b""
    error: BackendError | None = None
    latency: float = 0.0
    attempts: int = 1


class _Post(Question):
    """One request over a line. ``limit`` is the seconds for its answer, of which ``spent`` have passed; ``error`` is
    that of the latest attempt."""

    def __init__(
        self, slots: Slots, line: Line, path: str, body: JsonObject | None, limit: float, spent: float = 0.0
    ) -> None:
        self._slots, self._line = slots, line
        self.route = line.route("GET" if body is None else "POST", path)
        self._data = None if body is None else written(body)
        self._limit, self.seconds = limit, max(0.0, limit - spent)
        self.body = b""
        self.error: BackendError | None = None
        self.attempts = self._failures = 0
        self.latency = 0.0

    async def send(self, endpoint: str) -> Reply:
        line, clock = self._line, asyncio.get_running_loop().time
        self.attempts += 1
        self.error, sent_at = None, clock()
        try:
            self.body = await line.client.send(self.route, self._data) or b""
        except BackendError as error:
            self.error = error
            self._failures += not _is_refused(error)
            raise
        except asyncio.CancelledError:
            if clock() - sent_at >= 0.99 * self.seconds:
                self.error = Timeout(f"{self.route.faults.where}: no complete answer in {self._limit:g} s")
            raise
        finally:
            if isinstance(self.error, Timeout) and self._data is not None and line.answered_at < sent_at:
                self._give_up(self.error)
        line.answered_at = clock()
        self.latency = line.answered_at - sent_at
        return Reply("")

    def _give_up(self, error: Timeout) -> None:
        """Fail the requests that wait for the server: it has answered nothing since this one was sent."""
        why = f"not sent, because the server did not answer the previous request: {error}"
        for ticket in tuple(self._line.asking):
            self._slots.reject(ticket, Timeout(why, unreached=True))

    def wants_again(self) -> bool:
        """Return whether to retry at the same server: it is starting or overloaded, or the connection broke."""
        error = self.error
        if error is None or _is_refused(error):  # None: the dispatcher recalled the request
            return True
        passing = error.overload or (isinstance(error, Unavailable) and error.status is None)
        return passing and self._failures < TRIES and (error.retry_after or 0.0) <= LONGEST_PAUSE


class _Once(_Post):
    """A request whose caller judges the outcome: for the dispatcher it always counts as answered."""

    def __init__(self, flights: Flights, slots: Slots, line: Line, path: str, body: JsonObject | None, limit: float):
        super().__init__(slots, line, path, body, limit)
        self._flights = flights

    async def send(self, endpoint: str) -> Reply:
        with suppress(TimeoutError, BackendError), self._flights.within(self.seconds):  # ``error`` has it
            await super().send(endpoint)
        return Reply("", saved=Usage())  # so that the dispatcher learns nothing from it


class Lines:
    def __init__(self, concurrency: int, connector_limit: int, api_key: str | None = None) -> None:
        self._sockets = whole("connector_limit", connector_limit)
        # Every request has its own connection, so the smaller limit counts.
        self.limit = min(whole("concurrency", concurrency), self._sockets)
        self._transport = Transport(proxies=False, connections=self._sockets)
        self._api_key = api_key
        self._lines: list[Line] = []  # of the whole tree of pools
        self._loop = OneLoop("pool", self._forget)
        self._dispatcher: Dispatcher | None = None  # while it is open
        self._endpoints: dict[Line, Endpoint] = {}
        self._unjudged: Endpoint  # for requests that are judged elsewhere

    @property
    def name(self) -> str:
        return "the server"

    def line(self, endpoint: AgentEndpoint) -> Line:
        line = Line(endpoint, self._transport, self._api_key)
        self._lines.append(line)
        return line

    async def open(self) -> Dispatcher:
        """Open the connections in the running event loop. Raises SpecError if they are open in another loop."""
        self._loop.bind()
        if self._dispatcher is None:
            await self._transport.__aenter__()
            servers = {str(place): Server(line.endpoint.url) for place, line in enumerate(self._lines)}
            self._dispatcher = Dispatcher(self, self.limit, servers={**servers, "": Server()}, max_outage=inf)
            *endpoints, self._unjudged = self._dispatcher.scheduler.endpoints
            self._endpoints = dict(zip(self._lines, endpoints, strict=True))
            for endpoint in endpoints:
                endpoint.health.patient = True  # prompts differ in length: how long others took is no evidence
        return self._dispatcher

    def _forget(self) -> None:
        self._dispatcher = None  # resources of a closed loop cannot be closed any more

    async def close(self) -> None:
        self._loop.bind()
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.refuse("not sent, because the pool was closed")
            await self._transport.__aexit__(None, None, None)
            dispatcher.close()
        self._loop.release()

    async def ask(self, line: Line, path: str, body: JsonObject | None, limit: float, spent: float = 0.0) -> Exchange:
        """Post the body, or GET without one. ``limit`` is the seconds of one request, of which ``spent`` have passed.

        A server that refuses connections is retried for ``PATIENCE_SECONDS``, or for ``limit`` if that is less. Other
        failures are retried a few times.
        """
        dispatcher = await self.open()
        slots = dispatcher.slots
        post = _Post(slots, line, path, body, limit, spent)
        ticket = slots.claim(Progress(LAST), LAST, pinned=self._endpoints[line])
        policy = Policy(
            MANY,
            wait_until=asyncio.get_running_loop().time() + min(post.seconds, PATIENCE_SECONDS),
            timeout=post.seconds,
            wanted=lambda: not slots.refusal and post.wants_again(),
        )
        line.asking.add(ticket)
        try:
            return await _exchange(dispatcher, post, policy, ticket)
        finally:
            line.asking.discard(ticket)

    async def ask_once(self, line: Line, path: str, body: JsonObject | None, limit: float) -> Exchange:
        """Send the request once, for a caller that judges failures itself, such as a run of the engine. The outcome
        does not affect the server's health here."""
        dispatcher = await self.open()
        post = _Once(dispatcher.endpoints.flights, dispatcher.slots, line, path, body, limit)
        ticket = dispatcher.slots.claim(Progress(LAST), LAST, pinned=self._unjudged)
        return await _exchange(dispatcher, post, Policy(0), ticket)

    async def probe(self, endpoint: str = "") -> Probe:
        return await self.probe_line(self._lines[int(endpoint)]) if endpoint else Probe("unknown")

    async def probe_line(self, line: Line) -> Probe:
        dispatcher = await self.open()
        found = await probe_server(line.client)
        if found.state == "down" and dispatcher.scheduler.inflight >= self._sockets:
            return Probe("unknown", "no connection was free for a probe")
        return found


async def _exchange(dispatcher: Dispatcher, post: _Post, policy: Policy, ticket: Ticket) -> Exchange:
    faults = post.route.faults
    error: BackendError | None = None
    try:
        await dispatcher.ask(post, policy, ticket=ticket)
    except BackendError as raised:
        error = raised
    except Interrupted as closed:
        error = Unavailable(f"{faults.where}: {closed}")
    if error is None and post.error is None:
        return Exchange(faults, post.body, None, post.latency, post.attempts)
    return Exchange(faults, error=post.error or error, attempts=max(1, post.attempts))


def _is_refused(error: BackendError) -> bool:
    return isinstance(error, Unavailable) and error.unreached

"""The connections of a pool and all its sub-pools: one transport, one gate, no proxies.

A Line is one server. ``Lines.ask`` sends one request over it: it waits for a slot, keeps to a time limit, and sends
again what never reached the server. Between two tries it holds no slot. Its outcome, faults included, is an Exchange.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from batch_agent.backends.http.client import HttpClient, Route
from batch_agent.backends.http.faults import Faults
from batch_agent.backends.http.transport import Transport
from batch_agent.backends.http.wire import written
from batch_agent.errors import BackendError, Timeout, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.one_loop import OneLoop
from batch_agent.messages import JsonObject
from batch_agent.swarm.checks import whole
from batch_agent.swarm.gate import Gate

TRIES = 5  # of a request whose connection broke, or that the server was too busy for
FIRST_PAUSE = 0.1  # seconds, longer with each try
LONGEST_PAUSE = 10.0  # a server that asks for more is not tried again
LONGEST_KNOCK = 1.0  # the longest pause while a server refuses connections


class Line:
    """One server of a pool tree."""

    __slots__ = ("_api_key", "_client", "_transport", "answered_at", "context", "endpoint", "has_chat_batch")

    def __init__(self, endpoint: AgentEndpoint, transport: Transport, api_key: str | None) -> None:
        self.endpoint = endpoint
        self.answered_at = -1.0  # of the event loop's clock
        self.has_chat_batch = True  # until it answers that it has not
        self.context: int | asyncio.Task[int | None] | None = None  # tokens, or the question for them
        self._transport = transport
        self._api_key = api_key
        self._client: HttpClient | None = None

    @property
    def client(self) -> HttpClient:
        """Made on first use: a pool of thousands is ready at once."""
        if self._client is None:
            base = self.endpoint.url.removesuffix("/v1")
            self._client = HttpClient(base, api_key=self._api_key, transport=self._transport)
        return self._client


@dataclass(frozen=True, slots=True)
class Exchange:
    """The outcome of one request: a body, or an error. ``faults`` builds the error of a body that cannot be read."""

    faults: Faults
    body: bytes = b""
    error: BackendError | None = None
    latency: float = 0.0
    attempts: int = 1


class Lines:
    def __init__(self, concurrency: int, connector_limit: int, api_key: str | None = None) -> None:
        sockets = whole("connector_limit", connector_limit)
        # Every request has a connection of its own, so the smaller bound is the one that counts.
        self._limit = min(whole("concurrency", concurrency), sockets)
        self._transport = Transport(proxies=False, connections=sockets)
        self._api_key = api_key
        self._loop = OneLoop("pool")
        self._gate: Gate | None = None  # while it is open

    def line(self, endpoint: AgentEndpoint) -> Line:
        return Line(endpoint, self._transport, self._api_key)

    async def open(self) -> Gate:
        """Opens the connections in the running event loop. SpecError if another loop has them open."""
        if self._loop.bind():
            self._gate = None
        if self._gate is None:
            await self._transport.__aenter__()
            self._gate = Gate(self._limit)
        return self._gate

    async def close(self) -> None:
        if self._loop.check():  # what a closed loop left cannot be closed any more
            self._gate = None
        if self._gate is not None:
            self._gate = None
            await self._transport.__aexit__(None, None, None)
        self._loop.release()

    async def ask(
        self, line: Line, path: str, body: JsonObject | None, limit: float, spent: float = 0.0, *, tries: int = TRIES
    ) -> Exchange:
        """Posts the body; without one, GET. ``limit`` is the seconds of one request, of which some may be ``spent``.

        A server that refuses connections is tried again for that long; other failures are tried again ``tries`` times.
        With one try nothing is.
        """
        gate, clock = await self.open(), asyncio.get_running_loop().time
        route = line.client.route("GET" if body is None else "POST", path)
        data = None if body is None else written(body)
        attempts = failures = 0
        gives_up = clock() + limit - spent
        while True:
            attempts += 1
            try:
                async with gate.hold(line):
                    if self._gate is not gate:
                        raise Unavailable(f"{route.faults.where}: not sent, because the pool was closed")
                    began = clock()
                    answer = await self._send(gate, line, route, data, limit, spent)
                line.answered_at = clock()
                return Exchange(route.faults, answer, None, line.answered_at - began, attempts)
            except BackendError as error:
                if isinstance(error, Unavailable) and error.unreached:
                    pause = min(FIRST_PAUSE * attempts, LONGEST_KNOCK)
                    again = tries > 1 and clock() + pause < gives_up
                else:
                    failures += 1
                    pause = error.retry_after or FIRST_PAUSE * 2 ** (failures - 1)
                    again = failures < tries and pause <= LONGEST_PAUSE and _may_pass(error)
                if not again or self._gate is not gate:
                    return Exchange(route.faults, error=error, attempts=attempts)
            await asyncio.sleep(pause)

    async def _send(
        self, gate: Gate, line: Line, route: Route, data: bytes | None, limit: float, spent: float
    ) -> bytes:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit - spent):
                return await line.client.send(route, data) or b""
        except TimeoutError:
            error = Timeout(f"{route.faults.where}: no complete answer in {limit:g} s")
        except Timeout as raised:
            error = raised
        if data is not None and line.answered_at < began:
            # The server has answered nothing since: requests that wait for it would wait as long for nothing.
            gate.give_up(line, f"not sent, because the server did not answer the request before it: {error}")
        raise error


def _may_pass(error: BackendError) -> bool:
    """Whether the same server may answer another try: the connection broke, or it was overloaded."""
    return error.overload or (isinstance(error, Unavailable) and error.status is None)

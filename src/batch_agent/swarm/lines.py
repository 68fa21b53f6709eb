"""The connections of a pool and all its sub-pools: one session for every server, one gate, no proxies.

A Line is what is known of one server. ``Lines.ask`` sends one request over it: it waits for a slot, keeps to a time
limit, and sends again what never reached a server; between two tries it holds no slot. What came of it is an Exchange,
faults included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from batch_agent.backends.http.client import HttpClient, Route
from batch_agent.backends.http.faults import Faults
from batch_agent.backends.http.transport import Transport
from batch_agent.backends.http.wire import written
from batch_agent.errors import BackendError, SpecError, Timeout, Unavailable
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.messages import JsonObject
from batch_agent.swarm.gate import Gate

CLOSE = {"Connection": "close"}
TRIES = 5
LONGEST_PAUSE = 10.0  # a server that asks for more patience is not waited for
FIRST_PAUSE = 0.1  # seconds, doubled with each try: what is refused is known to be after a second and a half


class Line:
    """One server of a pool tree."""

    __slots__ = (
        "_api_key",
        "_client",
        "_transport",
        "answered_at",
        "context",
        "endpoint",
        "has_chat_batch",
        "keeping",
        "kept",
    )

    def __init__(self, endpoint: AgentEndpoint, transport: Transport, api_key: str | None) -> None:
        self.endpoint = endpoint
        self.answered_at = -1.0  # of the event loop's clock
        self.has_chat_batch = True  # until it says that it has not
        self.kept = self.keeping = 0  # connections that may stay open, and those of them in use
        self.context: int | asyncio.Task[int | None] | None = None  # tokens, or the question for them
        self._transport = transport
        self._api_key = api_key
        self._client: HttpClient | None = None

    @property
    def client(self) -> HttpClient:
        """Made when it is needed: a pool of thousands is ready at once."""
        if self._client is None:
            base = self.endpoint.url.removesuffix("/v1")
            self._client = HttpClient(base, api_key=self._api_key, transport=self._transport)
        return self._client


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what came of it: a body, or an error. ``faults`` are for whoever cannot read the body."""

    faults: Faults
    body: bytes = b""
    error: BackendError | None = None
    latency: float = 0.0
    attempts: int = 1


class Lines:
    def __init__(self, concurrency: int, connector_limit: int, api_key: str | None = None) -> None:
        for name, value in (("concurrency", concurrency), ("connector_limit", connector_limit)):
            if type(value) is not int or value < 1:
                raise SpecError(f"{name} is {value!r}: give a whole number above 0")
        # Every request has a connection of its own, so the smaller bound is the one that counts. What is above it may
        # stay open between requests.
        self.limit = min(concurrency, connector_limit)
        self._may_keep = connector_limit - self.limit
        self._transport = Transport(proxies=False, connections=connector_limit)
        self._api_key = api_key
        self._gate = Gate(self.limit)
        self._loop: asyncio.AbstractEventLoop | None = None

    def line(self, endpoint: AgentEndpoint) -> Line:
        return Line(endpoint, self._transport, self._api_key)

    async def open(self) -> None:
        """Also by the first request of a pool that nobody entered."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            await self._transport.__aenter__()
            self._loop, self._gate = loop, Gate(self.limit)

    async def close(self) -> None:
        if self._loop is not None:
            self._loop = None
            await self._transport.__aexit__(None, None, None)

    async def ask(
        self, line: Line, path: str, body: JsonObject | None, limit: float, spent: float = 0.0, *, tries: int = TRIES
    ) -> Exchange:
        """POST the body; without one, GET. ``limit`` is seconds for one try, of which some may be ``spent``."""
        await self.open()
        loop = asyncio.get_running_loop()
        route = line.client.route("GET" if body is None else "POST", path)
        data = None if body is None else written(body)
        attempts = 0
        while True:
            attempts += 1
            try:
                async with self._gate.hold(line):
                    if self._loop is not loop:
                        raise Unavailable(f"{route.faults.where}: not sent, because the pool was closed")
                    began = loop.time()
                    answer = await self._send(line, route, data, limit, spent)
                line.answered_at = loop.time()
                return Exchange(route.faults, answer, None, line.answered_at - began, attempts)
            except BackendError as error:
                pause = error.retry_after or FIRST_PAUSE * 2 ** (attempts - 1)
                hopeless = pause > LONGEST_PAUSE or self._loop is not loop or not _may_pass(error)
                if attempts >= tries or hopeless:
                    return Exchange(route.faults, error=error, attempts=attempts)
            await asyncio.sleep(pause)

    @contextmanager
    def _connection(self, line: Line) -> Iterator[Mapping[str, str] | None]:
        """The headers of a request whose connection is closed after it; None where it may stay open."""
        if line.keeping == line.kept:
            if not self._may_keep:
                yield CLOSE
                return
            self._may_keep -= 1
            line.kept += 1
        line.keeping += 1
        try:
            yield None
        finally:
            line.keeping -= 1

    async def _send(self, line: Line, route: Route, data: bytes | None, limit: float, spent: float) -> bytes:
        began = asyncio.get_running_loop().time()
        try:
            with self._connection(line) as headers:
                async with asyncio.timeout(limit - spent):
                    return await line.client.send(route, data, headers=headers) or b""
        except TimeoutError:
            error = Timeout(f"{route.faults.where}: no complete answer in {limit:g} s")
        except Timeout as raised:
            error = raised
        if data is not None and line.answered_at < began:
            # Nothing has come from it since: those who wait for it would wait as long again for nothing.
            self._gate.give_up(line, f"not sent, because the server did not answer the request before it: {error}")
        raise error


def _may_pass(error: BackendError) -> bool:
    """Worth another try at the same server: no connection, one that broke, or more than it can take just now."""
    return error.overload or (isinstance(error, Unavailable) and error.status is None)

"""One request of a proxy's client, as a question to the dispatcher: sent to an endpoint, its answer passed back.

The request may move to another endpoint until its client has received the first byte of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from aiohttp import web
from multidict import CIMultiDict, MultiMapping
from yarl import URL

from batch_agent.backends.http.wire import Faults
from batch_agent.dispatch.policy import Question
from batch_agent.errors import Unavailable
from batch_agent.fleet.affinity import Homes
from batch_agent.fleet.upstreams import Upstream, Upstreams
from batch_agent.http.failures import TransportError
from batch_agent.http.opened import OpenResponse
from batch_agent.http.transport import Transport
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.server import Endpoint

CONNECT_SECONDS = 5.0
LONGEST_HOLD = 10.0  # the longest pause of an endpoint, even if it requests more
ELSEWHERE = frozenset({429, 502, 503, 504})  # statuses of an overloaded server
MOST_REFUSED = 2  # endpoints that may refuse a request for load; the last answer is final
MOST_REFUSAL_BYTES = 1024 * 1024
HOP_BY_HOP = frozenset(
    ("connection", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection")
) | {"te", "trailer", "transfer-encoding", "upgrade"}


class Forward(Question):
    """``ticket`` is the request's claim for a slot, ``answer`` what the client gets."""

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
        self._upstreams, self._transport, self._homes = upstreams, transport, homes
        self._request, self._body, self._key, self._ticket = request, body, key, ticket
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
        """Forward the request and return its answer. Raises a TransportError if the endpoint failed, and a BackendError
        for an answer that the client must not get, or that is bad evidence about the endpoint."""
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
        """Raise the refusal. Its answer is kept for the client, in case no other endpoint answers."""
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

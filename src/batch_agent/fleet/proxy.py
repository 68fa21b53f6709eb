"""One address for many servers: passes each request to the endpoint that the dispatcher grants, and its answer back.

A request goes elsewhere as long as its client has seen no byte of an answer. A client that leaves ends its request on
the server. Keys and all other end-to-end headers pass through.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from batch_agent.backends.http.transport import Transport
from batch_agent.dispatch.policy import Policy
from batch_agent.dispatch.request_numbers import RequestNumbers
from batch_agent.errors import BackendError, SpecError
from batch_agent.fleet.affinity import Homes, read_ask
from batch_agent.fleet.following import Hostfile
from batch_agent.fleet.forwarding import ClientGone, Forward
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import Prober
from batch_agent.fleet.upstreams import Upstreams
from batch_agent.gateway.http_server import (
    PATIENCE_SECONDS,
    BodyRefused,
    HttpServer,
    answer_unread,
    is_loopback,
    json_response,
    read_body,
)
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import Counter, page
from batch_agent.observe.metrics_server import metrics_response
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.ordering import LAST

logger = logging.getLogger("batch_agent")

MAX_INFLIGHT = 256  # at each endpoint
MOST_RETRIES = 2  # of a request that servers break off: it may be what breaks them
MOST_ENCODINGS = 4  # of a path, one inside the other
PARENT = re.compile(r"(^|[/\\])\.\.([/\\;?#\s\0]|$)")  # a .. in a decoded path, as lenient servers read it


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
) -> None:
    """Serves until cancelled; ``ready`` gets the URL once requests can come. A taken port is a SpecError. A request
    that sends no byte for ``patience`` seconds before it is complete is dropped."""
    if not is_loopback(host):
        logger.warning(
            "the proxy listens on %s: everybody who can reach the port can use the endpoints. It asks for no key, and "
            "the keys that clients send cross the network unencrypted",
            host or "all addresses",
        )
    async with Transport() as transport, Prober(environ=environ) as prober:
        upstreams = Upstreams(hosts, max_inflight, prober)
        proxy = Proxy(upstreams, transport, patience)
        server = HttpServer(proxy.handle, host=host, port=port, patience=patience)
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
    def __init__(self, upstreams: Upstreams, transport: Transport, patience: float) -> None:
        self._upstreams, self._transport, self._patience = upstreams, transport, patience
        self._dispatcher = upstreams.dispatcher
        self._homes = Homes(self._dispatcher.scheduler.router)
        self._numbers = RequestNumbers()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer what is the proxy's own, and pass everything else below /v1 on."""
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
        return _refusal(404, f"{path} is not served here: there are /v1/…, /health, /status and /metrics")

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
        """What Prometheus reads."""
        requests = Counter("batch_agent_proxy_requests_total", "Requests sent to an endpoint.", ("endpoint",))
        failures = Counter("batch_agent_proxy_failures_total", "Requests that an endpoint failed.", ("endpoint",))
        for upstream in self._upstreams.present:
            requests.add(upstream.requests, upstream.endpoint.name)
            failures.add(upstream.failures, upstream.endpoint.name)
        return page([requests, failures, *self._numbers.families([(self._upstreams.name, self._dispatcher)])])

    # What it passes on

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        if _leads_out(request.rel_url.raw_path):
            return _refusal(400, "the path leads out of /v1")
        try:
            body = await read_body(request, self._patience)
        except BodyRefused as error:
            return await answer_unread(request, _refusal(error.status, str(error)))
        key, model = read_ask(request.headers, body)
        model = model or request.path.partition("/v1/models/")[2]
        progress = Progress(LAST, model=model)
        progress.home = self._homes.find(key, model)
        ticket = self._dispatcher.slots.claim(progress, LAST)
        forward = Forward(self._upstreams, self._transport, self._homes, request, body, key, ticket)
        policy = Policy(MOST_RETRIES, wait_out=False, wanted=lambda: forward.can_move)
        try:
            await self._dispatcher.ask(forward, policy, ticket=ticket, observer=self._numbers)
        except BackendError as error:
            return self._failed(request, forward, error)
        except SpecError as error:
            return _refusal(400, str(error))
        except ClientGone:
            pass
        return forward.answer or web.Response()

    def _failed(self, request: web.BaseRequest, forward: Forward, error: BackendError) -> web.StreamResponse:
        """What the client of a request gets that no endpoint has answered well."""
        if forward.answer is not None and (forward.complete or not forward.begun):
            return forward.answer
        if forward.begun:
            if request.transport is not None:
                request.transport.abort()  # so that the client does not take it for the end
            return web.Response()  # it goes nowhere
        if not self._upstreams.up:
            return _refusal(503, self._upstreams.outage, {"Retry-After": "1"})
        return _refusal(502, f"no endpoint answered: {error}")


def _leads_out(path: str) -> bool:
    """Whether the path has a ``..``, in any encoding that a server might decode."""
    for _ in range(MOST_ENCODINGS):
        decoded = unquote(path)
        if decoded == path:
            return PARENT.search(path) is not None
        path = decoded
    return True


def _refusal(status: int, words: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the form of OpenAI's API."""
    error: JsonObject = {"message": words, "type": "proxy_error", "param": None, "code": status}
    return json_response({"error": error}, status, headers)

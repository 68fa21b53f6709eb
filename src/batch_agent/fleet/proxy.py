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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from batch_agent.backends.schemes import KEY_VARIABLE
from batch_agent.dispatch.policy import Policy
from batch_agent.dispatch.request_numbers import RequestNumbers
from batch_agent.door import PATIENCE_SECONDS, Door, RequestRefused, is_loopback, json_response, read_body
from batch_agent.errors import BackendError, SpecError
from batch_agent.fleet.affinity import Homes, read_ask
from batch_agent.fleet.following import Hostfile
from batch_agent.fleet.forwarding import ClientGone, Forward
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import Prober
from batch_agent.fleet.upstreams import Upstreams
from batch_agent.http.transport import Transport
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import Counter, page
from batch_agent.observe.metrics_server import metrics_response
from batch_agent.scheduler.ordering import LAST, AgentForecast

logger = logging.getLogger("batch_agent")

MAX_INFLIGHT = 256  # at each endpoint
MOST_RETRIES = 2  # of a request that several servers break off: the request itself may be the cause
MOST_ENCODINGS = 4  # layers of encoding of a path
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
    """``key`` is the one that the door asks for; endpoints get ``endpoint_key`` in its place."""

    def __init__(
        self, upstreams: Upstreams, transport: Transport, patience: float, key: str = "", endpoint_key: str = ""
    ) -> None:
        self._upstreams, self._transport, self._patience = upstreams, transport, patience
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
        """Return what the client gets for a request without a good answer."""
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

"""One address for many servers: passes each request to the endpoint that the dispatcher grants, and its answer back.

A request goes elsewhere as long as its client has seen no byte of an answer. A client that leaves ends its request on
the server. Keys and all other end-to-end headers pass through.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote

import orjson
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
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import Counter, page
from batch_agent.observe.metrics_server import metrics_handler
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.ordering import LAST

logger = logging.getLogger("batch_agent")

MAX_INFLIGHT = 256  # at each endpoint
MAX_BODY_BYTES = 256 * 1024 * 1024
PATIENCE_SECONDS = 30.0  # without a byte of a request, after which its connection is closed
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
    if not _is_loopback(host):
        logger.warning(
            "the proxy listens on %s: everybody who can reach the port can use the endpoints. It asks for no key, and "
            "the keys that clients send cross the network unencrypted",
            host or "all addresses",
        )
    async with Transport() as transport, Prober(environ=environ) as prober:
        upstreams = Upstreams(hosts, max_inflight, prober)
        proxy = Proxy(upstreams, transport, patience)
        # A handler is cancelled when its client leaves; compressed bodies pass as they are. The timeout is also that of
        # a request's headers.
        runner = web.AppRunner(
            proxy.application(),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=patience,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            await upstreams.look()
            await web.TCPSite(runner, host, port).start()
            place = f"[{host}]" if ":" in host else host
            ready(f"http://{place}:{runner.addresses[0][1]}")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(upstreams.watch())
                if hostfile is not None:
                    tasks.create_task(Hostfile(hostfile).follow(upstreams.follow))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SpecError(f"{host}:{port} is taken by another program: choose another port") from None
            raise SpecError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        finally:
            await runner.cleanup()
            upstreams.dispatcher.close()


class Proxy:
    def __init__(self, upstreams: Upstreams, transport: Transport, patience: float) -> None:
        self._upstreams, self._transport, self._patience = upstreams, transport, patience
        self._dispatcher = upstreams.dispatcher
        self._homes = Homes(self._dispatcher.scheduler.router)
        self._numbers = RequestNumbers()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/health", self._health), web.get("/status", self._status)])
        app.add_routes([web.get("/metrics", metrics_handler(self._metrics))])
        app.add_routes([web.get("/v1/models", self._models), web.route("*", "/v1/{path:.*}", self._forward)])
        app.add_routes([web.route("*", "/{path:.*}", self._unknown)])
        return app

    # What it answers itself

    async def _health(self, request: web.Request) -> web.Response:
        up = self._upstreams.up
        return _json(
            {"status": "ok" if up else "no endpoint is up", "up": up, "endpoints": len(self._upstreams.present)},
            200 if up else 503,
        )

    async def _status(self, request: web.Request) -> web.Response:
        endpoints = [upstream.to_json() for upstream in self._upstreams.present]
        waiting = self._dispatcher.scheduler.waiting
        return _json({"up": self._upstreams.up, "waiting": waiting, "endpoints": [*endpoints]})

    def _metrics(self) -> str:
        """What Prometheus reads."""
        requests = Counter("batch_agent_proxy_requests_total", "Requests sent to an endpoint.", ("endpoint",))
        failures = Counter("batch_agent_proxy_failures_total", "Requests that an endpoint failed.", ("endpoint",))
        for upstream in self._upstreams.present:
            requests.add(upstream.requests, upstream.endpoint.name)
            failures.add(upstream.failures, upstream.endpoint.name)
        return page([requests, failures, *self._numbers.families([(self._upstreams.name, self._dispatcher)])])

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The models of all endpoints. If none lists its models without a key, one is asked with the client's."""
        models = self._upstreams.models
        return _json({"object": "list", "data": [*models]}) if models else await self._forward(request)

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(404, f"{request.path} is not served here: there are /v1/…, /health, /status and /metrics")

    # What it passes on

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if _leads_out(request.rel_url.raw_path):
            return _refusal(400, "the path leads out of /v1")
        try:
            body = await self._read(request)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"the body is larger than {MAX_BODY_BYTES // 1024**2} MiB")
        except TimeoutError:
            return await _drop(request, _refusal(408, f"no more of the body came for {self._patience:g} s"))
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

    def _failed(self, request: web.Request, forward: Forward, error: BackendError) -> web.StreamResponse:
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

    async def _read(self, request: web.Request) -> bytes:
        """Returns the body. TimeoutError if it stops coming."""
        body, clock = bytearray(), asyncio.get_running_loop().time
        async with asyncio.timeout(self._patience) as limit:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(body))
                limit.reschedule(clock() + self._patience)
        return bytes(body)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _leads_out(path: str) -> bool:
    """Whether the path has a ``..``, in any encoding that a server might decode."""
    for _ in range(MOST_ENCODINGS):
        decoded = unquote(path)
        if decoded == path:
            return PARENT.search(path) is not None
        path = decoded
    return True


async def _drop(request: web.Request, answer: web.Response) -> web.Response:
    """Answers, and closes the connection without waiting for the rest of the request."""
    await answer.prepare(request)
    await answer.write_eof()
    if request.transport is not None:
        request.transport.close()
    return answer


def _json(document: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json", headers=headers)


def _refusal(status: int, words: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the form of OpenAI's API."""
    error: JsonObject = {"message": words, "type": "proxy_error", "param": None, "code": status}
    return _json({"error": error}, status, headers)

"""One address for many servers: requests in, to the endpoint that ``slots`` grants, and its bytes back as they come.

A request goes elsewhere as long as its client has seen nothing of an answer; a client that leaves takes its request off
the server. Keys, and all else that is not between two neighbours, only pass through.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict, MultiMapping
from yarl import URL

from batch_agent.backends.http.client import LARGE_BODY_BYTES
from batch_agent.backends.http.transport import Transport
from batch_agent.errors import SpecError
from batch_agent.fleet.balance import Place, read_ask
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.slots import NobodyThere, Slots
from batch_agent.messages import JsonObject

MAX_INFLIGHT = 256  # at each endpoint
MAX_BODY_BYTES = 256 * 1024 * 1024
CONNECT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
MOST_BROKEN = 3  # servers that may break off one request: it may be what breaks them
ELSEWHERE = frozenset({429, 502, 503, 504})  # answers of a server that has too much to do
NEIGHBOURS = frozenset(
    {
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # that the client library would add


async def serve_proxy(
    hosts: Sequence[AgentEndpoint],
    *,
    host: str,
    port: int,
    ready: Callable[[str], None],
    hostfile: Path | None = None,
    max_inflight: int = MAX_INFLIGHT,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Serves until cancelled; ``ready`` gets the URL once requests can come. A taken port is a SpecError."""
    async with Transport() as transport, Slots(hosts, max_inflight, environ) as slots:
        proxy = Proxy(slots, transport)
        # A handler is cancelled when its client leaves; what is compressed passes as it is.
        runner = web.AppRunner(
            proxy.application(),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            place = f"[{host}]" if ":" in host else host
            ready(f"http://{place}:{runner.addresses[0][1]}")
            if hostfile is not None:
                await slots.follow_file(hostfile)
            await asyncio.get_running_loop().create_future()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SpecError(f"{host}:{port} is taken by another program: choose another port") from None
            raise SpecError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        finally:
            await runner.cleanup()


class Broken(Exception):
    """The server gave no answer. ``unreached``: it knows nothing of the request."""

    def __init__(self, words: str, *, unreached: bool) -> None:
        super().__init__(words)
        self.unreached = unreached


class Proxy:
    def __init__(self, slots: Slots, transport: Transport) -> None:
        self._slots, self._transport = slots, transport

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/health", self._health), web.get("/status", self._status)])
        app.add_routes([web.get("/v1/models", self._models), web.route("*", "/v1/{path:.*}", self._forward)])
        app.add_routes([web.route("*", "/{path:.*}", self._unknown)])
        return app

    # What it says of itself

    async def _health(self, request: web.Request) -> web.Response:
        up = self._slots.balance.router.working
        return _json(
            {"status": "ok" if up else "no endpoint is up", "up": up, "endpoints": len(self._slots.balance.places)},
            200 if up else 503,
        )

    async def _status(self, request: web.Request) -> web.Response:
        places = [place.to_json() for place in self._slots.balance.places.values()]
        up = self._slots.balance.router.working
        return _json({"up": up, "waiting": self._slots.waiting, "endpoints": [*places]})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Of all together; where they keep their models from strangers, one is asked with the client's key."""
        cards = self._slots.balance.models
        return _json({"object": "list", "data": [*cards]}) if cards else await self._forward(request)

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(404, f"{request.path} is not served here: there are /v1/…, /health and /status")

    # What it passes on

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if ".." in request.rel_url.raw_path.split("/"):
            return _refusal(400, "the path leads out of /v1")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"the body is larger than {MAX_BODY_BYTES // 1024**2} MiB")
        key, model = read_ask(request.headers, body)
        model = model or request.path.partition("/v1/models/")[2]
        avoid: Place | None = None
        broken = unreached = 0
        while True:
            try:
                place = await self._slots.take(key, model, avoid)
            except NobodyThere as error:
                return _refusal(503, str(error), {"Retry-After": "1"})
            try:
                # One that has too much to do is left for another once; what the other says stands.
                answer = await self._ask(place, request, body, last=avoid is not None)
            except Broken as error:
                self._slots.failed(place, str(error), unreached=error.unreached)
                broken += not error.unreached
                unreached += error.unreached
                if broken >= MOST_BROKEN or unreached > len(self._slots.balance.places):
                    return _refusal(502, f"no endpoint answered: {place.host.address}: {error}")
            else:
                if answer is not None:
                    return answer
            finally:
                self._slots.release(place)
            avoid = place

    async def _ask(self, place: Place, request: web.Request, body: bytes, *, last: bool) -> web.StreamResponse | None:
        """The answer, when all of it has been passed on; None where another should be asked. Broken as long as the
        client has seen nothing."""
        clock, generation = asyncio.get_running_loop().time, place.endpoint.capacity.generation
        began = clock()
        response, chunk = await self._begin(place, request, body)
        async with response:
            if response.status in ELSEWHERE and not last and self._slots.balance.router.working > 1:
                self._slots.balance.overloaded(place, generation)
                return None
            answer = web.StreamResponse(
                status=response.status, reason=response.reason, headers=_passing(response.headers)
            )
            await answer.prepare(request)
            while chunk:
                await answer.write(chunk)
                try:
                    chunk = await response.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    self._slots.failed(place, _words(error), unreached=False)
                    if request.transport is not None:
                        request.transport.abort()  # so that the client does not take it for the end
                    return answer
            if response.status < 500:
                self._slots.balance.answered(place, clock() - began, clock())
            return answer

    async def _begin(self, place: Place, request: web.Request, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """The head of an answer, and what came first of it."""
        url = URL(place.host.api + request.rel_url.raw_path_qs.removeprefix("/v1"), encoded=True)
        response = None
        try:
            async with asyncio.timeout(None) as limit:
                with self._slots.until_answered(place, limit):
                    response = await self._transport.session.request(
                        request.method,
                        url,
                        data=io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body or None,
                        headers=_passing(request.headers, {"content-length"}),
                        proxy=self._transport.proxy_for(url) if place.host.scheme == "https" else None,
                        allow_redirects=False,
                        auto_decompress=False,
                        skip_auto_headers=OWN_HEADERS,
                        timeout=CONNECT,
                    )
                    return response, await response.content.readany()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Broken(_words(error), unreached=True) from None
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError: the endpoint went down meanwhile
            raise Broken(_words(error), unreached=False) from None
        finally:
            if response is not None and sys.exception() is not None:
                response.close()


def _passing(headers: MultiMapping[str], own: Collection[str] = ()) -> CIMultiDict[str]:
    """Without what is said to a neighbour only, which the neighbour may name itself."""
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    dropped = NEIGHBOURS | named | set(own)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
        return "it stopped answering"
    return str(error) or type(error).__name__


def _json(document: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json", headers=headers)


def _refusal(status: int, words: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """As the servers behind say it, so that clients can read it."""
    error: JsonObject = {"message": words, "type": "proxy_error", "param": None, "code": status}
    return _json({"error": error}, status, headers)

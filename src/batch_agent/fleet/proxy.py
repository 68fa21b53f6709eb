"""One address for many servers: passes each request to the endpoint that ``slots`` grants, and its answer back.

A request goes elsewhere as long as its client has seen no byte of an answer. A client that leaves ends its request on
the server. Keys and all other end-to-end headers pass through.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote

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
from batch_agent.fleet.slots import NobodyThere, Slots, Transfer
from batch_agent.messages import JsonObject

logger = logging.getLogger("batch_agent")

MAX_INFLIGHT = 256  # at each endpoint
MAX_BODY_BYTES = 256 * 1024 * 1024
PATIENCE_SECONDS = 30.0  # without a byte of a request, after which its connection is closed
CONNECT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
MOST_BROKEN = 3  # servers that may break off one request: it may be what breaks them
ELSEWHERE = frozenset({429, 502, 503, 504})  # statuses of an overloaded server
MOST_ENCODINGS = 4  # of a path, one inside the other
PARENT = re.compile(r"(^|[/\\])\.\.([/\\;?#\s\0]|$)")  # a .. in a decoded path, as lenient servers read it
HOP_BY_HOP = frozenset(
    ("connection", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection")
) | {"te", "trailer", "transfer-encoding", "upgrade"}
OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # that the client library would add


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
    async with Transport() as transport, Slots(hosts, max_inflight, environ) as slots:
        proxy = Proxy(slots, transport, patience)
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
    """The server gave no answer, or not all of it. ``unreached``: it has not seen the request."""

    def __init__(self, words: str, *, unreached: bool) -> None:
        super().__init__(words)
        self.unreached = unreached


class Proxy:
    def __init__(self, slots: Slots, transport: Transport, patience: float) -> None:
        self._slots, self._transport, self._patience = slots, transport, patience

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/health", self._health), web.get("/status", self._status)])
        app.add_routes([web.get("/v1/models", self._models), web.route("*", "/v1/{path:.*}", self._forward)])
        app.add_routes([web.route("*", "/{path:.*}", self._unknown)])
        return app

    # What it answers itself

    async def _health(self, request: web.Request) -> web.Response:
        up = self._slots.balance.router.working
        return _json(
            {"status": "ok" if up else "no endpoint is up", "up": up, "endpoints": len(self._slots.balance.places)},
            200 if up else 503,
        )

    async def _status(self, request: web.Request) -> web.Response:
        places = [place.to_json() for place in self._slots.balance.places]
        up = self._slots.balance.router.working
        return _json({"up": up, "waiting": self._slots.waiting, "endpoints": [*places]})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The models of all endpoints. If none lists its models without a key, one is asked with the client's."""
        models = self._slots.balance.models
        return _json({"object": "list", "data": [*models]}) if models else await self._forward(request)

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(404, f"{request.path} is not served here: there are /v1/…, /health and /status")

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
        avoid: Place | None = None
        broken = unreached = 0
        while True:
            try:
                place = await self._slots.take(key, model, avoid)
            except NobodyThere as error:
                return _refusal(503, str(error), {"Retry-After": "1"})
            try:
                # An overloaded server is left for another once; the answer of the other stands.
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

    async def _ask(self, place: Place, request: web.Request, body: bytes, *, last: bool) -> web.StreamResponse | None:
        """Passes the request on and its answer back. None if another endpoint should be asked; Broken if the endpoint
        failed before the client has seen anything."""
        try:
            async with asyncio.timeout(None) as limit:
                with self._slots.transfer(place, limit) as transfer:
                    return await self._pass(transfer, request, body, last=last)
        except TimeoutError:
            error = Broken("it stopped answering", unreached=False)
        except Broken as raised:
            error = raised
        if not transfer.begun:
            raise error
        self._slots.failed(place, str(error), unreached=False)
        if request.transport is not None:
            request.transport.abort()  # so that the client does not take it for the end
        return web.Response()  # it goes nowhere

    async def _pass(
        self, transfer: Transfer, request: web.Request, body: bytes, *, last: bool
    ) -> web.StreamResponse | None:
        place, slots, clock = transfer.place, self._slots, asyncio.get_running_loop().time
        began, generation = clock(), place.endpoint.capacity.generation
        response, chunk = await self._begin(place, request, body)
        async with response:
            slots.heard(transfer)
            if response.status in ELSEWHERE and not last and slots.balance.router.working > 1:
                slots.balance.overloaded(place, generation)
                return None
            transfer.begun = True
            answer = web.StreamResponse(
                status=response.status, reason=response.reason, headers=_passing(response.headers)
            )
            await answer.prepare(request)
            while chunk:
                await answer.write(chunk)
                try:
                    chunk = await response.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    raise Broken(_words(error), unreached=False) from None
                slots.heard(transfer)
            if response.status < 500:
                slots.balance.answered(place, clock() - began, clock())
            return answer

    async def _begin(self, place: Place, request: web.Request, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """Returns the head of the answer and its first bytes."""
        url = URL(place.host.api + request.rel_url.raw_path_qs.removeprefix("/v1"), encoded=True)
        response = None
        try:
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
        except (aiohttp.ClientError, OSError) as error:
            raise Broken(_words(error), unreached=False) from None
        finally:
            if response is not None and sys.exception() is not None:
                response.close()


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


def _passing(headers: MultiMapping[str], own: Collection[str] = ()) -> CIMultiDict[str]:
    """Returns the headers without those for the next hop only: the known ones, those named in Connection, ``own``."""
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    dropped = HOP_BY_HOP | named | set(own)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _json(document: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json", headers=headers)


def _refusal(status: int, words: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the form of OpenAI's API."""
    error: JsonObject = {"message": words, "type": "proxy_error", "param": None, "code": status}
    return _json({"error": error}, status, headers)

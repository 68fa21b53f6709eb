"""Connections on real sockets: kept, limited, given up, encrypted, tunnelled."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import tracemalloc
import zlib
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import pytest
from aiohttp import web
from tests.backends.certificates import self_signed
from yarl import URL

from batch_agent.backends.http.backend import HttpClient
from batch_agent.errors import BackendError, BadResponse, Rejected, Unavailable
from batch_agent.http.connection import STALE_SECONDS, Connection, ResponseParser
from batch_agent.http.lookup import Lookup
from batch_agent.http.origin import Origin
from batch_agent.http.transport import Pool, Transport
from batch_agent.testing.contract.wire import STREAM_HEAD, Exchange, WireServer, answer, hang, raw

LARGE = 8 * 1024 * 1024


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def post(url: str, body: bytes = b"{}", times: int = 1, **options: object) -> list[bytes | None]:
    async with HttpClient(url) as client, asyncio.timeout(20):
        route = client.route("POST", "/ask", **options)
        return [await client.send(route, body) for _ in range(times)]


async def silent_close(exchange: Exchange) -> None:
    exchange.writer.close()


async def test_what_was_read_of_an_answer_without_end_is_freed_at_once() -> None:
    endless = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + bytes(LARGE))
    async with WireServer(endless) as server:
        gc.disable()  # errors are parts of reference cycles: what they hold waits for the collector
        tracemalloc.start()
        try:
            errors = [await cut_off(server.url) for _ in range(5)]
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert all("cut off at this limit" in error for error in errors)
    assert used < 2 * LARGE  # the server's own copy


async def cut_off(url: str) -> str:
    with pytest.raises(BadResponse) as caught:
        await post(url, max_bytes=LARGE // 2)
    return str(caught.value)


# Kept and used again


async def test_a_request_that_meets_a_closed_connection_fails_as_stale_and_is_not_sent_again() -> None:
    async with WireServer(answer({"n": 1}), silent_close) as server:
        with pytest.raises(Unavailable, match="closed the connection before it answered") as caught:
            await post(server.url, times=2)
        assert caught.value.stale
        assert (server.connections, len(server.requests)) == (1, 2)


async def test_a_new_connection_that_is_closed_is_not_stale() -> None:
    async with WireServer(silent_close) as server:
        with pytest.raises(Unavailable, match="closed the connection before it answered") as caught:
            await post(server.url)
        assert not caught.value.stale
        assert len(server.requests) == 1


async def test_the_other_kept_connections_of_a_server_are_closed_with_a_stale_one() -> None:
    async with WireServer(answer({"n": 1}), answer({"n": 1}), silent_close, answer({"n": 2})) as server:
        async with HttpClient(server.url) as client, asyncio.timeout(10):
            route = client.route("POST", "/x")
            await asyncio.gather(client.send(route, b"{}"), client.send(route, b"{}"))
            with pytest.raises(Unavailable):
                await client.send(route, b"{}")
            assert await client.send(route, b"{}") == b'{"n":2}'
        assert server.connections == 3


async def test_a_request_that_got_the_beginning_of_an_answer_is_not_sent_again() -> None:
    async with WireServer(answer({"n": 1}), raw(b"HTTP/1.1 200 OK\r\n")) as server:
        with pytest.raises(Unavailable, match="broke off"):
            await post(server.url, times=2)
        assert len(server.requests) == 2


async def test_a_request_that_must_not_come_twice_goes_over_a_new_connection_and_once() -> None:
    async with WireServer(answer({"n": 1}), silent_close, answer({"n": 2})) as server:
        with pytest.raises(Unavailable):
            await post(server.url, times=2, once=True)
        assert (server.connections, len(server.requests)) == (2, 2)


async def test_a_connection_that_closes_later_may_have_been_read_from() -> None:
    class Clock:
        now = 0.0

        def time(self) -> float:
            return self.now

        def create_future(self) -> asyncio.Future[None]:
            return asyncio.get_running_loop().create_future()

    class Sink(asyncio.Transport):
        def write(self, data: bytes) -> None: ...
        def abort(self) -> None: ...
        def is_closing(self) -> bool:
            return False

    class Nobody:
        def idle(self, connection: Connection) -> None: ...
        def lost(self, connection: Connection) -> None: ...

    clock = Clock()
    connection = Connection(Origin(False, "h", 80), Nobody(), clock)
    connection.connection_made(Sink())
    done = connection.ask(ResponseParser("POST", 1000), b"", b"", None, None)
    assert not connection.stale, "it is new"
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    await done
    connection.reused_at = clock.now
    connection.ask(ResponseParser("POST", 1000), b"", b"", None, None)
    assert connection.stale
    clock.now = STALE_SECONDS
    assert not connection.stale


@pytest.mark.parametrize("headers", [{"Connection": "close"}, {}])
async def test_a_connection_that_ends_with_its_answer_is_not_used_again(headers: dict[str, str]) -> None:
    async def step(exchange: Exchange) -> None:
        await answer({"n": 1}, headers=headers)(exchange)
        if not headers:
            await exchange.send(b"a word too many")

    async with WireServer(step) as server:
        assert await post(server.url, times=3) == [b'{"n":1}'] * 3
        assert server.connections == 3


async def test_a_server_that_speaks_unasked_is_not_listened_to() -> None:
    spoken = asyncio.Event()

    async def step(exchange: Exchange) -> None:
        await answer({"n": len(server.requests)})(exchange)
        if len(server.requests) == 1:
            await asyncio.sleep(0)
            await answer({"n": "evil"})(exchange)
            spoken.set()

    async with WireServer(step) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        route = client.route("GET", "/x")
        assert await client.send(route) == b'{"n":1}'
        await spoken.wait()
        await server.client_gone.wait()
        assert await client.send(route) == b'{"n":2}'


async def test_an_idle_connection_is_closed_after_a_while() -> None:
    async with WireServer(answer({"n": 1})) as server, asyncio.timeout(10):
        pool = Pool(asyncio.get_running_loop(), 0, keepalive_seconds=0.01)
        connection = await pool.connect(Origin.of(URL(server.url)), 10, fresh=False)
        await connection.ask(ResponseParser("GET", 1000), b"GET / HTTP/1.1\r\n\r\n", b"", None, None)
        await server.client_gone.wait()
        assert pool.take(connection.origin) is None
        await pool.close()


async def test_a_request_that_is_left_while_it_connects_fails_and_leaves_nothing_behind() -> None:
    async with WireServer(answer({"n": 1})) as server, asyncio.timeout(10):
        async with HttpClient(server.url) as client:
            asking = asyncio.create_task(client.send(client.route("GET", "/x")))
            await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await asking


# Limited


async def test_no_more_connections_are_open_than_allowed_over_all_servers() -> None:
    async with WireServer(answer({"n": 1})) as one, WireServer(answer({"n": 2})) as two, asyncio.timeout(20):
        transport = Transport(connections=2)
        clients = [HttpClient(server.url, transport=transport) for server in (one, two)]
        async with transport, clients[0], clients[1]:
            asked = [clients[n % 2].send(clients[n % 2].route("GET", "/x")) for n in range(40)]
            assert await asyncio.gather(*asked) == [b'{"n":1}', b'{"n":2}'] * 20
        assert one.most_open <= 2
        assert two.most_open <= 2


async def test_a_waiter_for_a_connection_can_be_cancelled_and_a_failed_request_gives_its_place_back() -> None:
    async with (
        WireServer(hang, silent_close, answer({"n": 1})) as server,
        HttpClient(server.url, transport=Transport(connections=1)) as client,
        asyncio.timeout(10),
    ):
        route = client.route("GET", "/x")
        first, waiting = (asyncio.create_task(client.send(route)) for _ in range(2))
        await server.asked.wait()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        first.cancel()
        with pytest.raises(Unavailable):
            await client.send(route)
        assert await client.send(route) == b'{"n":1}'
        assert len(server.requests) == 3


# Large bodies


async def test_a_large_body_arrives_whole() -> None:
    async def size(exchange: Exchange) -> None:
        await answer({"n": len(exchange.body)})(exchange)

    async with WireServer(size) as server:
        assert await post(server.url, b"x" * LARGE, times=2) == [b'{"n":%d}' % LARGE] * 2
        assert server.connections == 1


class Deaf:
    """A server that says something and reads no body before it is told to."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self.asked, self.go_on, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked.set()
        with suppress(ConnectionError):
            writer.write(self._said)
            await self.go_on.wait()
            while await reader.read(LARGE):
                pass
        writer.close()
        self.gone.set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=1024)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc: object) -> None:
        self.go_on.set()
        await self.gone.wait()
        self._server.close()


async def test_an_answer_that_comes_before_the_body_was_sent_is_taken() -> None:
    async with asyncio.timeout(10), Deaf(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n") as url:
        with pytest.raises(Rejected) as caught:
            await post(url, b"x" * 4 * LARGE)
    assert caught.value.status == 413


async def test_an_answer_is_read_although_the_connection_breaks_while_the_body_is_sent() -> None:
    """The server refuses and closes with a reset; the event loop is busy meanwhile, and notices at its next write."""
    said = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = threading.Event()

        def refuse() -> None:
            connection, _ = listening.accept()
            connection.recv(64)
            connection.sendall(said)
            connection.close()  # unread bytes are left: the client gets a reset
            closed.set()

        serving = threading.Thread(target=refuse)
        serving.start()

        async def hold_up_the_loop() -> None:
            while not closed.is_set():
                await asyncio.sleep(0)
            time.sleep(0.05)

        holding = asyncio.create_task(hold_up_the_loop())
        with pytest.raises(Rejected) as caught:
            await post(f"http://127.0.0.1:{listening.getsockname()[1]}", b"x" * 8 * LARGE)
        assert caught.value.status == 413
        await holding
        serving.join()


async def test_a_body_that_is_not_read_waits_and_can_be_cancelled() -> None:
    server = Deaf(b"")
    async with asyncio.timeout(10), server as url:
        sending = asyncio.create_task(post(url, b"x" * 4 * LARGE))
        await server.asked.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending


async def endless(exchange: Exchange) -> None:
    kind = b"text/event-stream" if b"stream" in exchange.body else b"application/json"
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n" % kind)
    while True:
        await exchange.send(b"x" * 65536)


@pytest.mark.parametrize(("streamed", "limit"), [(False, "100,000 bytes"), (True, "400,000 bytes")])
async def test_an_answer_without_end_is_cut_at_a_limit_that_the_error_names(streamed: bool, limit: str) -> None:
    async with WireServer(endless) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        route = client.route("POST", "/ask", max_bytes=100_000)
        size = 0

        def receive(chunk: bytes) -> bool:
            nonlocal size
            size += len(chunk)
            return False

        with pytest.raises(BadResponse, match=limit):
            await client.send(route, b"stream" if streamed else b"", receive)
        await server.client_gone.wait()
    assert size <= 400_000


# Streams


async def test_a_stream_that_said_all_is_done_before_its_body_ends_and_its_connection_is_used_again() -> None:
    returned, ended = asyncio.Event(), asyncio.Event()

    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.event(b"done")
        await returned.wait()
        await exchange.send(b"0\r\n\r\n")
        ended.set()

    async with WireServer(talk) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        route = client.route("POST", "/ask")
        assert await client.send(route, b"", lambda chunk: chunk == b"done") is None
        returned.set()
        await ended.wait()
        for _ in range(5):  # turns of the event loop, which reads what was sent
            await asyncio.sleep(0)
        await client.send(route, b"", lambda chunk: chunk == b"done")
        assert server.connections == 1


async def test_a_stream_that_said_all_and_goes_on_is_hung_up_on() -> None:
    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.event(b"done")
        await exchange.reader.readexactly(1)

    async with WireServer(talk) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        await client.send(client.route("POST", "/ask"), b"", lambda chunk: chunk == b"done")
        await server.client_gone.wait()


async def test_what_takes_a_stream_runs_in_its_callers_context_and_its_error_reaches_the_caller() -> None:
    name: ContextVar[str] = ContextVar("name")
    seen: list[str] = []

    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.event(b"one")
        await exchange.send(b"0\r\n\r\n")

    async with WireServer(talk) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        route = client.route("POST", "/ask")

        async def read(own: str) -> None:
            name.set(own)
            await client.send(route, b"", lambda chunk: bool(seen.append(name.get())))

        await asyncio.create_task(read("a"))
        await asyncio.create_task(read("b"))
        assert seen == ["a", "b"]
        assert server.connections == 1

        def fail(chunk: bytes) -> bool:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            await client.send(route, b"", fail)
        await server.client_gone.wait()


async def test_a_compressed_stream_is_unpacked_as_it_comes() -> None:
    go_on, packer = asyncio.Event(), zlib.compressobj(wbits=31)

    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n")
        await exchange.event(packer.compress(b"one ") + packer.flush(zlib.Z_SYNC_FLUSH))
        await go_on.wait()
        await exchange.event(packer.compress(b"two") + packer.flush())
        await exchange.send(b"0\r\n\r\n")

    chunks: list[bytes] = []

    def receive(chunk: bytes) -> bool:
        chunks.append(chunk)
        go_on.set()
        return False

    async with WireServer(talk) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        await client.send(client.route("POST", "/ask"), b"", receive)
    assert chunks == [b"one ", b"two"]


# What is no HTTP


@pytest.mark.parametrize(
    "said",
    [
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00" * 100,
        b"\n" * 70_000,
        b"HTTP/1.1 200 OK\r\n:\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_garbage_is_a_backend_error_also_on_a_connection_that_worked(said: bytes) -> None:
    async with WireServer(raw(said)) as server:
        with pytest.raises(BackendError):
            await post(server.url)
    async with WireServer(answer({"n": 1}), raw(said)) as server:
        with pytest.raises(BackendError):
            await post(server.url, times=2)


# Ways to a server


async def test_a_host_name_with_several_addresses_is_reached_at_the_one_that_listens() -> None:
    async with WireServer(answer({"n": 1})) as server:
        assert await post(server.url.replace("127.0.0.1", "localhost")) == [b'{"n":1}']
        assert server.requests[0].headers["Host"] == f"localhost:{server.port}"


async def test_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    async with WireServer(answer({"n": 1}), host="::1") as server:
        assert await post(server.url) == [b'{"n":1}']
        assert server.requests[0].headers["Host"] == f"[::1]:{server.port}"


async def test_addresses_that_are_forgotten_by_one_caller_are_there_for_the_others() -> None:
    lookup = Lookup(asyncio.get_running_loop())

    async def find() -> int:
        found = await lookup.find("localhost", 80)
        lookup.forget("localhost", 80)
        return len(found)

    assert all(await asyncio.gather(find(), find(), find()))


@pytest.mark.parametrize("host", ["a" * 64, "x..y"])
async def test_a_host_name_that_cannot_be_one_is_refused(host: str) -> None:
    with pytest.raises(Rejected, match="not a valid address"):
        await post(f"http://{host}/v1")


async def test_tls_with_a_trusted_certificate_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, certificate = self_signed(tmp_path)
    async with WireServer(answer({"n": 1}), host="localhost", tls=context) as server:
        with pytest.raises(Unavailable, match="TLS certificate could not be verified") as caught:
            await post(server.url)
        assert caught.value.unreached
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert await post(server.url, b"x" * LARGE, times=2) == [b'{"n":1}'] * 2
        assert {len(request.body) for request in server.requests} == {LARGE}


async def tunnel(exchange: Exchange) -> None:
    """What a proxy does for CONNECT."""
    host, port = exchange.path.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    await exchange.send(b"HTTP/1.1 200 Connection established\r\nX-Proxy: mine\r\n\r\n")

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    try:
        await asyncio.gather(pass_on(exchange.reader, writer), pass_on(reader, exchange.writer))
    finally:
        writer.close()


async def test_tls_through_the_tunnel_of_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with (
        WireServer(answer({"n": 1}), host="localhost", tls=context) as server,
        WireServer(tunnel) as proxy,
    ):
        monkeypatch.setenv("https_proxy", f"http://me:proxy-pass@127.0.0.1:{proxy.port}")
        assert await post(server.url, b"x" * LARGE, times=2) == [b'{"n":1}'] * 2
        (request,) = proxy.requests
    assert (request.method, request.path) == ("CONNECT", f"localhost:{server.port}")
    assert request.headers["Proxy-Authorization"] == "Basic bWU6cHJveHktcGFzcw=="
    assert "Proxy-Authorization" not in server.requests[0].headers


@pytest.mark.parametrize("said", [b"no http\r\n", b""])
async def test_a_proxy_that_makes_no_tunnel_is_named(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with WireServer(raw(said)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(Unavailable, match="proxy set in the environment") as caught:
            await post("https://model.invalid/v1")
    assert caught.value.unreached


# A server that others wrote


async def test_the_answers_of_aiohttps_server_are_read_as_it_means_them() -> None:
    async def chunked(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        if "packed" in request.query:
            response.enable_compression(web.ContentCoding[request.query["packed"]])
        await response.prepare(request)
        for _ in range(50):
            await response.write(b"some words " * 200)
        return response

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def nothing(request: web.Request) -> web.Response:
        return web.Response(status=204)

    app = web.Application()
    app.add_routes([web.get("/v1/chunked", chunked), web.post("/v1/echo", echo)])
    app.add_routes([web.get("/v1/none", nothing)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as client, asyncio.timeout(20):
            for query in ("", "?packed=gzip", "?packed=deflate"):
                assert await client.send(client.route("GET", f"/chunked{query}")) == b"some words " * 10_000
            assert await client.send(client.route("GET", "/none")) == b""
            body = bytes(range(256)) * 2048
            assert await client.send(client.route("POST", "/echo"), body) == body
            assert await client.send(client.route("HEAD", "/chunked")) == b""
    finally:
        await runner.cleanup()

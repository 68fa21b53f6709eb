from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping

import pytest
from yarl import URL

from batch_agent.backends.http.backend import HttpClient
from batch_agent.errors import BadResponse, Rejected, SpecError, Timeout, Unavailable
from batch_agent.http.connection import FEW_STREAMS
from batch_agent.http.transport import Transport
from batch_agent.testing.contract.wire import Exchange, WireServer, answer, hang, raw

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def get(url: str, **options: object) -> bytes | None:
    async with HttpClient(url, **options) as client, asyncio.timeout(10):
        return await client.send(client.route("GET", "/models"))


async def test_the_first_user_opens_and_the_last_closes() -> None:
    async with WireServer(answer({"a": 1})) as server:
        client = HttpClient(server.url)
        route = client.route("GET", "/models")
        for _ in range(2):
            async with client:
                async with client:
                    await client.send(route)
                await client.send(route)
        assert server.connections == 2


async def test_clients_that_share_a_transport_share_its_connections_and_the_last_closes_them() -> None:
    async with WireServer(answer({"a": 1})) as server, asyncio.timeout(10):
        transport = Transport()
        clients = [HttpClient(server.url, transport=transport) for _ in range(3)]
        for client in clients:
            await client.__aenter__()
        for client in clients:
            assert await client.send(client.route("GET", "/models"))
            await client.__aexit__(None, None, None)
        await server.client_gone.wait()
        assert server.connections == 1


async def test_a_transport_without_proxies_leaves_those_of_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with WireServer(answer({"a": 1})) as server:
        assert await get(server.url, transport=Transport(proxies=False))


def test_it_can_be_used_in_one_loop_after_another() -> None:
    client = HttpClient("http://127.0.0.1:1/v1")

    async def enter() -> bool:
        async with client:
            return True

    assert asyncio.run(enter())
    assert asyncio.run(enter())


async def test_it_cannot_be_used_in_two_loops_at_once() -> None:
    async def enter() -> None:
        async with client:
            pass

    async with HttpClient("http://127.0.0.1:1/v1") as client:
        with pytest.raises(SpecError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, enter())


async def test_headers_are_sent_and_the_users_win() -> None:
    async with WireServer(answer({})) as server:
        await get(server.url, api_key="key-1", headers={"authorization": "Token mine", "X-Team": "blue"})
        headers = server.requests[0].headers
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Token mine"
    assert headers["X-Team"] == "blue"
    assert "Cookie" not in headers


async def test_a_request_can_be_signed_instead_of_carrying_a_key() -> None:
    def sign(method: str, url: URL, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
        return {"X-Signature": f"{method} {url.path} {headers['X-Team']} {headers['X-Turn']} {body.decode()}"}

    async with WireServer(answer({})) as server, HttpClient(server.url, headers={"X-Team": "b"}, sign=sign) as client:
        route = client.route("POST", "/ask")
        for turn in ("1", "2"):
            await client.send(route, b"{}", headers={"X-Turn": turn})
    signed = [exchange.headers["X-Signature"] for exchange in server.requests]
    assert signed == ["POST /v1/ask b 1 {}", "POST /v1/ask b 2 {}"]
    assert "Authorization" not in server.requests[0].headers
    assert "X-Turn" not in route.headers


async def test_a_key_in_a_header_of_another_name_is_no_less_secret() -> None:
    async with WireServer(answer({"error": "bad key-12345"}, 401)) as server:
        with pytest.raises(Rejected) as caught:
            await get(server.url, headers={"x-api-key": "key-12345"})
    assert server.requests[0].headers["x-api-key"] == "key-12345"
    assert "key-12345" not in str(caught.value)


async def test_no_cookie_is_kept() -> None:
    async with WireServer(answer({}, headers={"Set-Cookie": "a=b"})) as server, HttpClient(server.url) as client:
        for _ in range(2):
            await client.send(client.route("GET", "/models"))
        assert "Cookie" not in server.requests[1].headers


async def test_a_compressed_body_is_unpacked_and_a_broken_one_is_an_error() -> None:
    packed = gzip.compress(b'{"a":1}')
    async with WireServer(answer(packed, headers={"Content-Encoding": "gzip"})) as server:
        assert await get(server.url) == b'{"a":1}'
    async with WireServer(answer(b"not gzip", headers={"Content-Encoding": "gzip"})) as server:
        with pytest.raises(Unavailable, match="broke off"):
            await get(server.url)


async def test_redirects_are_not_followed() -> None:
    async with WireServer(answer(b"", 308, {"Location": "http://other.example/v1"})) as server:
        with pytest.raises(Rejected, match=r"other\.example"):
            await get(server.url, api_key="key-1")
        assert len(server.requests) == 1


async def test_plain_requests_go_through_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WireServer(answer(b"via proxy")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:proxy-pass@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "direct.invalid")
        assert await get("http://model.invalid/v1", api_key="key-1") == b"via proxy"
        (request,) = proxy.requests
        assert request.path == "http://model.invalid/v1/models"
        assert request.headers["Proxy-Authorization"] == "Basic bWU6cHJveHktcGFzcw=="
        assert request.headers["Authorization"] == "Bearer key-1"
        with pytest.raises((Unavailable, Timeout)):
            await get("http://direct.invalid/v1")
        assert len(proxy.requests) == 1


async def test_a_tunnel_through_a_proxy_never_shows_it_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WireServer(answer(b"", 407)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(Unavailable, match="proxy refused the connection with status 407"):
            await get("https://model.invalid/v1", api_key="key-1")
        (request,) = proxy.requests
    assert request.method == "CONNECT"
    assert "key-1" not in str(request.headers)


async def test_a_proxy_that_is_not_there_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WireServer(hang) as gone:
        monkeypatch.setenv("http_proxy", f"http://me:proxy-pass@127.0.0.1:{gone.port}")
    with pytest.raises(Unavailable, match="proxy set in the environment") as caught:
        await get("http://model.invalid/v1")
    assert "proxy-pass" not in str(caught.value)


async def test_a_proxy_that_cannot_be_used_is_a_spec_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
    with pytest.raises(SpecError, match="socks5"):
        await get("http://model.invalid/v1")


async def test_a_server_that_speaks_no_tls_is_told_apart() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="TLS handshake"):
            await get(f"https://127.0.0.1:{port}/v1")


async def test_a_server_that_hangs_up_is_unavailable() -> None:
    async with WireServer(raw(b"")) as server:
        with pytest.raises(Unavailable, match="closed the connection"):
            await get(server.url)


async def test_a_body_that_ends_early_is_unavailable() -> None:
    async with WireServer(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")) as server:
        with pytest.raises(Unavailable, match="broke off"):
            await get(server.url)


async def test_a_head_that_is_not_http_is_a_bad_response() -> None:
    async with WireServer(raw(b"HTTP/1.1 2x0 OK\r\n\r\n")) as server:
        with pytest.raises(BadResponse, match="not valid HTTP"):
            await get(server.url)


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://[::1", "http://host:port/v1"])
def test_what_is_not_an_address_is_a_spec_error(url: str) -> None:
    with pytest.raises(SpecError):
        HttpClient(url)


@pytest.mark.parametrize("headers", [{"X": "a\r\nB: c"}, {"X Y": "a"}, {"": "a"}, {"X": "é"}])
def test_headers_that_cannot_be_sent_are_a_spec_error_that_does_not_show_them(headers: dict[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        HttpClient("http://host", headers=headers)
    assert "B: c" not in str(caught.value)


def test_two_logins_are_a_spec_error() -> None:
    with pytest.raises(SpecError, match="either a key or a user name") as caught:
        HttpClient("http://user:password@host", api_key="key-1")
    assert "password" not in str(caught.value)


async def test_a_cancelled_request_leaves_the_others_alone() -> None:
    release = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        await release.wait()
        await answer({"n": 1})(exchange)

    async with WireServer(hang, held) as server, HttpClient(server.url) as client, asyncio.timeout(10):
        route = client.route("POST", "/chat/completions")
        doomed = asyncio.create_task(client.send(route, b"{}"))
        await server.asked.wait()
        other = asyncio.create_task(client.send(route, b"{}"))
        await asyncio.sleep(0)
        doomed.cancel()
        await server.client_gone.wait()
        release.set()
        assert await other == b'{"n":1}'


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_many_streams_at_once_are_each_read_to_their_end_and_their_connections_used_again() -> None:
    count = 2 * FEW_STREAMS

    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for number in range(20):
            await exchange.event(b"%d " % number)
            await asyncio.sleep(0.002)
        await exchange.send(b"0\r\n\r\n")

    async with WireServer(talk) as server, HttpClient(server.url) as client, asyncio.timeout(30):
        route = client.route("POST", "/ask")

        async def read() -> tuple[bytes, int]:
            chunks: list[bytes] = []
            await client.send(route, b"{}", lambda chunk: bool(chunks.append(chunk)))
            return b"".join(chunks), len(chunks)

        for _ in range(2):
            streams = await asyncio.gather(*(read() for _ in range(count)))
            assert {text for text, _ in streams} == {b"".join(b"%d " % number for number in range(20))}
            assert sum(reads for _, reads in streams) < 20 * count, "several events to a read"
        assert server.connections == count


async def test_a_stream_that_is_cancelled_while_it_is_left_alone_leaves_the_others_alone() -> None:
    count, go_on = 2 * FEW_STREAMS, asyncio.Event()

    async def talk(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.event(b"one ")
        await go_on.wait()
        await exchange.event(b"two")
        await exchange.send(b"0\r\n\r\n")

    async with WireServer(talk) as server, HttpClient(server.url) as client, asyncio.timeout(30):
        begun = asyncio.Semaphore(0)
        texts: list[list[bytes]] = [[] for _ in range(count)]

        async def read(chunks: list[bytes]) -> None:
            def receive(chunk: bytes) -> bool:
                chunks.append(chunk)
                begun.release()
                return False

            await client.send(client.route("POST", "/ask"), b"{}", receive)

        tasks = [asyncio.create_task(read(chunks)) for chunks in texts]
        for _ in tasks:
            await begun.acquire()
        for task in tasks[::2]:
            task.cancel()
        go_on.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends[::2]} == {asyncio.CancelledError}
    assert [b"".join(chunks) for chunks in texts[1::2]] == [b"one two"] * (count // 2)


async def test_a_stream_that_breaks_while_it_is_left_alone_is_unavailable() -> None:
    async def break_off(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        await exchange.event(b"one ")
        exchange.writer.close()

    async with WireServer(break_off) as server, HttpClient(server.url) as client, asyncio.timeout(30):
        route = client.route("POST", "/ask")
        reads = [client.send(route, b"{}", lambda chunk: False) for _ in range(2 * FEW_STREAMS)]
        ends = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(end) for end in ends} == {Unavailable}

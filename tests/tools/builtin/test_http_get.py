import asyncio
import gzip
import ipaddress
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from batch_agent.errors import ToolError
from batch_agent.messages import ToolCall
from batch_agent.tools import Tool, http_get
from batch_agent.tools.builtin.http import AddressPolicy, CheckedResolver

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[TestServer]]
LOCAL = http_get(allow=["127.0.0.1"], max_bytes=1000)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[TestServer] = []

    async def start(handler: Handler) -> TestServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        server = TestServer(app, host="127.0.0.1")
        servers.append(server)
        await server.start_server()
        return server

    yield start
    for server in servers:
        await server.close()


def answer(**options: object) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(**options)  # type: ignore[arg-type]

    return handler


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:7f00:1::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not AddressPolicy().permits(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "::ffff:8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"]
)
def test_a_public_address_is_permitted(address: str) -> None:
    assert AddressPolicy().permits(ipaddress.ip_address(address))


def test_an_allowed_network_is_permitted_also_in_its_mapped_form() -> None:
    policy = AddressPolicy.allowing(["10.0.0.0/8", "::1"])
    assert policy.permits(ipaddress.ip_address("10.1.2.3"))
    assert policy.permits(ipaddress.ip_address("::ffff:10.1.2.3"))
    assert policy.permits(ipaddress.ip_address("::1"))
    assert not policy.permits(ipaddress.ip_address("192.168.0.1"))


async def test_the_connection_is_made_only_to_addresses_that_were_checked() -> None:
    resolver = CheckedResolver(AddressPolicy.allowing(["127.0.0.1"]))
    assert {item["host"] for item in await resolver.resolve("localhost", 80)} == {"127.0.0.1"}
    await resolver.close()
    with pytest.raises(ToolError, match="localhost is refused"):
        await CheckedResolver(AddressPolicy()).resolve("localhost", 80)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "0",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "１２７.0.0.1",  # noqa: RUF001
        "127.0.0.1.",
        "169.254.169.254",
    ],
)
async def test_no_way_of_writing_a_local_address_reaches_a_server(serve: Serve, host: str) -> None:
    reached = []

    async def handler(request: web.Request) -> web.StreamResponse:
        reached.append(request.path)
        return web.Response()

    server = await serve(handler)
    with pytest.raises(ToolError):
        await Tool.http_get(f"http://{host}:{server.port}/")
    assert reached == []


async def test_the_error_says_why_an_address_is_refused() -> None:
    for url in ("http://localhost/", "http://127.0.0.1/"):
        with pytest.raises(ToolError, match="only public addresses"):
            await Tool.http_get(url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://example.org/", "gopher://x/", "/path", "", "http://", "http://["]
)
async def test_only_http_and_https_urls_are_fetched(url: str) -> None:
    with pytest.raises(ToolError, match="URL"):
        await Tool.http_get(url)


async def test_a_url_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ToolError) as caught:
        await Tool.http_get("http://me:hunter2@example.org/")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"text": "héllo"}, "héllo"),
        ({"body": "héllo".encode("latin-1"), "headers": {"Content-Type": "text/html; charset=iso-8859-1"}}, "héllo"),
        ({"body": b"\xef\xbb\xbfhi"}, "hi"),
        ({"body": "hi".encode("utf-16")}, "hi"),
        ({"body": b"hi", "headers": {"Content-Type": "text/plain; charset=klingon"}}, "hi"),
        ({"body": b"hi", "headers": {"Content-Type": "text/plain; charset=hex"}}, "hi"),
        ({"body": b"h\xffi"}, "h�i"),
        ({"text": "<p>as it is</p>"}, "<p>as it is</p>"),
        ({"text": ""}, ""),
    ],
)
async def test_a_body_is_decoded(serve: Serve, options: dict[str, object], text: str) -> None:
    server = await serve(answer(**options))
    assert await LOCAL(str(server.make_url("/"))) == text


async def test_what_is_not_text_is_said(serve: Serve) -> None:
    server = await serve(answer(body=b"\x89PNG\0\0", content_type="image/png"))
    with pytest.raises(ToolError, match="not text but image/png"):
        await LOCAL(str(server.make_url("/")))


async def test_an_error_status_is_an_error_with_what_the_server_said(serve: Serve) -> None:
    server = await serve(answer(status=404, text="no such page" + "!" * 5000))
    with pytest.raises(ToolError, match="/x answered 404 Not Found\nno such page") as caught:
        await LOCAL(str(server.make_url("/x?token=abc")))
    assert len(str(caught.value)) < 700
    assert "token" not in str(caught.value)


async def test_an_endless_body_is_read_only_up_to_the_limit(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 500)
        except ConnectionError:
            return response

    server = await serve(handler)
    text = await LOCAL(str(server.make_url("/")))
    assert text == "x" * 1000 + "\n[cut: these are the first 1000 bytes, and there are more]"


async def test_a_long_page_says_how_much_of_it_is_missing(serve: Serve) -> None:
    server = await serve(answer(text="x" * 200_000))
    text = await http_get(allow=["127.0.0.1"])(str(server.make_url("/")))
    assert text == "x" * 64_000 + "\n[cut: these are the first 64000 of 200000 bytes]"


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_packed_body_is_unpacked_only_up_to_the_limit(
    serve: Serve, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    bomb = await serve(answer(body=pack(b"x" * 20_000_000), headers={"Content-Encoding": encoding}))
    assert len(await LOCAL(str(bomb.make_url("/")))) < 1100
    small = await serve(answer(body=pack(b"small"), headers={"Content-Encoding": encoding}))
    assert await LOCAL(str(small.make_url("/"))) == "small"


@pytest.mark.parametrize("encoding", ["br", "gzip"])
async def test_a_body_that_cannot_be_unpacked_is_an_error(serve: Serve, encoding: str) -> None:
    server = await serve(answer(body=b"not packed", headers={"Content-Encoding": encoding}))
    with pytest.raises(ToolError):
        await LOCAL(str(server.make_url("/")))


async def test_redirects_are_followed_and_each_one_is_checked(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/start":
                return web.Response(status=302, headers={"Location": "next"})
            case "/next":
                return web.Response(status=308, headers={"Location": "/end"})
            case "/away":
                return web.Response(status=302, headers={"Location": f"http://127.0.0.2:{request.url.port}/end"})
            case "/metadata":
                return web.Response(status=301, headers={"Location": "http://169.254.169.254/latest/meta-data/"})
            case "/file":
                return web.Response(status=302, headers={"Location": "file:///etc/passwd"})
            case "/loop":
                return web.Response(status=302, headers={"Location": "/loop"})
        return web.Response(text="the end")

    server = await serve(handler)
    assert await LOCAL(str(server.make_url("/start"))) == "the end"
    for path, message in (
        ("/away", "127.0.0.2 is refused"),
        ("/metadata", "169.254.169.254 is refused"),
        ("/file", "not an http or https"),
        ("/loop", "more than 5 redirects"),
    ):
        with pytest.raises(ToolError, match=message):
            await LOCAL(str(server.make_url(path)))


async def test_no_proxy_and_no_cookie_is_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Cookie"))
        if request.path == "/":
            return web.Response(status=302, headers={"Location": "/b", "Set-Cookie": "a=b"})
        return web.Response(text="direct")

    server = await serve(handler)
    assert await LOCAL(str(server.make_url("/"))) == "direct"
    assert seen == [None, None]


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ToolError, match=r"127\.0\.0\.1 could not be fetched"):
            await LOCAL(f"http://127.0.0.1:{port}/")
    with pytest.raises(ToolError, match=r"nowhere\.invalid could not be fetched"):
        await LOCAL("http://nowhere.invalid/")


async def test_cancelling_closes_the_connection(serve: Serve) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        started.set()
        try:
            while True:
                await asyncio.sleep(0.01)
                if request.transport is None or request.transport.is_closing():
                    return web.Response()
        finally:
            ended.set()

    server = await serve(handler)
    task = asyncio.create_task(LOCAL(str(server.make_url("/"))))
    await started.wait()
    task.cancel()
    async with asyncio.timeout(10):
        await ended.wait()
    assert task.cancelled()


async def test_a_page_is_fetched_once_for_all_agents(serve: Serve, open_pool) -> None:
    count = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        return web.Response(text="page")

    server = await serve(handler)
    call = ToolCall("1", "http_get", f'{{"url": "{server.make_url("/")}"}}')
    async with open_pool(LOCAL) as pool:
        assert [(await p.wait()).text for p in [pool.start(call) for _ in range(20)]] == ["page"] * 20
        assert (await pool.start(call).wait()).source == "cache"
    assert count == 1

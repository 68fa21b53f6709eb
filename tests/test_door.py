"""The door of all HTTP servers, on real sockets: who is let in, what is bounded, and how errors are told."""

from __future__ import annotations

import asyncio
import json
import platform
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from batch_agent import BatchAgent, SpecError
from batch_agent.door import (
    ALLOWED_HOSTS_VARIABLE,
    Door,
    RequestRefused,
    json_response,
    read_body,
    read_object,
    routes,
)
from batch_agent.testing import Say, ScriptedServer


async def echo(request: web.BaseRequest) -> web.Response:
    return json_response({"got": read_object(await read_body(request, 0.2, 1024 * 1024))})


async def fail(request: web.BaseRequest) -> web.Response:
    raise KeyError("a secret detail")


def refused(request: web.BaseRequest, why: RequestRefused) -> web.Response:
    return json_response({"why": str(why)}, why.status)


TABLE = routes({"/echo": {"POST": echo}, "/fail": {"GET": fail}, "/below/*": {"GET": fail}})


@asynccontextmanager
async def door(**options: Any) -> AsyncIterator[int]:
    async with Door(TABLE, refused, **{"patience": 0.2, **options}) as opened:
        yield opened.port


async def ask(port: int, request: bytes, *more: bytes) -> tuple[int, dict[str, str]]:
    """The status and the document of an answer; ``more`` comes later, in pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    received = bytearray()

    async def receive() -> None:
        with suppress(ConnectionResetError):  # a piece met a connection that the server had closed
            while some := await reader.read(65536):
                received.extend(some)

    answer = asyncio.create_task(receive())
    for piece in more:
        await asyncio.wait([answer], timeout=0.01)
        if received or answer.done():
            break
        writer.write(piece)
    await answer
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


def get(path: str, host: str = "localhost", *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *lines, "", ""]).encode()


def post(body: bytes, *lines: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = ["POST /echo HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {size}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.1.2.3:1", "[::1]:80"])
async def test_a_name_of_this_machine_is_let_in(host: str) -> None:
    async with door() as port:
        assert (await ask(port, get("/nothing", host)))[0] == 404


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "10.1.2.3", "[::1", "[::1]evil", "127.0.0.1@evil"]
)
async def test_another_name_is_refused(host: str) -> None:
    async with door() as port:
        assert (await ask(port, get("/nothing", host)))[0] == 403


async def test_a_request_line_with_the_address_of_another_server_is_refused() -> None:
    async with door() as port:
        assert (await ask(port, get("http://evil.example/nothing")))[0] == 403
        assert (await ask(port, get("http://localhost/nothing")))[0] == 404


async def test_on_a_network_addresses_and_names_of_this_machine_are_let_in() -> None:
    own = platform.node().partition(".")[0]
    async with door(host="0.0.0.0") as port:
        for host, status in ((f"{own}.some.domain:80", 404), (own, 404), ("10.1.2.3:80", 404), ("evil.example", 403)):
            assert (await ask(port, get("/nothing", host)))[0] == status


async def test_further_names_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_HOSTS_VARIABLE, "proxy.example, other")
    async with door() as port:
        assert (await ask(port, get("/nothing", "Proxy.example:80")))[0] == 404
        status, said = await ask(port, get("/nothing", "evil.example"))
    assert status == 403 and ALLOWED_HOSTS_VARIABLE in said["why"]


async def test_a_page_of_the_server_itself_is_let_in_and_a_link_to_it_too() -> None:
    async with door() as port:
        assert (await ask(port, get("/", "localhost:1", "Origin: http://localhost:1")))[0] == 404
        assert (await ask(port, get("/", "localhost:1", "Origin: http://localhost:2")))[0] == 403
        link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
        assert (await ask(port, get("/", "localhost", *link)))[0] == 404


async def test_a_key_is_asked_for_except_where_it_is_not_needed() -> None:
    async with door(key="s3cret", keyless={"/free"}) as port:
        assert (await ask(port, get("/fail")))[0] == 401
        assert (await ask(port, get("/fail", "localhost", "Authorization: Bearer s3cre\xff")))[0] == 401
        assert (await ask(port, get("/nothing", "localhost", "Authorization: Bearer s3cret")))[0] == 404
        assert (await ask(port, get("/nothing", "localhost", "x-api-key: s3cret")))[0] == 404
        assert (await ask(port, get("/free")))[0] == 404


async def test_paths_and_methods_that_do_not_exist_are_named() -> None:
    async with door() as port:
        assert await ask(port, get("/nothing")) == (404, {"why": "/nothing does not exist"})
        assert await ask(port, get("/echo")) == (405, {"why": "/echo accepts only POST"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["/fail", "/below/this"])
async def test_a_bug_of_ours_is_told_in_the_clients_form_without_details(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with door() as port:
        status, said = await ask(port, get(path))
    assert status == 500 and "secret" not in said["why"]
    assert "a secret detail" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 5_000,
        b"{" * 3,
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"[1]",
        b"",
        b'{"a":' + b"[" * 999 + b"]" * 999 + b"}",
    ],
)
async def test_a_body_that_is_no_object_or_nested_deeply_is_a_400(body: bytes) -> None:
    async with door() as port:
        assert (await ask(port, post(body)))[0] == 400


async def test_a_wide_body_is_no_deep_one() -> None:
    body = json.dumps({"a": [{"b": [1, 2]} for _ in range(1_000)]}).encode()
    async with door() as port:
        assert (await ask(port, post(body)))[0] == 200


async def test_a_body_is_bounded_in_size_and_in_time() -> None:
    async with door() as port:
        assert (await ask(port, post(b"", length=2 * 1024 * 1024)))[0] == 413
        assert (await ask(port, post(b'{"a"', length=100)))[0] == 408
        drips = [b" "] * 90  # each in time, and all together far too slow
        status, said = await ask(port, post(b"{", length=100_000), *drips)
    assert status == 408 and "too slowly" in said["why"]


async def test_a_body_that_cannot_be_decoded_is_a_400(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedServer(lambda _: Say("ok"), models=["m"]) as server:
        headers = {"Content-Encoding": "gzip"}
        async with aiohttp.ClientSession() as session:
            url = f"http://{server.address}/v1/chat/completions"
            async with session.post(url, data=b"no gzip", headers=headers) as answer:
                assert answer.status == 400 and "cannot be decoded" in await answer.text()
    assert not caplog.records


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with door(patience=5.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", "Expect: 100-continue", length=7))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"a":1}')
        assert b'{"got":{"a":1}}' in await reader.read()
        writer.close()
    async with door() as port:  # what is too large is refused without it
        assert (await ask(port, post(b"", "Expect: 100-continue", length=2 * 1024 * 1024)))[0] == 413


async def test_a_half_sent_head_is_given_up() -> None:
    async with door() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: local")
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 500 + b"\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_are_refused_in_the_clients_form_without_a_word_in_the_log(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with door() as port:
        status, said = await ask(port, request_bytes)
    assert status == 400 and said["why"].startswith("the request is not valid HTTP: ")
    assert not caplog.records


async def test_an_address_that_cannot_be_used_is_named_in_one_way() -> None:
    async with door() as port:
        for options, words in (
            ({"port": port}, "in use by another program"),
            ({"host": "203.0.113.1"}, "203.0.113.1:0"),
        ):
            with pytest.raises(SpecError, match=f"cannot listen on .*{words}"):
                async with door(**options):
                    pass


def test_files_of_a_run_are_for_their_owner_only(tmp_path: Path) -> None:
    BatchAgent.run_sync(
        task="{input}",
        inputs=["a"],
        backend="simulated://",
        run_dir=tmp_path / "r",
        cache=tmp_path / "c",
        temperature=0,
    )
    for path in [tmp_path / "r", tmp_path / "c", *(tmp_path / "r").rglob("*"), *(tmp_path / "c").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

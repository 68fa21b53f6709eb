"""The gateway on real sockets: keys, limits, bad input, waiting clients, errors in each dialect's own form."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.gateway.rows import FixedRow, post

from batch_agent.errors import ContextOverflow, Interrupted, Rejected, SpecError, Unavailable
from batch_agent.gateway.gateway import EVERY_SECONDS, FIRST_SECONDS, Gateway
from batch_agent.messages import Reply
from batch_agent.testing import virtual_clock

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 9}
ANSWER = Reply("hello")


async def raw(gateway: Gateway, request: bytes) -> bytes:
    place = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def head(key: str, *lines: str, path: str = CHAT, host: str = "127.0.0.1") -> bytes:
    given = [f"POST {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Authorization: Bearer {key}", *lines]
    return "\r\n".join([*given, "", ""]).encode()


# Keys


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_key_is_good_for_its_own_row_until_that_ends(path: str) -> None:
    async with Gateway() as gateway:
        key, other = gateway.admit(FixedRow(Reply("one"))), gateway.admit(FixedRow(Reply("two")))
        statuses = [(await post(gateway, key, path, ASK))[0]]
        statuses.append((await post(gateway, "wrong", path, ASK))[0])
        statuses.append((await post(gateway, "", path, ASK, **{"x-api-key": other}))[0])
        gateway.dismiss(key)
        status, document = await post(gateway, key, path, ASK)
        _, told = await post(gateway, other, path, ASK)
    assert statuses == [200, 401, 200]
    assert status == 401
    assert "its row has ended" in str(document["error"])
    assert "two" in str(told)


async def test_a_row_that_ends_takes_its_requests_with_it() -> None:
    async with Gateway() as gateway:
        row = FixedRow(ANSWER, asyncio.Event())
        key = gateway.admit(row)
        asking = asyncio.create_task(post(gateway, key, CHAT, ASK))
        await row.waiting.wait()
        gateway.dismiss(key)
        await row.left.wait()
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with Gateway() as gateway:
        row = FixedRow(ANSWER, asyncio.Event())
        asking = asyncio.create_task(post(gateway, gateway.admit(row), CHAT, ASK))
        await row.waiting.wait()
        asking.cancel()
        await row.left.wait()


async def test_environment_variables_lead_clients_here() -> None:
    async with Gateway() as gateway:
        env = gateway.env("row-1")
    assert env["OPENAI_BASE_URL"] == f"{env['ANTHROPIC_BASE_URL']}/v1"
    assert {env[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")} == {"row-1"}


# Bad input


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
async def test_a_request_for_another_host_is_refused(name: str) -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        answer = await raw(gateway, head(key, "Content-Length: 0", host=name))
    assert answer.startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"{}",
        b'{"messages": 5}',
        b'{"messages": [5]}',
        b'{"messages": [{"role": "nobody", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": 7}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/passwd"}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
        b"[" * 100_000,
    ],
)
async def test_garbage_is_a_400_that_says_what_is_wrong(body: bytes) -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        answer = await raw(gateway, head(key, f"Content-Length: {len(body)}") + body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_what_is_no_http_is_refused_and_the_gateway_goes_on() -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        assert (await raw(gateway, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.")
        assert (await post(gateway, key, CHAT, ASK))[0] == 200


async def test_half_a_body_is_given_up_after_a_while() -> None:
    async with Gateway(patience=0.1) as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        answer = await raw(gateway, head(key, "Content-Length: 1000") + b'{"messages": [')
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused(chunked: bool) -> None:
    large = 100 * 1024 * 1024
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        place = urlsplit(gateway.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(head(key, "Transfer-Encoding: chunked" if chunked else f"Content-Length: {large}"))
        piece = b"%x\r\n%b\r\n" % (1024 * 1024, b" " * 1024 * 1024) if chunked else b" " * 1024 * 1024
        with suppress(ConnectionError):
            for _ in range(100):
                writer.write(piece)
                await writer.drain()
        status = await reader.readline()
        writer.close()
        assert (await post(gateway, key, CHAT, ASK))[0] == 200
    assert status.startswith(b"HTTP/1.1 413 ")  # the phrase depends on the version of Python


async def test_other_paths_and_methods_are_named() -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        assert (await post(gateway, key, "/v1/embeddings", {}))[0] == 404
        assert (await post(gateway, key, "/v1/v1/messages", ASK))[0] == 200
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"{gateway.url}{CHAT}", headers={"Authorization": f"Bearer {key}"})
        assert answer.status == 405


# Errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Interrupted("the run is out of budget: max_cost $1"), 402),
        (ContextOverflow("prompt is too long", status=400), 400),
        (Rejected("no such model", status=404), 404),
        (Rejected("wrong key", status=401), 400),
        (Rejected("conflict", status=409), 400),
        (SpecError("it takes no seed"), 400),
        (Unavailable("it broke off", status=500), 502),
    ],
)
async def test_errors_have_the_dialects_form_and_a_status_that_is_final(error: Exception, status: int) -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(error))
        for path in (CHAT, RESPONSES, MESSAGES):
            for streamed in (False, True):
                body = json.dumps({**ASK, "stream": streamed}).encode()
                answer = await raw(gateway, head(key, f"Content-Length: {len(body)}", path=path) + body)
                told = json.loads(answer.partition(b"\r\n\r\n")[2])
                assert answer.startswith(b"HTTP/1.1 %d" % status)
                assert b"x-should-retry: false" in answer
                assert told["error"]["message"] == str(error)
                assert (told.get("type") == "error") is (path == MESSAGES)


async def test_what_another_wire_cannot_say_is_refused() -> None:
    audio = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        status, document = await post(gateway, key, CHAT, {**ASK, "messages": [{"role": "user", "content": audio}]})
        stored, _ = await post(gateway, key, RESPONSES, {**ASK, "previous_response_id": "resp_1"})
    assert (status, stored) == (400, 400)
    assert "'input_audio'" in str(document["error"])


# Waiting


@virtual_clock
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_client_that_waits_long_gets_signs_of_life_and_then_the_answer(path: str) -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER, seconds=FIRST_SECONDS + 3.5 * EVERY_SECONDS))
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            whole = await (await session.post(gateway.url + path, json=ASK)).read()
            streamed = await (await session.post(gateway.url + path, json={**ASK, "stream": True})).read()
    assert whole.startswith(b"    {")
    assert "hello" in str(json.loads(whole))
    assert streamed.startswith(b": keep-alive\n\n" * 4)
    assert b"hello" in streamed


@virtual_clock
async def test_a_failure_after_a_long_wait_is_not_taken_for_an_answer() -> None:
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(Unavailable("down"), seconds=60.0))
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            with pytest.raises(aiohttp.ClientError):
                await (await session.post(gateway.url + CHAT, json=ASK)).read()
            for path, mark in ((CHAT, b'"error"'), (RESPONSES, b"response.failed"), (MESSAGES, b"event: error")):
                answer = await session.post(gateway.url + path, json={**ASK, "stream": True})
                told = (await answer.read()).removeprefix(b": keep-alive\n\n" * 5)
                assert mark in told
                assert b"down" in told


async def test_a_thousand_clients_wait_at_once() -> None:
    async with Gateway() as gateway:
        open_ = asyncio.Event()
        rows = [FixedRow(ANSWER, open_) for _ in range(1000)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(row: FixedRow) -> int:
                key = gateway.admit(row)
                async with session.post(gateway.url + CHAT, json=ASK, headers={"x-api-key": key}) as answer:
                    await answer.read()
                    return answer.status

            asking = [asyncio.create_task(ask(row)) for row in rows]
            await asyncio.gather(*(row.waiting.wait() for row in rows))
            open_.set()
            assert set(await asyncio.gather(*asking)) == {200}


@virtual_clock
async def test_models_are_listed_although_the_server_does_not_answer() -> None:
    class Silent(FixedRow):
        async def models(self) -> list[str]:
            await asyncio.sleep(3600)
            return []

    async with Gateway() as gateway:
        key = gateway.admit(Silent(ANSWER))
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            listed = await (await session.get(f"{gateway.url}/v1/models")).json()
            one = await session.get(f"{gateway.url}/v1/models/m")
            other = await session.get(f"{gateway.url}/v1/models/x")
    assert [card["id"] for card in listed["data"]] == ["m"]
    assert (one.status, other.status) == (200, 404)


async def test_a_picture_counts_as_a_picture_and_not_as_its_bytes() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    async with Gateway() as gateway:
        key = gateway.admit(FixedRow(ANSWER))
        _, counted = await post(gateway, key, "/v1/messages/count_tokens", body)
    assert counted == {"input_tokens": 1000}

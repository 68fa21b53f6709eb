"""Notices of batches that have ended."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from tests.serve.served import CHAT, chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.door import Door, json_response
from batch_agent.errors import StoreError
from batch_agent.serve import catalog as catalogs
from batch_agent.serve import webhooks
from batch_agent.serve.catalog import Catalog, ServedBatch, Tenant
from batch_agent.serve.webhooks import new_secret


async def test_a_notice_is_signed_and_sent_again_until_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE", 0.01)
    secret, came = new_secret(), asyncio.Queue[tuple[dict[str, str], bytes]]()

    async def receive(request: web.BaseRequest) -> web.Response:
        came.put_nowait((dict(request.headers), await request.read()))
        return web.Response(status=500 if came.qsize() < 2 else 204)

    async with Door(receive, lambda request, refused: json_response({}, refused.status)) as door:
        async with backend() as model, serving(tmp_path, model) as client:
            catalog = client.server.catalog
            key = catalog.add_tenant(Tenant("one", webhook=f"{door.url}/hook", secret=secret))
            batch = await client.with_key(key).create([chat("a")])
            while came.qsize() < 2:
                await asyncio.sleep(0.01)
            ended = await client.with_key(key).wait(batch["id"])
            while catalog.next_notices():
                await asyncio.sleep(0.01)
        first, second = came.get_nowait(), came.get_nowait()
    assert first[1] == second[1] and ended["status"] == "completed"
    headers, body = second
    told = orjson.loads(body)
    assert told["type"] == "batch.completed" and told["data"] == {"id": batch["id"]} and told["object"] == "event"
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    mac = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), text, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(mac).decode()}"


async def test_a_notice_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE", 0.01)
    came = asyncio.Event()

    async def receive(request: web.BaseRequest) -> web.Response:
        came.set()
        return web.Response()

    async with Door(receive, lambda request, refused: json_response({}, refused.status)) as door:
        address = door.url
    async with backend() as model:
        async with serving(tmp_path, model) as client:
            tenant = Tenant("one", webhook=address, secret=new_secret())
            key = client.server.catalog.add_tenant(tenant)
            await client.with_key(key).wait((await client.with_key(key).create([chat("a")]))["id"])
            while not client.server.webhooks.failed:
                await asyncio.sleep(0.01)
        port = int(address.rpartition(":")[2])
        again = Door(receive, lambda request, refused: json_response({}, refused.status), port=port)
        async with again, serving(tmp_path, model):
            await came.wait()


async def test_the_notice_of_a_wrong_file_is_written_with_the_state_of_its_batch(tmp_path: Path) -> None:
    def killed(*_: object) -> None:
        raise StoreError("nothing is written any more")

    async with backend() as model, serving(tmp_path, model) as client:
        catalog = client.server.catalog
        key = catalog.add_tenant(Tenant("one", webhook="http://127.0.0.1:9/hook", secret=new_secret()))
        catalog.put_batch = killed  # type: ignore[method-assign]
        batch = await client.with_key(key).wait((await client.with_key(key).create(b"{"))["id"])
        assert batch["status"] == "failed" and catalog.next_notices()


async def test_a_receiver_that_hangs_delays_no_other_tenant(tmp_path: Path) -> None:
    hanging, came = asyncio.Event(), asyncio.Event()

    async def receive(request: web.BaseRequest) -> web.Response:
        if request.path == "/two":
            came.set()
            return web.Response()
        hanging.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    door = Door(receive, lambda request, refused: json_response({}, refused.status))
    async with door, backend() as model, serving(tmp_path, model) as client:
        add = client.server.catalog.add_tenant
        one = add(Tenant("one", webhook=f"{door.url}/one", secret=new_secret()))
        two = add(Tenant("two", webhook=f"{door.url}/two", secret=new_secret()))
        for number in range(3):
            await client.with_key(one).wait((await client.with_key(one).create([chat(f"a{number}")]))["id"])
        await hanging.wait()
        await client.with_key(two).wait((await client.with_key(two).create([chat("b")]))["id"])
        async with asyncio.timeout(webhooks.ANSWER_SECONDS / 2):
            await came.wait()


async def test_a_queue_of_notices_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "MOST_NOTICES", 3)
    with Catalog(tmp_path) as catalog:
        for number in range(5):
            batch = ServedBatch(f"batch_{number}", "one", "openai", CHAT, "24h", 0.0, 1.0, status="completed")
            catalog.put_batch(batch, notice={"id": f"event_{number}"})
        catalog.put_batch(replace(batch, tenant="two"), notice={"id": "other"})
        assert [id for id, _, _ in catalog.due_notices("one")] == ["event_2", "event_3", "event_4"]
        assert [id for id, _, _ in catalog.due_notices("two")] == ["other"]


async def test_a_tenant_with_a_wrong_secret_delays_no_other(tmp_path: Path) -> None:
    came = asyncio.Event()

    async def receive(request: web.BaseRequest) -> web.Response:
        came.set()
        return web.Response()

    door = Door(receive, lambda request, refused: json_response({}, refused.status))
    async with door, backend() as model, serving(tmp_path, model) as client:
        add = client.server.catalog.add_tenant
        wrong = add(Tenant("wrong", webhook=f"{door.url}/one", secret="whsec_no base64"))
        right = add(Tenant("right", webhook=f"{door.url}/two", secret=new_secret()))
        for key in (wrong, right):
            await client.with_key(key).wait((await client.with_key(key).create([chat("a")]))["id"])
        await came.wait()
        assert not client.server.parts.failures["webhooks"]

"""Notices of batches that have ended."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from tests.serve.served import chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.door import Door, json_response
from batch_agent.errors import StoreError
from batch_agent.serve import webhooks
from batch_agent.serve.catalog import Tenant
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
            while catalog.next_notice() is not None:
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
        assert batch["status"] == "failed" and catalog.next_notice() is not None

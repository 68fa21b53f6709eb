"""What people and monitoring see: status, lists, export, metrics, and the commands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from tests.observe.exposition_rules import read_page
from tests.serve.served import Client, chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.cli.main import main
from batch_agent.serve.catalog import Tenant
from batch_agent.testing import Hang


async def command(client: Client, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["serve", *arguments, "--url", client.url, "--key", client.key])


async def test_the_commands_work_by_address_and_by_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        batch = await client.create([chat("a"), chat("b", "refuse")])
        await client.wait(batch["id"])
        assert await command(client, "list") == 0
        assert f"{batch['id']}  completed  operator" in capsys.readouterr().out
        assert await command(client, "status", "--json") == 0
        assert orjson.loads(capsys.readouterr().out)["lines_left"] == 0
        output = tmp_path / "out.jsonl"
        assert await command(client, "export", batch["id"], "--output", str(output)) == 0
        assert {orjson.loads(line)["custom_id"] for line in output.read_bytes().splitlines()} == {"a", "b"}
        assert await command(client, "cancel", "batch_none") == 1
        assert await command(client.with_key("wrong"), "list") == 1
    data = ["--data", str(tmp_path)]
    capsys.readouterr()
    assert main(["serve", "list", *data]) == 0
    assert batch["id"] in capsys.readouterr().out
    assert main(["serve", "status", *data]) == 0
    assert main(["serve", "export", batch["id"], "--output", str(output), *data]) == 0
    assert main(["serve", "cancel", batch["id"], *data]) == 0
    assert "completed" in capsys.readouterr().out
    assert main(["serve", "list", "--data", str(tmp_path / "nothing")]) == 1


async def test_a_tenant_sees_its_own_and_the_operator_all(tmp_path: Path) -> None:
    async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
        one = client.with_key(client.server.catalog.add_tenant(Tenant("one")))
        other = client.with_key(client.server.catalog.add_tenant(Tenant("other")))
        batch = await one.create([chat("a")])
        assert [each["id"] for each in (await client.get("/serve/batches"))["data"]] == [batch["id"]]
        assert [each["id"] for each in (await one.get("/serve/batches"))["data"]] == [batch["id"]]
        assert (await other.get("/serve/batches"))["data"] == []
        for path in (f"/serve/batches/{batch['id']}", f"/serve/batches/{batch['id']}/export"):
            assert (await other.send("GET", path))[0] == 404
        assert (await other.send("POST", f"/serve/batches/{batch['id']}/cancel"))[0] == 404
        assert "tenants" not in await one.get("/serve/status")
        assert (await client.get("/serve/status"))["batches"] == 1
        assert (await client.send("POST", f"/serve/batches/{batch['id']}/cancel"))[0] == 200


async def test_the_page_holds_no_data_and_lets_no_other_site_in(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        async with client.session.get(client.url + "/") as answer:
            text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert client.key not in text and "/serve/batches" in text and "frame-ancestors 'none'" in policy
        other = {"Origin": "http://evil.example"}
        assert (await client.send("POST", "/serve/batches/x/cancel", headers=other))[0] == 403
        assert (await client.send("GET", "/serve/batches", headers={"Host": "evil.example"}))[0] == 403


async def test_the_page_for_prometheus_is_valid_and_the_operators(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        await client.wait((await client.create([chat("a")]))["id"])
        status, page = await client.with_key("").send("GET", "/metrics")
        assert status == 200 and b'batch_agent_serve_tokens_total{tenant="operator"}' in page
        assert read_page(page.decode())
        client.server.admin.open_metrics = False
        one = client.with_key(client.server.catalog.add_tenant(Tenant("one")))
        assert (await one.send("GET", "/metrics"))[0] == 403
        assert (await client.with_key("").send("GET", "/metrics"))[0] == 401
        assert (await client.send("GET", "/metrics"))[0] == 200


async def test_a_batch_cancelled_in_the_directory_is_cancelled_by_the_server(tmp_path: Path) -> None:
    from batch_agent.serve import batches, server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "BOOKS_SECONDS", 0.02)
        patch.setattr(batches, "GRACE_SECONDS", 0.02)
        async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
            batch = await client.create([chat("a")])
            await model.wait_requests(1)
            await asyncio.to_thread(main, ["serve", "cancel", batch["id"], "--data", str(tmp_path)])
            assert (await client.wait(batch["id"]))["status"] == "cancelled"

"""A backup of a server that runs, and how long uploads are kept."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.serve.served import chat, serving
from tests.serve.test_kills import served
from tests.serve.test_openai_batches import backend
from tests.serve.test_recovery import run

from batch_agent.serve import server
from batch_agent.serve.catalog import Catalog, Tenant
from batch_agent.testing import Request, Say
from batch_agent.testing.replies import ScriptedReply


async def test_a_backup_that_was_made_while_a_server_worked_continues_from_there(tmp_path: Path) -> None:
    data, copy, gate = tmp_path / "data", tmp_path / "copy", asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        if "late" in request.text:
            await gate.wait()
        return Say(f"echo {request.text}")

    with Catalog(data) as catalog:
        key = catalog.add_tenant(Tenant("alice"))
    async with backend(script) as model:
        async with served(data, model.backend_url) as client:
            alice = client.with_key(key)
            done = await alice.wait((await alice.create([chat("a")]))["id"])
            batch = await alice.create([*(chat(f"l{n}") for n in range(30)), *(chat(f"late-{n}") for n in range(5))])
            while (await alice.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 30:
                await asyncio.sleep(0.02)
            status, told = await run("serve", "backup", str(copy), "--data", str(data))
            assert status == 0 and "2 batches and 2 files" in told, told
            status, told = await run("serve", "backup", str(copy), "--data", str(data))
            assert status == 1 and "is there and not empty" in told
        shutil.rmtree(data)
        status, told = await run("serve", "check", "--data", str(copy))
        assert status == 0, told
        asked = model.received
        gate.set()
        async with served(copy, model.backend_url) as client:
            alice = client.with_key(key)
            assert await alice.get(f"/v1/batches/{done['id']}") == done
            ended = await alice.wait(batch["id"])
            output, errors = await alice.outcomes(ended)
            assert ended["status"] == "completed" and len({line["custom_id"] for line in output}) == 35 and not errors
            assert len(await alice.lines_of(batch["input_file_id"])) == 35
        assert model.received == asked + 5  # no answer of the backup is asked again


async def test_a_backup_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").touch()
    for data in ("own", "nothing"):
        status, told = await run("serve", "backup", str(tmp_path / "copy"), "--data", str(tmp_path / data))
        assert status == 1 and "not the" in told and not (tmp_path / "copy").exists()


async def test_uploads_are_kept_from_their_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.01)
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.01)
    now, gate = [1_000_000.0], asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        if "late" in request.text:
            await gate.wait()
        return Say("done")

    async with backend(script) as model, serving(tmp_path, model, keep=1000.0, now=lambda: now[0]) as client:
        unused = await client.upload([chat("a")])
        given: dict[str, Any] = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        timed = await client.upload([chat("b")], **given)
        assert unused["expires_at"] == 1_001_000 and timed["expires_at"] == 1_003_600
        batches = [await client.create([chat("late")])]
        used = batches[0]["input_file_id"]
        body = {"input_file_id": used, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batches.append(await client.post("/v1/batches", body))
        assert (await client.get(f"/v1/files/{used}"))["expires_at"] == 1_000_000 + 86400 + 1000
        now[0] += 1500
        while list((tmp_path / "files").glob(f"{unused['id']}*")):  # its content, and then its description
            await asyncio.sleep(0.01)
        assert {file["id"] for file in (await client.get("/v1/files"))["data"]} == {used, timed["id"]}
        gate.set()
        ended = [await client.wait(batch["id"]) for batch in batches]
        assert [batch["status"] for batch in ended] == ["completed"] * 2
        for file in (used, ended[0]["output_file_id"]):
            assert (await client.get(f"/v1/files/{file}"))["expires_at"] == 1_001_500 + 1000
        now[0] += 1001
        while (tmp_path / "files" / used).exists():
            await asyncio.sleep(0.01)
        assert [file["id"] for file in (await client.get("/v1/files"))["data"]] == [timed["id"]]
    async with backend(script) as model, serving(tmp_path, model, keep=10.0, now=lambda: now[0]) as client:
        assert (await client.get(f"/v1/files/{timed['id']}"))["expires_at"] == 1_003_600  # as the client has said


async def test_files_of_an_earlier_version_are_kept_from_the_first_start(tmp_path: Path) -> None:
    now = [1_000_000.0]
    async with backend() as model:
        async with serving(tmp_path, model, keep=1000.0, now=lambda: now[0]) as client:
            file = await client.upload([chat("a")])
            with client.server.catalog._writing() as db:
                before = "json_set(document, '$.kept_since', NULL, '$.expires', NULL)"
                db.execute(f"UPDATE file SET expires = NULL, document = {before}")
        now[0] += 5000
        async with serving(tmp_path, model, keep=1000.0, now=lambda: now[0]) as client:
            assert (await client.get(f"/v1/files/{file['id']}"))["expires_at"] == 1_006_000

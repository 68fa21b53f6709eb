"""A data directory is ours only by its marker, and nothing in it is deleted because the catalog does not know it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.serve.served import Client, chat, serving
from tests.serve.test_kills import served
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.errors import SpecError
from batch_agent.serve.catalog import Catalog, Tenant
from batch_agent.serve.directory import CATALOG, MARKER, TENANTS
from batch_agent.serve.recovery import check
from batch_agent.testing import Hang, Request, Say, ScriptedServer
from batch_agent.testing.replies import ScriptedReply


async def run(*arguments: str) -> tuple[int, str]:
    process = await start(
        "-m", "batch_agent", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    return await process.wait(), told.decode()


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_directory_with_foreign_files_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    for name in ("files/thesis.tex", "batches/2019/data.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("the user's own")
    before = listing(tmp_path)
    async with backend() as model:
        for command in (("--backend", model.backend_url, "--port", "0"), ("keys", "add", "alice"), ("check",)):
            status, told = await run("serve", *command, "--data", str(tmp_path))
            assert status == 1 and "is not the data directory of a server" in told, told
            assert "Traceback" not in told and listing(tmp_path) == before


def test_a_foreign_database_named_like_the_catalog_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / CATALOG)) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")
    before = listing(tmp_path)
    with pytest.raises(SpecError, match="not the data directory"):
        Catalog(tmp_path)
    assert listing(tmp_path) == before


def test_an_empty_directory_and_a_mounted_volume_become_ours(tmp_path: Path) -> None:
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    for name in ("new", "volume"):
        Catalog(tmp_path / name).close()
        assert (tmp_path / name / MARKER).exists()


def test_the_marker_of_a_later_version_is_refused(tmp_path: Path) -> None:
    Catalog(tmp_path).close()
    marker = tmp_path / MARKER
    marker.write_bytes(marker.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(SpecError, match="another version"):
        Catalog(tmp_path)


def script(request: Request) -> ScriptedReply:
    return Hang() if "late" in request.text else Say(f"echo {request.text}")


async def fill(client: Client, alice: Client) -> tuple[Any, Any]:
    """Return a batch of the operator that has ended, and one of alice of which 5 of 6 lines are answered."""
    done = await client.wait((await client.create([chat("a")]))["id"])
    open_batch = await alice.create([*(chat(f"l{n}") for n in range(5)), chat("late")])
    while (await alice.get(f"/v1/batches/{open_batch['id']}"))["request_counts"]["completed"] < 5:
        await asyncio.sleep(0.01)
    return done, open_batch


async def check_all_is_there(client: Client, alice: Client, done: Any, open_batch: Any) -> None:
    again = await client.get(f"/v1/batches/{done['id']}")
    assert again == done and len((await client.outcomes(again))[0]) == 1
    assert len(await client.lines_of(done["input_file_id"])) == 1
    assert [file["purpose"] for file in (await client.get("/v1/files"))["data"]].count("batch") == 1
    finished = await alice.wait(open_batch["id"])
    output, errors = await alice.outcomes(finished)
    assert finished["status"] == "completed" and len(output) == 6 and not errors


async def test_without_its_catalog_a_server_takes_everything_back(tmp_path: Path) -> None:
    gate = False

    def gated(request: Request) -> ScriptedReply:
        return Say("late") if gate else script(request)

    with Catalog(tmp_path) as catalog:
        key = catalog.add_tenant(Tenant("alice"))
    async with backend(gated) as model:
        async with served(tmp_path, model.backend_url) as client:
            done, open_batch = await fill(client, client.with_key(key))
        asked, gate = model.received, True
        for part in tmp_path.glob(f"{CATALOG}*"):
            part.unlink()
        status, told = await run("serve", "check", "--data", str(tmp_path))
        assert status == 1 and open_batch["id"] in told and "taken back from its description" in told
        assert not (tmp_path / CATALOG).exists()
        async with served(tmp_path, model.backend_url) as client:
            await check_all_is_there(client, client.with_key(key), done, open_batch)
        assert model.received == asked + 1  # the line that had no answer
        assert not (tmp_path / "lost").exists()
        assert (await run("serve", "check", "--data", str(tmp_path)))[0] == 0


def emptied(data: Path) -> None:
    (data / CATALOG).write_bytes(b"")


def garbage(data: Path) -> None:
    (data / CATALOG).write_bytes(os.urandom(20_000))


def half_garbage(data: Path) -> None:
    content = (data / CATALOG).read_bytes()
    (data / CATALOG).write_bytes(content[: len(content) // 2] + b"\x00no page\xff" * 4096)


def older(data: Path) -> None:
    shutil.copyfile(data.with_name("before.db"), data / CATALOG)


@pytest.mark.parametrize("damage", [emptied, garbage, half_garbage, older])
async def test_a_damaged_or_older_catalog_is_completed_from_the_descriptions(tmp_path: Path, damage: Any) -> None:
    gate, data = False, tmp_path / "data"

    def gated(request: Request) -> ScriptedReply:
        return Say("late") if gate else script(request)

    with Catalog(data) as catalog:
        catalog.operator_key()
        with closing(sqlite3.connect(tmp_path / "before.db")) as backup:
            catalog._db.backup(backup)
        key = catalog.add_tenant(Tenant("alice"))
    async with backend(gated) as model:
        async with serving(data, model) as client:
            done, open_batch = await fill(client, client.with_key(key))
        asked, gate = model.received, True
        for part in data.glob(f"{CATALOG}-*"):
            part.unlink()
        damage(data)
        async with serving(data, model) as client:
            await check_all_is_there(client, client.with_key(key), done, open_batch)
        assert model.received == asked + 1
        if damage in (garbage, half_garbage):
            assert list((data / "lost").glob(f"*{CATALOG}"))


def test_a_command_does_not_begin_a_new_catalog_beside_descriptions(tmp_path: Path) -> None:
    with Catalog(tmp_path) as catalog:
        catalog.add_tenant(Tenant("alice"))
    emptied(tmp_path)
    with pytest.raises(SpecError, match="next start of the server makes it again"):
        Catalog(tmp_path)


async def test_a_directory_of_an_earlier_version_is_recognised_and_gets_marker_and_descriptions(tmp_path: Path) -> None:
    """Such a one has no marker and no descriptions."""
    async with backend() as model:
        async with serving(tmp_path, model) as client:
            batch = await client.wait((await client.create([chat("a")]))["id"])
        for path in (tmp_path / MARKER, tmp_path / TENANTS, *tmp_path.rglob("*.json")):
            path.unlink(missing_ok=True)
        async with serving(tmp_path, model) as client:
            assert await client.get(f"/v1/batches/{batch['id']}") == batch
        assert (tmp_path / MARKER).exists() and (tmp_path / TENANTS).exists()
        assert (tmp_path / "batches" / batch["id"] / "batch.json").exists()
        assert (tmp_path / "files" / f"{batch['input_file_id']}.json").exists()


async def test_what_has_no_entry_and_no_description_is_moved_to_lost_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, orphan = {"files/thesis.tex": b"own", "files/notes/a": b"1"}, f"batches/batch_{'a' * 32}"
    async with backend() as model:
        async with serving(tmp_path, model) as client:
            await client.upload([chat("a")])
        for name, content in {**own, f"{orphan}/output.jsonl": b"paid"}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        (tmp_path / "files" / f"file-{'b' * 32}.part").write_bytes(b"half an upload")
        told = [str(finding) for finding in check(tmp_path)[1]]
        assert len(told) == 4 and (tmp_path / "files" / "thesis.tex").exists()
        for _ in range(2):
            async with serving(tmp_path, model) as client:
                assert len((await client.get("/v1/files"))["data"]) == 1
        for name, content in {**own, f"{orphan}/output.jsonl": b"paid"}.items():
            assert (tmp_path / "lost" / name).read_bytes() == content
        assert "files/thesis.tex" in caplog.text and orphan in caplog.text
        assert not list((tmp_path / "files").glob("*.part")) and not check(tmp_path)[1]


async def test_a_removal_that_a_kill_interrupted_is_completed(tmp_path: Path) -> None:
    """What a client has deleted does not come back, although its description is still there."""
    async with backend() as model:
        async with serving(tmp_path, model) as client:
            file = await client.upload([chat("a")])
            batch = await client.wait((await client.create([chat("b")]))["id"])
        for folder, id in (("files", file["id"]), ("batches", batch["id"])):
            path = tmp_path / folder / id
            path.rename(path.with_name(f"{id}.deleted"))
        async with serving(tmp_path, model) as client:
            assert (await client.send("GET", f"/v1/files/{file['id']}"))[0] == 404
            assert (await client.send("GET", f"/v1/batches/{batch['id']}"))[0] == 404
        left = listing(tmp_path)
        assert not any(file["id"] in name or batch["id"] in name for name in left) and not check(tmp_path)[1]


async def test_a_revoked_tenant_stays_revoked_with_an_older_catalog(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Catalog(data) as catalog:
        key = catalog.add_tenant(Tenant("alice"))
        with closing(sqlite3.connect(tmp_path / "before.db")) as backup:
            catalog._db.backup(backup)
        catalog.revoke("alice")
    older(data)
    model: ScriptedServer
    async with backend() as model, serving(data, model) as client:
        assert (await client.with_key(key).send("GET", "/v1/files"))[0] == 401

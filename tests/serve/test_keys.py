"""Keys: what the configuration says holds, a name that is given again is another tenant, and keys are rotated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from tests.serve.served import Client, chat, serving
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.cli.main import main
from batch_agent.errors import SpecError
from batch_agent.serve import server
from batch_agent.serve.catalog import Catalog, ConfiguredTenant, Tenant
from batch_agent.testing import Hang, Say

ALICE, BOB, OTHER = "alices-key-of-many-letters", "bobs-key-of-many-letters", "another-key-of-many-letters"


@asynccontextmanager
async def configured(data: Path, backend_url: str, config: str | None) -> AsyncIterator[Client]:
    """Serve in a process of its own with this configuration, and stop it at the end."""
    command = ["-m", "batch_agent", "serve", "--data", str(data), "--backend", backend_url, "--port", "0"]
    if config is not None:
        data.mkdir(exist_ok=True)
        (data.parent / "config.toml").write_text(config)
        command += ["--config", str(data.parent / "config.toml")]
    process = await start(*command, "--reserve", "1K", "--drain", "1s", stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
        async with aiohttp.ClientSession() as session:
            yield Client(url, key, session, cast("Any", None))
    finally:
        process.terminate()
        assert await process.wait() == 0


async def status(client: Client, key: str) -> int:
    return (await client.with_key(key).send("GET", "/v1/batches"))[0]


async def test_a_key_that_is_removed_from_the_configuration_is_refused_after_a_restart(tmp_path: Path) -> None:
    data, both = tmp_path / "data", f'[keys.alice]\nkey = "{ALICE}"\n[keys.bob]\nkey = "{BOB}"\n'
    async with backend(lambda request: Hang()) as model:
        async with configured(data, model.backend_url, both) as client:
            assert [await status(client, key) for key in (ALICE, BOB, OTHER)] == [200, 200, 401]
            mine = await client.with_key(ALICE).create([chat("a")])
            theirs = await client.with_key(BOB).create([chat("b")])
            await model.wait_requests(2)
        async with configured(data, model.backend_url, None) as client:  # without --config: a mistake, perhaps
            assert [await status(client, key) for key in (ALICE, BOB)] == [401, 401]
            await asyncio.sleep(1.2)  # the books are looked at
            shown = {each["id"]: each["status"] for each in (await client.get("/serve/batches"))["data"]}
            assert shown == {mine["id"]: "in_progress", theirs["id"]: "in_progress"}
        async with configured(data, model.backend_url, f'[keys.bob]\nkey = "{BOB}"\n') as client:
            assert [await status(client, key) for key in (ALICE, BOB)] == [401, 200]
            assert (await client.with_key(BOB).get(f"/v1/batches/{theirs['id']}"))["status"] == "in_progress"
            while (await client.get(f"/serve/batches/{mine['id']}"))["status"] == "in_progress":
                await asyncio.sleep(0.05)
        changed = f'[keys.alice]\nkey = "{OTHER}"\n[keys.bob]\nkey = "{ALICE}"\nold_key = "{BOB}"\n'
        async with configured(data, model.backend_url, changed) as client:
            assert (await client.with_key(OTHER).get("/v1/batches"))["data"] == []  # alice, but not the earlier one
            for key in (ALICE, BOB):  # bob with his new key, and with his former one
                assert [each["id"] for each in (await client.with_key(key).get("/v1/batches"))["data"]] == [
                    theirs["id"]
                ]


async def test_a_new_key_of_a_revoked_name_sees_nothing_of_the_earlier_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)
    async with backend(lambda request: Say("secret")) as model, serving(tmp_path, model) as client:
        catalog = client.server.catalog
        earlier = client.with_key(catalog.add_tenant(Tenant("alice")))
        done = await earlier.wait((await earlier.create([chat("a")]))["id"])
        catalog.revoke("alice")
        alice = client.with_key(catalog.add_tenant(Tenant("alice")))
        assert (await alice.get("/v1/files"))["data"] == (await alice.get("/v1/batches"))["data"] == []
        for path in (f"batches/{done['id']}", f"files/{done['output_file_id']}/content"):
            assert (await alice.send("GET", f"/v1/{path}"))[0] == 404
        own = await alice.wait((await alice.create([chat("a")]))["id"])
        assert (await client.get(f"/serve/batches/{own['id']}"))["tenant"] == "alice"
        assert (await earlier.send("GET", "/v1/files"))[0] == 401
        assert (await alice.get("/v1/files"))["data"] != []
        catalog.revoke("alice")
        assert (await alice.send("GET", "/v1/files"))[0] == 401


async def test_a_rotated_key_has_an_overlap_with_the_former_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1_000_000.0]
    async with backend() as model, serving(tmp_path, model, now=lambda: now[0]) as client:
        former = client.with_key(client.server.catalog.add_tenant(Tenant("alice")))
        await former.upload([chat("a")])
        alice = client.with_key(client.server.catalog.rotate_key("alice", 60.0))
        assert (await alice.get("/v1/files"))["data"] == (await former.get("/v1/files"))["data"] != []
        now[0] += 61
        assert (await former.send("GET", "/v1/files"))[0] == 401
        assert len((await alice.get("/v1/files"))["data"]) == 1
        operator = client.with_key(client.server.catalog.rotate_key("operator", 0.0))
        assert (tmp_path / "key").read_text().strip() == operator.key
        assert (await client.send("GET", "/serve/status"))[0] == 401
        await operator.get("/serve/status")
    assert main(["serve", "keys", "rotate", "alice", "--overlap", "0s", "--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.strip()
    with Catalog(tmp_path) as catalog:
        assert catalog.tenant_of(alice.key) is None
        assert catalog.tenant_of(printed) is not None
    assert main(["serve", "keys", "rotate", "bob", "--data", str(tmp_path)]) == 1


def test_two_tenants_cannot_have_one_key(tmp_path: Path) -> None:
    with Catalog(tmp_path) as catalog:
        catalog.operator_key()
        both = [ConfiguredTenant(Tenant(name), ALICE) for name in ("alice", "bob")]
        with pytest.raises(SpecError, match="same key"):
            catalog.configure(both)
        assert catalog.tenant_of(ALICE) is None  # all or nothing
        catalog.configure([ConfiguredTenant(Tenant("alice"), ALICE)])
        with pytest.raises(SpecError, match="in the configuration"):
            catalog.rotate_key("alice", 1.0)
        assert catalog.configure([ConfiguredTenant(Tenant("bob"), ALICE)]) == ["alice"]  # the key may move
        tenant = catalog.tenant_of(ALICE)
        assert tenant is not None and tenant.name == "bob"


@pytest.mark.parametrize("name", ["operator", "a~2", "a b", ""])
def test_a_name_that_no_tenant_can_have_is_refused(tmp_path: Path, name: str) -> None:
    assert main(["serve", "keys", "add", name, "--data", str(tmp_path)]) == 1
    (tmp_path / "config.toml").write_text(f'[keys."{name}"]\nkey = "{ALICE}"\n')
    command = ["serve", "--backend", "http://127.0.0.1:9", "--config", str(tmp_path / "config.toml")]
    assert main([*command, "--data", str(tmp_path / "data")]) == 1


async def test_a_configuration_is_enough_to_listen_for_other_machines(tmp_path: Path) -> None:
    tenants = [ConfiguredTenant(Tenant("alice"), ALICE)]
    async with backend() as model, serving(tmp_path, model, configured=tenants, host="0.0.0.0") as client:
        assert await status(client, ALICE) == 200

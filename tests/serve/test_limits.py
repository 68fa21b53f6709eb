"""Disk, retention, several models, and the configuration file."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serve.served import chat, serving
from tests.serve.test_anthropic_batches import ROUTE, ask
from tests.serve.test_openai_batches import backend

from batch_agent.cli.commands.serve import _limits, _models_in, _tenant_in, add_serve_arguments
from batch_agent.cli.main import main
from batch_agent.errors import SpecError
from batch_agent.serve import LatencyTarget, server
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.models import names_in, open_models


async def test_below_the_reserve_uploads_get_507_and_no_line_starts(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        file = await client.upload([chat("a")])
        client.server.api._options = replace(client.server.api._options, reserve=2**62)
        status, told = await client.try_upload([chat("b")])
        assert status == 507 and told["error"]["message"]
        assert len((await client.get("/v1/files"))["data"]) == 1 and file
        assert [path.stem for path in (tmp_path / "files").iterdir()] == [file["id"]] * 2  # and its description
    async with backend() as model, serving(tmp_path, model) as client:
        client.server._has_room = lambda: False  # type: ignore[method-assign]
        client.server.room = False
        batch = await client.create([chat("a")])
        while not client.server.line_scheduler.why:
            await asyncio.sleep(0.01)
        assert "disk" in client.server.line_scheduler.why and model.received == 0
        client.server._has_room = lambda: True  # type: ignore[method-assign]
        assert (await client.wait(batch["id"]))["status"] == "completed"


async def test_batches_and_files_are_removed_when_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.0)
    now = [1_000_000_000.0]
    async with backend() as model, serving(tmp_path, model, keep=100.0, now=lambda: now[0]) as client:
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = await client.upload([chat("a")], **expiry)
        assert file["expires_at"] == file["created_at"] + 3600
        done = await client.wait((await client.create([chat("a")]))["id"])
        now[0] += 99.0
        await asyncio.sleep(0.1)
        assert await client.lines_of(done["output_file_id"])
        now[0] += 10.0
        while list((tmp_path / "batches").iterdir()):
            await asyncio.sleep(0.01)
        assert (await client.send("GET", f"/v1/batches/{done['id']}"))[0] == 404
        assert (await client.send("GET", f"/v1/files/{done['output_file_id']}"))[0] == 404
        now[0] += 3600.0
        assert (await client.send("GET", f"/v1/files/{file['id']}"))[0] == 404
        while (tmp_path / "files" / file["id"]).exists():
            await asyncio.sleep(0.01)


async def test_the_model_of_each_line_chooses_its_backend(tmp_path: Path) -> None:
    async with backend() as one, backend() as two:
        named = {"small": {"url": one.backend_url, "model": "m"}, "large": {"url": two.backend_url, "model": "other"}}
        async with serving(tmp_path, open_models(None, named)) as client:
            listed = await client.get("/v1/models")
            assert [card["id"] for card in listed["data"]] == ["small", "large"]
            lines = [chat(f"s{n}", model="small") for n in range(3)] + [chat(f"l{n}", model="large") for n in range(2)]
            done = await client.wait((await client.create(lines))["id"])
            assert done["status"] == "completed" and done["model"] is None
            assert {request.model for request in one.requests} == {"m"} and one.received == 3
            assert {request.model for request in two.requests} == {"other"} and two.received == 2
            failed = await client.wait((await client.create([chat("a", model="m")]))["id"])
            assert failed["errors"]["data"][0]["code"] == "model_not_found"


def test_a_configuration_has_models_limits_and_keys() -> None:
    config = {"models": {"small": {"backend": "vllm://a:1", "model": "x"}}, "limits": {"keep": "2d", "reserve": "5GB"}}
    assert _models_in(config) == {"small": {"url": "vllm://a:1", "model": "x"}}
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    found = _limits(parser.parse_args(["--reserve", "1MB"]), config)
    assert (found["keep"], found["reserve"], found["max_lines"]) == (2 * 86400.0, 1024**2, 1_000_000)
    assert found["interactive_latency"] == 2.5 and found["max_inflight"] is None
    assert _limits(parser.parse_args(["--interactive-latency", "off"]), {})["interactive_latency"] is None
    for told, read in {"p95 3": LatencyTarget(3.0, 95), "p50 2.5": LatencyTarget(2.5), "2": 2.0}.items():
        assert _limits(parser.parse_args(["--interactive-latency", told]), {})["interactive_latency"] == read
        assert _limits(parser.parse_args([]), {"limits": {"interactive_latency": told}})["interactive_latency"] == read
    configured = _tenant_in("alice", {"key": "k" * 20, "share": 2, "max_file": "1GB"})
    tenant, key = configured.tenant, configured.key
    assert (tenant.name, tenant.share, tenant.max_file, key) == ("alice", 2.0, 1024**3, "k" * 20)
    with pytest.raises(SpecError, match="max_lines"):
        _limits(parser.parse_args([]), {"limits": {"max_lines": "many"}})


@pytest.mark.parametrize("told", ["p95", "p100 3", "p30 3", "p95 0.5", "1", "fast", "95 3", "p95 nan"])
def test_a_target_that_cannot_be_read_is_refused(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--interactive-latency", told])
    assert 'such as "p95 3", or off' in capsys.readouterr().err


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="NAME=URL"):
        names_in(["small"])
    assert main(["serve", "--data", str(tmp_path / "a")]) == 1
    assert "--backend" in capsys.readouterr().err
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[model.a]\n")
    assert main(["serve", "--data", str(tmp_path / "a"), "--config", str(wrong)]) == 1
    assert "model" in capsys.readouterr().err


SMALL = Tenant("small", max_bytes=9000)


async def test_a_tenant_has_no_more_files_and_bytes_than_its_quota(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        add = client.server.catalog.add_tenant
        few, small = (client.with_key(add(each)) for each in (Tenant("few", max_files=2), SMALL))
        told = await asyncio.gather(*(few.try_upload(b"{}") for _ in range(6)))
        assert sorted(status for status, _ in told) == [200] * 2 + [413] * 4
        assert {document["error"]["code"] for status, document in told if status == 413} == {"quota_exceeded"}
        stored = (await few.get("/v1/files"))["data"]
        assert len(stored) == 2 and len(list((tmp_path / "files").glob("file-*"))) in (2, 4)  # with descriptions
        assert (await few.send("DELETE", f"/v1/files/{stored[0]['id']}"))[0] == 200
        assert (await few.try_upload(b"{}"))[0] == 200
        told = await asyncio.gather(*(small.try_upload(b"x" * 4000) for _ in range(6)))
        assert 1 <= sum(status == 200 for status, _ in told) <= 2
        requests = {"requests": [ask("a", "word " * 3000)]}
        status, _ = await small.send("POST", ROUTE, requests)
        assert status == 413 and (await small.get(ROUTE))["data"] == []
        assert (await client.send("POST", ROUTE, requests))[0] == 200  # the operator has no quota

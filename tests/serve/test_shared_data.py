"""Several servers on the same data: each answers for all batches, and one takes over what another left."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.record.redis_servers import RedisServer
from tests.serve.served import chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.backends.registry import open_backend
from batch_agent.errors import SpecError
from batch_agent.record.address import StoreAddress
from batch_agent.record.lock import Lock
from batch_agent.record.redis.reading import run_names
from batch_agent.run.joined_worker import JoinedWorkers
from batch_agent.run.trust import Trust
from batch_agent.serve import ServeOptions, batches, server
from batch_agent.serve.catalog import Catalog, Tenant
from batch_agent.serve.models import ServedModels, open_models
from batch_agent.serve.server import BatchService
from batch_agent.testing import Fail, Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply


@pytest.mark.parametrize("in_redis", [False, True])
async def test_a_second_server_continues_the_batches_of_one_that_is_gone(
    in_redis: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis: RedisServer
) -> None:
    is_late, later = True, 0.0
    options: dict[str, object] = {"store": redis.url} if in_redis else {"shared": True}
    options["now"] = lambda: time.time() + later
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)
    monkeypatch.setattr(batches, "LEASE_SECONDS", 600.0)  # a slow machine must not lose it to the other server

    def script(request: Request) -> ScriptedReply:
        return Hang() if is_late and "late" in request.text else Say("done")

    async with backend(script) as model, AsyncExitStack() as stays:
        async with serving(tmp_path, model, **options) as client:
            batch = await client.create([chat("early"), chat("late")])
            running = client.server.batches.running
            while batch["id"] not in running or running[batch["id"]].lines.left > 1:
                await asyncio.sleep(0.01)
            other = await stays.enter_async_context(serving(tmp_path, model, **options))  # else it could take the batch
            assert (await other.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
            assert batch["id"] not in other.server.batches.running
        is_late, later = False, 601.0
        done = await other.wait(batch["id"])
        output, _ = await other.outcomes(done)
        assert {line["custom_id"] for line in output} == {"early", "late"}
        assert [request.text for request in model.requests].count("say early") == 1


async def test_a_batch_is_cancelled_through_any_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)
    async with (
        backend(lambda request: Hang()) as model,
        serving(tmp_path, model, shared=True) as other,
        serving(tmp_path, model, shared=True) as client,
    ):
        batch = await client.create([chat("a")])
        await model.wait_requests(1)
        if batch["id"] not in client.server.batches._stops:  # the other one was faster
            client, other = other, client
        assert (await other.post(f"/v1/batches/{batch['id']}/cancel"))["status"] == "cancelling"
        while not client.server.batches._stops[batch["id"]].is_set():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("in_redis", [False, True])
async def test_the_files_of_a_batch_stay_untouched_while_a_process_that_lost_its_lease_has_them(
    in_redis: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    redis: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that was stopped for longer than its lease goes on where it was, in the middle of a line."""
    is_late = True
    options: dict[str, object] = {"store": redis.url} if in_redis else {"shared": True}
    options["now"] = lambda: time.time() + (0.0 if is_late else 60.0)
    monkeypatch.setattr(batches, "AGAIN_SECONDS", 0.02)

    def script(request: Request) -> ScriptedReply:
        return Hang() if is_late and "late" in request.text else Say("done")

    async with backend(script) as model:
        async with serving(tmp_path, model, **options) as client:
            batch = await client.create([chat("early"), chat("late")])
            await model.wait_requests(2)
            while not client.server.batches.running[batch["id"]].lines.tallied.completed:
                await asyncio.sleep(0.01)
        folder, is_late = tmp_path / "batches" / batch["id"], False
        part = folder / "output.jsonl.part"
        written = part.read_bytes() + b'{"id": "half of a l'
        part.write_bytes(written)
        held, asked = Lock(folder / "lock"), model.received
        async with serving(tmp_path, model, **options) as client:
            async with asyncio.timeout(30):
                while "another server works on it" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert part.read_bytes() == written and model.received == asked
            held.release()
            output, errors = await client.outcomes(await client.wait(batch["id"]))
            assert sorted(line["custom_id"] for line in output) == ["early", "late"] and not errors


async def test_a_second_server_on_the_same_data_is_refused_unless_both_share_it(tmp_path: Path) -> None:
    async with backend() as model:
        for first, second in ((False, False), (False, True), (True, False)):
            async with serving(tmp_path, model, shared=first):
                with pytest.raises(SpecError, match=r"in use by .*--shared"):
                    async with serving(tmp_path, model, shared=second):
                        pass
        async with serving(tmp_path, model, shared=True), serving(tmp_path, model, shared=True):
            pass


async def test_workers_of_other_processes_answer_lines_of_a_batch_in_redis(tmp_path: Path, redis: RedisServer) -> None:
    joined = asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        await joined.wait()
        return Fail(400) if "refuse" in request.text else Say("done", latency=0.01)

    options: dict[str, object] = {"store": redis.url, "max_inflight": 4}
    async with backend(script) as model, serving(tmp_path, model, **options) as client:
        trust = Trust(fingerprint=client.server.joining.rpartition(" ")[2], environ={})
        workers = JoinedWorkers(StoreAddress.parse(redis.url, named=False), "serve-", trust, import_from=None, wait=60)
        working = asyncio.create_task(workers.work())
        lines = [*(chat(f"line-{number}") for number in range(60)), chat("bad", "refuse this")]
        batch = await client.create(lines)
        while not any(worker.run is not None for worker in workers._workers.values()):
            await asyncio.sleep(0.01)
        joined.set()
        done = await client.wait(batch["id"])
        assert done["request_counts"] == {"total": 61, "completed": 60, "failed": 1}, done
        assert done["usage"]["output_tokens"] > 0
        output, errors = await client.outcomes(done)
        assert {line["custom_id"] for line in output} == {f"line-{number}" for number in range(60)}
        assert [line["response"]["status_code"] for line in errors] == [400]
        assert len(model.requests) == 61
        async with asyncio.timeout(20):  # the run is deleted after its batch is reported as done
            while any(done["id"] in name for name in run_names(StoreAddress.parse(redis.url, named=False))):
                await asyncio.sleep(0.01)
        workers.drain()
        assert (await working).rows > 0


def test_the_key_of_a_model_does_not_go_to_the_store(tmp_path: Path) -> None:
    models = open_models(None, {"m": {"url": "vllm://x:1", "api_key": "secret"}})
    with pytest.raises(SpecError, match="environment"):
        BatchService(ServeOptions(tmp_path, store="redis://localhost/0"), models)
    named = open_models("vllm://every:1", {"m": {"url": "vllm://x:1?priority=true", "model": "inner"}})
    again, _ = open_backend(named.url)
    assert isinstance(again, ServedModels) and again.url == named.url


async def test_a_command_leaves_the_catalog_in_the_form_that_several_machines_can_use(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model, shared=True) as client:
        with Catalog(tmp_path) as catalog:  # as the commands of `serve` open it
            key = catalog.add_tenant(Tenant("one"))
        assert not (tmp_path / "serve.db-wal").exists()
        done = await client.with_key(key).wait((await client.with_key(key).create([chat("a")]))["id"])
        assert done["status"] == "completed" and not (tmp_path / "serve.db-wal").exists()

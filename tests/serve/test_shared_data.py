"""Several servers on the same data: each answers for all batches, and one takes over what another left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.serve.served import chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.cli.main import main
from batch_agent.serve import server
from batch_agent.testing import Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply


async def test_a_second_server_continues_the_batches_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)
    monkeypatch.setattr(server, "LEASE_SECONDS", 0.5)
    is_late = True

    def script(request: Request) -> ScriptedReply:
        return Hang() if is_late and "late" in request.text else Say("done")

    async with backend(script) as model, serving(tmp_path, model, shared=True) as other:
        async with serving(tmp_path, model, shared=True) as client:
            batch = await client.create([chat("early"), chat("late")])
            running = client.server.batches.running
            while batch["id"] not in running or running[batch["id"]].lines.left > 1:
                await asyncio.sleep(0.01)
            assert (await other.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
            assert batch["id"] not in other.server.batches.running
        is_late = False
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
        assert (await other.post(f"/v1/batches/{batch['id']}/cancel"))["status"] == "cancelling"
        while not client.server.batches._stops[batch["id"]].is_set():
            await asyncio.sleep(0.01)


def test_another_store_is_refused_with_what_to_use_instead(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--backend", "vllm://x:1", "--data", str(tmp_path), "--store", "redis://localhost/0"])
    told = capsys.readouterr().err
    assert "redis://localhost/0" in told and "use --shared" in told

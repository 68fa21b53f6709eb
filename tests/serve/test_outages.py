"""Servers behind ``serve`` that refuse, hang or are away: what lines, people, supervisors and the operator get."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.serve.served import CHAT, Client, chat, serving
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.serve import batches, upstreams
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.models import open_models
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedServer
from batch_agent.testing.replies import ScriptedReply

SPENT: ScriptedReply = Fail(429, {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}})
LONG = Fail(429, headers={"Retry-After": "86400"})


class Switch:
    """A script that refuses every request until it is turned off."""

    def __init__(self, refusal: ScriptedReply) -> None:
        self.refusal: ScriptedReply | None = refusal

    def __call__(self, request: Request) -> ScriptedReply:
        return Say("good") if self.refusal is None else self.refusal


async def ask(client: Client, text: str = "hello", *, model: str = "m", stream: bool = False) -> tuple[int, str, bytes]:
    """Return status, ``Retry-After`` and body of a person's request."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {"Authorization": f"Bearer {client.key}"}
    async with client.session.post(client.url + CHAT, json=body, headers=headers) as response:
        return response.status, response.headers.get("Retry-After", ""), await response.read()


async def wait_health(client: Client, status: int) -> None:
    while (await client.send("GET", "/health"))[0] != status:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("refusal", "status"), [(Fail(401), 503), (Fail(402), 503), (SPENT, 503), (Fail(403), 403), (Fail(404), 404)]
)
async def test_a_line_at_fault_fails_alone(tmp_path: Path, refusal: ScriptedReply, status: int) -> None:
    def script(request: Request) -> ScriptedReply:
        return refusal if request.text == "say l4" else Say("good", latency=0.01)

    async with backend(script) as model, serving(tmp_path, model) as client:
        done = await client.wait((await client.create([chat(f"l{number}") for number in range(40)]))["id"])
        assert done["status"] == "completed"
        output, errors = await client.outcomes(done)
        assert len(output) == 39 and [line["custom_id"] for line in errors] == ["l4"]
        assert errors[0]["response"]["status_code"] == status
        assert (await client.send("GET", "/health"))[0] == 200


async def test_a_line_that_is_alone_and_at_fault_fails(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Fail(401) if request.text == "say only" else Say("good")

    async with backend(script) as model, serving(tmp_path, model) as client:
        done = await client.wait((await client.create([chat("only")]))["id"])
        assert done["status"] == "completed" and done["request_counts"]["failed"] == 1
        assert (await ask(client))[0] == 200


HOLD = Fail(503, headers={"Retry-After": "90"})


@pytest.mark.parametrize("refusal", [Fail(401), Fail(403), SPENT, Fail(404), LONG, HOLD])
async def test_while_a_server_refuses_all_people_are_told_and_lines_wait(
    tmp_path: Path, refusal: ScriptedReply
) -> None:
    switch = Switch(refusal)
    async with backend(switch) as model, serving(tmp_path, model, outage_patience=0.5) as client:
        batch = await client.create([chat(f"l{number}") for number in range(20)])
        await wait_health(client, 503)
        for status, again, body in await asyncio.gather(ask(client), ask(client, stream=True)):
            assert status == 503 and int(again) >= 1 and b"cannot be answered now" in body and b"127.0.0.1" not in body
        _, health = await client.send("GET", "/health")
        assert health == {"status": "unavailable", "models": [], "unavailable": ["m", "other"]}
        assert (await client.send("GET", "/health/live"))[0] == 200
        told = await client.get("/serve/status")
        (endpoint,) = told["endpoints"]
        assert not endpoint["up"] and endpoint["needs"] and endpoint["why"] and model.address in endpoint["upstream"]
        assert endpoint["why"] in told["waiting_because"]
        _, page = await client.send("GET", "/metrics")
        assert b"batch_agent_serve_endpoint_down_seconds{" in page and b'_endpoint_up{endpoint="backend"} 0' in page
        waits = await client.get(f"/v1/batches/{batch['id']}")
        assert waits["status"] == "in_progress" and not waits["request_counts"]["failed"]


async def test_lines_wait_until_the_deadline_and_no_longer(tmp_path: Path) -> None:
    switch = Switch(Fail(401))
    async with backend(switch) as model, serving(tmp_path, model) as client:
        file = await client.upload([chat("a"), chat("b")])
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "2s"}
        ended = await client.wait((await client.post("/v1/batches", body))["id"])
        assert ended["status"] == "expired"
        _, errors = await client.outcomes(ended)
        assert [line["error"]["code"] for line in errors] == ["batch_expired", "batch_expired"]


async def test_a_rate_limit_at_work_is_no_outage(tmp_path: Path) -> None:
    held = Fail(429, headers={"Retry-After": "5"})
    async with backend(Switch(held)) as model, serving(tmp_path, model) as client:
        await client.create([chat("a"), chat("b")])
        server = client.server.dispatcher.scheduler.endpoints[0].server
        while not server.held_until:
            await asyncio.sleep(0.01)
        assert (await client.send("GET", "/health"))[0] == 200
        assert (await client.get("/serve/status"))["endpoints"][0]["up"]


@pytest.mark.parametrize("refusal", [Fail(401), Fail(404), Fail(500)])
async def test_the_first_good_answer_ends_an_outage(tmp_path: Path, refusal: ScriptedReply) -> None:
    switch = Switch(refusal)
    async with backend(switch) as model, serving(tmp_path, model) as client:
        batch = await client.create([chat(f"l{number}") for number in range(20)])
        await wait_health(client, 503)
        person = asyncio.create_task(ask(client))
        await asyncio.sleep(0.2)
        switch.refusal = None
        assert (await person)[0] == 200
        done = await client.wait(batch["id"])
        assert done["status"] == "completed" and done["request_counts"]["completed"] == 20
        assert (await client.send("GET", "/health"))[0] == 200


async def test_a_model_that_is_away_stops_neither_the_others_nor_their_people(tmp_path: Path) -> None:
    away, good = ScriptedServer(lambda request: Fail(500), models=["away"]), ScriptedServer(models=["here"])
    async with away, good:
        models = open_models(None, {"away": away.backend_url, "here": good.backend_url})
        async with serving(tmp_path, models, outage_patience=0.5) as client:
            mixed = [chat(f"m{number}", model=("away", "here")[number % 2]) for number in range(40)]
            waits = [await client.create([chat(f"a{number}", model="away") for number in range(200)]) for _ in range(5)]
            half = await client.create(mixed)
            while (await client.send("GET", "/health"))[1]["unavailable"] != ["away"]:
                await asyncio.sleep(0.05)
            goes = await client.create([chat(f"b{number}", model="here") for number in range(200)])
            done = await client.wait(goes["id"])
            assert done["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
            assert (await ask(client, model="here"))[0] == 200
            assert (await ask(client, model="away"))[0] == 503
            status, health = await client.send("GET", "/health")
            assert status == 200 and health == {"status": "degraded", "models": ["here"], "unavailable": ["away"]}
            while (await client.get(f"/v1/batches/{half['id']}"))["request_counts"]["completed"] < 20:
                await asyncio.sleep(0.05)
            for batch in (*waits, half):
                now = await client.get(f"/v1/batches/{batch['id']}")
                assert now["status"] == "in_progress" and not now["request_counts"]["failed"]


async def test_health_is_true_without_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "IDLE_SECONDS", "READY_SECONDS"):
        monkeypatch.setattr(upstreams, name, 0.05)
    async with backend() as model:
        port = int(model.address.rpartition(":")[2])
        async with serving(tmp_path, model) as client:
            await wait_health(client, 200)
            await model.__aexit__()
            await wait_health(client, 503)
            async with type(model)(model._script, port=port, models=["m", "other"]):
                await wait_health(client, 200)
            await wait_health(client, 503)
        await model.__aenter__()


async def test_a_run_that_ends_early_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "AGAIN_SECONDS", 0.01)
    gate = asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        if request.text != "say l0":
            await gate.wait()
        return Say("good")

    async with backend(script) as model, serving(tmp_path, model, max_inflight=4) as client:
        batch = await client.create([chat(f"l{number}") for number in range(12)])
        while not (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"]:
            await asyncio.sleep(0.01)
        run = client.server.batches.running[batch["id"]].run
        assert run is not None
        run.drain()
        gate.set()
        done = await client.wait(batch["id"])
        assert done["status"] == "completed" and done["request_counts"]["completed"] == 12


async def test_a_run_that_always_ends_early_fails_the_batch_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "AGAIN_SECONDS", 0.001)

    async def script(request: Request) -> ScriptedReply:
        return Say("good") if request.text == "say l0" else Hang()

    async with backend(script) as model, serving(tmp_path, model, max_inflight=4) as client:
        batch = await client.create([chat(f"l{number}") for number in range(12)])
        while not (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"]:
            await asyncio.sleep(0.01)
        while (await client.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress":
            running = client.server.batches.running.get(batch["id"])
            if running is not None and running.run is not None:
                running.run.cancel()
            await asyncio.sleep(0.01)
        done = await client.wait(batch["id"])
        assert done["status"] == "failed" and done["errors"]["data"][0]["code"] == "run_failed"
        output, errors = await client.outcomes(done)
        assert [line["custom_id"] for line in output] == ["l0"] and len(errors) == 11
        assert {line["error"]["code"] for line in errors} == {"batch_failed"}


async def test_the_command_asks_the_running_server_and_says_what_it_needs(tmp_path: Path) -> None:
    command = ("serve", "status", "--data", str(tmp_path))
    async with backend(Switch(Fail(401))) as model:
        async with serving(tmp_path, model) as client:
            await client.create([chat("a")])
            await wait_health(client, 503)
            told = await output_of(*command)
            assert f"{model.backend_url}: down since" in told and "it needs a key that the server accepts" in told
            tenant = client.with_key(client.server.catalog.add_tenant(Tenant("one")))
            await tenant.wait((await tenant.create([chat("b")]))["id"], "in_progress")
            why = (await tenant.get("/serve/status"))["waiting_because"]
            assert "every request is denied" in why and model.address not in why
        told = await output_of(*command)
        assert f"no running server answered; this is what {tmp_path} has" in told
        assert "2 unfinished batches, 2 lines left" in told


async def output_of(*command: str) -> str:
    process = await start("-m", "batch_agent", *command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert not await process.wait()
    return out.decode()

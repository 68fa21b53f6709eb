"""Interactive requests, whole and streamed, to backends of the same and of another wire."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests.serve.served import CHAT, Client, chat, serving
from tests.serve.test_openai_batches import backend

from batch_agent.dispatch import load_poller
from batch_agent.door import Handler
from batch_agent.scheduler.numbers import N
from batch_agent.serve import line_scheduler
from batch_agent.serve.asking import PRIORITY
from batch_agent.serve.catalog import Tenant
from batch_agent.testing import Hang, Request, Say
from batch_agent.testing.replies import Body, ScriptedReply
from batch_agent.testing.server import ScriptedServer, VllmMetrics

ASKED = [{"role": "user", "content": "hello"}]


async def events_of(client: Client, path: str, body: dict[str, object]) -> list[Any]:
    headers = {"Authorization": f"Bearer {client.key}"}
    async with client.session.post(client.url + path, json=body, headers=headers) as response:
        assert response.status == 200 and response.content_type == "text/event-stream", await response.read()
        text = await response.read()
    data = [line.removeprefix(b"data: ") for line in text.splitlines() if line.startswith(b"data: ")]
    return [orjson.loads(each) for each in data if each != b"[DONE]"]


async def test_each_wire_is_answered_in_its_own_form(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        told = await client.post(CHAT, {"model": "m", "messages": ASKED})
        assert told["choices"][0]["message"]["content"] == "echo hello"
        told = await client.post("/v1/responses", {"model": "m", "input": "hello"})
        assert told["output"][0]["content"][0]["text"] == "echo hello"
        told = await client.post("/v1/messages", {"model": "m", "max_tokens": 9, "messages": ASKED})
        assert told["content"] == [{"type": "text", "text": "echo hello"}]
        told = await client.post("/v1/completions", {"model": "m", "prompt": "hello"})
        assert told["choices"][0]["text"] == "echo hello"


async def test_each_wire_is_streamed_piece_by_piece(tmp_path: Path) -> None:
    async with backend(lambda request: Say("one two three four five six")) as model, serving(tmp_path, model) as client:
        chunks = await events_of(client, CHAT, {"model": "m", "messages": ASKED, "stream": True})
        pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
        assert "".join(filter(None, pieces)) == "one two three four five six" and len(pieces) > 3
        events = await events_of(client, "/v1/responses", {"model": "m", "input": "hello", "stream": True})
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "one two three four five six"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "one two three four five six"
        body = {"model": "m", "max_tokens": 9, "messages": ASKED, "stream": True}
        events = await events_of(client, "/v1/messages", body)
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(deltas) == "one two three four five six"
        assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
        assert events[-2]["usage"]["output_tokens"] > 0


async def test_the_first_piece_arrives_before_the_answer_is_complete(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Say("first piece, and then much more text" * 100, chunk_delay=0.1)

    for path in (CHAT, "/v1/messages"):
        async with backend(script) as model, serving(tmp_path / path[4:].replace("/", "-"), model) as client:
            body = {"model": "m", "max_tokens": 9, "messages": ASKED, "stream": True}
            headers = {"Authorization": f"Bearer {client.key}"}
            async with client.session.post(client.url + path, json=body, headers=headers) as response:
                line = b""
                while b"first" not in line:
                    line = await response.content.readline()
                assert model.inflight == 1
            await model.wait_disconnects(1)  # a client that leaves ends its request


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"model": "unknown", "messages": ASKED}, 404),
        (CHAT, {"messages": ASKED}, 400),
        (CHAT, {"model": "m", "messages": []}, 400),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "refuse"}]}, 400),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "refuse"}], "stream": True}, 400),
        (CHAT, b"[1", 400),
        ("/v1/messages", {"model": "m", "messages": [], "max_tokens": 1}, 400),
        ("/v1/embeddings", {"model": "m", "input": "text"}, 404),
        ("/v1/nothing", {}, 404),
        ("/v1/batches/batch_x", {}, 405),
    ],
)
async def test_a_wrong_request_gets_an_error_of_its_wire(tmp_path: Path, path: str, body: object, status: int) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        answered, told = await client.send("POST", path, body)
        assert answered == status, told
        assert told["error"]["message"] and ("type" in told) == (path == "/v1/messages")


async def test_a_wrong_key_gets_401(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        for path in (CHAT, "/v1/messages", "/v1/files", "/v1/models"):
            status, told = await client.with_key("wrong").send("POST", path, {})
            assert status == 401 and "error" in told


async def test_a_file_above_the_limit_gets_413(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        small = client.with_key(client.server.catalog.add_tenant(Tenant("small", max_file=100)))
        assert (await small.try_upload(b"x" * 100))[0] == 200
        assert (await small.try_upload(b"x" * 101))[0] == 413
        assert (await small.try_upload(b"x" * 300_000))[0] == 413
        assert [path.name for path in (tmp_path / "files").iterdir() if path.suffix != ".json"] == [
            (await small.get("/v1/files"))["data"][0]["id"]
        ]


class WithEmbeddings(ScriptedServer):
    paths = (*ScriptedServer.paths, "/v1/embeddings")

    def check(self, request: Request) -> None:
        pass


async def test_embeddings_and_completions_pass_through_as_they_are(tmp_path: Path) -> None:
    document: Any = {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}}

    def script(request: Request) -> ScriptedReply:
        return Body(document)

    async with WithEmbeddings(script, models=["m"]) as model, serving(tmp_path, model) as client:
        assert await client.post("/v1/embeddings", {"model": "m", "input": ["text"], "dimensions": 1}) == document
        assert model.requests[-1].body == {"model": "m", "input": ["text"], "dimensions": 1}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "text"}}
        done = await client.wait((await client.create([line], endpoint="/v1/embeddings"))["id"])
        output, _ = await client.outcomes(done)
        assert output[0]["response"]["body"] == document and done["usage"]["input_tokens"] == 3


async def test_batches_of_every_endpoint_are_answered(tmp_path: Path) -> None:
    asks: dict[str, dict[str, object]] = {
        "/v1/responses": {"model": "m", "input": "hello"},
        "/v1/completions": {"model": "m", "prompt": "hello"},
    }
    async with backend() as model, serving(tmp_path, model) as client:
        for endpoint, body in asks.items():
            line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
            done = await client.wait((await client.create([line], endpoint=endpoint))["id"])
            output, _ = await client.outcomes(done)
            assert done["status"] == "completed" and b"echo hello" in orjson.dumps(output)


async def test_models_have_the_form_of_the_client(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        listed = await client.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["m", "other"] and listed["object"] == "list"
        listed = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [card["type"] for card in listed["data"]] == ["model", "model"] and listed["has_more"] is False
        assert (await client.get("/v1/models/other"))["id"] == "other"
        assert (await client.send("GET", "/v1/models/none"))[0] == 404


async def test_an_interactive_request_does_not_wait_for_lines(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Hang() if "line" in request.text else Say("at once")

    async with backend(script) as model, serving(tmp_path, model, max_inflight=4) as client:
        batch = await client.create([chat(f"line-{number}") for number in range(50)])
        await model.wait_requests(3)
        told = await client.post(CHAT, {"model": "m", "messages": ASKED})
        assert told["choices"][0]["message"]["content"] == "at once"
        await client.post(f"/v1/batches/{batch['id']}/cancel")


async def test_no_line_starts_while_an_interactive_request_may_wait_in_the_engines_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_poller, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(load_poller, "N", replace(N, refresh=0.01))
    queued, answer = 3, asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        if "hello" in request.text:
            await answer.wait()
        return Say("done")

    def metrics() -> str:
        told = VllmMetrics("m", "scripted").put("num_requests_running", "Requests in flight", 1)
        return str(told.put("num_requests_waiting", "Requests in the queue", queued))

    async with (
        ScriptedServer(script, models=["m"], metrics=metrics) as model,  # type: ignore[arg-type]
        serving(tmp_path, model, interactive_latency=None) as client,
    ):
        person = asyncio.create_task(client.post(CHAT, {"model": "m", "messages": ASKED}))
        await model.wait_requests(1)
        while not client.server.line_scheduler.may_wait_in_engine():
            await asyncio.sleep(0.01)
        batch = await client.create([chat("a"), chat("b")])
        while (await client.get("/serve/status"))["waiting_because"] != "interactive requests come first":
            await asyncio.sleep(0.01)
        assert len(model.requests) == 1
        queued = 0
        assert (await client.wait(batch["id"]))["request_counts"]["completed"] == 2
        assert not person.done()
        answer.set()
        await person


class ByPriority(ScriptedServer):
    """A vLLM that was started with --scheduling-policy priority."""

    policy = "priority"

    def table(self) -> dict[str, Mapping[str, Handler]]:
        return {**super().table(), "/server_info": {"GET": self._info}}

    async def _info(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"vllm_config": {"scheduler_config": {"policy": self.policy}}})


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
async def test_lines_have_a_lower_priority_than_people_where_the_engine_schedules_by_it(
    tmp_path: Path, policy: str
) -> None:
    async with ByPriority(lambda request: Say("done"), models=["m"]) as model:
        model.policy = policy
        async with serving(tmp_path, model) as client:
            await client.wait((await client.create([chat("a")]))["id"])
            message = {"model": "m", "max_tokens": 9, "messages": ASKED}
            batch = await client.post("/v1/messages/batches", {"requests": [{"custom_id": "b", "params": message}]})
            await client.wait_messages(batch["id"])
            await client.post(CHAT, {"model": "m", "messages": ASKED})
            await client.post("/v1/messages", message)
        sent = [request.body.get("priority", 0) for request in model.requests]
    assert sent == ([PRIORITY, PRIORITY, 0, 0] if policy == "priority" else [0, 0, 0, 0])  # vLLM serves the least first


class BesideLines:
    """An engine that reports its load and never answers the first request of a line."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.reported = 0

    def script(self, request: Request) -> ScriptedReply:
        self.asked[request.text] += 1
        return Hang() if "line" in request.text and self.asked[request.text] == 1 else Say("done")

    def metrics(self) -> str:
        self.reported += 1
        told = VllmMetrics("m", "scripted").put("num_requests_running", "Requests in flight", 4)
        return str(told.put("num_requests_waiting", "Requests in the queue", 0))


@asynccontextmanager
async def beside_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[BesideLines, ScriptedServer, Client, str]]:
    """Serve in front of such an engine, with a batch of four lines in flight."""
    monkeypatch.setattr(load_poller, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(load_poller, "N", replace(N, refresh=0.01))
    engine = BesideLines()
    async with (
        ScriptedServer(engine.script, models=["m"], metrics=engine.metrics) as model,
        serving(tmp_path, model, max_inflight=8, **options) as client,
    ):
        batch = await client.create([chat(f"line-{number}") for number in range(4)])
        await model.wait_requests(4)
        read = engine.reported
        while engine.reported < read + 2:
            await asyncio.sleep(0.01)
        yield engine, model, client, batch["id"]


async def test_young_lines_make_room_when_people_come_and_start_again_at_no_cost_to_their_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with beside_lines(tmp_path, monkeypatch) as (engine, model, client, id):
        told = await client.post(CHAT, {"model": "m", "messages": ASKED})
        await model.wait_disconnects(4)
        done = await client.wait(id)
        outputs, errors = await client.outcomes(done)
        assert [line["custom_id"] for line in sorted(outputs, key=lambda line: line["custom_id"])] == [
            f"line-{number}" for number in range(4)
        ]
        assert not errors and {engine.asked[f"say line-{number}"] for number in range(4)} == {2}
        # The tokens of the cancelled requests are not counted: their line did not need them.
        used = sum(line["response"]["body"]["usage"]["total_tokens"] for line in outputs)
        (account,) = client.server.line_scheduler.accounts.values()
        assert account.tokens == used + told["usage"]["total_tokens"]
        assert not client.server.line_scheduler.inflight and not caplog.records  # its run went on


async def test_old_lines_stay_in_flight_when_people_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_scheduler, "YOUNG_SECONDS", 0.0)
    async with beside_lines(tmp_path, monkeypatch) as (engine, _, client, id):
        await client.post(CHAT, {"model": "m", "messages": ASKED})
        assert {engine.asked[f"say line-{number}"] for number in range(4)} == {1}
        await client.post(f"/v1/batches/{id}/cancel")


async def test_a_batch_is_cancelled_while_its_lines_make_room_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beside_lines(tmp_path, monkeypatch) as (engine, model, client, id):
        people = client.server.line_scheduler.governor
        people.waiting += 1  # one who is not served yet
        await client.post(CHAT, {"model": "m", "messages": ASKED})
        await model.wait_disconnects(4)
        await client.post(f"/v1/batches/{id}/cancel")
        batch = await client.wait(id)
        assert batch["status"] == "cancelled" and batch["request_counts"]["completed"] == 0
        assert {engine.asked[f"say line-{number}"] for number in range(4)} == {1}
        people.waiting -= 1


async def test_lines_that_made_room_are_asked_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with beside_lines(tmp_path, monkeypatch) as (engine, model, client, id):
        client.server.line_scheduler.governor.waiting += 1
        await client.post(CHAT, {"model": "m", "messages": ASKED})
        await model.wait_disconnects(4)
    async with ScriptedServer(engine.script, models=["m"]) as model, serving(tmp_path, model) as client:
        done = await client.wait(id)
        assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}

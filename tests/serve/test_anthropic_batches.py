"""Message Batches of Anthropic's API, answered by a backend of another wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.serve.served import Client, serving
from tests.serve.test_openai_batches import backend

from batch_agent.serve import batches
from batch_agent.testing import Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply

ROUTE = "/v1/messages/batches"


def ask(name: str, text: str = "hello", **fields: object) -> dict[str, object]:
    params = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": name, "params": params}


async def results_of(client: Client, id: str) -> dict[str, dict[str, object]]:
    lines = await client.lines_at(f"{ROUTE}/{id}/results")
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["result"] for line in lines}


async def test_requests_succeed_or_are_errored(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        wrong = [ask("b", "refuse"), ask("c", messages=[]), ask("d", model="unknown")]
        batch = await client.post(ROUTE, {"requests": [ask("a"), *wrong]})
        assert batch["type"] == "message_batch" and batch["processing_status"] == "in_progress"
        assert batch["request_counts"]["processing"] == 4 and batch["results_url"] is None
        done = await client.wait_messages(batch["id"])
        counts = {"processing": 0, "succeeded": 1, "errored": 3, "canceled": 0, "expired": 0}
        assert done["request_counts"] == counts and done["ended_at"]
        assert done["results_url"].endswith(f"{ROUTE}/{batch['id']}/results")
        results = await results_of(client, batch["id"])
        message = results["a"]["message"]
        assert isinstance(message, dict)
        assert message["content"] == [{"type": "text", "text": "echo hello"}] and message["type"] == "message"
        for name, kind in (("b", "invalid_request_error"), ("c", "invalid_request_error"), ("d", "not_found_error")):
            error = results[name]["error"]
            assert isinstance(error, dict) and error["error"]["type"] == kind


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"requests": []}, "at least 1"),
        ({}, "requests"),
        ([], "object"),
        (b"{", "requests"),
        ({"requests": {}}, "list"),
        ({"requests": [ask("a"), ask("a")]}, "unique"),
        ({"requests": [{"params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "x" * 65, "params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "a b", "params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "params"),
        ({"requests": [{**ask("a"), "more": 1}]}, "more"),
        ({"requests": [ask("a")], "more": 1}, "expecting"),
        (b'{"requests": [' + b"[" * 100_000, "requests"),
    ],
)
async def test_what_is_wrong_with_the_list_creates_no_batch(tmp_path: Path, body: object, told: str) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        status, document = await client.send("POST", ROUTE, body)
        assert status == 400 and document["type"] == "error", document
        assert document["error"]["type"] == "invalid_request_error" and told in document["error"]["message"]
        assert (await client.get(ROUTE))["data"] == []
        assert not list((tmp_path / "batches").iterdir())


async def test_pages_go_in_both_directions(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        ids = [(await client.post(ROUTE, {"requests": [ask("a")]}))["id"] for _ in range(5)][::-1]
        first = await client.get(f"{ROUTE}?limit=2")
        assert [each["id"] for each in first["data"]] == ids[:2] and first["has_more"]
        assert (first["first_id"], first["last_id"]) == (ids[0], ids[1])
        second = await client.get(f"{ROUTE}?limit=2&after_id={first['last_id']}")
        assert [each["id"] for each in second["data"]] == ids[2:4]
        back = await client.get(f"{ROUTE}?limit=1&before_id={ids[2]}")
        assert [each["id"] for each in back["data"]] == ids[1:2] and back["has_more"]


async def test_a_batch_is_cancelled_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: Request) -> ScriptedReply:
        return Hang() if "never" in request.text else Say("done")

    monkeypatch.setattr(batches, "GRACE_SECONDS", 0.05)
    async with backend(script) as model, serving(tmp_path, model) as client:
        batch = await client.post(ROUTE, {"requests": [ask("a"), ask("b", "never")]})
        await model.wait_requests(2)
        while client.server.batches.running[batch["id"]].lines.left > 1:
            await asyncio.sleep(0.01)
        status, told = await client.send("DELETE", f"{ROUTE}/{batch['id']}")
        assert status == 400, told
        told = await client.post(f"{ROUTE}/{batch['id']}/cancel")
        assert told["processing_status"] == "canceling" and told["cancel_initiated_at"]
        done = await client.wait_messages(batch["id"])
        assert done["request_counts"]["succeeded"] == 1 and done["request_counts"]["canceled"] == 1
        assert (await results_of(client, batch["id"]))["b"] == {"type": "canceled"}
        status, told = await client.send("DELETE", f"{ROUTE}/{batch['id']}")
        assert (status, told) == (200, {"id": batch["id"], "type": "message_batch_deleted"})
        assert (await client.send("GET", f"{ROUTE}/{batch['id']}"))[0] == 404
        assert not list((tmp_path / "batches").iterdir())


async def test_what_is_not_done_in_the_window_expires(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Hang() if "never" in request.text else Say("done")

    async with backend(script) as model, serving(tmp_path, model, anthropic_window=1.0) as client:
        batch = await client.post(ROUTE, {"requests": [ask("a"), ask("b", "never")]})
        done = await client.wait_messages(batch["id"])
        assert done["request_counts"]["expired"] == 1
        assert (await results_of(client, batch["id"]))["b"] == {"type": "expired"}

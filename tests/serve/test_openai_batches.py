"""Batches of OpenAI's API, by requests on the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from tests.serve.served import CHAT, chat, serving

from batch_agent.testing import Fail, Hang, Request, Say, ScriptedServer
from batch_agent.testing.replies import ScriptedReply


def echo(request: Request) -> ScriptedReply:
    return Fail(400) if "refuse" in request.text else Say(f"echo {request.text}")


def backend(script: object = echo) -> ScriptedServer:
    return ScriptedServer(script, models=["m", "other"])  # type: ignore[arg-type]


async def test_every_line_has_its_outcome_in_one_of_the_two_files(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        lines = [chat(f"line-{number}") for number in range(20)] + [chat("bad", "refuse this")]
        batch = await client.create(lines, metadata={"of": "tests"})
        assert batch["status"] == "validating" and batch["object"] == "batch" and batch["metadata"] == {"of": "tests"}
        done = await client.wait(batch["id"])
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
        assert done["model"] == "m" and done["usage"]["total_tokens"] > 0
        assert done["in_progress_at"] and done["finalizing_at"] and done["completed_at"]
        output, errors = await client.outcomes(done)
        assert {line["custom_id"] for line in output} == {f"line-{number}" for number in range(20)}
        first = next(line for line in output if line["custom_id"] == "line-3")
        assert first["error"] is None and first["response"]["status_code"] == 200
        assert first["response"]["body"]["choices"][0]["message"]["content"] == "echo say line-3"
        (error,) = errors
        assert error["custom_id"] == "bad" and error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["message"]


async def test_the_files_can_be_split_at_every_line_end_of_unicode(tmp_path: Path) -> None:
    text = "one\x85two\u2028three\u2029four and “five”"
    async with backend(lambda request: Say(text)) as model, serving(tmp_path, model) as client:
        done = await client.wait((await client.create([chat("a\u2028b"), chat("c")]))["id"])
        _, content = await client.send("GET", f"/v1/files/{done['output_file_id']}/content")
        lines = [orjson.loads(line) for line in content.decode().splitlines()]
        assert {line["custom_id"] for line in lines} == {"a\u2028b", "c"}
        assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines} == {text}


async def test_a_client_does_not_see_the_address_of_the_backend(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        done = await client.wait((await client.create([chat("a", "refuse this")]))["id"])
        _, (error,) = await client.outcomes(done)
        _, told = await client.send("POST", CHAT, chat("a", "refuse this")["body"])
        for document in (error["response"]["body"], told):
            message = document["error"]["message"]
            assert message.startswith("the server of the model answered 400: ") and "http" not in message


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b'{"custom_id": \n', "invalid_json_line", 1),
        (b"[]\n", "invalid_json_line", 1),
        (orjson.dumps({**chat("a"), "custom_id": ""}), "missing_required_parameter", 1),
        (orjson.dumps(chat("a")) + b"\n" + orjson.dumps(chat("a")), "duplicate_custom_id", 2),
        (orjson.dumps({**chat("a"), "url": "/v1/embeddings"}), "invalid_url", 1),
        (orjson.dumps({**chat("a"), "method": "GET"}), "invalid_method", 1),
        (orjson.dumps({**chat("a"), "method": None}), "missing_required_parameter", 1),
        (orjson.dumps(chat("a", model="unknown")), "model_not_found", 1),
        (b"\n".join(orjson.dumps(chat(str(number))) for number in range(4)), "too_many_lines", None),
        (b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions"}', "missing_required_parameter", 1),
        (orjson.dumps(chat("a")) + b"\n" + b"[" * 5000 + b"]" * 5000, "invalid_json_line", 2),
    ],
)
async def test_what_is_wrong_with_a_file_fails_the_batch(
    tmp_path: Path, content: bytes, code: str, line: int | None
) -> None:
    async with backend() as model, serving(tmp_path, model, max_lines=3) as client:
        done = await client.wait((await client.create(content))["id"])
        assert done["status"] == "failed" and done["failed_at"] and done["output_file_id"] is None
        error = done["errors"]["data"][0]
        assert (error["code"], error["line"]) == (code, line) and error["message"]
        assert model.received == 0


async def test_a_restarted_server_goes_on_without_paying_twice(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        if "late" in request.text:
            await gate.wait()
        return Say(f"echo {request.text}")

    async with backend(script) as model:
        lines = [chat(f"early-{number}") for number in range(5)] + [chat(f"late-{number}") for number in range(5)]
        async with serving(tmp_path, model) as client:
            batch = await client.create(lines)
            while (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 5:
                await asyncio.sleep(0.01)
            client.server.line_scheduler.resting = True
            client.server.batches.drain = _at_once  # type: ignore[method-assign]
        before = model.received
        gate.set()
        async with serving(tmp_path, model) as client:
            done = await client.wait(batch["id"])
            output, errors = await client.outcomes(done)
        assert done["status"] == "completed" and len(output) == 10 and not errors
        assert len({line["custom_id"] for line in output}) == 10
        assert model.received <= before + 5


async def _at_once(seconds: float) -> None:
    return


async def test_a_cancelled_batch_delivers_what_is_done(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Hang() if "never" in request.text else Say("done")

    async with backend(script) as model, serving(tmp_path, model) as client:
        from batch_agent.serve import batches

        batches.GRACE_SECONDS = 0.1
        batch = await client.create([chat("one"), chat("never-1"), chat("never-2")])
        while (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.01)
        told = await client.post(f"/v1/batches/{batch['id']}/cancel")
        assert told["status"] == "cancelling" and told["cancelling_at"]
        done = await client.wait(batch["id"])
        assert done["status"] == "cancelled" and done["cancelled_at"]
        output, errors = await client.outcomes(done)
        assert [line["custom_id"] for line in output] == ["one"]
        assert {line["custom_id"]: line["error"]["code"] for line in errors} == {
            "never-1": "batch_cancelled",
            "never-2": "batch_cancelled",
        }
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


async def test_what_is_not_done_at_the_end_of_the_window_expires(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Hang() if "never" in request.text else Say("done")

    async with backend(script) as model, serving(tmp_path, model) as client:
        batch = await client.create([chat("one"), chat("never")], completion_window="1s")
        assert batch["expires_at"] - batch["created_at"] == 1
        done = await client.wait(batch["id"])
        assert done["status"] == "expired" and done["expired_at"]
        output, errors = await client.outcomes(done)
        assert [line["custom_id"] for line in output] == ["one"]
        assert errors[0]["error"]["code"] == "batch_expired" and errors[0]["response"] is None


async def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        files = [await client.upload([chat(str(number))]) for number in range(3)]
        page = await client.get("/v1/files?limit=2")
        assert [file["id"] for file in page["data"]] == [files[2]["id"], files[1]["id"]] and page["has_more"]
        rest = await client.get(f"/v1/files?limit=2&after={page['last_id']}")
        assert [file["id"] for file in rest["data"]] == [files[0]["id"]] and not rest["has_more"]
        assert await client.get(f"/v1/files/{files[0]['id']}/content") == chat("0")
        batch = await client.post(
            "/v1/batches", {"input_file_id": files[0]["id"], "endpoint": CHAT, "completion_window": "24h"}
        )
        status, told = await client.send("DELETE", f"/v1/files/{files[0]['id']}")
        assert (status, told["deleted"]) == (200, True)
        assert (await client.send("GET", f"/v1/files/{files[0]['id']}"))[0] == 404
        assert (await client.wait(batch["id"]))["status"] == "completed"
        assert (await client.send("GET", "/v1/files/../../serve.db"))[0] == 404


async def test_batches_are_listed_newest_first_in_pages(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        ids = [(await client.create([chat("a")]))["id"] for _ in range(3)]
        page = await client.get("/v1/batches?limit=2")
        assert [batch["id"] for batch in page["data"]] == [ids[2], ids[1]] and page["has_more"]
        rest = await client.get(f"/v1/batches?limit=2&after={page['last_id']}")
        assert [batch["id"] for batch in rest["data"]] == [ids[0]] and not rest["has_more"]
        for wrong in ("0", "101", "x"):
            assert (await client.send("GET", f"/v1/batches?limit={wrong}"))[0] == 400


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"endpoint": "/v1/images"}, 400),
        ({"completion_window": "soon"}, 400),
        ({"completion_window": None}, 400),
        ({"input_file_id": "file-of-nobody"}, 404),
        ({"metadata": {"a": 1}}, 400),
        ({"metadata": {str(number): "" for number in range(17)}}, 400),
        ({"metadata": {"a": "x" * 513}}, 400),
        ({"unknown": 1}, 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400),
    ],
)
async def test_a_wrong_request_creates_no_batch(tmp_path: Path, change: dict[str, object], status: int) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        file = await client.upload([chat("a")])
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **change}
        answered, told = await client.send("POST", "/v1/batches", body)
        assert answered == status and told["error"]["message"], told
        assert (await client.get("/v1/batches"))["data"] == []


async def test_an_idempotency_key_creates_one_batch(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        file = await client.upload([chat("a")])
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        key = {"Idempotency-Key": "one"}
        first, second = await asyncio.gather(*(client.post("/v1/batches", body, key) for _ in range(2)))
        assert first["id"] == second["id"]
        status, told = await client.send("POST", "/v1/batches", {**body, "completion_window": "1h"}, key)
        assert status == 409, told
        assert len((await client.get("/v1/batches"))["data"]) == 1


async def test_identical_lines_are_computed_once_if_asked(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        lines = [chat(f"same-{number}", "the same") for number in range(6)] + [chat("another")]
        done = await client.wait((await client.create(lines, metadata={"x_dedupe": "true"}))["id"])
        output, _ = await client.outcomes(done)
        assert len(output) == 7 and done["request_counts"]["completed"] == 7
        assert model.received == 2

"""What a client is told of its own mistakes, and of failures behind the server."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests.serve.served import CHAT, Client, chat, serving
from tests.serve.test_anthropic_batches import ROUTE, ask
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.cli.main import main
from batch_agent.door import Handler
from batch_agent.serve import batches
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.models import open_models
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedServer
from batch_agent.testing.replies import ScriptedReply

ASKED = [{"role": "user", "content": "hello"}]
TOO_LONG = {
    "message": "This model's maximum context length is 9 tokens",
    "type": "invalid_request_error",
    "param": "messages",
    "code": "context_length_exceeded",
}


def told(document: Any) -> Any:
    return {name: document["error"][name] for name in ("type", "param", "code")}


async def test_type_param_and_code_of_an_upstreams_error_reach_the_client(tmp_path: Path) -> None:
    wanted = {name: TOO_LONG[name] for name in ("type", "param", "code")}
    async with backend(lambda request: Fail(400, {"error": TOO_LONG})) as model, serving(tmp_path, model) as client:
        for stream in (False, True):
            status, document = await client.send("POST", CHAT, {"model": "m", "messages": ASKED, "stream": stream})
            assert status == 400 and told(document) == wanted
        done = await client.wait((await client.create([chat("a")]))["id"])
        _, (line,) = await client.outcomes(done)
        assert line["response"]["status_code"] == 400 and told(line["response"]["body"]) == wanted
        status, document = await client.send("POST", "/v1/messages", {"model": "m", "max_tokens": 9, "messages": ASKED})
        assert status == 400 and document["error"]["type"] == "invalid_request_error"


async def test_an_overflow_has_its_code_although_the_server_gave_only_a_number(tmp_path: Path) -> None:
    error = {**TOO_LONG, "type": "BadRequestError", "param": "input_tokens", "code": 400}
    async with backend(lambda request: Fail(400, {"error": error})) as model, serving(tmp_path, model) as client:
        _, document = await client.send("POST", CHAT, {"model": "m", "messages": ASKED})
        assert told(document) == {"type": "BadRequestError", "param": "input_tokens", "code": "context_length_exceeded"}


class HalfAnEvent(ScriptedServer):
    """Breaks off in the middle of the third event of a stream."""

    def table(self) -> dict[str, dict[str, Handler]]:  # type: ignore[override]
        return {**super().table(), CHAT: {"POST": self._half}}  # type: ignore[dict-item]

    async def _half(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
        await response.write(event % b"one " + event % b"two ")
        await response.write((event % b"three")[:40])
        assert request.transport is not None
        await asyncio.sleep(0.05)
        request.transport.abort()
        return response


async def test_a_stream_that_breaks_within_an_event_ends_with_an_error_event_of_its_own(tmp_path: Path) -> None:
    async with HalfAnEvent(lambda request: Hang(), models=["m"]) as model, serving(tmp_path, model) as client:
        headers = {"Authorization": f"Bearer {client.key}"}
        body = {"model": "m", "messages": ASKED, "stream": True}
        async with client.session.post(client.url + CHAT, json=body, headers=headers) as response:
            text = await response.read()
        data = [part.removeprefix(b"data: ") for part in text.split(b"\n\n") if part]
        assert data[-1] == b"[DONE]"
        events = [orjson.loads(part) for part in data[:-1]]  # each one is whole
        assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["one ", "two "]
        assert events[-1]["error"]["message"] and events[-1]["error"]["type"] == "server_error"


async def test_an_unknown_cursor_is_404(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        other = client.with_key(client.server.catalog.add_tenant(Tenant("other")))
        theirs, message = await other.create([chat("a")]), await other.post(ROUTE, {"requests": [ask("a")]})
        own = await client.create([chat("a")])
        for path, id in (
            ("/v1/batches?after=", "batch_nothing"),
            ("/v1/batches?after=", theirs["id"]),
            ("/v1/batches?after=", message["id"]),
            ("/v1/files?after=", "file-nothing"),
            ("/v1/files?after=", theirs["input_file_id"]),
            (f"{ROUTE}?after_id=", "msgbatch_nothing"),
            (f"{ROUTE}?before_id=", message["id"]),
            ("/serve/batches?after=", "batch_nothing"),
        ):
            assert (await client.send("GET", path + id))[0] == 404, path
        assert (await client.get(f"/v1/batches?after={own['id']}"))["data"] == []
        assert (await client.get(f"/v1/files?after={own['input_file_id']}"))["data"] == []


def form(disposition: str, *more: str) -> bytes:
    head = "\r\n".join(["--B", disposition, *more])
    purpose = '--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    return f"{purpose}{head}\r\n\r\n{{}}\r\n--B--\r\n".encode()


@pytest.mark.parametrize(
    "body",
    [
        form("Content-Disposition"),
        form("Content-\0Disposition: form-data; name=file"),
        form(f'Content-Disposition: form-data; name="file"; x="{"a" * 100_000}"'),
        form("Content-Disposition: form-data; name=\"file\"; filename*=utf-8''a%0d%0aX-Injected%3a%20b"),
        form("Content-Disposition: form-data; name=\"file\"; filename*=utf-8''a%0ab"),
        form("Content-Disposition: form-data; name=\"file\"; filename*=utf-8''a%0d%0aX-Injected: b"),
        form('Content-Disposition: form-data; name="file"; filename="a"')[:-12],
        b"nothing of a form",
    ],
)
async def test_a_form_that_is_wrong_is_400_and_leaves_nothing(tmp_path: Path, body: bytes) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        headers = {"Content-Type": "multipart/form-data; boundary=B"}
        status, document = await client.send("POST", "/v1/files", body, headers)
        assert status == 400 and document["error"]["type"] == "invalid_request_error", document
        assert (await client.get("/v1/files"))["data"] == [] and not list((tmp_path / "files").iterdir())
        good = form('Content-Disposition: form-data; name="file"; filename="größe.jsonl"')
        assert (await client.send("POST", "/v1/files", good, headers))[1]["filename"] == "größe.jsonl"


async def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path / "one", model) as client:
        command = ("-m", "batch_agent", "serve", "--backend", model.backend_url, "--reserve", "1K")
        port = client.url.rpartition(":")[2]
        process = await start(*command, "--data", str(tmp_path / "two"), "--port", port, stderr=PIPE)
        _, text = await process.communicate()
        assert process.returncode == 1
        assert text.decode().count("\n") == 1 and "in use by another program" in text.decode()


async def test_what_a_cancelled_batch_did_is_said_in_the_same_words_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batches, "GRACE_SECONDS", 0.02)

    def script(request: Request) -> ScriptedReply:
        return Hang() if "wait" in request.text else Say("done")

    async with backend(script) as model, serving(tmp_path, model) as client:
        batch = await client.create([chat(f"l{n}") for n in range(36)] + [chat(f"w{n}", "wait") for n in range(44)])
        path = f"/serve/batches/{batch['id']}"
        while (await client.get(path))["summary"] != "36 of 80 done":
            await asyncio.sleep(0.01)
        await client.post(f"{path}/cancel")
        await client.wait(batch["id"])
        shown = await client.get(path)
        assert shown["summary"] == "36 of 80 done, 44 cancelled"
        assert (shown["cancelled"], shown["expired"]) == (44, 0)
        assert shown["request_counts"] == {"total": 80, "completed": 36, "failed": 44}
        by_address = ["--url", client.url, "--key", client.key]
        for arguments in (by_address, ["--data", str(tmp_path)]):
            capsys.readouterr()
            assert await asyncio.to_thread(main, ["serve", "list", *arguments]) == 0
            assert "36 of 80 done, 44 cancelled\n" in capsys.readouterr().out


async def test_the_backend_of_another_wire_ends_a_broken_stream_with_an_event_of_the_clients_wire(
    tmp_path: Path,
) -> None:
    async with HalfAnEvent(lambda request: Hang(), models=["m"]) as model:
        models = open_models(model.backend_url, {})
        async with serving(tmp_path, models) as client:
            text = await _stream(client, "/v1/messages", {"model": "m", "max_tokens": 9, "messages": ASKED})
            assert b"one two" in text.replace(b'"}}\n\nevent: content_block_delta\ndata: ', b"") or b"one " in text
            last = text.rstrip(b"\n").rpartition(b"\n\n")[2]
            assert last.startswith(b"event: error\ndata: ")
            assert orjson.loads(last.partition(b"data: ")[2])["error"]["message"]


async def _stream(client: Client, path: str, body: dict[str, object]) -> bytes:
    headers = {"Authorization": f"Bearer {client.key}"}
    async with client.session.post(client.url + path, json={**body, "stream": True}, headers=headers) as response:
        return await response.read()

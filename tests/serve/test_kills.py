"""A server that is killed at any time continues when it is started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest
from tests.serve.served import Client, chat, serving
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.testing import Fail, Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply


@asynccontextmanager
async def served(data: Path, backend_url: str) -> AsyncIterator[Client]:
    """Serve in a process of its own, which is killed at the end."""
    command = ("-m", "batch_agent", "serve", "--data", str(data), "--backend", backend_url)
    process = await start(*command, "--port", "0", "--reserve", "1K", stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
        async with aiohttp.ClientSession() as session:
            yield Client(url, key, session, cast("Any", None))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def begin_upload(client: Client) -> asyncio.StreamWriter:
    """Send half of an upload."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/files HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {client.key}\r\n"
    head += "Content-Type: multipart/form-data; boundary=B\r\nContent-Length: 9000000\r\n\r\n"
    part = '--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    writer.write((head + part).encode() + b"x" * 3_000_000)
    await writer.drain()
    return writer


async def test_a_kill_at_any_time_loses_and_repeats_nothing(tmp_path: Path) -> None:
    gate, seen = asyncio.Event(), list[str]()

    async def script(request: Request) -> ScriptedReply:
        seen.append(request.text)
        if "late" in request.text:
            await gate.wait()
        return Say(f"echo {request.text}")

    early, late = [chat(f"early-{n}") for n in range(30)], [chat(f"late-{n}") for n in range(30)]
    async with backend(script) as model:
        async with served(tmp_path, model.backend_url) as client:
            first = await client.create([*early, *late])
            other = await client.create([*early, *late])
            for batch in (first, other):
                while (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 30:
                    await asyncio.sleep(0.02)
            writer = await begin_upload(client)
            while not list((tmp_path / "files").glob("*.part")):
                await asyncio.sleep(0.02)
            told = await client.post(f"/v1/batches/{other['id']}/cancel")
            assert told["status"] == "cancelling"
            checked = await client.create(b"\n".join(orjson.dumps(chat(f"v-{n}")) for n in range(300)))
        writer.close()
        assert seen.count("say early-0") == 2
        gate.set()
        async with served(tmp_path, model.backend_url) as client:
            done = await client.wait(first["id"])
            output, errors = await client.outcomes(done)
            names = [line["custom_id"] for line in output]
            assert done["status"] == "completed" and not errors
            assert len(names) == len(set(names)) == 60
            assert seen.count("say early-0") == 2  # what was on disk is not asked again
            stopped = await client.wait(other["id"])
            output, errors = await client.outcomes(stopped)
            assert stopped["status"] == "cancelled" and len(output) == 30
            assert {line["error"]["code"] for line in errors} == {"batch_cancelled"} and len(errors) == 30
            assert stopped["request_counts"] == {"total": 60, "completed": 30, "failed": 30}
            assert (await client.wait(checked["id"]))["request_counts"]["completed"] == 300
            assert not list((tmp_path / "files").glob("*.part"))


async def test_outcomes_that_did_not_reach_the_files_are_written_again_from_the_record(tmp_path: Path) -> None:
    """As after a kill between the record and the files: nothing is asked again, and the outcomes are the same."""
    gate = asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        if "late" in request.text:
            await gate.wait()
        return Fail(400) if "refuse" in request.text else Say(f"echo {request.text}")

    lines = [chat(f"l{n}", n=1, logprobs=False) for n in range(20)] + [chat("bad", "refuse it"), chat("late")]
    async with backend(script) as model:
        async with serving(tmp_path, model) as client:
            batch = await client.create(lines)
            while (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"] != {
                "total": 22,
                "completed": 20,
                "failed": 1,
            }:
                await asyncio.sleep(0.01)
            files = [tmp_path / "batches" / batch["id"] / f"{name}.jsonl.part" for name in ("output", "errors")]
            before = [sorted(file.read_bytes().splitlines()) for file in files]
            assert [len(found) for found in before] == [20, 1]
        asked = model.received
        files[0].write_bytes(files[0].read_bytes()[:-40])  # a torn line at its end
        files[0].write_bytes(b"\n".join(files[0].read_bytes().splitlines()[-3:]))  # and most are missing
        files[1].unlink()
        gate.set()
        async with serving(tmp_path, model) as client:
            done = await client.wait(batch["id"])
            assert done["request_counts"] == {"total": 22, "completed": 21, "failed": 1}
            assert model.received == asked + 1  # only the line that had no answer
            content = tmp_path / "batches" / batch["id"]
            after = [(content / f"{name}.jsonl").read_bytes().splitlines() for name in ("output", "errors")]
            assert sorted(line for line in after[0] if b'"late"' not in line) == before[0] and after[1] == before[1]


async def test_a_batch_whose_index_is_damaged_does_not_stop_the_server(tmp_path: Path) -> None:
    async with backend(lambda request: Hang() if "wait" in request.text else Say("done")) as model:
        async with serving(tmp_path, model) as client:
            damaged = await client.create([chat("a"), chat("b", "wait")])
            while not (await client.get(f"/v1/batches/{damaged['id']}"))["request_counts"]["completed"]:
                await asyncio.sleep(0.01)
        index = tmp_path / "batches" / damaged["id"] / "lines.db"
        index.write_bytes(index.read_bytes()[:4096] + b"no index" * 4096)  # its first page is whole
        async with serving(tmp_path, model) as client:
            other = await client.create([chat("c")])
            assert (await client.wait(other["id"]))["status"] == "completed"
            assert (await client.get(f"/v1/batches/{damaged['id']}"))["status"] == "in_progress"
            await client.get("/serve/status")


@pytest.mark.parametrize("stop", ["cancelled", "expired"])
async def test_a_kill_after_the_files_were_completed_changes_no_number(
    tmp_path: Path, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the renaming of the files and the last transaction of the catalog."""
    monkeypatch.setattr("batch_agent.serve.batches.GRACE_SECONDS", 0.1)  # the lines in flight never end
    route = "/v1/messages/batches"
    params = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "wait"}]}
    window = 86400.0 if stop == "cancelled" else 0.5
    async with backend(lambda request: Hang()) as model:
        async with serving(tmp_path, model, anthropic_window=window) as client:
            batch = await client.post(route, {"requests": [{"custom_id": each, "params": params} for each in "ab"]})
            if stop == "cancelled":
                await client.post(f"{route}/{batch['id']}/cancel")
            ended = await client.wait_messages(batch["id"])
            kind = "canceled" if stop == "cancelled" else "expired"
            assert ended["request_counts"][kind] == 2 and ended["request_counts"]["errored"] == 0
            before: Any = {"status": "cancelling" if stop == "cancelled" else "finalizing", "completed": 0}
            before |= {"failed": 0, "cancelled": 0, "expired": 0}
            client.server.catalog.change_batch(batch["id"], lambda now: replace(now, **before))
        async with serving(tmp_path, model) as client:
            again = await client.wait_messages(batch["id"])
            assert again["request_counts"] == ended["request_counts"]


async def test_a_server_that_is_stopped_lets_answers_end_and_ends_longer_ones_with_an_error(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        if "never" in request.text:
            return Hang()
        return Say("word " * (100_000 if "endless" in request.text else 40), chunk_delay=0.01, latency=0.1)

    command = ("-m", "batch_agent", "serve", "--data", str(tmp_path), "--port", "0", "--reserve", "1K", "--drain", "3s")
    async with backend(script) as model, aiohttp.ClientSession() as session:
        process = await start(*command, "--backend", model.backend_url, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
        client = Client(url, key, session, cast("Any", None))

        async def ask(text: str, *, stream: bool) -> tuple[int, bytes]:
            body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                return answer.status, await answer.read()

        asked = [asyncio.create_task(ask("endless" if n == 2 else "short", stream=n > 0)) for n in range(3)]
        asked.append(asyncio.create_task(ask("never", stream=False)))
        await model.wait_requests(4)
        await client.get("/serve/status")  # its connection stays open
        process.terminate()
        (status, whole), (_, streamed), (_, cut), (late, told) = await asyncio.gather(*asked)
        assert status == 200 and orjson.loads(whole)["choices"][0]["message"]["content"] == "word " * 40
        assert streamed.endswith(b"data: [DONE]\n\n") and b"error" not in streamed
        events = [part.removeprefix(b"data: ") for part in cut.split(b"\n\n") if part]
        assert events[-1] == b"[DONE]" and orjson.loads(events[-2])["error"]["code"] == "stopping"
        assert late == 503 and orjson.loads(told)["error"]["code"] == "stopping"
        assert await process.wait() == 0


async def test_a_server_that_is_being_stopped_accepts_nothing_new(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def script(request: Request) -> ScriptedReply:
        await gate.wait()
        return Say("done")

    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with backend(script) as model, serving(tmp_path, model, drain=60.0) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", body))
        await model.wait_requests(1)
        await client.get("/serve/status")
        door = client.server.door
        stopping = asyncio.create_task(client.server._drain(door))
        while not client.server.stopping:
            await asyncio.sleep(0.01)
        status, told = await client.send("GET", "/v1/models")  # on the connection that is open
        assert status == 503 and "stopping" in told["error"]["message"]
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as session, session.get(client.url + "/health"):
                pass
        gate.set()
        assert (await asked)["choices"][0]["message"]["content"] == "done"
        await stopping

"""The log as JSON lines, and the id of each request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
from tests.serve.served import CHAT, Client, chat
from tests.serve.test_openai_batches import backend
from tests.warm import start

BODY = {"model": "m", "messages": [{"role": "user", "content": "a secret"}]}


async def test_each_request_and_batch_is_a_line_with_its_id(tmp_path: Path) -> None:
    command = ("-m", "batch_agent", "serve", "--data", str(tmp_path), "--port", "0", "--reserve", "1K", "--log", "json")
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    async with backend() as model, aiohttp.ClientSession() as session:
        process = await start(*command, "--backend", model.backend_url, **pipes)
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
        client, ids = Client(url, key, session, cast("Any", None)), list[str]()
        for path, body in ((CHAT, BODY), (CHAT, {**BODY, "stream": True}), (CHAT, {}), ("/v1/messages", {})):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(url + path, json=body, headers=headers) as answer:
                told = await answer.read()
                ids.append(answer.headers["x-request-id"])
                assert answer.headers["request-id"] == ids[-1]
        assert orjson.loads(told)["request_id"] == ids[-1]
        for given, kept in (("mine-1", True), ("no\xa0id", False)):
            headers = {"Authorization": "Bearer wrong", "x-request-id": given}
            async with session.get(url + "/v1/models", headers=headers) as answer:
                assert answer.status == 401 and (answer.headers["x-request-id"] == given) == kept
        batch = await client.create([chat("a"), chat("b", "refuse")])
        await client.wait(batch["id"])
        async with session.get(url + "/health/live") as answer:
            assert answer.status == 200 and "x-request-id" not in answer.headers
        process.terminate()
        _, text = await process.communicate()
    lines = [orjson.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "event", "message"} <= line.keys() for line in lines)
    requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
    assert len(ids) == len(set(ids)) and set(ids) <= requests.keys()
    whole, streamed, wrong, _ = (requests[id] for id in ids)
    for line, stream in ((whole, False), (streamed, True)):
        assert (line["method"], line["path"], line["status"], line["stream"]) == ("POST", CHAT, 200, stream)
        assert (line["tenant"], line["model"], line["level"]) == ("operator", "m", "info")
        assert line["input_tokens"] > 0 and line["output_tokens"] > 0 and line["seconds"] > 0
    assert wrong["status"] == 400 and "messages" in wrong["error"]
    assert (requests["mine-1"]["status"], requests["mine-1"]["tenant"]) == (401, None)
    states = [line["batch_status"] for line in lines if line["event"] == "batch"]
    assert states == ["validating", "completed"]
    assert "1 of 2 done, 1 failed" in next(line for line in lines if line.get("batch_status") == "completed")["message"]
    assert key.encode() not in text and b"a secret" not in text and b"/health" not in text

"""A server of batches in front of a scripted one, for tests, and what a client of it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from batch_agent.serve import ServeOptions
from batch_agent.serve.catalog import ConfiguredTenant
from batch_agent.serve.models import ServedModel, ServedModels, open_models
from batch_agent.serve.server import BatchService
from batch_agent.testing import ScriptedServer

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass
class Client:
    """A client with one key. ``get`` and the others return status and document."""

    url: str
    key: str
    session: aiohttp.ClientSession
    server: BatchService

    def with_key(self, key: str) -> Client:
        return Client(self.url, key, self.session, self.server)

    async def send(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes | aiohttp.FormData) else orjson.dumps(body)
        sent = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        async with self.session.request(method, self.url + path, data=data, headers=sent) as response:
            text = await response.read()
            try:
                return response.status, orjson.loads(text)
            except ValueError:
                return response.status, text

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        status, document = await self.send("GET", path, headers=headers)
        assert status == 200, document
        return document

    async def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
        status, document = await self.send("POST", path, body, headers)
        assert status == 200, document
        return document

    async def upload(self, lines: Sequence[object] | bytes, purpose: str = "batch", **fields: str) -> Any:
        status, document = await self.try_upload(lines, purpose, **fields)
        assert status == 200, document
        return document

    async def try_upload(
        self, lines: Sequence[object] | bytes, purpose: str = "batch", **fields: str
    ) -> tuple[int, Any]:
        content = lines if isinstance(lines, bytes) else b"".join(orjson.dumps(line) + b"\n" for line in lines)
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        for name, value in fields.items():
            form.add_field(name, value)
        form.add_field("file", content, filename="lines.jsonl", content_type="application/jsonl")
        return await self.send("POST", "/v1/files", form)

    async def create(self, lines: Sequence[object] | bytes, endpoint: str = CHAT, **fields: object) -> Any:
        file = await self.upload(lines)
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
        return await self.post("/v1/batches", body)

    async def wait(self, id: str, *states: str) -> Any:
        """Return the batch when it has one of these states, or has ended."""
        while True:
            batch = await self.get(f"/v1/batches/{id}")
            if batch["status"] in (states or OVER) or batch["status"] in OVER:
                return batch
            await asyncio.sleep(0.01)

    async def wait_messages(self, id: str) -> Any:
        while True:
            batch = await self.get(f"/v1/messages/batches/{id}")
            if batch["processing_status"] == "ended":
                return batch
            await asyncio.sleep(0.01)

    async def lines_of(self, file: str | None) -> list[Any]:
        return [] if file is None else await self.lines_at(f"/v1/files/{file}/content")

    async def lines_at(self, path: str) -> list[Any]:
        status, content = await self.send("GET", path)
        assert status == 200, content
        text = content if isinstance(content, bytes) else orjson.dumps(content)
        return [orjson.loads(line) for line in text.splitlines()]

    async def outcomes(self, batch: Any) -> tuple[list[Any], list[Any]]:
        return await self.lines_of(batch["output_file_id"]), await self.lines_of(batch["error_file_id"])


def chat(name: str, text: str = "", *, model: str = "m", **fields: object) -> dict[str, object]:
    body = {"model": model, "messages": [{"role": "user", "content": text or f"say {name}"}], **fields}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


@asynccontextmanager
async def serving(
    data: Path,
    backend: ScriptedServer | ServedModels,
    configured: Sequence[ConfiguredTenant] | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """Serve batches until exit, as if the process then ended."""
    models = backend if isinstance(backend, ServedModels) else open_models(backend.backend_url, {})
    server = BatchService(ServeOptions(data, port=0, **{"reserve": 0, "drain": 0.0, **options}), models, configured)
    told: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    async def ready(url: str, key: str) -> None:
        told.set_result((url, key))
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(server.serve(ready))
    try:
        await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        async with aiohttp.ClientSession() as session:
            yield Client(*told.result(), session, server)
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]


__all__ = ["CHAT", "Client", "ServedModel", "chat", "serving"]

"""The data directory is away for a while, or the disk is full: the server waits, and says so."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from tests.serve.served import Client, chat, serving
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.errors import StoreError
from batch_agent.serve import batches, ledger, server
from batch_agent.serve.lines import BatchLines
from batch_agent.testing import Request, Say
from batch_agent.testing.replies import ScriptedReply


@asynccontextmanager
async def served(data: Path, backend_url: str) -> AsyncIterator[tuple[Client, asyncio.StreamReader]]:
    """Serve in a process of its own, whose log can be read."""
    command = ("-m", "batch_agent", "serve", "--data", str(data), "--backend", backend_url, "--port", "0")
    process = await start(*command, "--reserve", "1K", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stderr is not None
        url = (await process.stdout.readline()).decode().strip()
        key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
        async with aiohttp.ClientSession() as session:
            yield Client(url, key, session, cast("Any", None)), process.stderr
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def line_with(log: asyncio.StreamReader, text: str) -> str:
    async with asyncio.timeout(30):
        while text not in (line := (await log.readline()).decode()):
            assert line, "the server has ended"
    return line


async def test_a_data_directory_that_is_away_for_a_while_stops_nothing_for_good(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    gate, seen = asyncio.Event(), list[str]()

    async def script(request: Request) -> ScriptedReply:
        seen.append(request.text)
        if "late" in request.text:
            await gate.wait()
        return Say("done")

    async with backend(script) as model, served(data, model.backend_url) as (client, log):
        batch = await client.create([*(chat(f"l{n}") for n in range(10)), *(chat(f"late-{n}") for n in range(10))])
        while (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 10:
            await asyncio.sleep(0.02)
        data.rename(elsewhere)
        assert str(data) in await line_with(log, "the server waits")
        status, told = await client.try_upload([chat("a")])
        assert status == 503 and "is not there" in told["error"]["message"]
        gate.set()  # lines are answered meanwhile
        assert not data.exists()  # nothing makes a new one in its place
        elsewhere.rename(data)
        await line_with(log, "the server continues")
        done = await client.wait(batch["id"])
        output, errors = await client.outcomes(done)
        assert done["status"] == "completed" and not errors
        assert len({line["custom_id"] for line in output}) == len(output) == 20
        assert sum("l" in text and "late" not in text for text in seen) == 10
        again = await client.wait((await client.create([chat("after")]))["id"])
        assert again["status"] == "completed"


async def test_another_directory_in_its_place_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a volume is unmounted, and its empty mount point is there."""
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    async with backend() as model, serving(data, model) as client:
        data.rename(elsewhere)
        data.mkdir()
        while "the server waits" not in caplog.text:
            await asyncio.sleep(0.01)
        assert (await client.try_upload([chat("a")]))[0] == 503 and not list(data.iterdir())
        assert "is not there" in (await client.get("/serve/status"))["waiting_because"]
        data.rmdir()
        elsewhere.rename(data)
        while "the server continues" not in caplog.text:
            await asyncio.sleep(0.01)
        assert (await client.wait((await client.create([chat("a")]))["id"]))["status"] == "completed"


async def test_a_full_disk_fails_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a batch cannot be completed for a while, for more attempts than a batch has otherwise."""
    monkeypatch.setattr(batches, "AGAIN_SECONDS", 0.005)
    attempts, finish = 0, BatchLines.finish

    def full(self: BatchLines, stop: str, reason: str = "") -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finish(self, stop, reason)

    monkeypatch.setattr(BatchLines, "finish", full)
    async with backend(lambda request: Say("done")) as model, serving(tmp_path, model) as client:
        done = await client.wait((await client.create([chat("a")]))["id"])
        assert done["status"] == "completed" and attempts == 20 and model.received == 1


async def test_a_catalog_that_cannot_be_written_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.01)
    monkeypatch.setattr(ledger, "AGAIN_SECONDS", 0.01)
    async with backend() as model, serving(tmp_path, model) as client:
        count, tokens = client.server.catalog.count_tokens, client.server.ledger
        is_full, calls = True, 0

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if is_full:
                raise StoreError("the catalog: database or disk is full")
            return count(*args)

        client.server.catalog.count_tokens = counted  # type: ignore[method-assign]
        for full in (True, False, True):
            is_full, calls = full, 0
            while calls < 8:
                tokens.settle("operator", 0, 1)
                await asyncio.sleep(0.01)
        told = [record.getMessage() for record in caplog.records if "disk is full" in record.getMessage()]
        assert 2 <= len(told) <= 4, told  # at most once by the writer of tokens and once by the books, each time
        is_full = False

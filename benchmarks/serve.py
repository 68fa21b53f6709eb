"""What ``batch-agent serve`` costs, beside ``batch-agent run`` of the same rows.

    python -m benchmarks.serve            # --quick: fewer lines

- ``cpu``: CPU of a line of a batch over CPU of a row of a run with a record, in the same process and minute, with the
  upload, the check and the client; the same C server answers both
- ``memory``: resident memory after the last over that after the first tenth of a long batch
- ``shares``: tokens of two tenants with equal shares, while both have lines left
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from batch_agent import BatchAgent
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.models import open_models
from batch_agent.serve.server import BatchService, ServeOptions
from benchmarks import report
from benchmarks.server import compiled

MODEL, INFLIGHT = "bench", 64
POLL_SECONDS = 0.5  # between two looks of the client, which is in the same process and costs CPU too
CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@contextmanager
def c_server() -> Iterator[str]:
    with (
        compiled("server") as program,
        subprocess.Popen([program, "1000", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        yield f"vllm://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


@asynccontextmanager
async def serving(backend: str, data: Path) -> AsyncIterator[tuple[BatchService, str, aiohttp.ClientSession]]:
    options = ServeOptions(data, port=0, reserve=0, max_inflight=INFLIGHT)
    server = BatchService(options, open_models(None, {MODEL: backend}))
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(url: str, key: str) -> None:
        told.set_result(url)
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(server.serve(ready))
    try:
        async with aiohttp.ClientSession() as session:
            yield server, await told, session
    finally:
        task.cancel()
        await asyncio.wait({task})


def text_of(number: int) -> str:
    return f"Say something about number {number}. " * 10


def lines(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            body = {"model": MODEL, "messages": [{"role": "user", "content": text_of(number)}]}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url, self._headers = session, url, {"Authorization": f"Bearer {key}"}

    async def batch(self, path: Path) -> str:
        form = aiohttp.FormData({"purpose": "batch"})
        with path.open("rb") as file:
            form.add_field("file", file, filename=path.name)
            async with self._session.post(f"{self._url}/v1/files", data=form, headers=self._headers) as answer:
                id = (await answer.json())["id"]
        body = {"input_file_id": id, "endpoint": CHAT, "completion_window": "24h"}
        async with self._session.post(f"{self._url}/v1/batches", json=body, headers=self._headers) as answer:
            return str((await answer.json())["id"])

    async def show(self, id: str) -> dict[str, object]:
        async with self._session.get(f"{self._url}/v1/batches/{id}", headers=self._headers) as answer:
            return dict(await answer.json())

    async def until(self, id: str, done: int) -> dict[str, int]:
        """Wait until so many lines are done; return the counts."""
        while True:
            batch = await self.show(id)
            counts = batch["request_counts"]
            assert isinstance(counts, dict)
            if counts["completed"] >= done or batch["status"] in OVER:
                assert batch["status"] != "failed" and not counts["failed"], batch
                return counts
            await asyncio.sleep(POLL_SECONDS)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


async def cpu(backend: str, folder: Path, count: int, repetitions: int) -> dict[str, object]:
    """CPU of each in turn; the ratio of the least of both, which other programs on the machine disturb least."""
    rows = [{"id": str(number), "text": text_of(number)} for number in range(count)]
    runs, served = [], []
    path = lines(folder / "lines.jsonl", count)
    async with serving(backend, folder / "data") as (server, url, session):
        client = Client(session, url, server.key)
        for number in range(repetitions + 1):  # the first is not counted
            began = time.process_time()
            results = await BatchAgent.run(
                task="{text}",
                inputs=rows,
                model=MODEL,
                backend=backend,
                max_inflight=INFLIGHT,
                run_dir=str(folder / f"run-{number}"),
                progress=False,
            )
            assert all(result.ok for result in results)
            runs.append((time.process_time() - began) / count)
            began = time.process_time()
            await client.until(await client.batch(path), count)
            served.append((time.process_time() - began) / count)
    ratio = min(served[1:]) / min(runs[1:])
    micro = [[round(value * 1e6, 1) for value in values[1:]] for values in (runs, served)]
    return {"lines": count, "ratio": ratio, "run_us": report.spread(micro[0]), "serve_us": report.spread(micro[1])}


async def memory(backend: str, folder: Path, count: int) -> dict[str, object]:
    async with serving(backend, folder / "data") as (server, url, session):
        client = Client(session, url, server.key)
        id = await client.batch(lines(folder / "long.jsonl", count))
        await client.until(id, count // 10)
        first = resident()
        await client.until(id, count)
        last = resident()
    return {"lines": count, "first_tenth_bytes": first, "end_bytes": last, "ratio": last / first}


async def shares(backend: str, folder: Path, count: int) -> dict[str, object]:
    path = lines(folder / "shares.jsonl", count)
    async with serving(backend, folder / "data") as (server, url, session):
        clients = [Client(session, url, server.catalog.add_tenant(Tenant(name))) for name in ("one", "other")]
        ids = [await client.batch(path) for client in clients]
        running = server.batches.running
        while ids[0] not in running or running[ids[0]].lines.left > count // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert running[ids[1]].lines.left  # both still share
        tokens = [server.turnstile.account(name).tokens for name in ("one", "other")]
    return {"lines": count, "tokens": tokens, "ratio": tokens[0] / max(1, tokens[1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lines")
    quick = parser.parse_args().quick
    env = report.environment()
    few, many, repetitions = (1_000, 10_000, 2) if quick else (5_000, 200_000, 5)
    with c_server() as backend, tempfile.TemporaryDirectory() as name:
        parts = {}
        for part in ("cpu", "memory", "shares"):
            folder = Path(name) / part
            folder.mkdir()
            match part:
                case "cpu":
                    parts[part] = asyncio.run(cpu(backend, folder, few, repetitions))
                case "memory":
                    parts[part] = asyncio.run(memory(backend, folder, many))
                case "shares":
                    parts[part] = asyncio.run(shares(backend, folder, few))
            print(part, json.dumps(parts[part]), file=sys.stderr)
    ratios = {part: float(str(measured["ratio"])) for part, measured in parts.items()}
    bars = [
        report.Bar("CPU of a line over that of a row of a run with a record", ratios["cpu"], "<=", 1.3),
        report.Bar("memory at the end of a long batch over that after its first tenth", ratios["memory"], "<=", 1.2),
        report.Bar("tokens of a tenant over those of another with the same share", ratios["shares"], ">=", 0.9),
        report.Bar("the same, from above", ratios["shares"], "<=", 1.1),
    ]
    return report.finish("serve", env, bars, parts)


if __name__ == "__main__":
    raise SystemExit(main())

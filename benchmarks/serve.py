"""What ``batch-agent serve`` costs, beside ``batch-agent run`` of the same rows.

    python -m benchmarks.serve            # --quick: fewer lines

- ``cpu``: CPU of a line of a batch over CPU of a row of a run with a record, in the same process and minute, with the
  upload, the check and the client; the same C server answers both
- ``memory``: resident memory after the last line of a long batch over that after its first 10,000
- ``shares``: tokens of two tenants with equal shares, while both have lines left
- ``people``, simulated: five interactive requests per second beside a batch, on a virtual clock and a simulated engine
  whose parameters are fitted to measurements of a 7B shape on vLLM and an H200: latency over that of an idle engine,
  and throughput over that of the batch alone, with the target of 2.5, in bursts of 12 s per minute, with the target
  ``p95 3``, and with no target
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from batch_agent import BatchAgent
from batch_agent.backends.simulated import EngineModel, SimulatedBackend
from batch_agent.serve import LatencyTarget, ServeOptions
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.models import ServedModel, ServedModels, open_models
from batch_agent.serve.server import BatchService
from batch_agent.testing.clock import run_virtual
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
async def serving(
    backend: str | ServedModels, data: Path, **options: Any
) -> AsyncIterator[tuple[BatchService, str, aiohttp.ClientSession]]:
    models = open_models(None, {MODEL: backend}) if isinstance(backend, str) else backend
    server = BatchService(ServeOptions(data, port=0, reserve=0, **{"max_inflight": INFLIGHT, **options}), models)
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


def messages_of(number: int, long: bool) -> list[dict[str, str]]:
    if not long:
        return [{"role": "user", "content": text_of(number)}]
    return [{"role": "system", "content": LONG}, {"role": "user", "content": text_of(number) * 5}]


def lines(path: Path, count: int, tokens: Sequence[int] = (), *, long: bool = False) -> Path:
    """Write the lines of a batch. ``tokens``: the lengths of their answers, in turn."""
    with path.open("w") as file:
        for number in range(count):
            body: dict[str, object] = {"model": MODEL, "messages": messages_of(number, long)}
            if tokens:
                body["max_tokens"] = tokens[number % len(tokens)]
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


async def memory(backend: str, folder: Path, count: int, early: int) -> dict[str, object]:
    async with serving(backend, folder / "data") as (server, url, session):
        client = Client(session, url, server.key)
        id = await client.batch(lines(folder / "long.jsonl", count))
        counts = await client.until(id, early)
        first = resident()
        await client.until(id, count)
        last = resident()
    early = counts["completed"]
    return {"lines": count, "early_lines": early, "early_bytes": first, "end_bytes": last, "ratio": last / first}


async def shares(backend: str, folder: Path, count: int) -> dict[str, object]:
    path = lines(folder / "shares.jsonl", count)
    async with serving(backend, folder / "data") as (server, url, session):
        clients = [Client(session, url, server.catalog.add_tenant(Tenant(name))) for name in ("one", "other")]
        ids = [await client.batch(path) for client in clients]
        running = server.batches.running
        while not all(id in running and running[id].answered for id in ids):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        accounts = [server.line_scheduler.account(name) for name in ("one", "other")]
        before = [account.tokens for account in accounts]
        while running[ids[0]].lines.left > count // 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert running[ids[1]].lines.left  # both still share
        tokens = [account.tokens - was for account, was in zip(accounts, before, strict=True)]
    return {"lines": count, "tokens": tokens, "ratio": tokens[0] / max(1, tokens[1])}


# People beside a batch, simulated

# Fitted to measurements on an H200 (results/people.json). With answers of 50 tokens that all begin together, as there:
# a request alone 0.46 s (measured 0.46), 256 lines alone 138 per second (136); people beside plain loops wait 1.53
# times as long beside 64 lines (1.67) and 4.41 times beside 256 (4.47), which keep 0.65 (0.655) and 0.97 (0.89) of it.
ENGINE = EngineModel(
    step_seconds=0.0086,
    sequence_seconds=0.0000566,
    prefill_step_seconds=0.0057,
    prefill_tokens_per_second=100_000,
    max_num_seqs=122,
    kv_tokens=1_000_000,
    answer_tokens=70,
)
TOKENS = 50  # of an answer to people; those to lines have 30 to 70
PEOPLE = 5.0  # requests per second
SETTLE = 20.0  # seconds after people come, which are counted for themselves
LONG = " ".join(f"Rule {number} of the brief: read the case and say what is to be done." for number in range(143))
MINUTE, BURST = 60.0, 12.0


async def scene(
    count: int, seconds: float, there: float, target: float | LatencyTarget | None, *, long: bool = False
) -> tuple[float, list[float], list[float]]:
    """Return the tokens per second of lines, the latencies of people, and those of the first ones. ``there``: the part
    of each minute in which they come. ``long``: all prompts have 2,000 shared words and 300 of their own."""
    loop, chance, engine = asyncio.get_running_loop(), random.Random(1), SimulatedBackend(ENGINE)
    models = ServedModels({MODEL: ServedModel(engine, ENGINE.name)})
    options = {"interactive_latency": target, "max_inflight": 256, "now": lambda: 1e9 + loop.time()}
    with tempfile.TemporaryDirectory() as name:
        async with serving(models, Path(name) / "data", **options) as (server, url, session):
            headers, taken = {"Authorization": f"Bearer {server.key}"}, list[tuple[float, float]]()

            async def person() -> None:
                began = loop.time()
                messages = messages_of(chance.randrange(10**6), long)
                body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS}
                async with session.post(f"{url}{CHAT}", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                taken.append((began, loop.time() - began))

            async def people(until: float) -> None:
                async with asyncio.TaskGroup() as tasks:
                    while loop.time() < until:
                        await asyncio.sleep(chance.expovariate(PEOPLE))
                        tasks.create_task(person())

            async def run(until: float) -> None:
                while loop.time() < until:
                    minute = min(until, loop.time() + MINUTE)
                    if there:
                        await people(minute if there == 1 else loop.time() + MINUTE * there)
                    await asyncio.sleep(max(0.0, minute - loop.time()))

            def tokens() -> int:
                return engine.runner.engine.counters.generated_tokens - len(taken) * TOKENS

            id = ""
            if count:
                lengths = [chance.randrange(30, 71) for _ in range(1000)]
                path = lines(Path(name) / "lines.jsonl", count, lengths, long=long)
                id = await Client(session, url, server.key).batch(path)
                await asyncio.sleep(SETTLE)
            await run(loop.time() + (MINUTE if 0 < there < 1 else SETTLE))
            began, first = loop.time(), tokens()
            await run(began + seconds)
            rate = (tokens() - first) / (loop.time() - began)
            assert not id or server.batches.running[id].lines.left, "the batch ended before the people left"
    return rate, [latency for at, latency in taken if at >= began], [latency for at, latency in taken if at < began]


def simulated(seconds: float) -> dict[str, object]:
    count, parts = round(150 * (seconds + 2 * MINUTE)), dict[str, object]()
    p95_3, p95_2 = LatencyTarget(3.0, 95), LatencyTarget(2.0, 95)
    short: tuple[tuple[str, float, float | LatencyTarget | None], ...] = (
        ("people", 1.0, 2.5),
        ("bursts", BURST / MINUTE, 2.5),
        ("p95", 1.0, p95_3),
        ("no_target", 1.0, None),
    )
    for long, scenes in ((False, short), (True, (("p95_long", 1.0, p95_3), ("p95_2_long", 1.0, p95_2)))):
        _, quiet, _ = run_virtual(scene(0, 20.0, 1, 2.5, long=long))
        alone, _, _ = run_virtual(scene(count, 20.0, 0, 2.5, long=long))
        idle = statistics.median(quiet)
        parts["idle_long" if long else "idle"] = {"s": round(idle, 3), "tokens_per_second_alone": round(alone, 1)}
        for name, there, target in scenes:
            length = max(seconds, MINUTE if there < 1 else 0.0)
            rate, latencies, early = run_virtual(scene(count, length, there, target, long=long))
            found = {"median": statistics.median(latencies) / idle, "p95": p95(latencies) / idle, "kept": rate / alone}
            parts[name] = found | ({"first_p95": p95(early) / idle} if there == 1 else {})
    return parts


def p95(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=20)[18]


PARTS = ("cpu", "memory", "shares", "people")
TAILS = (
    ("p95", "short prompts, p95 3", 3.0, 0.75),
    ("p95_long", "long prompts, p95 3", 3.0, 0.75),
    ("p95_2_long", "long prompts, p95 2", 2.0, 0.5),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lines")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")
    options = parser.parse_args()
    quick = options.quick
    env = report.environment()
    few, many, repetitions, seconds = (1_000, 10_000, 2, 30.0) if quick else (5_000, 200_000, 5, 120.0)
    with c_server() as backend, tempfile.TemporaryDirectory() as name:
        parts: dict[str, dict[str, Any]] = {}
        for part in options.only or PARTS:
            folder = Path(name) / part
            folder.mkdir()
            match part:
                case "cpu":
                    parts[part] = asyncio.run(cpu(backend, folder, few, repetitions))
                case "memory":
                    parts[part] = asyncio.run(memory(backend, folder, many, many // 10 if quick else 10_000))
                case "shares":
                    parts[part] = asyncio.run(shares(backend, folder, few))
                case "people":
                    parts[part] = simulated(seconds)
            print(part, json.dumps(parts[part]), file=sys.stderr)
    return report.finish("serve", env, list(bars_of(parts)), parts)


def bars_of(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[report.Bar]:
    if "cpu" in parts:
        ratio = parts["cpu"]["ratio"]
        yield report.Bar("CPU of a line over that of a row of a run with a record", ratio, "<=", 1.3)
    if "memory" in parts:
        ratio = parts["memory"]["ratio"]
        yield report.Bar("memory at the end of a long batch over that after its first 10,000 lines", ratio, "<=", 1.2)
    if "shares" in parts:
        ratio = parts["shares"]["ratio"]
        yield report.Bar("tokens of a tenant over those of another with the same share", ratio, ">=", 0.9)
        yield report.Bar("the same, from above", ratio, "<=", 1.1)
    if "people" in parts:
        people, bursts = parts["people"]["people"], parts["people"]["bursts"]
        yield report.Bar("simulated: latency beside a batch over idle, median", people["median"], "<=", 2.5)
        yield report.Bar("simulated: the same, 95th percentile", people["p95"], "<=", 4)
        yield report.Bar("simulated: throughput of the batch over that alone", people["kept"], ">=", 0.7)
        yield report.Bar("simulated: the same with people for a fifth of the time", bursts["kept"], ">=", 0.9)
        for name, said, most, least in TAILS:
            tail = parts["people"][name]
            yield report.Bar(f"simulated: {said}: 95th percentile over idle", tail["p95"], "<=", most)
            yield report.Bar(f"simulated: {said}: the same, 20 s after people come", tail["first_p95"], "<=", most)
            yield report.Bar(f"simulated: {said}: throughput of the batch over that alone", tail["kept"], ">=", least)


if __name__ == "__main__":
    raise SystemExit(main())

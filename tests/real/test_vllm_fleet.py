"""A fleet with real vLLM servers, as tests/real/test_vllm.py has one:

    BATCH_AGENT_TEST_VLLM=vllm://127.0.0.1:8000 python -m pytest tests/real/test_vllm_fleet.py

Several addresses may be given, with commas between them; beside one alone a simulated server is started, which serves a
model of the same name.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from batch_agent import BatchAgent
from batch_agent.backends.simulated import EngineModel
from batch_agent.cli.main import main
from batch_agent.fleet.bench import Bench, Wanted, bench_all
from batch_agent.fleet.hostfile import parse_hostfile
from batch_agent.fleet.probe import Prober
from batch_agent.fleet.proxy import serve_proxy
from batch_agent.testing.server import SimulatedServer

URLS = [url for url in os.environ.get("BATCH_AGENT_TEST_VLLM", "").split(",") if url]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not URLS, reason="set BATCH_AGENT_TEST_VLLM to the URLs of real vLLM servers"),
]

ROWS = [f"Question {number}: name a colour." for number in range(24)]


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[Path]:
    """A hostfile of two servers at least, one of them real."""
    hosts = folder / "hosts.txt"
    places = [urlsplit(url).netloc for url in URLS]
    hosts.write_text("".join(f"{place} kind=real\n" for place in places))
    if len(places) > 1:
        yield hosts
        return
    async with Prober() as prober:
        _, models = await prober.probe(parse_hostfile(hosts)[0])
    async with SimulatedServer(EngineModel(name=next(iter(models)))) as simulated:
        hosts.write_text(f"{hosts.read_text()}{simulated.address} kind=simulated\n")
        yield hosts


async def test_a_run_is_answered_by_every_server_of_the_fleet(tmp_path: Path) -> None:
    async with two(tmp_path) as hosts:
        results = await BatchAgent.run(
            task="{input}", inputs=ROWS, backend=f"fleet://{hosts}", max_tokens=20, stop=["\n"], max_inflight=8
        )
        async with Prober() as prober:
            looks = await prober.look_at_all(parse_hostfile(hosts))
    assert all(result.error is None or result.error.type == "Truncated" for result in results)
    assert all(look.up and look.told is not None and look.told.generated_tokens for look in looks)


async def test_a_server_that_is_not_there_loses_no_row(tmp_path: Path) -> None:
    async with two(tmp_path) as hosts:
        hosts.write_text(f"127.0.0.1:9\n{hosts.read_text()}")
        results = await BatchAgent.run(task="{input}", inputs=ROWS, backend=f"fleet://{hosts}", max_tokens=20)
    assert all(result.error is None or result.error.type == "Truncated" for result in results)


async def test_wait_and_status_see_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with two(tmp_path) as hosts:
        ready = tmp_path / "ready.txt"
        assert (
            await asyncio.to_thread(main, ["fleet", "wait", str(hosts), "--timeout", "30", "--output", str(ready)]) == 0
        )
        assert parse_hostfile(ready) == parse_hostfile(hosts)
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["fleet", "status", str(hosts), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["up"] == document["total"] >= 2
    for endpoint in document["endpoints"]:
        assert endpoint["errors"] is not None
        assert endpoint["kv_usage"] is not None
        assert endpoint["tokens_per_second"] is not None


async def test_a_bench_finds_a_knee_for_each(tmp_path: Path) -> None:
    async with two(tmp_path) as hosts:
        benches = [Bench(host) for host in parse_hostfile(hosts)]
        await bench_all(benches, Wanted(steps=(1, 4), seconds=20.0, tokens_in=75, tokens_out=15))
    for bench in benches:
        assert bench.reason == ""
        assert bench.knee in (1, 4)
        assert 60 <= bench.tokens_in <= 90
        assert {answer.usage.completion_tokens for step in bench.steps for answer in step.answers} == {15}


async def test_runs_and_streams_go_through_the_proxy(tmp_path: Path) -> None:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with two(tmp_path) as hosts:
        serving = asyncio.create_task(
            serve_proxy(parse_hostfile(hosts), host="127.0.0.1", port=0, ready=url.set_result, hostfile=hosts)
        )
        try:
            place = (await url).removeprefix("http://")
            results = await BatchAgent.run(task="{input}", inputs=ROWS, backend=f"vllm://{place}", max_tokens=20)
            assert all(result.error is None or result.error.type == "Truncated" for result in results)
            body = {"model": await _model(place), "messages": [{"role": "user", "content": "Count to five."}]}
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    f"http://{place}/v1/chat/completions", json=body | {"stream": True, "max_tokens": 20}
                ) as answer,
            ):
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            async with aiohttp.ClientSession() as session, session.get(f"http://{place}/status") as answer:
                status = await answer.json()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    assert sum(endpoint["requests"] for endpoint in status["endpoints"]) >= len(ROWS) + 1
    assert all(endpoint["requests"] for endpoint in status["endpoints"])


async def _model(place: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{place}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])

"""A real Prometheus scrapes a run. ``make test-prometheus`` installs it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import aiohttp
import pytest

from batch_agent import BatchAgent
from batch_agent.testing import Request, Say, ScriptedBackend

PROGRAM = shutil.which("prometheus")
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs: [{{job_name: run, static_configs: [{{targets: ["{target}"]}}]}}]
"""


async def ask(session: aiohttp.ClientSession, url: str, query: str) -> list[dict[str, object]]:
    """What Prometheus answers; nothing while it starts."""
    try:
        async with session.get(f"{url}/api/v1/query", params={"query": query}) as response:
            return (await response.json())["data"]["result"] if response.ok else []
    except aiohttp.ClientConnectionError:
        return []


@pytest.mark.real
@pytest.mark.skipif(PROGRAM is None, reason="needs prometheus")
async def test_prometheus_scrapes_a_run_while_it_works(tmp_path: Path, unused_port: int) -> None:
    seen = asyncio.Event()

    async def script(request: Request) -> Say:
        if request.text == "last":
            await seen.wait()
        return Say("x")

    run = BatchAgent.open(
        task="{input}", inputs=["a", "b", "last"], backend=ScriptedBackend(script), max_inflight=3, metrics_port=0
    )
    async with run:
        results = run.results()
        await anext(results), await anext(results)
        assert run.metrics_url is not None
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.format(target=run.metrics_url.split("/")[2]))
        url = f"http://127.0.0.1:{unused_port}"
        prometheus = await asyncio.create_subprocess_exec(
            str(PROGRAM),
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{unused_port}",
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(60):
                while not (done := await ask(session, url, 'batch_agent_rows_finished_total{state="ok"}')):
                    await asyncio.sleep(0.2)
                assert done[0]["value"][1] == "2"
                [up] = await ask(session, url, "batch_agent_endpoint_up")
                assert up["value"][1] == "1" and up["metric"]["endpoint"] == "scripted://"
                quantile = "histogram_quantile(0.5, batch_agent_turn_duration_seconds_bucket)"
                assert len(await ask(session, url, quantile)) == 1
        finally:
            prometheus.terminate()
            await prometheus.wait()
            seen.set()
        assert [result.ok async for result in results] == [True]


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])

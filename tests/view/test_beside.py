"""The page beside a run: started with it, in a process of its own, and ended with it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
from tests.cli.commandline import batch_agent

from batch_agent import BatchAgent, SpecError
from batch_agent.testing import Say, ScriptedServer


async def test_a_program_sees_its_page_for_as_long_as_it_keeps_the_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as server:
        results = await BatchAgent.run(
            task="{x}", inputs=[{"x": 1}], backend=server.backend_url, run_dir=tmp_path / "run", view=True
        )
    found = re.search(r"view the run: (http://127\.0\.0\.1:\d+)/\?token=([\w-]+)#/run/run", capfd.readouterr().err)
    assert found is not None
    async with aiohttp.ClientSession() as session:
        asked = {"token": found[2], "run": "run"}
        async with session.get(f"{found[1]}/api/run", params=asked) as answer:
            told = json.loads(await answer.text())
        assert told["run"]["state"] == "complete" and results[0].output == "fine"
        del results
        async with asyncio.timeout(20):
            with pytest.raises(aiohttp.ClientConnectorError):
                while True:
                    await (await session.get(f"{found[1]}/api/run", params=asked)).read()
    assert "stopped" not in capfd.readouterr().err  # of the program that shows something else meanwhile


async def test_a_run_without_a_record_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="give run_dir"):
        await BatchAgent.run(task="{x}", inputs=[{"x": 1}], backend="vllm://127.0.0.1:1", view=True)


async def test_the_command_says_where_its_page_is(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as server:
        outcome = await batch_agent(
            tmp_path, "run", "--task", "{x}", "rows.jsonl", "--backend", server.backend_url, "--run-dir", "r", "--view"
        )
    assert outcome.code == 0 and re.search(r"view the run: http://127\.0\.0\.1:\d+/\?token=", outcome.stderr)

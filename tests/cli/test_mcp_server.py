"""``batch-agent mcp``, as a coding agent uses it: the official client, in this process and over standard input."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import warm
from tests.tools.mcp_tools.conftest import needs_mcp

from batch_agent.testing import Request, Say, ScriptedServer

if TYPE_CHECKING:
    from mcp import Client

pytestmark = needs_mcp


@asynccontextmanager
async def coding_agent(directory: Path, *arguments: str) -> AsyncIterator[Client]:
    """A client of a server of its own."""
    from mcp import Client, StdioServerParameters

    program, *words = warm.command("-m", "batch_agent", "mcp", *arguments, imports=warm.MCP_IMPORTS)
    server = StdioServerParameters(
        command=program,
        args=words,
        env={name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "PATH")},
        cwd=directory,
    )
    async with Client(server) as client:
        yield client


async def use(client: Client, tool: str, **arguments: object) -> dict[str, Any]:
    result = await client.call_tool(tool, dict(arguments))
    assert not result.is_error, result.content
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def refusal(client: Client, tool: str, **arguments: object) -> str:
    result = await client.call_tool(tool, dict(arguments))
    [content] = result.content
    assert result.is_error and content.type == "text"
    return content.text


async def test_an_agent_plans_runs_and_reads_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcp import Client

    from batch_agent.cli.commands.mcp_server import Batches, make_server

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", warm.interpreter())
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
    rows = [{"name": f"n{number}", "text": f"t{number}"} for number in range(3)]
    (tmp_path / "rows.csv").write_text("name,text\n" + "".join(f"{row['name']},{row['text']}\n" for row in rows))
    batch = {"instruction": "Which mood? {text}", "id_column": "name", "output_schema": schema}
    async with (
        ScriptedServer(lambda request: Say('{"mood": "good"}'), models=["m"]) as server,
        Client(make_server(Batches(tmp_path / "runs", {"backend": server.backend_url}))) as client,
    ):
        listed = {tool.name for tool in (await client.list_tools()).tools}
        assert listed == {
            *("plan_batch", "start_batch", "batch_status", "batch_results", "show_row", "stop_batch", "resume_batch")
        }
        assert "a limit is required" in await refusal(client, "start_batch", rows=rows, **batch)
        assert "either rows or path" in await refusal(client, "plan_batch", max_rows=5, **batch)
        wrong = batch | {"instruction": "Which mood? {txt}"}
        assert "txt" in await refusal(client, "start_batch", rows=rows, max_rows=5, **wrong)
        assert not server.requests and not any((tmp_path / "runs").iterdir()), "nothing was sent, nothing is left"

        plan = await use(client, "plan_batch", rows=rows, max_rows=2, **batch)
        assert plan["rows"] == 2 and plan["first_prompt"].startswith("Which mood? t0")

        seen: list[float] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            seen.append(progress)

        started = await client.call_tool(
            "start_batch",
            {**batch, "path": "rows.csv", "max_rows": 10, "output_path": "moods.jsonl", "wait_seconds": 120},
            progress_callback=on_progress,
        )
        assert isinstance(started.structured_content, dict), started.content
        assert started.structured_content["state"] == "complete"
        name = started.structured_content["batch"]
        results = await use(client, "batch_results", batch=name, limit=2)
        assert [(row["job_id"], row["output"]) for row in results["rows"]] == [
            ("n0", {"mood": "good"}),
            ("n1", {"mood": "good"}),
        ]
        assert results["next_offset"] == 2
        [last] = (await use(client, "batch_results", batch=name, offset=2))["rows"]
        assert last["job_id"] == "n2"
        shown = await client.call_tool("show_row", {"batch": name, "row": "n1"})
        assert "Which mood? t1" in str(shown.content)
        assert len((tmp_path / "moods.jsonl").read_text().splitlines()) == 3
        assert "there is no batch 'nope'" in await refusal(client, "batch_status", batch="nope")
        assert "is not running" in await refusal(client, "stop_batch", batch=name)


async def test_a_batch_outlives_its_server_and_another_one_stops_and_resumes_it(tmp_path: Path) -> None:
    gate = asyncio.Event()
    asked: list[str] = []

    async def answer(request: Request) -> Say:
        asked.append(str(request.messages[-1]["content"]))
        if len(asked) > 1:
            await gate.wait()
        return Say("fine")

    rows = [{"text": str(number)} for number in range(4)]
    async with ScriptedServer(answer, models=["m"]) as server:
        async with coding_agent(tmp_path, "--backend", server.backend_url) as client:
            started = await use(
                client, "start_batch", instruction="Look: {text}", rows=rows, max_rows=9, max_concurrency=1
            )
            name = started["batch"]
            while len(asked) < 2:
                await asyncio.sleep(0.05)
        async with coding_agent(tmp_path, "--backend", server.backend_url) as client:
            status = await use(client, "batch_status", batch=name)
            assert status["state"] == "running" and status["rows"]["done"] == 1
            assert f"{name} is running" in await refusal(client, "resume_batch", batch=name)
            stopped = await use(client, "stop_batch", batch=name, now=True, wait_seconds=60)
            assert stopped["state"] == "interrupted", stopped
            gate.set()
            done = await use(client, "resume_batch", batch=name, wait_seconds=120)
            assert done["state"] == "complete" and done["rows"]["ok"] == 4, done
            results = await use(client, "batch_results", batch=name)
    assert [row["output"] for row in results["rows"]] == ["fine"] * 4
    assert asked.count("Look: 0") == 1, "what was answered before is not asked again"
    assert json.loads((tmp_path / "runs" / name / "run.json").read_text())["state"] == "complete"

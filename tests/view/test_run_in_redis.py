"""The page of a run in Redis: it follows the run while other processes work on it, steers it, and keeps what was."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import needs_redis

from batch_agent import BatchAgent
from batch_agent.cli.main import main
from batch_agent.record.address import StoreAddress
from batch_agent.record.reader import open_run
from batch_agent.testing import Say, ScriptedServer
from batch_agent.view.runs import ShownRun, ShownRuns

pytestmark = needs_redis


class Held:
    """A server that answers the first rows, and the others when ``go`` is set."""

    def __init__(self, first: int) -> None:
        self.go, self._first = asyncio.Event(), first

    async def answer(self, request: Any) -> Say:
        if int(request.messages[-1]["content"].split()[-1]) >= self._first:
            await self.go.wait()
        return Say(f"said: {request.messages[-1]['content']}")


def options(server: ScriptedServer, url: str) -> dict[str, Any]:
    inputs = [{"row": f"row {row}"} for row in range(12)]
    common = {"task": "Do {row}", "system_prompt": "Be brief.", "backend": server.backend_url, "model": "m"}
    return {**common, "inputs": inputs, "run_dir": url, "max_inflight": 4, "progress": False}


@asynccontextmanager
async def shown(url: str) -> AsyncIterator[ShownRun]:
    run = ShownRun("run", open_run(url))
    try:
        yield run
    finally:
        await run.close()


async def heard(run: ShownRun, condition: Any) -> dict[str, Any]:
    """The first news for which the condition holds."""
    news = run.news()
    try:
        async with asyncio.timeout(30):
            async for now in news:
                if condition(now):
                    return dict(now)
    finally:
        await news.aclose()
    raise AssertionError("the news ended")


@pytest.mark.covers("view live", "Redis")
async def test_the_page_follows_a_run_in_redis_and_steers_it(url: str) -> None:
    held = Held(4)
    async with ScriptedServer(held.answer, models=["m"]) as server:
        working = asyncio.create_task(BatchAgent.run(**options(server, url)))
        await server.wait_requests(8)
        async with shown(url) as run:
            live = await heard(run, lambda now: now["alive"] and now["index"]["rows"] == 4)
            conversations = run.conversations(str(live["rows"][0]["index"]))
            talking = await anext(conversations)
            await conversations.aclose()
            await run.steer({"do": "pause"})
            paused = await heard(run, lambda now: now["alive"] and now["status"]["state"] == "paused")
            await run.steer({"do": "resume"})
            held.go.set()
            await working
            ended = await heard(run, lambda now: not now["alive"] and now["index"]["rows"] == 12)
            row = await run.do(lambda: run.record.row("3"))
            overview = await run.do(run.record.overview)

    assert live["status"]["rows"]["total"] == 12
    assert live["status"]["endpoints"][0]["inflight"] == 4
    assert [said["role"] for said in talking["conversation"]] == ["system", "user"]  # type: ignore[index]
    assert paused["status"]["state"] == "paused"
    assert ended["state"] == "complete"
    assert [said["text"] for said in row["conversation"]] == [  # type: ignore[index]
        *("Be brief.", "Do row 3", "said: Do row 3")
    ]
    assert overview["counts"]["ok"] == 12  # type: ignore[index]
    assert overview["samples"]


@pytest.mark.covers("show with inputs of unfinished rows", "Redis")
async def test_after_a_run_was_stopped_its_unfinished_rows_are_shown_with_their_inputs(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Held(4)
    async with ScriptedServer(held.answer, models=["m"]) as server:
        working = asyncio.create_task(BatchAgent.run(**options(server, url)))
        await server.wait_requests(8)
        working.cancel()
        await asyncio.wait([working])
        async with shown(url) as run:
            stopped = await heard(run, lambda now: now["index"]["rows"] == 4)
    assert stopped["state"] == "interrupted"
    assert not stopped["alive"]

    status = await asyncio.to_thread(lambda: main(["show", url, "--unfinished"]))
    printed = capsys.readouterr().out
    assert status == 0
    assert [f"Do row {row}\n" in printed for row in range(12)] == [False] * 4 + [True] * 8


async def test_the_page_of_a_server_lists_runs_that_begin_later(url: str) -> None:
    server = StoreAddress.parse(url).at("")
    runs = ShownRuns([], server)
    try:
        before = await asyncio.to_thread(runs.in_short)
        async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as models:
            await BatchAgent.run(**options(models, url))
        after = await asyncio.to_thread(runs.in_short)
        title = StoreAddress.parse(url).name
        overview = await asyncio.to_thread(lambda: runs.of(title).record.overview())
    finally:
        await runs.close()
    assert title not in [run["name"] for run in before]
    assert [(run["state"], run["ok"]) for run in after if run["name"] == title] == [("complete", 12)]
    assert overview["progress"]["ok"] == 12  # type: ignore[index, call-overload]
    assert overview["run"]["command"] == url  # type: ignore[index, call-overload]

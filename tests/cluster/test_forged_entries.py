"""Entries in the queue of a run in Redis that its feeder has not put there."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import closing

import pytest
from tests.record.redis_servers import needs_redis

from batch_agent import BatchAgent
from batch_agent.cli.main import main
from batch_agent.record.address import StoreAddress
from batch_agent.record.reader import look, open_run
from batch_agent.record.redis.connection import connect
from batch_agent.run.joined_worker import work as join
from batch_agent.testing import Request, Say, ScriptedServer

ROWS = 6


def forged(first: dict[str, str]) -> list[dict[str, str]]:
    """Entries that are no rows of the run; ``first`` is one that is."""
    return [
        {"row": "ab" * 32 + "-0", "index": "0", "value": '"evil"'},
        {"row": "no key", "index": "seven", "value": "no JSON"},
        {"value": '"evil"'},
        {"other": "x"},
        {**first, "value": '"evil"'},  # a second entry of a row
        {**first, "index": "5", "past": "checked"},
    ]


@needs_redis
@pytest.mark.parametrize("when", ["before the worker comes", "while it works"])
async def test_a_forged_entry_is_dropped_and_counted_and_not_waited_for(
    url: str, when: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    go, prefix = asyncio.Event(), StoreAddress.parse(url).prefix

    async def answer(request: Request) -> Say:
        await go.wait()
        return Say(request.text)

    async with ScriptedServer(answer, models=["m"]) as server:
        given = {"task": "Do {input}", "inputs": [f"row-{n}" for n in range(ROWS)], "model": "m"}
        running = asyncio.create_task(
            BatchAgent.run(**given, backend=server.backend_url, run_dir=url, feed_only=True, progress=False)
        )
        with closing(connect(StoreAddress.parse(url))) as client:
            while not client.execute_command("EXISTS", f"{prefix}queue"):
                await asyncio.sleep(0.02)
            while not (entries := client.execute_command("XRANGE", f"{prefix}queue", "-", "+", "COUNT", "1")):
                await asyncio.sleep(0.02)
            first = {name.decode(): value.decode() for name, value in entries[0][1].items()}

            def forge() -> None:
                for entry in forged(first):
                    words = [word for pair in entry.items() for word in pair]
                    client.execute_command("XADD", f"{prefix}queue", "*", *words)

            if when == "before the worker comes":
                forge()
            working = asyncio.create_task(join(url, wait=5.0, allow=[server.backend_url]))
            await server.wait_requests(1)
            if when == "while it works":
                forge()
            go.set()
            async with asyncio.timeout(30):
                results = await running
                await working
    assert [result.output for result in results] == [f"Do row-{n}" for n in range(ROWS)]
    assert Counter(request.text for request in server.requests) == Counter(f"Do row-{n}" for n in range(ROWS))
    told = [record.args for record in caplog.records if "no feeder put them there" in record.message]
    assert sum(args[1] for args in told if isinstance(args, tuple)) == len(forged(first))  # type: ignore[misc]
    assert look(url).facts["forged_entries"] == len(forged(first))
    assert main(["status", url]) == 0
    assert "forged" in capsys.readouterr().out
    assert main(["status", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forged_entries"] == len(forged(first))


@needs_redis
async def test_a_resume_and_a_reader_pass_over_forged_entries(url: str) -> None:
    async with ScriptedServer(lambda request: Say(request.text), models=["m"]) as server:
        given = {"task": "Do {input}", "model": "m", "backend": server.backend_url, "run_dir": url, "progress": False}
        await BatchAgent.run(**given, inputs=["row-0", "row-1"])
        with closing(connect(StoreAddress.parse(url))) as client:
            for entry in forged({"row": "x", "index": "0", "value": "1"}):
                words = [word for pair in entry.items() for word in pair]
                client.execute_command("XADD", f"{StoreAddress.parse(url).prefix}queue", "*", *words)
        with open_run(url) as reader:
            assert list(reader.unfinished()) == []
        results = await BatchAgent.run(**given, inputs=["row-0", "row-1", "row-2"], resume=True)
    assert [result.output for result in results] == ["Do row-0", "Do row-1", "Do row-2"]
    assert len(server.requests) == 3

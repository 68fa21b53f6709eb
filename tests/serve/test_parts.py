"""A bug in one part of a server does not end the others."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from tests.serve.served import chat, serving
from tests.serve.test_openai_batches import backend
from tests.warm import start

from batch_agent.serve import parts
from batch_agent.serve.parts import PartFailed, ServerParts
from batch_agent.testing import virtual_clock

# A server whose part for webhooks has a bug. It is started as the command starts it.
BROKEN = """
import sys
from batch_agent.cli.main import main
from batch_agent.serve import parts, webhooks

async def run(self):
    raise ZeroDivisionError("a bug of a test")

webhooks.Webhooks.run = run
parts.PAUSE_SECONDS = 0.01
sys.exit(main(sys.argv[1:]))
"""


async def test_a_part_that_fails_is_started_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PAUSE_SECONDS", 0.01)
    async with backend() as model, serving(tmp_path, model) as client:
        line_scheduler = client.server.line_scheduler
        choose = line_scheduler._choose
        line_scheduler._choose = None  # type: ignore[method-assign,assignment]
        while client.server.parts.failures["lines"] < 2:
            line_scheduler.touch()
            await asyncio.sleep(0.01)
        line_scheduler._choose = choose  # type: ignore[method-assign]
        done = await client.wait((await client.create([chat("a"), chat("b")]))["id"])
        assert done["request_counts"]["completed"] == 2
        _, page = await client.send("GET", "/metrics")
        assert b'batch_agent_serve_part_failures_total{part="lines"} ' in page
        assert b'batch_agent_serve_part_failures_total{part="webhooks"} 0' in page


@virtual_clock
async def test_a_part_that_fails_five_times_within_a_minute_ends_the_server() -> None:
    async def fails() -> None:
        raise ValueError("a bug")

    async def works() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            both = ServerParts(tasks)
            both.start("good", works)
            both.start("bad", fails)
    (error,) = raised.value.exceptions
    assert isinstance(error, PartFailed) and "ValueError: a bug" in str(error)
    assert both.failures == {"good": 0, "bad": 5}


@virtual_clock
async def test_a_part_that_fails_now_and_then_goes_on() -> None:
    async def fails() -> None:
        await asyncio.sleep(20)
        raise ValueError("a bug")

    async with asyncio.TaskGroup() as tasks:
        both = ServerParts(tasks)
        both.start("bad", fails)
        await asyncio.sleep(3600)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[arg-type]
            task.cancel()
    assert both.failures["bad"] > 100


async def test_the_command_says_so_and_ends_with_70(tmp_path: Path) -> None:
    async with backend() as model:
        command = ("serve", "--data", str(tmp_path), "--backend", model.backend_url, "--port", "0", "--reserve", "1K")
        process = await start("-c", BROKEN, *command, stdout=PIPE, stderr=PIPE)
        _, words = await process.communicate()
    assert process.returncode == 70
    assert b"Traceback" in words and b"the part 'webhooks' failed 5 times within 60 s" in words

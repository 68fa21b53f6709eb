"""A row leaves no reference cycles: the garbage collector has nothing to do while a run works. No agent is kept."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, Tool
from batch_agent.agent.agent import Agent
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse, virtual_clock

FEW, MANY = 50, 1_000


class Verdict(BaseModel):
    verdict: str


@Tool.define
async def lookup(topic: str) -> str:
    """Look up what is known about a topic."""
    await asyncio.sleep(0.01)
    return f"nothing is known about {topic}"


class Script:
    """A tool call, then an answer. One row in ten has an answer that must be repaired, and a request that fails."""

    def __init__(self) -> None:
        self._failed = set[str]()

    def __call__(self, request: Request) -> Say | CallTools | Fail:
        row = str(request.messages[1]["content"])
        if row.endswith("7") and row not in self._failed:
            self._failed.add(row)
            return Fail(503)
        last = request.messages[-1]
        if last["role"] == "tool":
            return Say("no JSON" if row.endswith("7") else '{"verdict": "clean"}')
        if last["content"] != row:
            return Say('{"verdict": "clean"}')
        return CallTools(ToolUse("lookup", {"topic": row}))


def garbage(rows: int, run_dir: Path | None) -> Counter[str]:
    """Return the objects of all rows of a run that only the garbage collector could free, by type."""

    @virtual_clock
    async def work() -> Counter[str]:
        options = {} if run_dir is None else {"run_dir": run_dir}
        run = BatchAgent.open(
            system_prompt="You review records.",
            task="Review {input}",
            inputs=[f"record {number}" for number in range(rows)],
            tools=[lookup],
            output_schema=Verdict,
            model="m",
            backend=ScriptedBackend(Script()),
            max_inflight=16,
            **options,
        )
        async with run:
            async for result in run.results():
                assert result.ok
            assert not any(isinstance(each, Agent) for each in gc.get_objects())
            gc.collect()
            return Counter(type(each).__qualname__ for each in gc.garbage)

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        return work()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("recorded", [False, True], ids=["in memory", "recorded"])
def test_rows_leave_no_cycles(recorded: bool, tmp_path: Path) -> None:
    _, few, many = (
        garbage(rows, tmp_path / str(place) if recorded else None)
        for place, rows in enumerate((FEW, FEW, MANY))  # the first also leaves what happens once in a process
    )
    assert (many - few).total() < FEW, many - few

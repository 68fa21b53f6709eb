"""The journal of a run directory need not be a file of SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_store import MemoryStore
from store_contract import Opened, StoreContract

from batch_agent import BatchAgent
from batch_agent.record.reader import look
from batch_agent.record.rundir import JOURNAL
from batch_agent.run.run import Run
from batch_agent.testing import Fail, Request, Say, ScriptedBackend


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def opened(self) -> Opened:
        store = MemoryStore()
        return lambda: store.open(Path(), begun=True)


async def test_a_run_is_recorded_and_resumed_with_a_store_of_its_own(tmp_path: Path) -> None:
    store = MemoryStore()

    async def session(script: Any) -> tuple[list[object], int]:
        backend = ScriptedBackend(script)
        prepared = BatchAgent.plan(
            task="{input}", inputs=["a", "b", "c"], backend=backend, run_dir=tmp_path, resume=True, max_retries=0
        )
        async with Run[str](prepared, open_store=store.open) as run:
            results = sorted([result async for result in run.results()], key=lambda result: result.index)
        return [result.output for result in results], len(backend.requests)

    def flaky(request: Request) -> Any:
        return Fail(422) if request.text == "b" else Say(request.text)

    assert await session(flaky) == (["a", None, "c"], 3)
    assert await session(lambda request: Say(request.text.upper())) == (["a", "B", "c"], 1)
    assert store.sessions() == 2
    assert not (tmp_path / JOURNAL).exists()
    assert look(tmp_path).state == "complete"

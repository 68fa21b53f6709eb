"""Reads the tool calls that rows made in an earlier run from its directory, even while a process works there.

Rows are matched by their content alone, because the task, the model or the tools may have changed.
"""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

from batch_agent.messages import ToolCall
from batch_agent.record.codec import ASKED, decode
from batch_agent.record.rundir import JOURNAL, read_run
from batch_agent.record.sqlite import open_to_read
from batch_agent.record.steps import Asked


class EarlierCalls:
    """Use it with ``async with``. All reading is in its own thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-earlier")
        self._db: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        """Raise SpecError if there is no run, StoreError if its journal cannot be read."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    async def of(self, row: bytes) -> list[tuple[ToolCall, ...]]:
        """Return the calls of the row's latest agent, grouped by answer. Empty if the row is not recorded."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, row)

    def _open(self) -> None:
        read_run(self._path)
        self._db = db = open_to_read(self._path / JOURNAL)
        db.execute("CREATE TEMP TABLE latest (row BLOB PRIMARY KEY, agent INTEGER) WITHOUT ROWID")
        db.execute("INSERT INTO latest SELECT row, max(agent) FROM main.record GROUP BY row")

    def _read(self, row: bytes) -> list[tuple[ToolCall, ...]]:
        assert self._db is not None
        query = (
            "SELECT kind, body FROM latest JOIN main.record AS record USING (agent) "
            "WHERE latest.row = ? AND kind = ? ORDER BY record.id"
        )
        # An unreadable record is ignored: these calls are only predictions, and must not make a run fail.
        with suppress(sqlite3.Error, ValueError):
            steps = [decode(*found) for found in self._db.execute(query, (row, ASKED))]
            return [step.reply.tool_calls for step in steps if isinstance(step, Asked) and step.reply.tool_calls]
        return []

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()

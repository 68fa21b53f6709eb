"""Finds the recorded agent of a row. A journal is ordered by agent; rows are identified by a hash of their input.

The journal is read in small parts, with a new connection for each, so that a running writer can truncate its log.
Methods block. Use an object in one thread only.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from batch_agent.files.columns import Record
from batch_agent.record.codec import DONE, ENDED, FAILED, decode
from batch_agent.record.keys import row_of
from batch_agent.record.rundir import JOURNAL
from batch_agent.record.sqlite import open_to_read
from batch_agent.record.steps import Past, read_past

AT_ONCE = 20_000  # records read in one transaction


class RecordedAgents:
    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / JOURNAL
        self._by_row: dict[bytes, list[int]] = {}
        self._kinds: dict[int, int] = {}  # kind of each agent's last record
        self._read = 0  # id of the last record that was read

    def of(self, record: Record) -> Past | None:
        """Return the agent of this result; None if it is not recorded or cannot be identified."""
        if not self._journal.exists():
            return None
        row = row_of(record.get("input"), "")
        guess = self._past(int(str(record["index"])) + 1, row)
        if guess is not None and _fits(guess, record):  # the usual case: agents start in the order of rows
            return guess
        self._catch_up()
        candidates = [past for agent in self._by_row.get(row, ()) if (past := self._past(agent, row)) is not None]
        return next((past for past in candidates if _fits(past, record)), candidates[-1] if candidates else guess)

    def unfinished(self) -> list[int]:
        """Return the agents that have started and have not ended."""
        if not self._journal.exists():
            return []
        self._catch_up()
        return [agent for agent, kind in self._kinds.items() if kind not in (DONE, ENDED, FAILED)]

    def _past(self, agent: int, row: bytes) -> Past | None:
        query = "SELECT kind, body, row FROM record WHERE agent = ? ORDER BY id"
        with closing(open_to_read(self._journal)) as db:
            found = db.execute(query, (agent,)).fetchall()
        if not found or bytes(found[0][2]) != row:
            return None
        try:
            return read_past(agent, [decode(kind, body) for kind, body, _ in found])
        except ValueError:
            return None

    def _catch_up(self) -> None:
        query = "SELECT id, agent, row, kind FROM record WHERE id > ? ORDER BY id LIMIT ?"
        while True:
            try:
                with closing(open_to_read(self._journal)) as db:
                    found = db.execute(query, (self._read, AT_ONCE)).fetchall()
            except sqlite3.Error:
                return
            for place, agent, row, kind in found:
                self._read = place
                if agent not in self._kinds:
                    self._by_row.setdefault(bytes(row), []).append(agent)
                self._kinds[agent] = kind
            if len(found) < AT_ONCE:
                return


def _fits(past: Past, record: Record) -> bool:
    """Return whether the agent may have made this result: each row with the same input has its own agent."""
    return len(past.turns) == record.get("turns") and past.done == bool(record.get("ok"))

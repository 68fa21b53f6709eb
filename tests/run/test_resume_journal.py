"""A journal of an older format, as it was written before there was the next, is resumed like one of today.

Each file of ``journals`` holds four rows: one that is done after a tool call, one that was repaired, one
that the server refused after a tool call, and one that was interrupted while its second call, a write, was running.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, StoreError, Tool
from batch_agent.record.codec import FORMAT, OLDEST
from batch_agent.record.sqlite import SqliteJournal, glance
from batch_agent.record.store import KeptStep, Totals
from batch_agent.testing import Request, Say, ScriptedBackend

JOURNALS = Path(__file__).parent.parent / "record" / "journals"
ROWS = ["done", "mended", "failed", "unfinished"]
ran: list[str] = []


class Answer(BaseModel):
    word: str


@Tool.define(effect="read")
async def look_up(word: str) -> str:
    """Look a word up."""
    ran.append(word)
    return f"about {word}"


@Tool.define(effect="write")
async def send(to: str) -> str:
    """Send it."""
    ran.append(to)
    return "sent"


@pytest.fixture(params=range(OLDEST, FORMAT))
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    ran.clear()
    shutil.copy(JOURNALS / f"format-{request.param}.db", tmp_path / "journal.db")
    return tmp_path


async def resume(directory: Path, **options: Any) -> tuple[list[AgentResult[Answer]], list[Request]]:
    backend = ScriptedBackend(lambda request: Say(json.dumps({"word": "new"})))
    results = await BatchAgent.run(
        task="{input}",
        inputs=ROWS,
        tools=[look_up, send],
        output_schema=Answer,
        backend=backend,
        model="scripted",
        run_dir=directory,
        resume=True,
        max_retries=1,
        **options,
    )
    return results, backend.requests


def version(path: Path) -> int:
    db = sqlite3.connect(path)
    try:
        return int(db.execute("PRAGMA user_version").fetchone()[0])
    finally:
        db.close()


async def test_what_it_holds_is_not_asked_again_and_the_rest_goes_on(directory: Path) -> None:
    results, requests = await resume(directory)
    assert [result.output and result.output.word for result in results] == ["done", "mended", "new", "new"]
    assert [(result.resumed, result.turns) for result in results] == [(True, 2), (True, 2), (False, 1), (False, 2)]
    assert sorted(str(request.messages[1]["content"]) for request in requests) == ["failed", "unfinished"]
    assert ran == []
    told = [message.content for message in results[3].messages if message.role == "tool"]
    assert told[0] == "about unfinished" and "its outcome is unknown" in told[1]


async def test_it_becomes_one_of_this_format_when_a_session_begins_and_not_before(directory: Path) -> None:
    path = directory / "journal.db"
    before = version(path)
    SqliteJournal.open(path).close()
    assert (glance(path).sessions, version(path)) == (1, before)
    assert before < FORMAT
    await resume(directory)
    assert (glance(path).sessions, version(path)) == (2, FORMAT)
    _, requests = await resume(directory)
    assert requests == []


async def test_a_kind_of_step_that_only_a_newer_version_knows_costs_its_row(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    db = sqlite3.connect(directory / "journal.db")
    query = "SELECT id, agent, key, row, body FROM record WHERE agent = 1 AND kind = 6"
    place, agent, key, row, body = db.execute(query).fetchone()
    db.execute("DELETE FROM record WHERE id = ?", (place,))
    db.commit()
    db.close()
    journal = SqliteJournal.open(directory / "journal.db")
    journal.begin(b"", "")
    journal.commit([KeptStep(agent, key, row, 99, body)], Totals())
    journal.close()
    results, requests = await resume(directory, retry_failed=False)
    assert [result.output and result.output.word for result in results] == ["new", "mended", None, "new"]
    assert len(requests) == 2
    assert "kind 99 was written by a newer version" in caplog.text


@pytest.mark.parametrize("other", [OLDEST - 1, FORMAT + 1])
async def test_a_journal_of_another_format_is_refused_with_its_number(directory: Path, other: int) -> None:
    db = sqlite3.connect(directory / "journal.db")
    db.execute(f"PRAGMA user_version = {other}")
    db.close()
    with pytest.raises(StoreError, match=rf"\(format {other}, this one reads {OLDEST} to {FORMAT}\)"):
        await resume(directory)
    assert version(directory / "journal.db") == other


@pytest.mark.parametrize(
    ("column", "body"),
    [
        ("body = CAST(? AS BLOB)", "[]"),  # test_step_codec.py has all other forms
        ("body = CAST(? AS BLOB)", '[9, "no such call"]'),
        ("body = CAST(? AS BLOB)", '[-1, ""]'),
        ("body = ?", "7"),
    ],
)
async def test_a_record_of_a_wrong_type_costs_its_row(
    directory: Path, body: str, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    db = sqlite3.connect(directory / "journal.db")
    db.execute(f"UPDATE record SET {column} WHERE agent = 1 AND kind IN (3, 10)", (body,))
    db.commit()
    db.close()
    results, _ = await resume(directory)
    assert [result.output and result.output.word for result in results] == ["new", "mended", "new", "new"]
    assert "is unreadable and is ignored" in caplog.text

"""A run directory that was damaged: its rows are asked again with a warning, or the run is refused. Never another
answer, and never a silent second bill."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, StoreError
from batch_agent.record.reader import open_run
from batch_agent.record.rundir import JOURNAL, RUN
from batch_agent.run.copying import copy_to_directory
from batch_agent.testing import Request, Say, ScriptedBackend

ROWS = [f"row {n}" for n in range(5)]


async def run(directory: Path, task: str = "{input}", **options: Any) -> tuple[list[object], ScriptedBackend]:
    backend = ScriptedBackend(lambda request: Say(f"said {request.text}"))
    results = await BatchAgent.run(
        task=task, inputs=ROWS, backend=backend, run_dir=directory, progress=False, **options
    )
    return [result.output for result in results], backend


def change(directory: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(directory / JOURNAL)
    with db:
        assert db.execute(statement, values).rowcount > 0
    db.close()


@pytest.fixture
async def forced(tmp_path: Path) -> Path:
    """A run whose rows kept their answers by force, although the task changed."""
    await run(tmp_path)
    outputs, backend = await run(tmp_path, "Now {input}", force_resume=True)
    assert (outputs, backend.requests) == ([f"said {row}" for row in ROWS], [])
    return tmp_path


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[]"])
async def test_a_damaged_run_file_is_replaced_by_its_copy_in_the_journal(
    forced: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (forced / RUN).write_bytes(content)
    outputs, backend = await run(forced, "Now {input}", resume=True)
    assert (outputs, backend.requests) == ([f"said {row}" for row in ROWS], [])
    assert "its copy in the journal is used" in caplog.text


async def test_a_damaged_run_file_without_a_copy_is_an_error_that_says_what_to_do(forced: Path) -> None:
    (forced / RUN).write_bytes(b"{")
    change(forced, "DELETE FROM fact WHERE name = 'facts'")
    with pytest.raises(StoreError, match=r"run\.json is damaged.*--keep-answers"):
        await run(forced, "Now {input}", resume=True)
    outputs, backend = await run(forced, "Now {input}", force_resume=True)
    assert (outputs, backend.requests) == ([f"said {row}" for row in ROWS], [])


@pytest.mark.parametrize("place", ["first", "middle", "last"])
async def test_a_flipped_bit_in_a_record_asks_that_row_again_and_names_it(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    outputs, _ = await run(tmp_path, max_inflight=1)
    db = sqlite3.connect(tmp_path / JOURNAL)
    number, body = db.execute("SELECT id, body FROM record ORDER BY id LIMIT 1 OFFSET 3").fetchone()
    db.close()
    damaged = bytearray(body)
    damaged[{"first": 0, "middle": len(body) // 2, "last": -1}[place]] ^= 1
    change(tmp_path, "UPDATE record SET body = ? WHERE id = ?", bytes(damaged), number)
    again, backend = await run(tmp_path, resume=True)
    assert again == outputs
    [request] = backend.requests
    assert row_of(request) == "row 3"
    assert "the record of row 3 is unreadable and is ignored" in caplog.text


async def test_a_record_that_was_given_to_another_row_is_not_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bodies of two records are exchanged: each can be read, but belongs to the other."""
    outputs, _ = await run(tmp_path, max_inflight=1)
    db = sqlite3.connect(tmp_path / JOURNAL)
    (one, first), (two, second) = db.execute("SELECT id, body FROM record ORDER BY id LIMIT 2").fetchall()
    db.close()
    change(tmp_path, "UPDATE record SET body = ? WHERE id = ?", second, one)
    change(tmp_path, "UPDATE record SET body = ? WHERE id = ?", first, two)
    again, backend = await run(tmp_path, resume=True)
    assert again == outputs
    assert sorted(map(row_of, backend.requests)) == ["row 0", "row 1"]
    assert caplog.text.count("is unreadable and is ignored") == 2


async def test_a_damaged_session_is_an_error_until_the_run_is_copied(tmp_path: Path) -> None:
    """What the session spent is unknown: a budget that continues would be another one."""
    outputs, _ = await run(tmp_path / "run", max_total_tokens=1_000_000)
    change(tmp_path / "run", "UPDATE session SET tokens = tokens - 1")
    with pytest.raises(StoreError, match=r"session 1 is not as it was written.*batch-agent copy"):
        await run(tmp_path / "run", resume=True, max_total_tokens=1_000_000)
    with open_run(tmp_path / "run") as reader:
        assert copy_to_directory(reader, tmp_path / "copy") == len(ROWS)
    again, backend = await run(tmp_path / "copy", resume=True, max_total_tokens=1_000_000)
    assert (again, backend.requests) == (outputs, [])


async def test_a_copy_leaves_out_damaged_records_and_names_their_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs, _ = await run(tmp_path / "run", max_inflight=1)
    change(tmp_path / "run", "UPDATE record SET body = replace(body, 'said', 'Said') WHERE id = 4")
    with open_run(tmp_path / "run") as reader:
        copy_to_directory(reader, tmp_path / "copy")
    assert "the record of row 3 is not copied; it is asked again: it is damaged" in caplog.text
    again, backend = await run(tmp_path / "copy", resume=True)
    assert again == outputs
    assert [row_of(request) for request in backend.requests] == ["row 3"]


async def test_a_damaged_key_is_an_error_until_the_run_is_copied(tmp_path: Path) -> None:
    outputs, _ = await run(tmp_path / "run", max_inflight=1)
    change(tmp_path / "run", "UPDATE record SET key = x'00' WHERE id = 4")
    with pytest.raises(StoreError, match=r"the key of agent 4 is not as it was written.*batch-agent copy"):
        await run(tmp_path / "run", resume=True)
    with open_run(tmp_path / "run") as reader:
        assert copy_to_directory(reader, tmp_path / "copy") == len(ROWS)
    again, backend = await run(tmp_path / "copy", resume=True)
    assert again == outputs
    assert [row_of(request) for request in backend.requests] == ["row 3"]


async def test_a_damaged_index_is_an_error_until_the_run_is_copied(tmp_path: Path) -> None:
    outputs, _ = await run(tmp_path / "run", max_inflight=1)
    db = sqlite3.connect(tmp_path / "run" / JOURNAL)
    with db:
        db.execute("DROP INDEX record_agent")
        db.execute("CREATE INDEX record_agent ON record (agent) WHERE agent != 4")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, ' WHERE agent != 4', '') WHERE type = 'index'")
    db.close()
    with pytest.raises(StoreError, match=r"missing from index.*batch-agent copy"):
        await run(tmp_path / "run", resume=True)
    with open_run(tmp_path / "run") as reader:
        assert copy_to_directory(reader, tmp_path / "copy") == len(ROWS)
    again, backend = await run(tmp_path / "copy", resume=True)
    assert again == outputs
    assert [row_of(request) for request in backend.requests] == ["row 3"]


def row_of(request: Request) -> str:
    return request.text

"""The journal on disk: what is committed is there, what is damaged is refused, nothing is ever misread."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_contract import Opened, StoreContract, done, read, text_of, write

from batch_agent.errors import StoreError
from batch_agent.record.base import Progress
from batch_agent.record.codec import FORMAT
from batch_agent.record.sqlite import SqliteJournal, glance


class TestSqliteJournal(StoreContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Opened:
        return at(tmp_path / "journal.db")


def at(path: Path) -> Opened:
    return lambda: SqliteJournal.open(path)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 256, 257, 1000])
def test_a_commit_of_any_size_is_recorded_whole(tmp_path: Path, count: int) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(agent, f"row {agent}") for agent in range(1, count + 1)])
    assert None not in read(at(path), *(f"row {agent}" for agent in range(1, count + 1)))


def test_a_glance_tells_of_the_last_session(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(7, "a")])
    write(at(path), [done(8, "b"), done(9, "c")])
    assert (glance(path).sessions, glance(path).latest.ok) == (2, 2)


def test_another_process_may_look_while_the_journal_is_open(tmp_path: Path) -> None:
    journal = SqliteJournal.open(tmp_path / "journal.db")
    journal.begin(b"f", "now")
    journal.commit([done(1, "a")], Progress(ok=1, tokens=12))
    assert glance(tmp_path / "journal.db").latest == Progress(ok=1, tokens=12)
    journal.close()


@pytest.mark.parametrize("version, age", [(FORMAT + 1, "a newer"), (0, "an older")])
def test_a_journal_of_another_format_is_refused(tmp_path: Path, version: int, age: str) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(1, "a")])
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(StoreError, match=f"{age} version.*format {version}"):
        SqliteJournal.open(path)


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SqliteJournal.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"this is no database, and it is long enough to be sure of that" * 50])
def test_a_journal_that_is_none_is_refused_with_a_way_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged.*move journal\.db"):
        SqliteJournal.open(path)


def test_a_record_that_cannot_be_decoded_is_none_and_keeps_no_other_from_being_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(1, "a"), done(2, "b"), done(3, "b", "another")])
    db = sqlite3.connect(path)
    db.execute("UPDATE record SET body = x'ff' WHERE agent < 3")
    db.commit()
    db.close()
    assert list(map(text_of, read(at(path), "a", "b", "b"))) == [None, "another", None]
    assert caplog.text.count("is unreadable and is ignored") == 2


def test_a_number_that_sqlite_cannot_hold_is_a_store_error_or_cut(tmp_path: Path) -> None:
    journal = SqliteJournal.open(tmp_path / "journal.db")
    journal.begin(b"f", "now")
    journal.commit([done(1, "a")], Progress(ok=1, tokens=10**30))
    assert glance(tmp_path / "journal.db").latest.tokens == 2**63 - 1
    with pytest.raises(StoreError, match="cannot be recorded"):
        journal.commit([done(10**30, "b")], Progress(ok=2))
    journal.close()
    assert text_of(read(at(tmp_path / "journal.db"), "a")[0]) == "answer"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a kill leaves it: ten commits of three rows, in the write-ahead log."""
    here = tmp_path_factory.mktemp("killed")
    journal = SqliteJournal.open(here / "live.db")
    journal.begin(b"f", "now")
    for commit in range(10):
        journal.commit([done(3 * commit + n, f"{3 * commit + n}") for n in range(1, 4)], Progress())
    for suffix in ("", "-wal"):
        shutil.copy(here / f"live.db{suffix}", here / f"journal.db{suffix}")
    journal.close()
    return here / "journal.db"


@given(st.floats(0, 1))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_prefix_of_the_log_holds_a_prefix_of_the_commits(killed: Path, share: float) -> None:
    log = killed.with_name("journal.db-wal").read_bytes()
    copy = killed.parent / "prefix.db"
    for leftover in killed.parent.glob("prefix.db*"):
        leftover.unlink()
    shutil.copy(killed, copy)
    copy.with_name("prefix.db-wal").write_bytes(log[: int(share * len(log))])
    try:
        found = [past is not None for past in read(at(copy), *(str(n) for n in range(1, 31)))]
    except StoreError:  # the schema itself was cut off
        assert share < 0.5
        return
    assert found == sorted(found, reverse=True)
    assert sum(found) % 3 == 0
    assert share < 1 or sum(found) == 30


@given(st.floats(0, 0.999))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_cut_off_is_refused_or_holds_true_answers(tmp_path: Path, share: float) -> None:
    path = tmp_path / "whole.db"
    if not path.exists():
        write(at(path), [done(n, str(n), f"answer {n}" + "." * 300) for n in range(1, 101)])
    cut = tmp_path / "cut.db"
    for leftover in tmp_path.glob("cut.db*"):
        leftover.unlink()
    content = path.read_bytes()
    cut.write_bytes(content[: int(share * len(content))])
    try:
        found = read(at(cut), *(str(n) for n in range(1, 101)))
    except StoreError:
        return
    for n, past in enumerate(found, start=1):
        assert past is None or text_of(past) == f"answer {n}" + "." * 300

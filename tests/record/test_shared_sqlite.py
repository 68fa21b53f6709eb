"""The contract of a shared run, for the file that the driver of a cluster keeps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_agent.record.shared import RowChange, RowLease, RunStore
from batch_agent.record.shared_sqlite import SHARED, SqliteRunStore
from run_store_contract import Expire, OpenedRun, RunStoreContract, fed, finish, new_row, step


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestSqliteRunStore(RunStoreContract):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def opened_run(self, tmp_path: Path, clock: Clock) -> Iterator[OpenedRun]:
        """Its workers share one object: it lives in the driver."""
        store = SqliteRunStore(tmp_path / SHARED, clock)
        yield lambda: store
        store.close()

    @pytest.fixture
    def expire(self, clock: Clock) -> Expire:
        def expire() -> None:
            clock.now += 1_000_000.0

        return expire

    def steps_kept(self, store: RunStore, lease: RowLease) -> int:
        assert isinstance(store, SqliteRunStore)
        with sqlite3.connect(store._path) as db:
            query = "SELECT count(*) FROM step JOIN entry ON step.entry = entry.id WHERE name = ?"
            count = int(db.execute(query, (lease.row,)).fetchone()[0])
        db.close()
        return count


def test_a_driver_that_was_killed_goes_on_from_its_file_with_higher_tokens(tmp_path: Path) -> None:
    store = SqliteRunStore(tmp_path / SHARED)
    fed(store, new_row(0), new_row(1))
    one, two = store.take(store.join({}), 2, 0)
    finish(store, 1, 1, one)
    store.commit(1, 2, [RowChange(two.lease, (step("turn"),))])
    store.close()  # without a word to the feeder

    again = SqliteRunStore(tmp_path / SHARED)
    sitting = again.open_feed({"fingerprint": "f", "lease": 60}, resume=True, keep_results_only=False).sitting
    assert again.feed(sitting, [new_row(0), new_row(1)], True) == [b"result of {}", None]
    (taken,) = again.take(again.join({}), 5, 0)
    assert taken.lease.token > two.lease.token
    assert taken.steps == (step("turn"),)
    assert again.commit(1, 3, [RowChange(two.lease, (), b"late")]) == {two.lease.place}
    again.close()

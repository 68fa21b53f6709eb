"""The part of a record's contract that is about its files: cut off, damaged, not synced, or impossible to write."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from batch_agent.errors import StoreError
from batch_agent.record.store import Commit, Row, RowChange
from batch_agent.share.table import BUDGET_TOKENS, Claim
from batch_agent.testing.store_place import (
    DEAD,
    MEMBER,
    RESUME,
    Session,
    StorePlace,
    begin,
    begun,
    bodies,
    done,
    facts,
    files_limited_to,
    needs,
    new_row,
    turn,
)


class DurabilityContract:
    def test_a_commit_that_was_cut_off_is_absent_as_a_whole_and_the_earlier_ones_are_there(
        self, place: StorePlace
    ) -> None:
        needs(place.log, "this store appends to no file")
        rows = [new_row(place, index) for index in range(4)]
        now = begin(place, place.open(), *rows)
        first, *others = now.take()
        now.record(first, turn(rows[0], "kept", 1))
        assert place.log is not None
        before = place.log.stat().st_size
        changes = [RowChange(row, (turn(rows[n], "cut", n + 1),)) for n, row in enumerate(others, start=1)]
        now.commit(*changes)
        whole = place.log.read_bytes()
        assert len(whole) > before, "a commit was not written when it returned"
        for size in (before + 1, (before + len(whole)) // 2, len(whole) - 1):
            place.log.write_bytes(whole[:size])
            again = begin(place, place.reopen(now.store), *rows, how=RESUME)
            found = {row.row.index: bodies(row.steps) for row in again.take()}
            assert found == {0: bodies([turn(rows[0], "kept")]), 1: [], 2: [], 3: []}
            place.log.write_bytes(whole)

    def test_lines_about_jobs_that_were_cut_off_are_absent_as_a_whole(self, place: StorePlace) -> None:
        needs(place.log, "this store appends to no file")
        now = begin(place, place.open())
        assert place.log is not None
        before = place.log.stat().st_size
        now.work.add_job_lines([b'{"wave":"1"}', b'{"wave":"2"}'])
        whole = place.log.read_bytes()
        needs(len(whole) > before, "lines about jobs are in another file")
        place.log.write_bytes(whole[:-1])
        assert begin(place, place.reopen(now.store), how=RESUME).work.job_lines() == []

    def test_a_record_that_was_cut_off_is_continued(self, place: StorePlace) -> None:
        needs(place.log, "this store appends to no file")
        rows = [new_row(place, index) for index in range(2)]
        now = begin(place, place.open(), *rows)
        one, two = now.take()
        now.record(one, turn(rows[0], "first", 1))
        now.record(two, turn(rows[1], "cut", 2))
        assert place.log is not None
        place.log.write_bytes(place.log.read_bytes()[:-1])
        again = begin(place, place.reopen(now.store), *rows, how=RESUME)
        _, two = sorted(again.take(), key=lambda row: row.row.index)
        again.record(two, turn(rows[1], "second", next(again.work.agent_numbers(again.worker))))
        again.close()
        third = begin(place, place.reopen(again.store), *rows, how=RESUME)
        found = [bodies(row.steps) for row in sorted(third.take(), key=lambda row: row.row.index)]
        assert found == [bodies([turn(rows[0], "first")]), bodies([turn(rows[1], "second")])]

    def test_what_was_committed_survives_a_loss_of_power(self, place: StorePlace) -> None:
        rows = [new_row(place, index) for index in range(2)]
        now = begin(place, place.open(), *rows)
        one, two = now.take()
        now.finish(one, steps=[done(rows[0], "answer", 1)])
        now.record(two, begun(rows[1], 2))
        claim = {BUDGET_TOKENS: Claim(1000, 0, 1000)}

        # What is written last is not synced with anything that is written after it.
        self._after_power_loss(place, rows)
        now.work.add_job_lines([b"{}"])
        again = self._after_power_loss(place, rows)
        assert again.work.job_lines() == [b"{}"]
        now.store.write_facts(now.number, facts(total=7))
        again = self._after_power_loss(place, rows)
        assert (again.previous or {})["total"] == 7
        now.work.beat("killed", DEAD, {BUDGET_TOKENS: Claim(1000, 0, 600)}, {}, {})
        again = self._after_power_loss(place, rows)
        assert again.work.beat("next", MEMBER, claim, {}, {}).grants[BUDGET_TOKENS].held == 400
        if place.ledger:
            now.store.lend("feeder", claim)
            now.work.commit(now.worker, 100, Commit())
            assert self._after_power_loss(place, rows).store.spent().tokens == 1000

    def _after_power_loss(self, place: StorePlace, rows: Sequence[Row]) -> Session:
        """Resume what survived: the result of the first row, and the write that the second has begun."""
        survived = place.lose_power()
        needs(survived, "the syncing of this store cannot be observed")
        assert survived is not None
        again = begin(place, survived, *rows, how=RESUME)
        found = {row.row.index: bodies(row.steps) for row in again.take()}
        assert found[1] == bodies([begun(rows[1])])
        assert again.answers[0] == "result 0" if place.keeps == "results" else found[0]
        return again

    def test_a_file_of_garbage_is_refused_and_left_alone(self, place: StorePlace) -> None:
        needs(place.file, "this store has no file")
        now = begin(place, place.open(), new_row(place, 0))
        now.record(now.take()[0], turn(new_row(place, 0), "turn"))
        now.close()
        assert place.file is not None
        garbage = b"this is not a record\n\xff\x00 and nothing reads it\n" * 200
        place.file.write_bytes(garbage)
        with pytest.raises(StoreError, match="damaged"):
            begin(place, place.open(), new_row(place, 0), how=RESUME)
        assert place.file.read_bytes() == garbage

    def test_a_place_that_cannot_be_written_is_a_store_error(self, place: StorePlace) -> None:
        store = place.unwritable()
        needs(store, "this store has no files")
        assert store is not None
        with pytest.raises(StoreError):
            begin(place, store, new_row(place, 0))

    def test_a_closed_store_refuses_commits(self, place: StorePlace) -> None:
        needs(place.file, "this store has no file")
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        (held,) = now.take()
        now.store.close()
        with pytest.raises(StoreError):
            now.record(held, turn(row, "turn"))

    def test_a_full_disk_is_a_store_error_and_nothing_of_the_commit_is_there_later(self, place: StorePlace) -> None:
        needs(place.log and sys.platform != "win32", "this store appends to no file whose size can be limited")
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        (held,) = now.take()
        now.record(held, turn(row, "before"))
        assert place.log is not None
        with files_limited_to(place.log.stat().st_size + 2000), pytest.raises(StoreError):
            now.record(held, turn(row, "x" * 100_000))
        (taken,) = begin(place, place.reopen(now.store), row, how=RESUME).take()
        assert bodies(taken.steps) == bodies([turn(row, "before")])

"""What every store of a shared run does. A class that inherits this says how a store is ``opened`` again and how time
passes in it (``expire``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from batch_agent.record.shared import (
    Counts,
    FeederReplaced,
    KeptStep,
    LeasedRow,
    NewRow,
    RowChange,
    RowLease,
    RunStore,
)

from batch_agent.errors import SpecError, StoreError

OpenedRun = Callable[[], RunStore]
Expire = Callable[[], None]


def new_row(index: int, name: str | None = None, value: bytes = b"{}") -> NewRow:
    key = (name or f"row {index}").encode()
    return NewRow(index, key, b"content of " + key, value)


def step(text: str, *, agent: int = 1, kind: int = 1) -> KeptStep:
    return KeptStep(agent, b"key", b"content", kind, text.encode())


def facts(fingerprint: str = "f", lease: float = 3600.0) -> dict[str, object]:
    return {"fingerprint": fingerprint, "lease": lease, "spec": {"task": "t"}}


def fed(store: RunStore, *rows: NewRow, fingerprint: str = "f", resume: bool = False) -> int:
    sitting = store.open_feed(facts(fingerprint), resume=resume, keep_results_only=False).sitting  # type: ignore[arg-type]
    store.feed(sitting, rows, True)
    return sitting


def leases(rows: list[LeasedRow]) -> list[RowLease]:
    return [row.lease for row in rows]


def delivered(store: RunStore, sitting: int, after: str = "0-0") -> list[tuple[int, bytes]]:
    return [(each.index, each.result) for each in store.results(sitting, after, 100, 0) if each.own]


def finish(store: RunStore, worker: int, number: int, *rows: LeasedRow, error: str = "") -> set[str]:
    changes = [RowChange(row.lease, (step("end"),), b"result of " + row.value, error) for row in rows]
    return store.commit(worker, number, changes)


class RunStoreContract:
    def test_there_is_no_run_before_it_is_fed(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        assert store.facts() is None
        with pytest.raises(StoreError):
            store.standing()

    def test_rows_are_leased_once_in_their_order_and_results_come_in_the_order_of_their_ends(
        self, opened_run: OpenedRun
    ) -> None:
        store = opened_run()
        sitting = fed(store, *(new_row(index, value=b"%d" % index) for index in range(5)))
        one, two = store.join({"host": "a"}), store.join({"host": "b"})
        assert one != two
        first, second = store.take(one, 3, 0), store.take(two, 3, 0)
        assert [row.value for row in first] == [b"0", b"1", b"2"]
        assert [row.lease.index for row in second] == [3, 4]
        assert store.take(one, 3, 0) == []
        assert finish(store, two, 1, *second) == finish(store, one, 1, *first) == set()
        assert [index for index, _ in delivered(store, sitting)] == [3, 4, 0, 1, 2]
        store.end_inputs(sitting)
        assert store.standing().counts == Counts(ok=5, fed=True)
        assert store.standing().done

    def test_a_row_whose_lease_ended_is_taken_over_with_its_steps_and_the_old_holder_is_refused(
        self, opened_run: OpenedRun, expire: Expire
    ) -> None:
        store, other = opened_run(), opened_run()
        sitting = fed(store, new_row(0))
        one, two = store.join({}), other.join({})
        (row,) = store.take(one, 1, 0)
        store.commit(one, 1, [RowChange(row.lease, (step("turn 1"), step("turn 2", kind=2)))])
        expire()
        (taken,) = other.take(two, 1, 0)
        assert taken.lease.token > row.lease.token
        assert taken.lease.row == row.lease.row
        assert taken.steps == (step("turn 1"), step("turn 2", kind=2))
        assert store.commit(one, 2, [RowChange(row.lease, (step("late"),), b"late")]) == {row.lease.place}
        assert store.renew(one, [row.lease])[0] == {row.lease.place}
        store.hand_back(one, [row.lease])  # it is not its own any more
        assert store.take(one, 1, 0) == []
        assert finish(other, two, 1, taken) == set()
        assert delivered(store, sitting) == [(0, b"result of {}")]

    def test_a_worker_that_takes_its_own_row_again_is_refused_under_the_old_token(
        self, opened_run: OpenedRun, expire: Expire
    ) -> None:
        store = opened_run()
        fed(store, new_row(0))
        worker = store.join({})
        (old,) = store.take(worker, 1, 0)
        expire()
        (new,) = store.take(worker, 1, 0)
        assert store.commit(worker, 1, [RowChange(old.lease, (step("late"),))]) == {old.lease.place}
        assert store.renew(worker, [new.lease])[0] == set()
        assert finish(store, worker, 2, new) == set()

    def test_a_renewed_lease_outlasts_the_time_of_a_lease(self, opened_run: OpenedRun, expire: Expire) -> None:
        store = opened_run()
        fed(store, new_row(0), new_row(1))
        one, two = store.join({}), store.join({})
        first, second = store.take(one, 2, 0)
        expire()
        assert store.renew(one, [first.lease])[0] == set()
        assert [row.lease.row for row in store.take(two, 2, 0)] == [second.lease.row]

    def test_a_commit_refuses_the_rows_that_are_lost_and_records_the_others(
        self, opened_run: OpenedRun, expire: Expire
    ) -> None:
        store = opened_run()
        sitting = fed(store, new_row(0), new_row(1))
        one, two = store.join({}), store.join({})
        rows = store.take(one, 2, 0)
        expire()
        store.renew(one, [rows[1].lease])
        store.take(two, 1, 0)
        assert finish(store, one, 1, *rows) == {rows[0].lease.place}
        assert [index for index, _ in delivered(store, sitting)] == [1]

    def test_a_commit_that_is_repeated_changes_nothing_and_answers_the_same(
        self, opened_run: OpenedRun, expire: Expire
    ) -> None:
        store = opened_run()
        sitting = fed(store, new_row(0), new_row(1))
        one, two = store.join({}), store.join({})
        rows = store.take(one, 2, 0)
        change = [RowChange(rows[0].lease, (step("turn"),))]
        assert store.commit(one, 1, change) == store.commit(one, 1, change) == set()
        assert finish(store, one, 2, *rows) == finish(store, one, 2, *rows) == set()
        assert len(delivered(store, sitting)) == 2
        assert store.standing().counts.ok == 2
        assert store.take(two, 2, 0) == []

    def test_what_is_handed_back_can_be_taken_at_once(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        fed(store, new_row(0), new_row(1))
        one, two = store.join({}), store.join({})
        rows = store.take(one, 2, 0)
        store.commit(one, 1, [RowChange(rows[0].lease, (step("turn"),))])
        store.hand_back(one, leases(rows))
        store.leave(one)
        taken = store.take(two, 2, 0)
        assert [(row.lease.index, row.steps) for row in taken] == [(0, (step("turn"),)), (1, ())]
        assert finish(store, one, 2, *rows) == {row.lease.place for row in rows}
        assert finish(store, two, 1, *taken) == set()

    def test_a_run_is_taken_up_only_on_request_and_delivers_what_ended_before(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = fed(store, *map(new_row, range(3)))
        worker = store.join({})
        rows = store.take(worker, 3, 0)
        finish(store, worker, 1, rows[0])
        finish(store, worker, 2, rows[1], error="Unavailable")
        store.close_feed(sitting, facts(), "ended")  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="holds a run already"):
            opened_run().open_feed(facts(), resume=False, keep_results_only=False)  # type: ignore[arg-type]
        again = opened_run()
        sitting = again.open_feed(facts(), resume=True, keep_results_only=False).sitting  # type: ignore[arg-type]
        answers = again.feed(sitting, [new_row(0), new_row(1), new_row(2)], True)
        assert answers == [b"result of {}", None, None]
        (retried,) = again.take(worker, 3, 0)
        assert (retried.lease.index, retried.steps) == (1, (step("end"),))
        assert finish(again, worker, 3, retried, rows[2]) == set()  # its lease held over the change of feeders
        assert sorted(index for index, _ in delivered(again, sitting)) == [1, 2]

    def test_only_the_failures_that_are_named_are_tried_again(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = fed(store, *map(new_row, range(2)))
        worker = store.join({})
        one, two = store.take(worker, 2, 0)
        finish(store, worker, 1, one, error="Unavailable")
        finish(store, worker, 2, two, error="Invalid")
        store.close_feed(sitting, facts(), "ended")  # type: ignore[arg-type]
        sitting = store.open_feed(facts(), resume=True, keep_results_only=False).sitting  # type: ignore[arg-type]
        assert store.feed(sitting, [new_row(0), new_row(1)], ["Invalid"]) == [b"result of {}", None]

    def test_a_result_that_comes_while_a_new_feeder_feeds_is_delivered_once(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = fed(store, *map(new_row, range(2)))
        worker = store.join({})
        rows = store.take(worker, 2, 0)
        store.close_feed(sitting, facts(), "running")  # type: ignore[arg-type]
        feed = store.open_feed(facts(), resume=True, keep_results_only=False)  # type: ignore[arg-type]
        finish(store, worker, 1, rows[0])
        answers = store.feed(feed.sitting, [new_row(0), new_row(1)], True)
        finish(store, worker, 2, rows[1])
        assert answers == [b"result of {}", None]
        assert store.feed(feed.sitting, [new_row(0), new_row(1)], True) == [b"result of {}", None]
        assert [index for index, _ in delivered(store, feed.sitting, feed.position)] == [1]

    def test_rows_that_ask_the_same_are_rows_of_their_own(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = fed(store, *(new_row(index, "same") for index in range(3)), new_row(3, "other"))
        store.feed(sitting, [new_row(4, "same"), new_row(5, "same")], True)
        worker = store.join({})
        rows = store.take(worker, 10, 0)
        assert [row.lease.index for row in rows] == [0, 1, 2, 3, 4, 5]
        assert len({row.lease.row for row in rows}) == 6
        finish(store, worker, 1, *rows)
        store.close_feed(sitting, facts(), "ended")  # type: ignore[arg-type]
        sitting = store.open_feed(facts(), resume=True, keep_results_only=False).sitting  # type: ignore[arg-type]
        assert None not in store.feed(sitting, [new_row(index, "same") for index in range(5)], True)
        assert store.feed(sitting, [new_row(5, "same")], True) == [None]

    def test_a_row_that_moved_keeps_its_record_and_one_that_is_gone_leaves_the_queue(
        self, opened_run: OpenedRun
    ) -> None:
        store = opened_run()
        sitting = fed(store, new_row(0, "a"), new_row(1, "b"), new_row(2, "c"))
        worker = store.join({})
        (row,) = store.take(worker, 1, 0)
        store.commit(worker, 1, [RowChange(row.lease, (step("turn"),))])
        store.close_feed(sitting, facts(), "running")  # type: ignore[arg-type]
        sitting = store.open_feed(facts(), resume=True, keep_results_only=False).sitting  # type: ignore[arg-type]
        store.feed(sitting, [new_row(0, "b"), new_row(1, "a")], True)
        store.end_inputs(sitting)
        taken = store.take(worker, 5, 0)
        assert sorted((each.lease.index, each.steps) for each in taken) == [(0, ()), (1, (step("turn"),))]
        assert store.renew(worker, [row.lease])[0] == {row.lease.place}

    def test_another_fingerprint_begins_a_generation_and_empties_the_queue(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = fed(store, new_row(0, "a"))
        worker = store.join({})
        (row,) = store.take(worker, 1, 0)
        before = store.standing().generation
        store.close_feed(sitting, facts(), "running")  # type: ignore[arg-type]
        fed(store, new_row(0, "b"), fingerprint="g", resume=True)
        lost, standing = store.renew(worker, [row.lease])
        assert lost == {row.lease.place}
        assert standing.generation != before
        assert [each.lease.row for each in store.take(worker, 5, 0)] == [b"b".hex()]

    def test_a_feeder_that_was_replaced_writes_nothing(self, opened_run: OpenedRun, expire: Expire) -> None:
        store, other = opened_run(), opened_run()
        sitting = fed(store, new_row(0))
        expire()
        feed = other.open_feed(facts(), resume=True, keep_results_only=False)  # type: ignore[arg-type]
        assert feed.previous == facts()
        for late in (
            lambda: store.feed(sitting, [new_row(1)], True),
            lambda: store.keep_feed(sitting),
            lambda: store.end_inputs(sitting),
            lambda: store.set_phase(sitting, "ended"),
            lambda: store.close_feed(sitting, facts(), "ended"),  # type: ignore[arg-type]
        ):
            with pytest.raises(FeederReplaced):
                late()  # type: ignore[no-untyped-call]
        assert other.keep_feed(feed.sitting).feeder

    def test_workers_see_the_phase_and_whether_there_is_a_feeder(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = fed(store, new_row(0))
        worker = store.join({})
        assert store.renew(worker, [])[1].phase == "running"
        store.set_phase(sitting, "draining")
        assert store.standing().phase == "draining"
        store.close_feed(sitting, facts(), "ended")  # type: ignore[arg-type]
        standing = store.renew(worker, [])[1]
        assert (standing.phase, standing.feeder, standing.done) == ("ended", False, True)

    def test_the_turns_of_rows_that_are_ok_are_dropped_where_only_results_are_kept(self, opened_run: OpenedRun) -> None:
        store = opened_run()
        sitting = store.open_feed(facts(), resume=False, keep_results_only=True).sitting  # type: ignore[arg-type]
        store.feed(sitting, [new_row(0), new_row(1)], True)
        worker = store.join({})
        good, bad = store.take(worker, 2, 0)
        finish(store, worker, 1, good)
        finish(store, worker, 2, bad, error="Invalid")
        assert self.steps_kept(store, good.lease) == 0
        assert self.steps_kept(store, bad.lease) == 1
        assert [index for index, _ in delivered(store, sitting)] == [0, 1]

    def steps_kept(self, store: RunStore, lease: RowLease) -> int:
        raise NotImplementedError

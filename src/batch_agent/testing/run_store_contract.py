"""The contract of a record: tests that every ``RunStore`` passes.

The author of a store writes a ``StorePlace`` (``testing.store_place``), and inherits ``RunStoreContract`` in a test
class with a fixture ``place``:

    class TestMyStore(RunStoreContract):
        @pytest.fixture
        def place(self, tmp_path):
            with closing(MyPlace(tmp_path)) as place:
                yield place

Every test takes only ``place``. A test of something that a store does not have is skipped, with the reason. This module
needs pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from batch_agent.errors import SpecError, StoreError
from batch_agent.record.store import (
    Commit,
    Counts,
    FeederReplaced,
    Identity,
    Lease,
    Resuming,
    Row,
    RowChange,
    RunStore,
    Spent,
)
from batch_agent.share.table import BUDGET_TOKENS, SLOTS, Claim, Learnt
from batch_agent.testing.store_durability import DurabilityContract
from batch_agent.testing.store_place import (
    DEAD,
    FRESH,
    MEMBER,
    RESUME,
    StorePlace,
    begin,
    begun,
    bodies,
    done,
    facts,
    needs,
    new_row,
    texts,
    turn,
)

SLOT_POT = f"{SLOTS}server"
TRIES = 20  # to wait for something for half a second
LONG = 'text "with" \n, é, \0 and \u2028 ' * 10_000


class RunStoreContract(DurabilityContract):
    # Rows and leases

    def test_there_is_no_run_before_it_is_fed(self, place: StorePlace) -> None:
        store = place.open()
        store.open(FRESH)
        assert store.facts() is None
        with pytest.raises(StoreError):
            store.standing()

    def test_rows_are_leased_once_in_their_order_and_results_come_in_the_order_of_their_ends(
        self, place: StorePlace
    ) -> None:
        now = begin(place, place.open(), *(new_row(place, index) for index in range(5)))
        other = now.work.join({"host": "b"})
        assert other != now.worker
        first, second = now.take(3), now.work.take(other, 3, 0)
        assert texts(first, place) == ["input row 0", "input row 1", "input row 2"]
        assert [row.row.index for row in second] == [3, 4]
        assert now.take() == []
        assert now.store.standing().counts == Counts(leased=5)
        assert now.work.commit(other, 1, Commit([now.ended(row) for row in second])) == set()
        assert now.finish(*first[:2]) == now.finish(first[2], error="Invalid") == set()
        assert now.delivered() == [(index, f"result {index}") for index in (3, 4, 0, 1, 2)]
        assert not now.store.standing().done
        now.store.end_inputs(now.number)
        assert now.store.standing().counts == Counts(ok=4, failed=1, fed=True)
        assert now.store.standing().done

    def test_each_result_is_read_once_in_pages(self, place: StorePlace) -> None:
        now = begin(place, place.open(), *(new_row(place, index) for index in range(7)))
        rows = now.take()
        now.finish(*rows[:5])
        read: list[int] = []
        position = now.position
        for _ in range(10):
            page = now.store.results(now.number, position, 2, 0)
            assert len(page) <= 2
            if not page and len(read) == 5:
                now.finish(*rows[5:])
            read += [each.index for each in page]
            position = page[-1].position if page else position
        assert read == [0, 1, 2, 3, 4, 5, 6]

    def test_a_row_whose_lease_ended_is_taken_over_with_its_steps_and_the_old_holder_is_refused(
        self, place: StorePlace
    ) -> None:
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        two = now.work.join({})
        (old,) = now.take()
        now.record(old, turn(row, "turn 1"), begun(row))
        now.record(old, turn(row, "turn 2"))
        place.expire()
        (taken,) = now.work.take(two, 1, 0)
        assert taken.token > old.token
        assert (taken.row.index, texts([taken], place)) == (old.row.index, ["input row 0"])
        assert bodies(taken.steps) == bodies([turn(row, "turn 1"), begun(row), turn(row, "turn 2")])
        assert now.record(old, turn(row, "late")) == {old.place}
        assert now.finish(old) == {old.place}
        assert now.work.renew(now.worker, [old])[0] == {old.place}
        now.work.hand_back(now.worker, [old])  # it is another worker's row
        assert now.take() == []
        assert now.delivered() == []
        assert now.work.commit(two, 1, Commit([now.ended(taken)])) == set()
        assert now.work.commit(two, 2, Commit([now.ended(taken)])) == {taken.place}  # it has ended
        assert now.delivered() == [(0, "result 0")]

    def test_a_row_whose_lease_ended_comes_before_new_rows(self, place: StorePlace) -> None:
        now = begin(place, place.open(), *(new_row(place, index) for index in range(3)))
        first, _ = now.take(2)
        now.finish(first)
        place.expire()
        now.store.feed(now.number, [new_row(place, 3)])
        assert [row.row.index for row in now.take(2)] == [1, 2]

    def test_a_lease_holds_for_its_whole_time(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0))
        (held,) = now.take()
        needs(place.wait_half(), "time cannot be moved by half a lease")
        assert now.work.take(now.work.join({}), 1, 0) == []
        assert now.finish(held) == set()

    def test_a_worker_that_takes_its_own_row_again_is_refused_under_the_old_token(self, place: StorePlace) -> None:
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        (old,) = now.take()
        place.expire()
        (new,) = now.take()
        assert new.token > old.token
        assert now.record(old, turn(row, "late")) == {old.place}
        assert now.work.renew(now.worker, [new])[0] == set()
        assert now.finish(new) == set()

    def test_a_renewed_lease_outlasts_the_time_of_a_lease(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0), new_row(place, 1))
        two = now.work.join({})
        first, second = now.take()
        place.expire()
        assert now.work.renew(now.worker, [first])[0] == set()
        assert [row.row.index for row in now.work.take(two, 2, 0)] == [second.row.index]

    def test_a_commit_refuses_the_rows_that_are_lost_and_records_the_others(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0), new_row(place, 1))
        two = now.work.join({})
        rows = now.take()
        place.expire()
        now.work.renew(now.worker, [rows[1]])
        now.work.take(two, 1, 0)
        assert now.finish(*rows) == {rows[0].place}
        assert [index for index, _ in now.delivered()] == [1]

    def test_a_commit_that_is_repeated_changes_nothing_and_answers_the_same(self, place: StorePlace) -> None:
        one, two = rows = new_row(place, 0), new_row(place, 1)
        now = begin(place, place.open(), *rows)
        other = now.work.join({})
        first, second = now.take()
        change = [RowChange(first, (turn(one, "turn"),))]
        assert now.work.commit(now.worker, 1, Commit(change)) == now.work.commit(now.worker, 1, Commit(change)) == set()
        place.expire()
        (again, _) = now.work.take(other, 2, 0)
        assert bodies(again.steps) == bodies([turn(one, "turn")])
        late = [now.ended(second)]
        lost = {second.place}
        assert now.work.commit(now.worker, 2, Commit(late)) == now.work.commit(now.worker, 2, Commit(late)) == lost
        ended = [now.ended(again, steps=[done(one, "end")])]
        assert now.work.commit(other, 1, Commit(ended)) == now.work.commit(other, 1, Commit(ended)) == set()
        assert len(now.delivered()) == 1
        assert now.store.standing().counts.ok == 1
        assert two.index not in [index for index, _ in now.delivered()]

    def test_what_is_handed_back_can_be_taken_at_once_with_its_steps(self, place: StorePlace) -> None:
        rows = [new_row(place, index) for index in range(3)]
        now = begin(place, place.open(), *rows)
        two = now.work.join({})
        held = now.take()
        turns = [turn(row, f"turn {row.index}") for row in rows]
        now.commit(*(RowChange(row, (step,)) for row, step in zip(held, turns, strict=True)))
        now.work.hand_back(now.worker, [held[1]])
        taken = now.work.take(two, 3, 0)
        assert [row.row.index for row in taken] == [1]
        now.work.hand_back(now.worker, [held[0]])
        now.work.leave(now.worker)
        taken += now.work.take(two, 3, 0)
        place.expire()  # the lease of the row that was not handed back
        now.work.renew(two, taken)
        taken += now.work.take(two, 3, 0)
        found = [(place.read_value(row.row.value), bodies(row.steps)) for row in taken]
        assert found == [(f"input row {index}", bodies([turns[index]])) for index in (1, 0, 2)]
        assert now.finish(*held) == {row.place for row in held}
        assert now.work.commit(two, 1, Commit([now.ended(row) for row in taken])) == set()
        assert now.delivered() == [(index, f"result {index}") for index in (1, 0, 2)]

    def test_a_worker_in_the_feeders_process_keeps_its_rows_and_hands_them_on_with_their_steps(
        self, place: StorePlace
    ) -> None:
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        needs(not now.store.wait, "no worker is in the process of this store")
        own = now.store.join({"feeder": True})
        (held,) = now.store.take(own, 1, 0)
        now.store.commit(own, 1, Commit([RowChange(held, (turn(row, "turn"),))]))
        place.expire()
        assert now.take() == []
        now.store.hand_back(own, [held])
        (taken,) = now.take()
        assert bodies(taken.steps) == bodies([turn(row, "turn")])

    def test_a_worker_in_the_feeders_process_continues_an_agent_of_another_process(self, place: StorePlace) -> None:
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        needs(not now.store.wait and place.keeps != "nothing", "no worker is in the process of this store")
        (old,) = now.take()
        now.record(old, turn(row, "first", next(now.work.agent_numbers(now.worker))))
        place.expire()
        own = now.store.join({"feeder": True})
        (taken,) = now.store.take(own, 1, 0)
        now.store.commit(own, 1, Commit([RowChange(taken, (turn(row, "second", taken.steps[0].agent),))]))
        (again,) = begin(place, place.reopen(now.store), row, how=RESUME).take()
        assert bodies(again.steps) == bodies([turn(row, "first"), turn(row, "second")])
        assert len({step.agent for step in again.steps}) == 1

    def test_rows_that_ask_the_same_are_rows_of_their_own(self, place: StorePlace) -> None:
        now = begin(
            place, place.open(), *(new_row(place, index, "same") for index in range(3)), new_row(place, 3, "other")
        )
        now.store.feed(now.number, [new_row(place, 4, "same"), new_row(place, 5, "same")])
        rows = now.take()
        assert [row.row.index for row in rows] == [0, 1, 2, 3, 4, 5]
        assert len({row.place for row in rows}) == 6
        now.finish(*rows)
        assert [index for index, _ in now.delivered()] == [0, 1, 2, 3, 4, 5]

    def test_no_two_agents_have_one_number(self, place: StorePlace) -> None:
        now = begin(place, place.open())
        workers = [now.work.join({}) for _ in range(3)]
        numbers = [now.work.agent_numbers(worker) for worker in workers]
        drawn = [next(each) for each in numbers for _ in range(5)]
        assert len(set(drawn)) == 15

    def test_threads_that_take_at_once_never_get_one_row_twice(self, place: StorePlace) -> None:
        now = begin(place, place.open(), *(new_row(place, index) for index in range(60)))

        def take(_: int) -> list[int]:
            worker, taken = now.work.join({}), list[int]()
            while rows := now.work.take(worker, 3, 0):
                now.work.commit(worker, len(taken) + 1, Commit([now.ended(row) for row in rows]))
                taken += [row.row.index for row in rows]
            return taken

        with ThreadPoolExecutor(4) as threads:
            taken = [index for found in threads.map(take, range(4)) for index in found]
        assert sorted(taken) == list(range(60))
        assert sorted(index for index, _ in now.delivered()) == list(range(60))

    def test_a_worker_that_waits_gets_a_row_when_one_is_fed_and_the_feeder_its_result(self, place: StorePlace) -> None:
        now = begin(place, place.open())

        def work() -> None:
            rows: list[Lease] = []
            for _ in range(TRIES):
                rows = rows or now.work.take(now.worker, 1, 0.5)
            now.finish(*rows)

        worker = threading.Thread(target=work)
        worker.start()
        now.store.feed(now.number, [new_row(place, 0)])
        worker.join()
        results = [each for _ in range(TRIES) for each in now.store.results(now.number, now.position, 10, 0.5)]
        assert {each.index for each in results} == {0}

    # The feeder

    def test_workers_see_the_phase_and_whether_there_is_a_feeder(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0))
        assert now.work.renew(now.worker, [])[1].phase == "running"
        assert now.store.keep_feed(now.number).feeder
        now.store.set_phase(now.number, "draining")
        assert now.work.standing().phase == "draining"
        now.store.close_feed(now.number, facts(), "ended")
        standing = now.work.renew(now.worker, [])[1]
        assert (standing.phase, standing.feeder, standing.done) == ("ended", False, True)

    def test_facts_are_those_that_were_written_last(self, place: StorePlace) -> None:
        now = begin(place, place.open())
        assert (now.work.facts() or {})["spec"] == {"task": "t"}
        now.store.write_facts(now.number, facts(total=7))
        assert (now.work.facts() or {})["total"] == 7

    def test_a_feeder_that_was_replaced_writes_nothing(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0))
        late, store = now.number + 1, now.store
        if place.shared:
            place.expire()
            other = place.open()
            late = now.number
            store, opened = now.store, other.open_feed(facts(), RESUME)
            assert opened.previous == facts()
            assert other.keep_feed(opened.number).feeder
        calls = (
            lambda: store.feed(late, [new_row(place, 1)]),
            lambda: store.keep_feed(late),
            lambda: store.write_facts(late, facts(late=True)),
            lambda: store.end_inputs(late),
            lambda: store.set_phase(late, "ended"),
            lambda: store.close_feed(late, facts(late=True), "ended"),
            lambda: store.events(late, "0", 1),
        )
        for call in calls:
            with pytest.raises(FeederReplaced):
                call()
        assert "late" not in (store.facts() or {})
        assert store.standing().phase == "running"
        assert store.standing().counts.unstarted == 1

    def test_a_run_is_resumed_only_on_request(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        begin(place, place.open(), new_row(place, 0)).close()
        again = place.open()
        with pytest.raises(SpecError, match="resume"):
            again.open(FRESH)
        again.close()
        resumed = begin(place, place.open(), new_row(place, 0), how=RESUME)
        assert (resumed.previous or {})["fingerprint"] == "0f"

    def test_only_one_process_feeds_a_run(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing" and not place.shared, "other processes do not open this store")
        begin(place, place.open(), new_row(place, 0))
        other = place.open()
        with pytest.raises(StoreError):
            other.open(RESUME)

    def test_leases_hold_when_another_process_becomes_the_feeder(self, place: StorePlace) -> None:
        needs(place.shared, "workers do not outlive the feeder of this store")
        rows = [new_row(place, index) for index in range(2)]
        now = begin(place, place.open(), *rows)
        held = now.take()
        now.store.close_feed(now.number, facts(), "running")
        other = place.open()
        opened = other.open_feed(facts(), RESUME)
        now.finish(held[0])
        answers = other.feed(opened.number, rows)
        assert answers == other.feed(opened.number, rows) == [place.result("result 0", 0), None]
        now.finish(held[1])
        found = other.results(opened.number, opened.position, 10, 0)
        assert [each.index for each in found if each.own] == [1]

    # The next process

    def test_after_a_kill_everything_that_was_committed_is_there(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        rows = [new_row(place, index) for index in range(4)]
        now = begin(place, place.open(), *rows)
        ended, failed, running, _ = now.take()
        now.record(running, turn(rows[2], LONG, 3), begun(rows[2], 3))
        now.finish(ended, steps=[done(rows[0], "the answer", 1)])
        now.finish(failed, error="Unavailable", steps=[turn(rows[1], "a turn", 2)])
        again = begin(place, place.reopen(now.store), *rows, how=RESUME)
        assert again.delivered() == []
        found = {row.row.index: bodies(row.steps) for row in again.take()}
        known = {
            0: bodies([done(rows[0], "the answer")]),
            1: bodies([turn(rows[1], "a turn")]),
            2: bodies([turn(rows[2], LONG), begun(rows[2])]),
            3: [],
        }
        if place.keeps == "results":
            assert again.answers == ["result 0", None, None, None]
            del known[0]
        else:
            assert again.answers == [None] * 4
        assert found == known

    def test_a_long_input_and_a_long_result_are_kept_whole(self, place: StorePlace) -> None:
        row = new_row(place, 0, LONG)
        now = begin(place, place.open(), row)
        (held,) = now.take()
        assert texts([held], place) == [f"input {LONG}"]
        now.commit(RowChange(held, (), place.result(LONG, 0)))
        assert now.delivered() == [(0, LONG)]
        if place.keeps == "results":
            assert begin(place, place.reopen(now.store), row, how=RESUME).answers == [LONG]

    def test_a_write_that_was_begun_is_known_after_a_kill(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        now.record(now.take()[0], begun(row))
        (taken,) = begin(place, place.reopen(now.store), row, how=RESUME).take()
        assert bodies(taken.steps) == bodies([begun(row)])

    def test_steps_keep_their_order_and_their_agents(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        (held,) = now.take()
        (agent,) = [next(now.work.agent_numbers(now.worker))]
        wanted = [turn(row, f"turn {number}", agent) for number in range(12)]
        for start in range(0, 12, 3):
            now.record(held, *wanted[start : start + 3])
        (taken,) = begin(place, place.reopen(now.store), row, how=RESUME).take()
        assert bodies(taken.steps) == bodies(wanted)
        assert len({step.agent for step in taken.steps}) == 1

    def test_a_lease_from_before_a_kill_is_refused_once_the_row_is_leased_again(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        (old,) = now.take()
        again = begin(place, place.reopen(now.store), row, how=RESUME)
        (taken,) = again.take()
        late = again.ended(old)
        assert again.work.commit(now.worker, 9, Commit([late])) == {old.place}
        assert again.work.commit(again.worker, 9, Commit([late])) == {old.place}
        assert (old.place, old.token) != (taken.place, taken.token)
        assert again.delivered() == []

    def test_a_worker_number_and_agent_numbers_are_not_used_again_after_a_kill(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        rows = [new_row(place, 0), new_row(place, 1)]
        now = begin(place, place.open(), *rows)
        one, _ = now.take()
        mine = now.work.agent_numbers(now.worker)
        now.record(one, turn(rows[0], "of the first", next(mine)))
        again = begin(place, place.reopen(now.store), *rows, how=RESUME)
        first, second = sorted(again.take(), key=lambda row: row.row.index)
        assert bodies(first.steps) == bodies([turn(rows[0], "of the first")])
        number = next(again.work.agent_numbers(again.worker))
        assert number not in [step.agent for step in first.steps]
        again.record(second, turn(rows[1], "of the second", number))
        third = begin(place, place.reopen(again.store), *rows, how=RESUME)
        found = [bodies(row.steps) for row in sorted(third.take(), key=lambda row: row.row.index)]
        assert found == [bodies([turn(rows[0], "of the first")]), bodies([turn(rows[1], "of the second")])]

    def test_only_the_failures_that_are_named_are_tried_again(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        rows = [new_row(place, index) for index in range(2)]
        now = begin(place, place.open(), *rows)
        one, two = now.take()
        now.finish(one, error="Unavailable")
        now.finish(two, error="Invalid")
        now.close()
        none = begin(place, place.open(), *rows, how=Resuming(resume=True, retry=False))
        assert none.answers == ["result 0", "result 1"] if place.keeps == "results" else not none.take()[0].retry
        none.close()
        named = ("Invalid",)
        again = begin(place, place.open(), *rows, how=Resuming(resume=True, retry=named))
        tried = again.take()
        if place.keeps == "steps":
            assert [row.retry for row in tried] == [named, named]  # a worker decides from the steps
            return
        assert again.answers == ["result 0", None]
        assert [row.row.index for row in tried] == [1]
        again.finish(*tried)
        again.close()
        assert begin(place, place.open(), *rows, how=RESUME).answers == [None, "result 1"]

    def test_rows_that_ask_the_same_each_get_a_record_once(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        rows = [new_row(place, index, "same") for index in range(3)]
        now = begin(place, place.open(), *rows)
        numbers = now.work.agent_numbers(now.worker)
        for number, row in enumerate(now.take()):
            now.finish(row, steps=[done(rows[0], f"answer {number}", next(numbers))])
        now.close()
        again = begin(place, place.open(), *(new_row(place, index, "same") for index in range(4)), how=RESUME)
        answers = [row for row in again.take() if row.steps]
        if place.keeps == "results":
            assert sorted(str(answer) for answer in again.answers[:3]) == ["result 0", "result 1", "result 2"]
            assert (again.answers[3], answers) == (None, [])
        else:
            given = sorted(step.body for row in answers for step in row.steps)
            assert given == sorted(done(rows[0], f"answer {number}").body for number in range(3))

    def test_each_recorded_agent_is_claimed_once(self, place: StorePlace) -> None:
        needs(place.keeps == "steps", "a leased row has the steps of all its agents")
        row, part = new_row(place, 0), new_row(place, 0, "part")
        now = begin(place, place.open(), row)
        numbers = now.work.agent_numbers(now.worker)
        (held,) = now.take()
        now.record(held, done(row, "whole", next(numbers)), done(part, "left", next(numbers)))
        again = begin(place, place.reopen(now.store), row, how=RESUME)
        (taken,) = again.take()
        assert taken.more
        wanted = [Identity(part.key, part.content)] * 2
        found = again.work.claim(taken, wanted)
        assert [bodies(steps) for steps in found] == [bodies([done(part, "left")]), []]
        assert again.work.claim(taken, wanted) == [(), ()]

    def test_a_row_that_moved_keeps_its_record_and_one_that_is_gone_leaves_the_queue(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        a, b, c = (new_row(place, index, name) for index, name in enumerate("abc"))
        now = begin(place, place.open(), a, b, c)
        held = now.take(1)[0]
        now.record(held, turn(a, "turn"))
        again = begin(place, place.reopen(now.store), new_row(place, 0, "b"), new_row(place, 1, "a"), how=RESUME)
        again.store.end_inputs(again.number)
        taken = {row.row.index: bodies(row.steps) for row in again.take()}
        assert taken == {0: [], 1: bodies([turn(a, "turn")])}
        assert again.store.standing().counts == Counts(leased=2, fed=True)

    def test_another_fingerprint_begins_a_generation_and_old_answers_are_not_used(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        rows = [new_row(place, index) for index in range(2)]
        now = begin(place, place.open(), *rows)
        ended, running = now.take()
        now.finish(ended, steps=[done(rows[0], "old answer")])
        generation = now.store.standing().generation
        changed = [new_row(place, index, question="another question about ") for index in range(2)]
        again = begin(place, place.reopen(now.store), *changed, how=RESUME, fingerprint="1f")
        assert again.store.standing().generation != generation
        assert again.answers == [None, None]
        assert again.work.renew(now.worker, [running])[0] == {running.place}
        assert [(row.row.index, row.steps) for row in again.take()] == [(0, ()), (1, ())]

    def test_by_force_rows_keep_their_steps_though_the_question_changed(self, place: StorePlace) -> None:
        needs(place.keeps == "steps", "this store looks rows up by their question")
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        now.finish(now.take()[0], steps=[done(row, "old answer")])
        now.close()
        changed = new_row(place, 0, question="another question about ")
        again = begin(place, place.open(), changed, how=Resuming(resume=True, force=True), fingerprint="1f")
        (taken,) = again.take()
        assert (bodies(taken.steps), taken.checks) == (bodies([done(row, "old answer")]), False)

    def test_the_steps_of_successful_rows_are_dropped_if_only_results_are_kept(self, place: StorePlace) -> None:
        store = place.open()
        store.open(FRESH)
        session = store.open_feed(facts(), FRESH, keep_results_only=True).number
        rows = [new_row(place, index) for index in range(2)]
        store.feed(session, rows)
        worker = store.join({})
        good, bad = store.take(worker, 2, 0)
        needs(place.steps_kept(store, good) is not None, "this store keeps all steps")
        store.commit(worker, 1, Commit([RowChange(good, (done(rows[0], "x"),), place.result("result 0", 0))]))
        store.commit(worker, 2, Commit([RowChange(bad, (turn(rows[1], "x"),), place.result("result 1", 1), "Invalid")]))
        assert (place.steps_kept(store, good), place.steps_kept(store, bad)) == (0, 1)

    # What was spent

    def test_what_sessions_spent_is_added_up_and_what_they_held_and_did_not_return_counts_as_spent(
        self, place: StorePlace
    ) -> None:
        needs(place.ledger, "the run is never alone")
        sessions = (
            (Claim(1000, 90, 90, spent=10), Spent(nano=5), None, False),  # killed
            (Claim(1000, 20, 20, spent=20), Spent(2), (1, 2, 3), True),
            (Claim(1000, 30, 30, spent=30), Spent(3, 7), None, True),
        )
        store = place.open()
        for number, (claim, spent, learnt, ends) in enumerate(sessions, start=1):
            now = begin(place, store, how=RESUME)
            own = store.join({"feeder": True})
            granted = store.lend(f"feeder-{number}", {BUDGET_TOKENS: Claim(1000, 0, 200)})
            assert granted[BUDGET_TOKENS].held == 200
            store.commit(own, 1, Commit())
            assert store.lend(f"feeder-{number}", {BUDGET_TOKENS: claim})[BUDGET_TOKENS].held == claim.held
            store.commit(own, 2, Commit((), spent, learnt))
            if ends:
                now.close()
            store = place.reopen(store)
        last = begin(place, store, how=RESUME)
        assert (last.store.spent(), last.store.learnt()) == (Spent(90 + 20 + 30 + 5, 12), (1, 2, 3))

    def test_a_part_of_the_budget_is_known_after_a_kill_also_before_anything_was_spent(self, place: StorePlace) -> None:
        needs(place.ledger, "the run is never alone")
        now = begin(place, place.open())
        now.store.lend("feeder-1", {BUDGET_TOKENS: Claim(1000, 0, 500)})
        now.store.commit(now.store.join({"feeder": True}), 1, Commit())
        again = begin(place, place.reopen(now.store), how=RESUME)
        assert again.store.spent().tokens == 500
        assert again.store.lend("feeder-2", {BUDGET_TOKENS: Claim(1000, 0, 800)})[BUDGET_TOKENS].held == 500

    def test_what_workers_have_done_is_added_up_and_a_repeated_commit_counts_once(self, place: StorePlace) -> None:
        row = new_row(place, 0)
        now = begin(place, place.open(), row)
        (taken,) = now.take()
        other = now.work.join({})
        lost = [RowChange(taken, (turn(row, "lost"),))]  # of another worker, which spent it nevertheless
        now.work.commit(other, 1, Commit(lost, Spent(2, 1, {"turns": 2})))
        for _ in range(2):
            more = Spent(40, 3, {"turns": 1, "seconds": 0.5})
            now.work.commit(now.worker, 1, Commit([RowChange(taken, (turn(row, "turn"),))], more))
        assert dict(now.store.worked()) == {"turns": 3, "seconds": 0.5}
        needs(place.keeps != "nothing", "this store keeps nothing")
        again = begin(place, place.reopen(now.store), how=RESUME)
        spent = again.store.spent()
        assert (spent.tokens, spent.nano) == (42, 4)
        assert not again.store.worked()  # in this session

    def test_an_observed_feeder_gets_the_events_of_workers_until_it_has_read_on(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0), observed=True)
        assert now.work.standing().observed and now.work.renew(now.worker, [])[1].observed
        other = now.work.join({})
        commits = [
            (now.worker, 1, b"one"),
            (other, 1, b"two\nlines"),
            (now.worker, 2, b"three"),
            (now.worker, 2, b"again"),
        ]
        for worker, number, events in commits:
            now.work.commit(worker, number, Commit(spent=Spent(events=events)))
        now.work.commit(other, 2, Commit(spent=Spent(1)))
        first = now.store.events(now.number, "0", 2)
        assert [events for _, events in first] == [b"one", b"two\nlines"]
        assert now.store.events(now.number, "0", 2) == first  # the answer may have been lost
        rest = now.store.events(now.number, first[-1][0], 9)
        assert [events for _, events in rest] == [b"three"]
        assert now.store.events(now.number, "0", 9) == rest  # the others are deleted
        assert now.store.events(now.number, rest[-1][0], 9) == now.store.events(now.number, "0", 9) == []
        now.store.close_feed(now.number, facts(), "ended")
        assert not now.work.standing().observed

    def test_events_are_kept_only_for_the_session_that_is_observed(self, place: StorePlace) -> None:
        now = begin(place, place.open(), observed=True)
        now.work.commit(now.worker, 1, Commit(spent=Spent(events=b"of the first session")))
        needs(place.keeps != "nothing", "this store keeps nothing")
        for observed, sent in ((False, []), (True, [b"second"])):
            now = begin(place, place.reopen(now.store), how=RESUME, observed=observed)
            assert now.work.standing().observed == observed and now.store.events(now.number, "0", 9) == []
            now.work.commit(now.worker, 1, Commit(spent=Spent(events=b"second")))
            assert [events for _, events in now.store.events(now.number, "0", 9)] == sent

    def test_the_share_of_a_killed_worker_stays_spent_for_the_next_process(self, place: StorePlace) -> None:
        needs(place.keeps != "nothing", "this store keeps nothing")
        now = begin(place, place.open())
        granted = now.work.beat("killed", DEAD, {BUDGET_TOKENS: Claim(1000, 0, 600)}, {}, {}).grants[BUDGET_TOKENS]
        assert granted.held == 600
        again = begin(place, place.reopen(now.store), how=RESUME)
        grants = again.work.beat("next", MEMBER, {BUDGET_TOKENS: Claim(1000, 0, 1000)}, {}, {}).grants
        assert grants[BUDGET_TOKENS].held == 400

    # Shares

    def test_workers_that_claim_at_once_never_hold_more_than_the_limit(self, place: StorePlace) -> None:
        work = begin(place, place.open()).work

        def claim(number: int) -> int:
            held = 0
            for _ in range(6):
                claims = {BUDGET_TOKENS: Claim(1000, held, held + 50, 50)}
                held = work.beat(f"w{number}", MEMBER, claims, {}, {}).grants[BUDGET_TOKENS].held
            return held

        with ThreadPoolExecutor(4) as threads:
            held = list(threads.map(claim, range(4)))
        assert sum(held) == 1000
        table, _ = work.table()
        assert sum(member.claims[BUDGET_TOKENS].held for member in table.members.values()) == 1000

    def test_a_worker_that_resigns_returns_its_slots_and_a_dead_one_loses_them(self, place: StorePlace) -> None:
        work, everything = begin(place, place.open()).work, {SLOT_POT: Claim(8, 0, 8)}
        first = work.beat("left", MEMBER, everything, {}, {}).grants[SLOT_POT].held
        none = work.beat("b", MEMBER, everything, {}, {}).grants[SLOT_POT].held
        work.resign("left")
        again = work.beat("b", DEAD, everything, {}, {}).grants[SLOT_POT].held
        after = work.beat("c", MEMBER, everything, {}, {}).grants[SLOT_POT].held
        assert (first, none, again, after) == (8, 0, 8, 8)

    def test_requests_reach_every_worker(self, place: StorePlace) -> None:
        work = begin(place, place.open()).work
        before = work.beat("a", MEMBER, {}, {"gpu": Learnt(down=True)}, {"host": "one"}).steering
        work.steer({"do": "pause"})
        work.steer({"do": "retry-row", "row": 7})
        heard = work.beat("b", MEMBER, {}, {"gpu": Learnt()}, {"host": "two"})
        table, now = work.table()
        assert (before.number, heard.steering.paused, heard.steering.rows) == (0, True, ((2, "retry-row", "7"),))
        assert heard.learnt == {"gpu": [Learnt(down=True)]}
        assert [member.status for member in table.live(now).values()] == [{"host": "one"}, {"host": "two"}]
        with pytest.raises(SpecError, match="does not support"):
            work.steer({"do": "dance"})
        work.resign("a")
        assert work.beat("b", MEMBER, {}, {}, {}).steering == heard.steering

    # Calls that run once

    def test_a_call_runs_at_one_worker_and_the_others_find_its_result(self, place: StorePlace) -> None:
        work = begin(place, place.open()).work
        work.beat("a", MEMBER, {}, {}, {})
        mine = work.begin_call("a", "key", "t1", "")
        theirs = work.begin_call("b", "key", "t2", "")
        assert (mine.state, theirs.state, theirs.token) == ("mine", "theirs", "t1")
        work.end_call("key", "t1", "the result", True, 60.0)
        position, ended = work.wait_calls(theirs.position, 5.0)
        found = work.begin_call("b", "key", "t2", theirs.token)
        assert ended == {"key"}
        assert (found.state, found.text, found.ok) == ("done", "the result", True)
        assert work.begin_call("c", "key", "t3", "").text == "the result"
        assert work.wait_calls(position, 0.001) == (position, set())
        for key in ("left", "right"):
            assert work.begin_call("a", key, f"token of {key}", "").state == "mine"
            work.end_call(key, f"token of {key}", f"the result of {key}", True, 60.0)
        assert work.wait_calls(position, 5.0)[1] == {"left", "right"}
        assert [work.begin_call("b", key, "t4", "").text for key in ("key", "left")] == [
            "the result",
            "the result of left",
        ]

    def test_a_result_that_is_not_kept_is_for_the_workers_that_waited(self, place: StorePlace) -> None:
        work = begin(place, place.open()).work
        work.beat("a", MEMBER, {}, {}, {})
        work.begin_call("a", "key", "t1", "")
        work.end_call("key", "t1", "it failed", False, 0.0)
        waited = work.begin_call("b", "key", "t2", "t1")
        assert (waited.state, waited.text, waited.ok) == ("done", "it failed", False)
        assert work.begin_call("c", "key", "t3", "").state == "mine"

    def test_the_call_of_a_dead_worker_is_free_and_the_worker_cannot_end_it_later(self, place: StorePlace) -> None:
        work = begin(place, place.open()).work
        work.beat("dead", DEAD, {}, {}, {})
        work.begin_call("dead", "key", "t1", "")
        taken = work.begin_call("b", "key", "t2", "t1")
        work.end_call("key", "t1", "an old result", True, 60.0)
        work.beat("b", MEMBER, {}, {}, {})
        still = work.begin_call("c", "key", "t3", "")
        work.end_call("key", "t2", None, False, 0.0)
        free = work.begin_call("c", "key", "t3", "t2")
        assert (taken.state, still.state, still.token, free.state) == ("mine", "theirs", "t2", "mine")
        work.beat("c", MEMBER, {}, {}, {})
        work.resign("c")
        assert work.begin_call("b", "key", "t4", "t3").state == "mine"

    def test_a_file_is_found_by_its_name(self, place: StorePlace) -> None:
        work = begin(place, place.open()).work
        work.put_file("hosts.txt", "gpu-1\ngpu-2 8001\n")
        work.put_file("more.txt", "é")
        assert [work.get_file(name) for name in ("hosts.txt", "more.txt")] == ["gpu-1\ngpu-2 8001\n", "é"]
        assert work.get_file("others.txt") is None

    def test_the_jobs_of_all_workers_are_there_in_their_order_and_known_after_a_kill(self, place: StorePlace) -> None:
        now = begin(place, place.open())
        lines = [b'{"wave":"1"}', b'{"wave":"2"}', b'{"wave":"1","job":"j"}']
        now.work.add_job_lines(lines[:2])
        place.worker(now.store).add_job_lines(lines[2:])
        assert now.work.job_lines() == now.store.job_lines() == lines
        assert now.work.outlasts() == (place.keeps != "nothing")
        if place.keeps != "nothing":
            assert begin(place, place.reopen(now.store), how=RESUME).work.job_lines() == lines

    def test_stages_have_rows_of_their_own_and_share_everything_else(self, place: StorePlace) -> None:
        now = begin(place, place.open(), new_row(place, 0))
        stages = [now.store.stage(name) for name in ("first", "second")]
        rows = [new_row(place, index) for index in range(3)]
        sessions = []
        for stage, fed in zip(stages, (rows[:2], rows), strict=True):
            stage.open(FRESH)
            sessions.append(stage.open_feed(facts(), FRESH).number)
            stage.feed(sessions[-1], fed)
        worked, second = (now.work.stage(name) for name in ("first", "second"))
        assert [each.standing().counts.unstarted for each in (now.work, worked, second)] == [1, 2, 3]
        worker = worked.join({})
        one, two = worked.take(worker, 5, 0)
        worked.commit(worker, 1, Commit([RowChange(one, (turn(rows[0], "of the first stage"),))]))
        worked.beat("a", MEMBER, {SLOT_POT: Claim(8, 0, 8)}, {}, {})
        assert now.work.beat("b", MEMBER, {SLOT_POT: Claim(8, 0, 8)}, {}, {}).grants[SLOT_POT].held == 0
        assert worked.begin_call("a", "key", "t1", "").state == "mine"
        assert now.work.begin_call("b", "key", "t2", "").state == "theirs"
        now.work.put_file("f", "text")
        assert worked.get_file("f") == "text"
        now.work.add_job_lines([b"{}"])
        assert worked.job_lines() == [b"{}"]
        worked.hand_back(worker, [one, two])
        for stage, session in zip(stages, sessions, strict=True):
            stage.close_feed(session, facts(), "running")
        if place.keeps != "nothing":
            self._resume_stages(place, now.store, rows)
        for each in (worked, second, *stages):
            each.close()

    def _resume_stages(self, place: StorePlace, killed: RunStore, rows: Sequence[Row]) -> None:
        again = begin(place, place.reopen(killed), how=RESUME)
        for name, steps in (("first", bodies([turn(rows[0], "of the first stage")])), ("second", [])):
            stage = again.store.stage(name)
            stage.open(RESUME)
            stage.feed(stage.open_feed(facts(), RESUME).number, rows)
            assert bodies(stage.take(stage.join({}), 1, 0)[0].steps) == steps
            stage.close()

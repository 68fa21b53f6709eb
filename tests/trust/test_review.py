"""What people have answered, and which row a person gets next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_agent.trust.review import AUDIT, REPAIR, Event, PeopleVerdict, Review, ReviewRow

NOBODY = 0.0  # overlap: no row is for two
ALL = 1.0


class Log:
    """A review that is decided event by event, as processes do it."""

    def __init__(self, overlap: float = NOBODY, lease: float = 600.0) -> None:
        self.review = Review(lambda one, other: one == other, overlap=overlap)
        self.lease, self.n = lease, 0

    def put(self, event: Event) -> None:
        self.n += 1
        self.review.add([replace(event, n=self.n)])

    def next(self, who: str, places: list[ReviewRow], now: float = 0.0) -> ReviewRow | None:
        place = self.review.next_of(places, who, now)
        if place is not None:
            self.put(Event(0, "lease", who, now, place.row, place.id, place.queue, place.input, until=now + self.lease))
        return place

    def say(self, who: str, place: ReviewRow, kind: Any = "answer", output: Any = None, now: float = 0.0) -> str:
        if why := self.review.refusal(place, who):
            return why
        self.put(Event(0, kind, who, now, place.row, place.id, place.queue, place.input, output))
        return ""

    def undo(self, who: str) -> Event | None:
        last = self.review.last_of(who)
        if last is not None:
            self.put(Event(0, "undo", who, row=last.row, queue=last.queue, undoes=last.n))
        return last

    def verdict(self, place: ReviewRow) -> PeopleVerdict:
        return self.review.verdict(place.row, place.queue, place.input)


def places(count: int, queue: Any = AUDIT) -> list[ReviewRow]:
    return [ReviewRow(row, f"T-{row}", queue, "same") for row in range(count)]


def test_a_row_that_somebody_holds_is_given_to_nobody_else_until_the_lease_ends() -> None:
    log, rows = Log(), places(2)
    assert log.next("ada", rows) == rows[0]
    assert log.next("bob", rows) == rows[1]
    assert log.next("eve", rows) is None
    assert log.next("eve", rows, now=599.9) is None
    assert log.next("eve", rows, now=600.0) == rows[0]


def test_a_person_gets_the_row_again_that_the_person_holds() -> None:
    log, rows = Log(), places(3)
    assert log.next("ada", rows) == log.next("Ada ", rows) == rows[0]


def test_a_late_answer_counts_if_nobody_else_has_answered() -> None:
    log, rows = Log(), places(1)
    log.next("ada", rows)
    assert log.say("ada", rows[0], output="yes", now=5000.0) == ""
    assert log.verdict(rows[0]) == PeopleVerdict("answer", "yes", 1)


def test_a_late_answer_to_a_row_that_another_has_answered_is_a_second_one() -> None:
    log, rows = Log(), places(1)
    log.next("ada", rows)
    log.next("bob", rows, now=700.0)
    assert not log.say("bob", rows[0], output="no", now=701.0)
    assert not log.say("ada", rows[0], output="yes", now=702.0)
    assert log.verdict(rows[0]).kind == "disputed"
    assert log.next("eve", rows, now=703.0) == rows[0], "a third decides"
    log.say("eve", rows[0], output="yes", now=704.0)
    assert log.verdict(rows[0]) == PeopleVerdict("answer", "yes", 3)


def test_a_row_that_was_not_given_to_a_person_is_not_judged_by_that_person() -> None:
    log, rows = Log(), places(1)
    assert "was not given to you" in log.say("ada", rows[0], output="yes")
    log.next("bob", rows)
    assert "was not given to you" in log.say("ada", rows[0], output="yes")
    assert log.verdict(rows[0]).kind == "open"


def test_nobody_judges_a_row_twice() -> None:
    log, rows = Log(ALL), places(1)
    log.next("ada", rows)
    log.say("ada", rows[0], output="yes")
    assert log.next("ada", rows) is None
    assert "already" in log.say("ada", rows[0], output="no")
    assert log.verdict(rows[0]) == PeopleVerdict("answer", "yes", 1)


def test_rows_of_the_overlap_go_to_two_people_and_their_agreement_is_counted() -> None:
    log, rows = Log(ALL), places(4)
    for who, answers in (("ada", "yyyn"), ("bob", "yyyy")):
        for answer in answers:
            place = log.next(who, rows)
            assert place is not None
            log.say(who, place, output=answer)
    found = log.review.agreement()
    assert found is not None
    assert (found.right, found.rows) == (3, 4)
    assert 0.19 < found.interval.low < 0.2
    assert [log.verdict(each).kind for each in rows] == ["answer", "answer", "answer", "disputed"]
    assert log.next("ada", rows) is None
    assert log.next("eve", rows) == rows[3]


def test_the_overlap_is_drawn_by_the_id_alone() -> None:
    review = Review(lambda one, other: one == other, overlap=0.1)
    drawn = sum(review.overlaps(f"row {number}") for number in range(20_000))
    assert 1800 < drawn < 2200


def test_a_skipped_row_comes_again_after_all_others() -> None:
    log, rows = Log(), places(3)
    first = log.next("ada", rows)
    assert first is not None
    log.say("ada", first, "skip")
    assert log.next("ada", rows) == rows[1]
    log.say("ada", rows[1], output="yes")
    log.say("ada", log.next("ada", rows) or first, output="yes")
    assert log.next("ada", rows) == rows[0]


def test_a_row_of_the_audit_that_is_skipped_twice_counts_as_wrong() -> None:
    log, rows = Log(), places(1)
    log.next("ada", rows)
    log.say("ada", rows[0], "skip")
    assert log.verdict(rows[0]).kind == "open"
    log.next("bob", rows)
    log.say("bob", rows[0], "skip")
    assert log.verdict(rows[0]).kind == "skipped"
    assert not log.verdict(rows[0]).decided
    assert log.next("eve", rows) is None
    log.undo("bob")
    assert log.verdict(rows[0]).kind == "open"
    assert log.next("eve", rows) == rows[0]


def test_a_row_to_repair_may_be_skipped_as_often_as_one_likes() -> None:
    log, rows = Log(), places(1, REPAIR)
    for _ in range(5):
        log.next("ada", rows)
        log.say("ada", rows[0], "skip")
    assert log.next("ada", rows) == rows[0]
    assert log.verdict(rows[0]).kind == "open"


def test_undo_takes_back_the_latest_of_ones_own_again_and_again() -> None:
    log, rows = Log(), places(3)
    for who in ("ada", "bob", "ada"):
        place = log.next(who, rows)
        assert place is not None
        log.say(who, place, output=who)
    for row in (2, 0):
        undone = log.undo("ada")
        assert undone is not None
        assert undone.row == row
        assert log.verdict(rows[row]).kind == "open"
    assert log.undo("ada") is None
    assert log.verdict(rows[1]) == PeopleVerdict("answer", "bob", 1)


def test_nobody_undoes_what_another_has_answered() -> None:
    log, rows = Log(), places(1)
    log.next("ada", rows)
    log.say("ada", rows[0], output="yes")
    log.put(Event(0, "undo", "bob", row=0, queue=AUDIT, undoes=2))
    assert log.verdict(rows[0]) == PeopleVerdict("answer", "yes", 1)


def test_no_right_answer_is_a_judgement_that_differs_from_every_answer() -> None:
    log, rows = Log(ALL), places(1)
    log.next("ada", rows)
    log.say("ada", rows[0], "none")
    assert log.verdict(rows[0]) == PeopleVerdict("none", None, 1)
    log.next("bob", rows)
    log.say("bob", rows[0], output=None)
    assert log.verdict(rows[0]).kind == "disputed"


def test_a_repair_is_no_audit_of_the_same_row() -> None:
    log = Log()
    [audit], [repair] = places(1), places(1, REPAIR)
    log.next("ada", [repair])
    log.say("ada", repair, output="yes")
    assert log.verdict(audit).kind == "open"
    assert log.next("ada", [audit]) == audit


def test_an_edit_of_a_row_voids_what_people_said_of_it() -> None:
    log, [place] = Log(), places(1)
    log.next("ada", [place])
    log.say("ada", place, output="yes")
    edited = place._replace(input="other")
    assert log.verdict(edited).kind == "open"
    assert log.review.void(0, AUDIT, "other") == 1
    assert log.next("ada", [edited]) == edited
    log.say("ada", edited, output="no")
    assert log.verdict(edited) == PeopleVerdict("answer", "no", 1)


def test_judgements_before_and_after_an_edit_are_no_pair_in_the_agreement() -> None:
    log, [row] = Log(overlap=ALL), places(1)
    edited = row._replace(input="other")
    for who, place, output in (("ada", row, "a"), ("ada", edited, "b"), ("bob", edited, "b")):
        assert log.next(who, [place]) is not None
        assert not log.say(who, place, output=output)
    agreement = log.review.agreement()
    assert agreement is not None
    assert (agreement.right, agreement.rows) == (1, 1)


def test_an_answer_to_a_row_that_was_edited_meanwhile_is_refused() -> None:
    log, [place] = Log(), places(1)
    log.next("ada", [place])
    assert "was edited since you got it" in log.say("ada", place._replace(input="other"), output="yes")


def test_what_is_left_is_counted_for_all_and_for_a_person() -> None:
    log, rows = Log(ALL), [*places(3), *places(2, REPAIR)]
    log.next("ada", rows)
    log.say("ada", rows[0], output="yes")
    audit = log.review.left(rows, "ada")[AUDIT]
    assert (audit.open, audit.second, audit.yours, audit.judged) == (2, 1, 2, 1)
    assert log.review.left(rows, "bob")[AUDIT].yours == 3
    assert log.review.left(rows, "bob")[REPAIR].open == 2


WHO = st.sampled_from(["ada", "bob", "eve"])
DOES = st.sampled_from(["yes", "no", "none", "skip", "undo", "leave"])


@settings(max_examples=60)
@given(st.lists(st.tuples(WHO, DOES, st.floats(0, 400)), max_size=60), st.sampled_from([0.0, 0.5, 1.0]))
def test_however_people_work_the_numbers_are_those_of_the_log(
    steps: list[tuple[str, str, float]], overlap: float
) -> None:
    log, rows, now = Log(overlap), [*places(3), *places(2, REPAIR)], 0.0
    held: dict[str, ReviewRow] = {}
    for who, does, passes in steps:
        now += passes
        if does == "undo":
            log.undo(who)
            continue
        if (place := log.next(who, rows, now)) is None:
            continue
        others = [each for name, each in held.items() if name != who]
        wanted = 3 if overlap or len(log.review._rows) > 9 else 1
        assert others.count(place) < 3 or wanted == 3
        held[who] = place
        if does != "leave":
            kind = does if does in ("none", "skip") else "answer"
            assert not log.say(who, place, kind, does if kind == "answer" else None, now)
            del held[who]
    left = log.review.left(rows)
    verdicts = [log.verdict(each) for each in rows]
    assert sum(each.open for each in left.values()) == sum(each.kind == "open" for each in verdicts)
    assert log.review.judgements == sum(each.judges for each in verdicts)
    for each in rows:
        judges = (
            [event.who for event in log.review._rows[each.row, each.queue].standing]
            if (each.row, each.queue) in log.review._rows
            else []
        )
        assert len(judges) == len({*judges})


@pytest.mark.parametrize("queue", [AUDIT, REPAIR])
def test_one_person_alone_can_judge_every_row(queue: Any) -> None:
    log, rows, count = Log(ALL), places(20, queue), 0
    while (place := log.next("ada", rows)) is not None:
        log.say("ada", place, output=count)
        count += 1
    assert count == 20
    assert all(log.verdict(each).decided for each in rows)
    assert log.review.agreement() is None

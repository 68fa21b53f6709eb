"""Whether a denial concerns one row or every row."""

from __future__ import annotations

from batch_agent.scheduler.blame import Denial, Denials
from batch_agent.scheduler.numbers import N


def denied(
    refusals: Denials, row: object, status: int, said: str = "no", at: float = 0.0, others: int = 0, times: int = 1
) -> str:
    """The request was sent ``at`` and denied at once. ``others`` are in flight; ``times`` counts the row's denials."""
    return refusals.scope(row, status, said, Denial(at, at, times), others)


def test_a_wrong_key_or_path_concerns_all_before_the_first_answer() -> None:
    for status in (401, 402, 429, 404, 405):
        assert denied(Denials(), "a", status, others=64) == "all"


def test_a_wrong_key_after_answers_is_confirmed_by_later_requests() -> None:
    refusals = Denials()
    refusals.answered(1.0)
    assert denied(refusals, "a", 401, at=2.0) == "confirm"
    refusals.answered(2.0)
    assert not refusals.is_unclear("a"), "one mistake of a gateway"
    assert denied(refusals, "a", 401, at=3.0, others=1) == "confirm"
    assert denied(refusals, "a", 401, at=4.0, others=1, times=2) == "confirm", "those in flight may be answered"
    assert denied(refusals, "a", 401, at=5.0, others=1, times=3) == "unclear"
    assert denied(refusals, "b", 401, at=5.0) == "all"


def test_a_forbidden_thing_after_answers_is_confirmed_too_where_a_control_request_can_tell_the_rest() -> None:
    for status in (403, 404, 307):
        refusals = Denials()
        refusals.answered(1.0)
        scopes = [
            refusals.scope("a", status, "no", Denial(at, at, number), 0, can_ask=True)
            for number, at in ((1, 2.0), (2, 3.0))
        ]
        assert scopes == ["confirm", "all"]
        refusals.answered(4.0)
        assert refusals.scope("a", status, "no", Denial(5.0, 5.0, 3), 0, can_ask=True) == "row"


def test_denials_of_requests_that_were_in_flight_together_do_not_confirm_each_other() -> None:
    refusals = Denials()
    refusals.answered(1.0)
    together = [refusals.scope(row, 401, "no", Denial(2.0, 3.0 + row / 100), 5 - row) for row in range(6)]
    assert together == ["confirm"] * 6
    assert refusals.scope("next", 401, "no", Denial(3.01, 3.1), 0) == "confirm", "the same mistake, a moment later"
    assert denied(refusals, 0, 401, at=4.0, others=5, times=2) == "confirm"
    assert denied(refusals, 1, 401, at=4.0, others=4, times=2) == "all"


def test_an_answer_between_two_denials_starts_the_evidence_anew() -> None:
    refusals = Denials()
    refusals.answered(1.0)
    assert denied(refusals, "a", 401, at=2.0) == "confirm"
    assert denied(refusals, "b", 401, at=2.1) == "confirm"
    refusals.answered(2.05)
    assert denied(refusals, "c", 401, at=4.0) == "confirm"
    assert denied(refusals, "c", 401, at=5.0, times=2) == "all"


def test_a_wrong_key_is_confirmed_by_the_same_row_if_no_other_is_in_flight() -> None:
    refusals = Denials()
    refusals.answered(1.0)
    assert denied(refusals, "a", 401, at=2.0) == "confirm"
    assert denied(refusals, "a", 401, at=3.0, times=2) == "all"


def test_a_row_that_is_denied_again_and_again_while_others_are_answered_is_denied_alone() -> None:
    refusals = Denials()
    refusals.answered(1.0)
    for times in (1, 2):
        assert denied(refusals, "a", 401, at=2.0 * times, others=9, times=times) == "confirm"
        refusals.answered(2.0 * times + 1)
    assert denied(refusals, "a", 401, at=6.0, others=9, times=3) == "row"


def test_a_wrong_path_after_answers_concerns_all_once_several_rows_are_denied() -> None:
    refusals = Denials()
    refusals.answered(1.0)
    assert [denied(refusals, row, 404, at=2.0) for row in range(N.learnt)] == ["unclear"] * (N.learnt - 1) + ["all"]


def test_a_forbidden_row_is_unclear_until_several_are_denied_or_one_is_answered() -> None:
    refusals = Denials()
    assert [denied(refusals, row, 403, f"row {row}") for row in "aab"] == ["unclear"] * 3
    assert refusals.is_unclear("a")
    assert denied(refusals, "c", 403) == "all"
    refusals.answered(0.0)
    assert not refusals.is_unclear("a")
    assert [denied(refusals, row, 403) for row in range(N.learnt)] == ["unclear"] * (N.learnt - 1) + ["all"]


def test_an_answer_proves_nothing_about_requests_that_were_sent_after_it() -> None:
    refusals = Denials()
    denied(refusals, "early", 403, at=1.0)
    denied(refusals, "late", 403, at=3.0)
    refusals.answered(2.0)
    assert [refusals.is_unclear(row) for row in ("early", "late")] == [False, True]


def test_denials_that_come_before_the_answers_do_not_concern_all() -> None:
    refusals = Denials()
    assert {denied(refusals, row, 403, others=64 - row) for row in range(20)} == {"unclear"}
    assert denied(refusals, 22, 403, others=42) == "all"


def test_the_same_words_to_many_rows_concern_all_whatever_numbers_and_quotations_they_have() -> None:
    refusals = Denials()
    scopes = [denied(refusals, n, 400, f"field 'f{n}' is unknown at line {n}") for n in range(N.many_denied)]
    assert scopes == ["unclear"] * (N.many_denied - 1) + ["all"]
    different = Denials()
    assert {denied(different, n, 400, "x" * (n % 2 + 1)) for n in range(10 * N.many_denied)} == {"unclear"}

"""Whose fault a failed attempt is, as a pure function of facts. How it works out over time: dispatch/test_any_order."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.examples import examples

from batch_agent.errors import (
    BackendError,
    BadResponse,
    ContextOverflow,
    EmptyAnswer,
    RateLimited,
    Rejected,
    Timeout,
    Truncated,
    Unavailable,
)
from batch_agent.scheduler.blame import (
    Attempt,
    EndpointHistory,
    Outcome,
    RowHistory,
    Verdict,
    judge,
    next_step,
    outcome_of,
)
from batch_agent.scheduler.numbers import N


class Endpoint:
    """One endpoint's history, and whether it is down."""

    def __init__(self) -> None:
        self.history = EndpointHistory()
        self.is_down = False

    def ends(
        self,
        row: RowHistory,
        outcome: str,
        at: float = 0.0,
        *,
        sent: float | None = None,
        trial: bool = False,
        left: int = 0,
        others: bool = False,
        few: bool = False,
        asks: bool = False,
        tested: bool = False,
        sound: bool = False,
        control: bool = False,
    ) -> Verdict:
        sent = at if sent is None else sent
        attempt = Attempt(row, sent, at, cast("Outcome", outcome), trial, sound, left, control=control)
        verdict = judge(
            attempt,
            self.history,
            is_down=self.is_down,
            others_healthy=others,
            few_rows=few,
            can_ask=asks,
            all_tested=tested,
        )
        if not control or outcome == "answered":
            self.history.add(attempt, verdict)
        if verdict.endpoint == "down" and not self.is_down:
            self.history.go_down()
        self.is_down = verdict.endpoint == "down" or (self.is_down and verdict.endpoint != "healthy")
        return verdict


def stale() -> Unavailable:
    error = Unavailable("the server closed the connection before it answered")
    error.stale = True
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Unavailable("refused", unreached=True), "unreachable"),
        (Timeout("no connection", unreached=True), "unreachable"),
        (Timeout("nothing came"), "silent"),
        (Unavailable("500", status=500), "broken"),
        (Unavailable("reset"), "broken"),
        (BadResponse("not valid HTTP"), "broken"),
        (stale(), "stale"),
        (Unavailable("503", status=503, overload=True), "overloaded"),
        (RateLimited("429", status=429), "overloaded"),
        (Rejected("401", status=401), "denied"),
        (Rejected("quota", status=429), "denied"),
        (Rejected("400", status=400), "refused"),
        (ContextOverflow("too long", status=400), "refused"),
        (Truncated("length"), "flawed"),
        (EmptyAnswer("nothing"), "flawed"),
    ],
)
def test_an_error_says_how_an_attempt_ended(error: BackendError, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_one_row_that_breaks_is_undecided_until_a_request_that_was_sent_no_earlier_is_answered() -> None:
    endpoint, bad, good = Endpoint(), RowHistory(), RowHistory()
    assert endpoint.ends(bad, "broken", 2.0, sent=1.0, left=5).row == "undecided"
    endpoint.ends(good, "answered", 3.0, sent=0.5)
    assert (bad.charges, bad.undecided) == (0, 1), "it was sent before"
    endpoint.ends(good, "answered", 3.0, sent=1.0)
    assert (bad.charges, bad.undecided) == (1, 0)


def test_a_hedge_that_fails_before_the_request_it_was_sent_beside_is_charged_in_its_own_time() -> None:
    endpoint, bad, good = Endpoint(), RowHistory(), RowHistory()
    endpoint.ends(bad, "broken", 3.0, sent=2.0, left=5)
    endpoint.ends(bad, "broken", 4.0, sent=1.0, left=5)
    endpoint.ends(good, "answered", 5.0, sent=1.5)
    assert (bad.charges, bad.undecided) == (1, 1)


def test_several_rows_that_break_put_the_endpoint_down_and_are_forgiven() -> None:
    endpoint, rows = Endpoint(), [RowHistory() for _ in range(N.several)]
    verdicts = [endpoint.ends(row, "broken").endpoint for row in rows]
    assert verdicts == ["suspect"] * (N.several - 1) + ["down"]
    assert [(row.charges, row.undecided, row.hits) for row in rows] == [(0, 0, 1)] * N.several


def test_failures_that_come_before_the_answers_put_nothing_down() -> None:
    endpoint = Endpoint()
    for n in range(20):
        assert endpoint.ends(RowHistory(), "broken", left=100 - n).endpoint == "suspect"


def test_one_row_is_one_witness_however_often_it_fails() -> None:
    endpoint, row = Endpoint(), RowHistory()
    assert {endpoint.ends(row, "broken").endpoint for _ in range(50)} == {"suspect"}


def test_a_row_that_was_charged_is_no_witness() -> None:
    endpoint, charged = Endpoint(), [RowHistory(charges=1) for _ in range(10)]
    assert {endpoint.ends(row, "broken").endpoint for row in charged} == {"suspect"}


def test_one_connection_that_is_refused_puts_the_endpoint_down_and_says_nothing_about_the_row() -> None:
    endpoint, row = Endpoint(), RowHistory()
    verdict = endpoint.ends(row, "unreachable", others=True)
    assert (verdict.row, verdict.endpoint, verdict.move) == ("clear", "down", True)
    assert (row.charges, row.undecided, row.hits, row.failures) == (0, 0, 0, 0)


def test_a_refusal_for_load_beside_others_is_nothing_and_alone_it_counts_as_a_refusal_only() -> None:
    endpoint, row, other = Endpoint(), RowHistory(), RowHistory()
    assert endpoint.ends(row, "overloaded", left=3).row == "clear"
    assert endpoint.ends(row, "overloaded", 1.0).row == "undecided"
    assert not endpoint.history.witnesses
    endpoint.ends(other, "answered", 2.0)
    assert (row.refused, row.charges, row.undecided) == (1, 0, 0)


def test_requests_in_flight_when_the_endpoint_went_down_are_forgiven_and_remembered() -> None:
    endpoint, row = Endpoint(), RowHistory()
    for n in range(N.twice):
        endpoint.is_down = True
        assert not row.suspect
        assert endpoint.ends(row, "broken", float(n)).endpoint == "down"
    assert row.suspect and not row.charges


def test_trials_that_fail_charge_nobody_while_several_rows_are_tried() -> None:
    endpoint, row = Endpoint(), RowHistory()
    endpoint.is_down = True
    for n in range(100):
        assert endpoint.ends(row, "broken", float(n), trial=True).row == "clear"
    assert (row.charges, row.hits, row.failures) == (0, 0, 0)


def test_a_row_that_fails_alone_is_charged_on_the_word_of_the_probe_but_not_soon() -> None:
    history, row = EndpointHistory(), RowHistory()
    for at, charges in ((0.0, 0), (N.least_trying - 1.0, 0), (N.least_trying, 1), (N.least_trying + 1.0, 2)):
        history.contradict(Attempt(row, at, at, "broken", trial=True))
        assert row.charges == charges


def test_an_outage_that_shows_starts_the_time_of_trying_anew() -> None:
    endpoint, row = Endpoint(), RowHistory()
    endpoint.history.contradict(Attempt(row, 0.0, 0.0, "broken", trial=True))
    endpoint.ends(row, "unreachable", 10.0)
    endpoint.history.contradict(Attempt(row, N.least_trying, N.least_trying, "broken", trial=True))
    assert not row.charges


def test_a_row_whose_retries_are_used_up_waits_until_its_failures_are_decided() -> None:
    row = RowHistory(undecided=2, failures=2)
    assert next_step(row, 2, retryable=True) == "retry"
    assert next_step(row, 1, retryable=True) == "wait"
    row.settle(2, charge=True)
    assert next_step(row, 1, retryable=True) == "fail"


def test_a_row_that_failed_once_may_be_tried_at_another_endpoint_even_without_a_retry() -> None:
    assert next_step(RowHistory(undecided=1, failures=1), 0, retryable=True, move=True) == "retry"
    assert next_step(RowHistory(undecided=1, failures=2), 0, retryable=True, move=True) == "wait"


# A kept connection that is closed at once


def test_a_stale_connection_charges_nobody_and_its_row_is_sent_again_at_once() -> None:
    endpoint, row, other = Endpoint(), RowHistory(), RowHistory()
    verdict = endpoint.ends(row, "stale", 1.0)
    assert (verdict.row, verdict.endpoint, verdict.at_once) == ("undecided", "", True)
    assert next_step(row, 0, retryable=True) == "retry", "also without retries"
    assert not endpoint.history.witnesses
    endpoint.ends(other, "answered", 2.0)
    assert (row.charges, row.undecided, row.refused, row.hits) == (0, 0, 0, 0)


def test_a_stale_connection_counts_as_a_hit_if_the_server_is_gone_afterwards() -> None:
    endpoint, row = Endpoint(), RowHistory()
    endpoint.ends(row, "stale", 1.0)
    endpoint.ends(row, "unreachable", 1.1)
    assert (row.hits, row.charges) == (1, 0)


# Control requests


@pytest.mark.parametrize(
    ("asks", "tested", "endpoint"),
    [(False, True, "down"), (True, True, "doubted"), (True, False, "doubted")],
    ids=["no control requests", "all failed", "others left"],
)
def test_several_rows_that_break_are_judged_by_a_control_request(asks: bool, tested: bool, endpoint: str) -> None:
    at = Endpoint()
    verdicts = [at.ends(RowHistory(), "broken", asks=asks, tested=tested).endpoint for _ in range(N.several)]
    assert verdicts[-1] == endpoint


def test_the_answer_of_a_control_request_charges_the_rows_that_failed_before_it() -> None:
    endpoint, rows = Endpoint(), [RowHistory() for _ in range(N.several)]
    for row in rows:
        endpoint.ends(row, "broken", 1.0, asks=True)
    late = RowHistory()
    endpoint.ends(late, "broken", 3.0, sent=2.5, left=99)
    endpoint.ends(RowHistory(), "answered", 4.0, sent=2.0, control=True)
    assert [row.charges for row in rows] == [1] * N.several
    assert (late.charges, late.undecided) == (0, 1), "it was sent after the control request"


@pytest.mark.parametrize("outcome", ["broken", "unreachable", "silent", "overloaded", "stale"])
def test_a_control_request_that_fails_puts_the_endpoint_down_and_charges_nobody(outcome: str) -> None:
    endpoint, row = Endpoint(), RowHistory()
    endpoint.ends(row, "broken", 1.0, asks=True, few=True)
    assert endpoint.ends(RowHistory(), outcome, 2.0, control=True).endpoint == "down"
    assert (row.charges, row.undecided) == (0, 0)


@pytest.mark.parametrize(
    ("seconds", "refusals", "step"),
    [(N.least_refused, 4, "fail"), (N.least_refused - 1.0, 4, "retry"), (N.least_refused, 3, "retry")],
)
def test_a_row_that_alone_is_too_much_fails_after_its_retries_and_a_minute(
    seconds: float, refusals: int, step: str
) -> None:
    endpoint, row = Endpoint(), RowHistory(tested=True)
    for number in range(refusals):
        at = seconds * number / (refusals - 1)
        verdict = endpoint.ends(row, "overloaded", at, few=True, asks=True)
        assert (verdict.row, verdict.endpoint) == ("undecided", "doubted")
        endpoint.ends(RowHistory(), "answered", at + 0.1, control=True)
    assert next_step(row, 3, retryable=True) == step


def test_the_first_refusal_for_load_of_a_row_asks_for_no_control_request() -> None:
    assert Endpoint().ends(RowHistory(), "overloaded", few=True, asks=True).endpoint == ""


# Crashes


@pytest.mark.parametrize(
    ("sound", "trial", "crashes"), [(True, False, [True]), (True, True, [False]), (False, False, [])]
)
def test_a_suspect_whose_server_was_up_before_has_crashed_it(sound: bool, trial: bool, crashes: list[bool]) -> None:
    endpoint, row = Endpoint(), RowHistory(hits=N.twice)
    endpoint.history.open[row] = [Attempt(row, 1.0, 2.0, "broken", trial, sound)]
    endpoint.history.go_down()
    assert [crash.proven for crash in row.crashes] == crashes
    assert row.hits == N.twice + (not crashes)


@pytest.mark.parametrize(
    ("hits", "neighbour_hits", "neighbour_ended", "unclear"),
    [
        (0, 0, 2.0, True),  # both broke at the same time: either may be the cause
        (0, N.twice, 2.0, True),
        (N.twice, 0, 2.0, False),  # it has broken before, and its neighbour has not
        (N.twice, N.twice, 2.0, True),
        (0, 0, 0.5, False),  # the neighbour had ended before this one was sent
    ],
)
def test_rows_that_break_together_have_not_crashed_the_server_each(
    hits: int, neighbour_hits: int, neighbour_ended: float, unclear: bool
) -> None:
    endpoint, row, neighbour = Endpoint(), RowHistory(hits=hits), RowHistory(hits=neighbour_hits)
    endpoint.ends(neighbour, "broken", neighbour_ended, sent=0.0, left=1)
    for _ in range(4):
        endpoint.ends(RowHistory(), "broken", neighbour_ended, sent=0.0, left=9)
    beside = endpoint.history.has_other_cause(row, 1.0)
    assert beside == unclear
    assert row.crash(endpoint.history, Attempt(row, 1.0, 2.0, "broken", sound=True, beside=beside)) != unclear


@pytest.mark.parametrize(("max_retries", "crashes"), [(0, 2), (1, 2), (3, 4)])
def test_crashes_after_good_answers_fail_a_row_after_its_retries(max_retries: int, crashes: int) -> None:
    """One crash may be an outage that began while this row was in flight."""
    history, row = EndpointHistory(), RowHistory()
    for number in range(crashes):
        assert not row.is_poison(max_retries)
        assert row.crash(history, Attempt(row, number, number + 0.5, "broken", sound=True))
    assert row.is_poison(max_retries)


class Judging(RuleBasedStateMachine):
    """Attempts that end in any order, at endpoints of any state: the books stay in balance."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoints = [Endpoint() for _ in range(3)]
        self.rows = [RowHistory() for _ in range(5)]
        self.attempts = dict.fromkeys(self.rows, 0)
        self.now = 0.0
        self.max_retries = 0

    @initialize(max_retries=st.integers(0, 3))
    def start(self, max_retries: int) -> None:
        self.max_retries = max_retries

    @rule(
        which=st.integers(0, 2),
        row=st.integers(0, 4),
        outcome=st.sampled_from(
            ["answered", "flawed", "refused", "overloaded", "broken", "stale", "unreachable", "silent", "recalled"]
        ),
        took=st.integers(0, 5),
        left=st.integers(0, 9),
        others=st.booleans(),
        few=st.booleans(),
    )
    def ends(self, which: int, row: int, outcome: str, took: int, left: int, others: bool, few: bool) -> None:
        endpoint, history = self.endpoints[which], self.rows[row]
        self.now += 1.0
        before, trial = (history.charges, history.undecided), endpoint.is_down and not left
        sent = self.now - took
        verdict = endpoint.ends(history, outcome, self.now, sent=sent, trial=trial, left=left, others=others, few=few)
        self.attempts[history] += 1
        if outcome in ("unreachable", "recalled") or (outcome == "overloaded" and left):
            assert history.charges == before[0], "never its fault"
        if verdict.endpoint == "down":
            assert not endpoint.history.open
        if outcome in ("answered", "flawed", "refused"):
            assert all(attempt.sent_at > sent for each in endpoint.history.open.values() for attempt in each)
        if next_step(history, self.max_retries, retryable=True, move=verdict.move) == "retry":
            history.excuse(self.max_retries)
        else:
            self._replace(row)

    def _replace(self, row: int) -> None:
        """It failed, or waits: another takes its place."""
        self.rows[row] = RowHistory()
        self.attempts[self.rows[row]] = 0

    @rule(which=st.integers(0, 2))
    def goes_down(self, which: int) -> None:
        self.endpoints[which].is_down = True
        self.endpoints[which].history.go_down()

    @invariant()
    def the_books_balance(self) -> None:
        for row in self.rows:
            there = sum(
                attempt.outcome not in ("overloaded", "stale")
                for each in self.endpoints
                for attempt in each.history.open.get(row, ())
            )
            assert 0 <= row.undecided <= there
            assert row.charges + row.undecided <= min(self.max_retries, self.attempts[row])


TestJudging = Judging.TestCase
TestJudging.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("refused", "answered_sent", "alone"),
    [
        ([0.0, 1.0, 2.0], -1.0, False),  # nothing was answered
        ([0.0, 1.0], 5.0, False),  # it was passed over once
        ([0.0, 1.0, 2.0], 1.0, True),
        ([0.0, 1.0, 2.0], 0.5, False),  # once: the answered request was sent before the second refusal
    ],
)
def test_refusals_for_load_concern_a_row_alone_if_later_requests_are_answered_each_time(
    refused: list[float], answered_sent: float, alone: bool
) -> None:
    row = RowHistory()
    for sent in refused:
        row.overloaded(Attempt(row, sent, sent + 0.1, "overloaded"), answered_sent)
    assert row.is_alone_refused is alone


def refused_together(seconds: float, times: int, *, tested: bool = True) -> tuple[Endpoint, RowHistory]:
    """A row that the endpoint has refused for itself, and refuses again beside others while control requests are
    answered. ``tested``: only rows that have failed are left."""
    endpoint, row = Endpoint(), RowHistory(tested=True, passed_over=2)
    for number in range(times):
        at = seconds * number / (times - 1)
        endpoint.ends(row, "overloaded", at, left=5, asks=True, tested=tested)
        if number < times - 1:
            endpoint.ends(RowHistory(), "answered", at + 0.1, control=True)
    return endpoint, row


def test_rows_that_are_refused_together_wait_for_the_last_control_request_and_then_fail() -> None:
    endpoint, row = refused_together(N.least_refused, 4)
    assert next_step(row, 3, retryable=True) == "wait"
    endpoint.ends(RowHistory(), "answered", N.least_refused + 0.1, control=True)
    assert next_step(row, 3, retryable=True) == "fail"


@pytest.mark.parametrize(
    ("seconds", "times", "tested"),
    [(N.least_refused - 1.0, 4, True), (N.least_refused, 3, True), (N.least_refused, 4, False)],
    ids=["too soon", "too few", "others are left"],
)
def test_rows_that_are_refused_together_are_tried_again_before_that(seconds: float, times: int, tested: bool) -> None:
    endpoint, row = refused_together(seconds, times, tested=tested)
    endpoint.ends(RowHistory(), "answered", seconds + 0.1, control=True)
    assert next_step(row, 3, retryable=True) == "retry"


def test_rows_that_are_refused_together_start_anew_when_one_of_them_has_room() -> None:
    """Large rows that share a number of tokens per minute: each minute some of them are taken."""
    _, row = refused_together(N.least_refused, 4)
    later = Attempt(row, N.least_refused + 1.0, N.least_refused + 1.0, "overloaded", left_in_flight=5)
    row.overloaded(later, answered_sent=N.least_refused / 2)
    assert (row.refused, row.is_too_much(3)) == (0, False)


@pytest.mark.parametrize(("pause", "endpoint"), [(N.control_pause - 1.0, ""), (N.control_pause + 1.0, "doubted")])
def test_refusals_for_load_ask_for_few_control_requests(pause: float, endpoint: str) -> None:
    there, row = Endpoint(), RowHistory(tested=True)
    there.ends(row, "overloaded", 0.0, few=True, asks=True)
    there.ends(RowHistory(), "answered", 0.1, control=True)
    assert there.ends(row, "overloaded", 0.1 + pause, few=True, asks=True).endpoint == endpoint


@pytest.mark.parametrize(
    ("row", "delay", "gives_way"),
    [
        (RowHistory(failures=1), 0.5, False),  # an outage may begin
        (RowHistory(failures=2), 0.5, True),
        (RowHistory(failures=1, charges=1), 0.5, True),
        (RowHistory(failures=2, overloaded_at=1.0), 0.5, False),  # the server may be full
        (RowHistory(overloaded_at=1.0, passed_over=2), 0.5, True),
        (RowHistory(overloaded_at=1.0), 20.0, True),  # a Retry-After of its own
    ],
)
def test_a_row_that_waits_for_its_next_attempt_gives_way_if_it_fails_for_itself(
    row: RowHistory, delay: float, gives_way: bool
) -> None:
    assert row.gives_way(delay) is gives_way

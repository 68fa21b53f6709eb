"""Whose fault a failure is: one endpoint's health and its refusals, told of answers and failures, told the time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_agent.scheduler.endpoint import Endpoint
from batch_agent.scheduler.health import LEARNT, LONGEST_PAUSE, SEVERAL, Health
from batch_agent.scheduler.refusals import MANY, Refusals
from batch_agent.scheduler.refusals import SEVERAL as ROWS


def fail(health: Health, agents: int, left: int = 0, kind: str = "broken", now: float = 0.0) -> bool:
    return any(health.failed(kind, agent, left, "why", now) for agent in range(agents))  # type: ignore[arg-type]


def test_one_agent_alone_does_not_put_a_server_down_however_often_it_fails() -> None:
    health = Health()
    for _ in range(50):
        assert not health.failed("broken", "agent", 0, "500", 0.0)
    assert health.state == "in doubt"


def test_several_agents_do_unless_a_good_answer_comes_between() -> None:
    health = Health()
    fail(health, SEVERAL - 1)
    health.answered_after(1.0, 0.0, 1.0)
    assert health.state == "works"
    assert not fail(health, SEVERAL - 1)
    assert health.failed("broken", "another", 0, "500", 0.0)
    assert (health.state, health.outages, health.reason) == ("down", 1, "500")


def test_requests_that_never_arrived_count_by_themselves() -> None:
    health = Health()
    for _ in range(SEVERAL):
        down = health.failed("unreached", "the only agent", 0, "refused", 0.0)
    assert down


def test_failures_count_against_what_may_yet_be_answered() -> None:
    assert not fail(Health(), SEVERAL, left=100)
    assert fail(Health(), 50, left=100)
    assert not fail(Health(), 50, left=1, kind="overload")
    assert fail(Health(), SEVERAL, left=0, kind="overload")


def test_silence_counts_when_the_server_is_known_and_several_wait() -> None:
    health = Health()
    assert not health.is_silent(10, 1e9)  # it may be a slow one
    for n in range(LEARNT):
        health.answered_after(2.0, n - 2.0, float(n))
    assert not health.is_silent(10, LEARNT + 5.0)
    assert not health.is_silent(SEVERAL - 1, LEARNT + 1_000.0)
    assert health.is_silent(SEVERAL, LEARNT + 1_000.0)


def test_an_answer_to_what_was_asked_before_an_outage_ends_it_only_where_there_was_silence() -> None:
    broken, silent = Health(), Health()
    fail(broken, SEVERAL, now=10.0)
    assert not broken.answered_after(2.0, 9.0, 11.0)
    assert broken.state == "down"
    assert broken.answered_after(1.0, 12.0, 13.0)
    silent.go_down(10.0, silent=True)
    assert silent.answered_after(2.0, 9.0, 11.0)


@given(st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_the_pause_between_trials_grows_with_the_outage_and_is_bounded(lasted: float, chance: float) -> None:
    health = Health(lambda: chance)
    fail(health, SEVERAL, now=100.0)
    health.try_now(100.0 + lasted)
    pause = health.next_trial - (100.0 + lasted)
    assert 0.3 <= pause <= LONGEST_PAUSE + 1e-6
    assert pause <= 0.5 + lasted / 300 + 1e-6


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["ask", "answer", "fail", "withdraw", "wait"]), st.integers(0, 20))))
def test_in_any_order_of_events_a_server_that_is_down_gets_one_trial_a_pause(steps: list[tuple[str, int]]) -> None:
    endpoint, now = Endpoint("", 8), 0.0
    flights: list[tuple[bool, float]] = []  # trial, and when it left
    last_trial = -1.0
    for step, number in steps:
        health = endpoint.health
        if step == "wait":
            now += number / 4
        elif step == "ask" and endpoint.has_slot(now):
            down = health.is_down
            trial = endpoint.take(now)
            assert trial == down
            if trial:
                assert not any(trial for trial, _ in flights)
                assert last_trial < 0 or now - last_trial >= 0.3 or health.trials == 1
                last_trial = now
            flights.append((trial, now))
        elif step in ("answer", "fail", "withdraw") and flights:
            trial, left = flights.pop(number % len(flights))
            if step == "answer":
                was_down = health.is_down
                health.answered_after(now - left, left, now)
                assert health.state == "works" or (was_down and left < health.down_since)
            elif step == "fail" and health.failed("broken", number, endpoint.inflight - 1, "why", now):
                endpoint.go_down()
                assert endpoint.capacity.limit == 1
            endpoint.inflight -= 1
            if trial:
                health.trial_over()
        assert endpoint.inflight == len(flights)
        assert (endpoint.health.state == "on trial") <= any(trial for trial, _ in flights)


# Refusals


def refused(refusals: Refusals, agent: object, status: int, said: str = "no", at: float = 0.0, others: int = 0) -> str:
    """``others`` are on their way."""
    return refusals.refused(agent, status, said, at, others)


def test_a_wrong_key_concerns_all_at_once_and_at_any_time() -> None:
    refusals = Refusals()
    refusals.answered(1.0)
    assert [refused(refusals, "a", status, others=64) for status in (401, 402, 429)] == ["all"] * 3


def test_a_wrong_place_concerns_all_until_there_was_a_good_answer() -> None:
    assert refused(Refusals(), "a", 404) == "all"
    refusals = Refusals()
    refusals.answered(1.0)
    assert [refused(refusals, agent, 404, at=2.0) for agent in range(ROWS)] == ["unclear"] * (ROWS - 1) + ["all"]


def test_what_is_forbidden_is_unclear_until_several_rows_are_refused_or_one_is_answered() -> None:
    refusals = Refusals()
    assert [refused(refusals, agent, 403, f"row {agent}") for agent in "aab"] == ["unclear"] * 3
    assert refusals.is_unclear("a")
    assert refused(refusals, "c", 403) == "all"
    refusals.answered(0.0)
    assert not refusals.is_unclear("a")
    assert [refused(refusals, agent, 403) for agent in range(ROWS)] == ["unclear"] * (ROWS - 1) + ["all"]


def test_a_good_answer_says_nothing_of_what_was_asked_after_it() -> None:
    refusals = Refusals()
    refused(refusals, "early", 403, at=1.0)
    refused(refusals, "late", 403, at=3.0)
    refusals.answered(2.0)
    assert [refusals.is_unclear(agent) for agent in ("early", "late")] == [False, True]


def test_refusals_that_come_before_the_answers_do_not_concern_all() -> None:
    refusals = Refusals()
    assert {refused(refusals, agent, 403, others=64 - agent) for agent in range(20)} == {"unclear"}
    assert refused(refusals, 22, 403, others=42) == "all"


def test_the_same_words_of_many_rows_concern_all_and_numbers_and_quotations_do_not_tell_them_apart() -> None:
    refusals = Refusals()
    verdicts = [refused(refusals, n, 400, f"field 'f{n}' is unknown at line {n}") for n in range(MANY)]
    assert verdicts == ["unclear"] * (MANY - 1) + ["all"]
    different = Refusals()
    assert {refused(different, n, 400, "x" * (n % 2 + 1)) for n in range(10 * MANY)} == {"unclear"}

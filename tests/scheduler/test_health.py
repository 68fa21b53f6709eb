"""The timing of one endpoint's health: silence, trials, the end of an outage. Whose fault a failure is: test_blame."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.scheduler.health import Health
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import Terms


def test_a_failure_makes_an_endpoint_suspect_and_an_answer_makes_it_healthy() -> None:
    health = Health()
    health.fail("500", 1.0)
    assert (health.state, health.reason, health.is_down) == ("suspect", "500", False)
    assert not health.answer(1.0, 1.0, 2.0)
    assert health.state == "healthy"


def test_silence_counts_when_the_server_is_known_and_several_wait() -> None:
    health = Health()
    assert not health.is_silent(10, 1e9), "it may be slow"
    for n in range(N.learnt):
        health.answer(2.0, n - 2.0, float(n))
    assert not health.is_silent(10, N.learnt + 5.0)
    assert not health.is_silent(N.several - 1, N.learnt + 1_000.0)
    assert health.is_silent(N.several, N.learnt + 1_000.0)
    health.patient = True
    assert not health.is_silent(N.several, N.learnt + 1_000.0)


def test_an_answer_to_a_request_from_before_an_outage_ends_it_only_if_the_server_was_silent() -> None:
    broken, silent = Health(), Health()
    broken.go_down(10.0)
    assert not broken.answer(2.0, 9.0, 11.0)
    assert broken.state == "down"
    assert broken.answer(1.0, 12.0, 13.0)
    silent.go_down(10.0, silent=True)
    assert silent.answer(2.0, 9.0, 11.0)


@given(st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_the_pause_between_trials_grows_with_the_outage_and_is_bounded(lasted: float, chance: float) -> None:
    health = Health(lambda: chance)
    health.go_down(100.0)
    health.try_now(100.0 + lasted)
    pause = health.next_trial - (100.0 + lasted)
    assert 0.3 <= pause <= N.longest_pause + 1e-6
    assert pause <= 0.5 + lasted / 300 + 1e-6


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(["ask", "answer", "go down", "withdraw", "wait"]), st.integers(0, 20))))
def test_in_any_order_of_events_a_server_that_is_down_gets_one_trial_a_pause(steps: list[tuple[str, int]]) -> None:
    endpoint, now = Endpoint(None, Terms(8)), 0.0
    health = endpoint.health
    flights: list[tuple[bool, float]] = []  # trial, and when it was sent
    last_trial = -1.0
    for step, number in steps:
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
        elif step in ("answer", "withdraw") and flights:
            trial, sent = flights.pop(number % len(flights))
            if step == "answer":
                was_down = health.is_down
                health.answer(now - sent, sent, now)
                assert health.state == "healthy" or (was_down and sent < health.down_since)
                if health.state == "healthy":  # the trials of this outage say nothing about the next one
                    flights = [(False, sent) for _, sent in flights]
            endpoint.give_back()
            if trial:
                health.trial_over()
        elif step == "go down" and not health.is_down:
            health.go_down(now)
        assert endpoint.inflight == len(flights)
        assert (health.state == "on trial") <= any(trial for trial, _ in flights)


def test_an_answered_trial_leaves_the_endpoint_sound() -> None:
    endpoint = Endpoint()
    endpoint.health.go_down(0.0)
    assert endpoint.take(1.0)
    assert endpoint.health.answer(0.5, 1.0, 1.5)
    endpoint.health.trial_over()
    assert endpoint.health.is_sound(2.0)


def test_an_endpoint_in_doubt_takes_nothing_but_a_control_request() -> None:
    endpoint = Endpoint()
    endpoint.health.doubt("500", 1.0)
    assert not endpoint.has_slot(1.0) and not endpoint.spare
    assert endpoint.takes_control(1.0)
    endpoint.health.answer(0.0, 1.0, 2.0)
    assert endpoint.has_slot(2.0)


def test_silence_is_looked_into_less_and_less_often_until_an_answer_comes() -> None:
    health = Endpoint().health
    health.heard, looks = 0.0, []
    for _ in range(4):
        looks.append(health.silent_at)
        health.look(health.silent_at)
    assert [later - earlier for earlier, later in pairwise([0.0, *looks])] == [5.0, 10.0, 20.0, 40.0]
    health.answer(0.5, 0.0, 100.0)
    assert health.silent_at == 105.0


def test_control_requests_before_the_first_answer_follow_each_other_with_growing_time_limits() -> None:
    health, limits = Endpoint().health, []
    while True:
        limits.append(health.control_seconds(0.0))
        if not health.asks_again():
            break
    assert limits == [10.0, 20.0, 30.0]
    health.answer(0.5, 0.0, 1.0)
    assert not health.asks_again()


def test_a_control_request_to_a_silent_server_that_is_known_has_little_time() -> None:
    health = Endpoint().health
    for _ in range(N.learnt):
        health.answer(3.0, 0.0, 1.0)
    assert health.control_seconds(1.0) == 10.0
    health.look(20.0)
    assert health.control_seconds(20.0) == 6.0

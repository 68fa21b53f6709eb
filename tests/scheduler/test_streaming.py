"""When an answer is streamed: while early tools gain more than reading tokens costs."""

from __future__ import annotations

from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import TOKEN_SECONDS, Streaming


def trial(streaming: Streaming, gained: float, tokens: int = 100, inflight: int = 1) -> list[tuple[bool, str]]:
    """One trial's answers; what was said about them."""
    assert streaming.wants_next()
    told = [streaming.learn(gained, tokens, inflight) for _ in range(N.enough)]
    return [decision for decision in told if decision is not None]


def test_it_is_tried_first_and_goes_on_while_it_pays() -> None:
    streaming = Streaming()
    [(streams, reason)] = trial(streaming, gained=0.5)
    assert streams and "0.5 s per turn, more than" in reason
    assert trial(streaming, gained=0.5) == [], "nothing new"
    assert streaming.wants_next()


def test_only_a_few_turns_are_streamed_until_it_is_decided() -> None:
    streaming = Streaming()
    wanted = [streaming.wants_next() for _ in range(512)]
    assert sum(wanted) == 2 * N.enough
    for _ in range(N.enough):
        streaming.learn(0.5, tokens=100, inflight=512)
    assert not streaming.wants_next(), "what it gains one costs 512"


def test_a_trial_whose_answers_never_came_is_made_again() -> None:
    streaming = Streaming()
    wanted = [streaming.wants_next() for _ in range(2 * N.enough + N.rarely + 1)]
    assert wanted[-1] and not any(wanted[2 * N.enough : -1])


def test_what_gains_nothing_is_given_up() -> None:
    streaming = Streaming()
    [(streams, reason)] = trial(streaming, gained=0.0)
    assert not streams and "no more than" in reason
    assert not streaming.wants_next()


def test_the_cost_is_that_of_all_who_wait_while_one_is_read() -> None:
    gained = 100 * TOKEN_SECONDS * 50
    assert trial(Streaming(), gained, inflight=49)[0][0]
    assert not trial(Streaming(), gained, inflight=51)[0][0]


def test_it_is_tried_again_after_a_rest_and_a_verdict_that_stands_is_not_told_again() -> None:
    streaming = Streaming()
    trial(streaming, gained=0.0)
    assert not any(streaming.wants_next() for _ in range(N.rarely))
    assert trial(streaming, gained=0.0) == []
    assert not any(streaming.wants_next() for _ in range(N.rarely))
    [(streams, _)] = trial(streaming, gained=0.5)
    assert streams


def test_a_wave_of_last_answers_is_no_reason_to_stop() -> None:
    streaming = Streaming()
    for _ in range(20):
        for gained in (1.0, 0.0):
            told = [streaming.learn(gained, tokens=100, inflight=64) for _ in range(64)]
            assert all(decision is None or decision[0] for decision in told)


def test_what_stops_paying_is_given_up_however_long_it_paid() -> None:
    streaming = Streaming()
    for _ in range(1000):
        trial(streaming, gained=0.5)
    told = [streaming.learn(0.0, tokens=1000, inflight=64) for _ in range(2 * N.rarely)]
    assert [decision[0] for decision in told if decision is not None] == [False]


def test_answers_that_come_after_it_was_given_up_do_not_count_in_the_next_trial() -> None:
    streaming = Streaming()
    trial(streaming, gained=0.0)
    assert [streaming.learn(9.0, 1, 1) for _ in range(N.enough)] == [None] * N.enough
    assert not any(streaming.wants_next() for _ in range(N.rarely))
    assert trial(streaming, gained=0.0) == []

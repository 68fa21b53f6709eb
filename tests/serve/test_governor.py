"""How many lines may be in flight while people are there."""

from __future__ import annotations

from statistics import median

from batch_agent.serve.turnstile import QUIET_SECONDS, Governor


def idle(governor: Governor, seconds: float = 0.5, tokens: int = 100) -> None:
    governor.began(0.0, 0)
    governor.admitted()
    governor.ended(0.5)
    governor.answered(seconds, tokens, 0, 0, 0.5)


def test_without_people_there_is_no_limit() -> None:
    governor = Governor(2.5)
    assert governor.limit(0.0) is None
    idle(governor)
    assert governor.limit(0.5) is not None
    assert governor.limit(0.6 + QUIET_SECONDS) is None


def test_without_a_target_there_is_no_limit() -> None:
    governor = Governor(None)
    governor.began(0.0, 100)
    assert governor.limit(0.0) is None and governor.waits
    governor.admitted()
    assert not governor.waits


def test_the_limit_shrinks_until_the_target_is_met_and_grows_when_there_is_room() -> None:
    """An engine whose steps take longer in proportion to the requests in its batch."""
    governor, now, lines = Governor(2.5), 100.0, 256
    idle(governor)
    met = []
    for _ in range(300):
        governor.began(now, lines)
        governor.admitted()
        limit = governor.limit(now)
        assert limit is not None
        lines = max(limit, lines - 40)  # lines in flight end one after another
        seconds = 0.5 * (1 + lines / 40)
        now += 0.2
        governor.ended(now)
        governor.answered(seconds, 100, lines, lines, now)
        met.append(seconds / 0.5)
    settled = met[100:]
    assert 2.3 < median(settled) < 2.5 and max(settled) < 3.0  # close to the target, and below it


def test_a_limit_that_met_the_target_is_used_again_when_people_return() -> None:
    governor = Governor(2.0)
    idle(governor)
    governor.began(1.0, 200)
    governor.admitted()
    governor.answered(5.0, 100, 200, 200, 10.0)
    governor.ended(10.0)
    limit = governor.limit(10.0)
    assert governor.limit(10.0 + 2 * QUIET_SECONDS) is None
    governor.began(30.0, 500)
    assert governor.limit(30.0) == limit


def test_the_reason_for_giving_the_target_up_is_shown() -> None:
    governor = Governor(2.5)
    governor.give_up("2 batches would miss their deadline")
    assert "deadline" in governor.reason


def test_a_pace_beside_lines_is_not_taken_for_that_of_an_idle_engine() -> None:
    """People come for the first time while a batch fills the engine: its lines end before more start."""
    governor, tokens, now = Governor(2.5), 92, 10.0
    governor.learn_line(8.0, tokens, 255)
    governor.began(now, 256)
    governor.admitted()
    assert governor.limit(now) == 0
    governor.ended(now + 5)
    governor.answered(5.0, tokens, 256, 0, now + 5)  # it began beside 256 lines
    assert governor.limit(now + 5) == 0
    governor.began(now + 5, 0)
    governor.admitted()
    governor.ended(now + 6)
    governor.answered(1.0, tokens, 0, 0, now + 6)
    limit = governor.limit(now + 6)
    assert limit is not None and 30 < limit < 60  # 255 lines made it 8 times slower


def test_the_more_often_people_ask_the_sooner_lines_fill_the_engine_again() -> None:
    def seconds_until_filled(gap: float) -> float:
        governor, now = Governor(2.5), 0.0
        idle(governor)
        for _ in range(30):
            now += gap
            governor.began(now, 0)
            governor.admitted()
            governor.ended(now)
            assert governor.limit(now + gap) is not None  # nobody is taken for gone between two requests
        after = now
        while governor.limit(after) is not None:
            after += 0.01
        return after - now

    assert 1.0 < seconds_until_filled(0.2) < 2.0
    assert 4.9 < seconds_until_filled(1.0) < 5.1
    assert 4.9 < seconds_until_filled(4.0) < 5.1

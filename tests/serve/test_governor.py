"""How many lines may be in flight while people are there."""

from __future__ import annotations

from random import Random
from statistics import median, quantiles

from batch_agent.serve import LatencyTarget
from batch_agent.serve.governor import QUIET_SECONDS, Governor


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


def latencies(governor: Governor, answers: int, *, lines_per_second: float) -> list[float]:
    """Let people ask five times a second an engine whose steps take longer in proportion to the requests in its batch,
    and some of whose answers take much longer. Return the latencies over that of the idle engine."""
    chance, now, lines, found = Random(1), 100.0, 256, []
    idle(governor)
    for _ in range(answers):
        governor.began(now, lines)
        governor.admitted()
        limit = governor.limit(now)
        assert limit is not None
        lines = max(limit, lines - round(lines_per_second / 5))
        seconds = 0.5 * (1 + lines / 100 * chance.lognormvariate(0, 0.5))
        now += 0.2
        governor.ended(now)
        governor.answered(seconds, 100, lines, lines, now)
        found.append(seconds / 0.5)
    return found


def test_the_95th_percentile_is_held_if_it_is_the_target() -> None:
    governor = Governor(LatencyTarget(3.0, 95))
    settled = latencies(governor, 3000, lines_per_second=150)[200:]
    assert 2.6 < quantiles(settled, n=20)[18] < 3.05
    assert median(settled) < 2.2
    assert governor.shown == "p95 3" and 2.5 < governor.ratio < 3.5
    of_median = latencies(Governor(3.0), 3000, lines_per_second=150)[200:]
    assert quantiles(of_median, n=20)[18] > 4  # the same engine with the target of the median


def test_the_limit_of_a_percentile_grows_fast_when_nothing_is_slow_any_more() -> None:
    governor, now = Governor(LatencyTarget(3.0, 95)), 200.0  # when the last of them has ended
    latencies(governor, 500, lines_per_second=150)
    before = governor.limit(now)
    assert before is not None
    for _ in range(300):  # a minute in which the engine is as fast as without lines
        limit = governor.limit(now) or 0
        governor.began(now, limit)
        governor.admitted()
        now += 0.2
        governor.ended(now)
        governor.answered(0.6, 100, limit, limit, now)
    after = governor.limit(now)
    assert after is not None and after > 3 * before


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


def test_a_limit_from_a_time_without_lines_is_not_kept() -> None:
    governor = Governor(2.0)
    governor.began(0.0, 0)
    governor.admitted()
    governor.ended(1.0)
    governor.answered(1.0, 92, 0, 0, 1.0)  # 0.01 s per token, with its overhead
    assert governor.limit(1.0) == 1
    assert governor.limit(100.0) is None
    governor.learn_line(3.0, 92, 100)  # three times as long beside 100 lines
    governor.began(200.0, 100)
    assert governor.limit(200.0) == 40  # half of them, and a fifth less


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

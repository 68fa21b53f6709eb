import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.errors import SpecError
from batch_agent.tools.rate import Bucket, RateGate, calls_per_second


@pytest.mark.parametrize(
    ("rate", "per_second"),
    [(10, 10.0), (0.5, 0.5), ("10/s", 10.0), ("100/min", 100 / 60), ("5/hour", 5 / 3600), (" 1.5 / Second ", 1.5)],
)
def test_a_rate_is_a_number_or_text_with_a_unit(rate: object, per_second: float) -> None:
    assert calls_per_second(rate) == pytest.approx(per_second)


@pytest.mark.parametrize("rate", [0, -1, True, "10", "10/fortnight", "/s", "-1/s", "0/s", float("nan"), [1]])
def test_a_wrong_rate_says_what_is_allowed(rate: object) -> None:
    with pytest.raises(SpecError, match="calls per second"):
        calls_per_second(rate)


def test_a_second_worth_of_calls_starts_at_once_and_then_one_per_interval() -> None:
    bucket = Bucket(4.0, now=100.0)
    for _ in range(4):
        assert bucket.delay(100.0) == 0.0
        bucket.take(100.0)
    assert bucket.delay(100.0) == pytest.approx(0.25)
    assert bucket.delay(100.25) == 0.0


def test_a_slow_rate_lets_one_call_start() -> None:
    bucket = Bucket(1 / 60, now=0.0)
    assert bucket.delay(0.0) == 0.0
    bucket.take(0.0)
    assert bucket.delay(0.0) == pytest.approx(60.0)


def test_a_clock_that_steps_back_gives_no_tokens() -> None:
    bucket = Bucket(1.0, now=10.0)
    bucket.take(10.0)
    assert bucket.delay(5.0) == pytest.approx(1.0)
    assert bucket.delay(10.0) == pytest.approx(1.0)


@given(st.floats(0.1, 50), st.lists(st.floats(0, 3), max_size=60))
def test_no_window_ever_sees_more_calls_than_the_rate_and_the_burst(rate: float, gaps: list[float]) -> None:
    bucket, now, starts = Bucket(rate, now=0.0), 0.0, []
    for gap in gaps:
        now += gap
        now += bucket.delay(now)
        bucket.take(now)
        starts.append(now)
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            allowed = max(1.0, rate) + (starts[last] - starts[first]) * rate
            assert last - first + 1 <= allowed + 1e-3


async def test_one_who_leaves_the_queue_costs_nothing() -> None:
    gate = RateGate(5.0)
    for _ in range(5):
        await gate.wait_turn()
    leaver = asyncio.create_task(gate.wait_turn())
    stayer = asyncio.create_task(gate.wait_turn())
    await asyncio.sleep(0)
    leaver.cancel()
    await stayer
    assert leaver.cancelled()

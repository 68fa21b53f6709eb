import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.errors import SpecError
from batch_agent.testing.clock import VirtualClockDeadlock, run_virtual, virtual_clock
from batch_agent.tools.execution import SLACK_SECONDS, RateGate, Window, calls_per_second


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


def test_a_second_worth_of_calls_starts_at_once_and_the_next_when_these_are_a_second_old() -> None:
    window = Window(4.0)
    for _ in range(4):
        assert window.delay(100.0) == 0.0
        window.take(100.0)
    assert window.delay(100.0) == pytest.approx(1.0 + SLACK_SECONDS)
    assert window.delay(100.0, ahead=4) == pytest.approx(2.0 + 2 * SLACK_SECONDS)
    assert window.delay(101.0 + SLACK_SECONDS) == 0.0


def test_a_slow_rate_lets_one_call_start() -> None:
    window = Window(1 / 60)
    assert window.delay(0.0) == 0.0
    window.take(0.0)
    assert window.delay(0.0) == pytest.approx(60.0, abs=0.1)


def test_a_start_that_was_undone_costs_nothing() -> None:
    window = Window(2.0)
    for _ in range(2):
        window.take(0.0)
    window.put_back()
    assert window.delay(0.1) == 0.0
    window.take(0.1)
    assert window.delay(0.1) > 0.0


@given(st.integers(1, 50), st.lists(st.floats(0, 3), max_size=60))
def test_no_second_ever_sees_more_calls_than_the_rate(rate: int, gaps: list[float]) -> None:
    window, now, starts = Window(rate), 0.0, []
    for gap in gaps:
        now += gap
        now += window.delay(now)
        window.take(now)
        starts.append(now)
    assert all(sum(first <= start < first + 1.0 for start in starts) <= rate for first in starts)


async def emptied(rate: float) -> RateGate:
    gate = RateGate(rate)
    while gate.enter_nowait():
        pass
    return gate


@virtual_clock
async def test_callers_are_let_through_in_the_order_they_came() -> None:
    gate, now, passed = await emptied(5.0), asyncio.get_running_loop().time, []

    async def pass_through(number: int) -> None:
        await gate.enter()
        passed.append((number, round(now(), 3)))

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(pass_through(number))
        await asyncio.sleep(0.3)
        assert not gate.enter_nowait()  # nobody overtakes
    assert [number for number, _ in passed] == [0, 1, 2, 3]
    assert passed[0][1] == pytest.approx(1.0, abs=0.01)


@virtual_clock
async def test_one_who_leaves_the_line_costs_nothing() -> None:
    gate, now = await emptied(5.0), asyncio.get_running_loop().time
    leaver = asyncio.create_task(gate.enter())
    stayer = asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    leaver.cancel()
    await stayer
    assert leaver.cancelled()
    assert now() == pytest.approx(1.0, abs=0.01)


@virtual_clock
async def test_one_who_is_cancelled_when_his_turn_comes_costs_nothing() -> None:
    gate, now = await emptied(5.0), asyncio.get_running_loop().time
    leaver, stayer = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    # Set later than the gate's own timer, for the same time.
    asyncio.get_running_loop().call_at(1.0 + SLACK_SECONDS, leaver.cancel)
    await stayer
    assert leaver.cancelled()
    assert now() == pytest.approx(1.0, abs=0.01)


def test_a_line_that_everybody_left_sets_no_timer() -> None:
    async def main() -> None:
        gate = await emptied(1 / 3600)
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(VirtualClockDeadlock, match="at virtual time 0:"):
        run_virtual(main())

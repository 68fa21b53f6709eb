"""What calls pass before they run: order, limits, and those who leave."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.testing.clock import run_virtual
from batch_agent.tools.execution import CallSlots


async def test_slots_are_given_in_the_order_they_were_asked_for() -> None:
    slots, order = CallSlots(1), []

    async def use(number: int) -> None:
        await slots.enter()
        order.append(number)
        await asyncio.sleep(0)
        slots.leave()

    await asyncio.gather(*(use(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]


async def test_nobody_overtakes_those_who_wait() -> None:
    slots = CallSlots(1)
    assert slots.enter_nowait()
    waiting = asyncio.create_task(slots.enter())
    await asyncio.sleep(0)
    slots.leave()
    assert not slots.enter_nowait()
    await waiting


async def test_a_cancelled_waiter_gives_its_slot_back() -> None:
    slots = CallSlots(1)
    assert slots.enter_nowait()
    waiting = [asyncio.create_task(slots.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    slots.leave()
    waiting[0].cancel()  # it was called a moment ago
    waiting[1].cancel()  # it was not
    await asyncio.wait(waiting)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    slots.leave()
    assert slots.enter_nowait()


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 6)), max_size=20))
def test_in_any_order_of_events_the_limit_holds_and_no_slot_is_lost(
    limit: int, users: list[tuple[int, int, int]]
) -> None:
    async def main() -> None:
        slots = CallSlots(limit)
        inside = 0

        async def use(begin: int, stay: int) -> None:
            nonlocal inside
            await asyncio.sleep(begin)
            await slots.enter()
            inside += 1
            assert inside <= limit
            try:
                await asyncio.sleep(stay)
            finally:
                inside -= 1
                slots.leave()

        tasks = [asyncio.create_task(use(begin, stay)) for begin, stay, _ in users]
        for task, (_, _, patience) in zip(tasks, users, strict=True):
            asyncio.get_running_loop().call_later(patience, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [slots.enter_nowait() for _ in range(limit + 1)] == [True] * limit + [False]

    run_virtual(main())

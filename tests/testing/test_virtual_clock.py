"""The virtual clock: time jumps, order is kept, and waiting for nothing is an error."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batch_agent.testing import VirtualClockDeadlock, run_virtual, virtual_clock


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual_clock
async def test_a_sleep_of_a_year_moves_the_clock_by_a_year() -> None:
    began = now()
    await asyncio.sleep(365 * 24 * 3600)
    assert now() - began == pytest.approx(365 * 24 * 3600)


@virtual_clock
async def test_timers_fire_in_the_order_of_their_time() -> None:
    fired: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((name, round(now(), 6)))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 30))
        group.create_task(sleeper("early", 10))
        asyncio.get_running_loop().call_later(20, lambda: fired.append(("callback", round(now(), 6))))
    assert fired == [("early", 10), ("callback", 20), ("late", 30)]


@virtual_clock
async def test_a_timeout_ends_what_never_would() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600):
            await asyncio.Event().wait()
    assert now() == pytest.approx(600)


@virtual_clock
async def test_the_clock_stands_still_while_a_thread_works() -> None:
    gate = threading.Event()
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    async with asyncio.timeout(3600):
        assert await asyncio.to_thread(gate.wait)
    assert now() == 0.0
    opener.join()


@virtual_clock
async def test_a_thread_can_hand_a_result_to_the_loop() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    await asyncio.to_thread(loop.call_soon_threadsafe, answer.set_result, 7)
    assert await answer == 7


def test_waiting_for_nothing_is_a_deadlock_that_names_who_waits() -> None:
    async def consumer(queue: asyncio.Queue[int]) -> int:
        return await queue.get()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(consumer(asyncio.Queue()), name="the-consumer")
            group.create_task(asyncio.sleep(5))

    with pytest.raises(VirtualClockDeadlock) as caught:
        run_virtual(main())
    assert "virtual time 5" in str(caught.value)
    assert "the-consumer" in str(caught.value)
    assert "consumer > Queue.get" in str(caught.value)


def test_a_deadlock_cancels_what_was_waiting() -> None:
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(VirtualClockDeadlock):
        run_virtual(main())
    assert cleaned == [True]


def test_sockets_of_this_process_carry_bytes_before_the_clock_jumps() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        await asyncio.sleep(10)
        writer.write(line)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def main() -> tuple[bytes, float]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            async with asyncio.timeout(60):
                writer.write(b"hello\n")
                answer = await reader.readline()
            writer.close()
            await writer.wait_closed()
        return answer, now()

    assert run_virtual(main()) == (b"hello\n", pytest.approx(10))


def test_the_result_of_the_coroutine_is_returned() -> None:
    async def main() -> str:
        await asyncio.sleep(1)
        return "done"

    assert run_virtual(main()) == "done"


@virtual_clock
async def test_a_wait_that_is_shorter_than_a_step_of_the_clock_passes() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1e6)
    began, goal = loop.time(), 1e-12
    while loop.time() - began < goal:  # as one does who waits for a part of a token
        await asyncio.sleep(goal - (loop.time() - began))
    assert loop.time() > began


@virtual_clock
async def test_a_timer_that_is_due_now_fires_after_years() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1e9)
    fired = loop.create_future()
    loop.call_at(loop.time(), fired.set_result, None)
    await fired


@virtual_clock
async def test_a_timer_never_fires_early() -> None:
    loop, fired = asyncio.get_running_loop(), []

    def fire(when: float) -> None:
        fired.append(loop.time() - when)
        if loop.time() < when:  # as one does who keeps a list of times
            loop.call_at(when, fire, when)

    for when in (178.5, 178.5 + 1e-10, 178.5 + 2e-10, 1e8, 1e8 + 2e-8):
        loop.call_at(when, fire, when)
    await asyncio.sleep(2e8)
    assert fired == [0.0] * 5

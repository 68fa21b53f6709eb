"""Signals during a run: each Ctrl-C calls the next step, other signals call the last one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from batch_agent.run.interruption import Interruption


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """The handlers of a plain Python process, also if another test has set others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def steps(count: int, called: list[int]) -> list[Callable[[], None]]:
    return [lambda number=number: called.append(number) for number in range(count)]  # type: ignore[misc]


async def raised(number: signal.Signals) -> None:
    signal.raise_signal(number)
    await asyncio.sleep(0)


async def test_the_first_ctrl_c_of_a_program_stops_the_run_and_the_next_has_its_usual_effect() -> None:
    called, interruption, usual = list[int](), Interruption(), signal.getsignal(signal.SIGINT)
    with interruption.stopping(*steps(1, called)):
        assert signal.getsignal(signal.SIGINT) != usual
        await raised(signal.SIGINT)
        assert called == [0] and interruption.happened
        assert signal.getsignal(signal.SIGINT) == usual
        assert not interruption.request()


async def test_a_command_drains_stops_and_is_killed_after_that() -> None:
    called, interruption = list[int](), Interruption([signal.SIGTERM], owns=True)
    with interruption.stopping(*steps(2, called)):
        await raised(signal.SIGINT)
        assert called == [0] and not interruption.happened
        await raised(signal.SIGINT)
        assert called == [0, 1] and interruption.stopped_by is signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        await raised(signal.SIGTERM)
        assert called == [0, 1, 1]


async def test_a_termination_stops_a_command_at_once() -> None:
    called, interruption = list[int](), Interruption([signal.SIGTERM], owns=True)
    usual = signal.getsignal(signal.SIGINT)
    with interruption.stopping(*steps(2, called)):
        await raised(signal.SIGTERM)
        assert called == [1] and interruption.stopped_by is signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) == usual


async def test_the_handler_of_a_program_is_not_replaced() -> None:
    seen, called = list[int](), list[int]()
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with Interruption().stopping(*steps(1, called)):
        await raised(signal.SIGINT)
    assert seen == [signal.SIGINT] and not called


async def test_a_run_can_be_stopped_from_another_thread() -> None:
    called, interruption = list[int](), Interruption()
    assert not interruption.request()
    with interruption.stopping(*steps(2, called)):
        assert await asyncio.to_thread(interruption.request)
        await asyncio.sleep(0)
    assert called == [1] and interruption.happened and interruption.stopped_by is None

import asyncio
import threading
from typing import Self

from batch_agent.observe.progress import Display, with_expected
from batch_agent.observe.statistics import Statistics


class FakeView:
    interval = 0.001

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.shown: list[Statistics] = []
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def show(self, statistics: Statistics) -> None:
        self.shown.append(statistics)
        if self.error is not None:
            raise self.error


async def test_a_view_is_shown_the_run_again_and_again_and_closed() -> None:
    view = FakeView()
    done = iter(range(1_000_000))
    async with Display(view, lambda: Statistics(done=next(done))):
        while len(view.shown) < 3:
            await asyncio.sleep(0.001)
    assert view.closed
    assert [statistics.done for statistics in view.shown[:3]] == [0, 1, 2]


async def test_a_view_that_fails_is_switched_off_and_the_run_goes_on() -> None:
    view = FakeView(OSError("the terminal is gone"))
    async with Display(view, Statistics):
        for _ in range(20):
            await asyncio.sleep(0.001)
    assert len(view.shown) == 1
    assert view.closed


async def test_a_view_that_hangs_is_not_asked_again_and_does_not_stop_the_loop() -> None:
    release = threading.Event()

    class Stuck(FakeView):
        def show(self, statistics: Statistics) -> None:
            super().show(statistics)
            release.wait(5)

    view = Stuck()
    async with Display(view, Statistics):
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(view.shown) == 1
        release.set()
    assert view.closed


def test_an_expected_total_stands_in_for_one_that_is_not_known() -> None:
    assert with_expected(Statistics(total=None, done=5), 3).total == 5
    assert with_expected(Statistics(total=None), 7).total == 7
    assert with_expected(Statistics(total=10), 7).total == 10
    assert with_expected(Statistics(total=None), None).total is None

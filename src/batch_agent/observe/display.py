"""Keeps a view up to date during a run.

Statistics are read on the event loop a few times a second. Drawing happens in a thread, because a stopped terminal or a
full pipe must not stop the agents. A view that fails is switched off; the run continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self

from batch_agent.blocking import in_thread
from batch_agent.observe.metrics import Statistics
from batch_agent.observe.terminal import TerminalDisplay

PATIENCE = 1.0  # seconds that the end of a run waits for a drawing that does not finish


class Display:
    def __init__(self, view: TerminalDisplay, statistics: Callable[[], Statistics]) -> None:
        self._view, self._statistics = view, statistics
        self._timer: asyncio.TimerHandle | None = None
        self._drawing: asyncio.Future[None] | None = None
        self._broken = False

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """Start showing, for callers that decide later to show something; ``__aexit__`` ends it in any case."""
        try:
            self._view.__enter__()
        except OSError:
            self._broken = True
        self._tick()

    async def __aexit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._drawing is not None:
            await asyncio.wait([self._drawing], timeout=PATIENCE)
        if self._finished_drawing():  # a view that still draws keeps its terminal; the process is about to end
            with suppress(OSError):
                self._view.__exit__(*exception)

    def _tick(self) -> None:
        if self._finished_drawing():
            if self._broken:
                return
            self._drawing = in_thread(partial(self._view.show, self._statistics()))
        self._timer = asyncio.get_running_loop().call_later(self._view.interval, self._tick)

    def _finished_drawing(self) -> bool:
        if self._drawing is None:
            return True
        if self._drawing.done():
            self._broken = self._drawing.exception() is not None
        return self._drawing.done()


def with_expected(statistics: Statistics, expected: int | None) -> Statistics:
    """Return the statistics with a total, if the run itself could not know it."""
    if statistics.total is not None or expected is None:
        return statistics
    return dataclasses.replace(statistics, total=max(expected, statistics.done))

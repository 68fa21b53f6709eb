"""Ctrl-C: the first drains the run, the second stops it, the third kills the process. SIGTERM stops the run at once.
So does SIGHUP, which a process gets when its terminal is closed (not under ``nohup``)."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Protocol, Self

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import say


def serve(serving: Coroutine[object, object, None], *, last_word: str = "stopped") -> int:
    """Run a server until Ctrl-C or SIGTERM, and print ``last_word``. Returns the exit status."""

    async def until_stopped() -> None:
        task = asyncio.current_task()
        assert task is not None
        with suppress(NotImplementedError, RuntimeError):  # Windows, or not in the main thread
            for number in stop_signals():
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await serving

    try:
        asyncio.run(until_stopped())
    except (KeyboardInterrupt, asyncio.CancelledError):
        if last_word:
            say(last_word)
    return ALL_OK


def stop_signals() -> list[signal.Signals]:
    """Return the signals at which a command ends in order. Under ``nohup`` SIGHUP is ignored and is not among them."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGTERM]
    return [signal.SIGTERM, signal.SIGHUP]


class Stoppable(Protocol):
    def drain(self) -> None: ...

    def cancel(self) -> None: ...


class Interrupts:
    def __init__(self, run: Stoppable) -> None:
        self._run = run
        self._interrupts = 0
        self._stops: list[signal.Signals] = []
        self.stopped_by: signal.Signals | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, RuntimeError):  # Windows, or not in the main thread
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
            self._stops = stop_signals()
            for number in self._stops:
                loop.add_signal_handler(number, self._stop, number)
        return self

    def __exit__(self, *exception: object) -> None:
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):
            for number in (signal.SIGINT, *self._stops):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            say("batch-agent: stopping: running agents finish, no new one starts. Ctrl-C again stops at once.")
            self._run.drain()
        else:
            self._stop(signal.SIGINT)

    def _stop(self, by: signal.Signals) -> None:
        say("batch-agent: stopping at once.")
        self.stopped_by = by
        self._run.cancel()
        # If cancelling takes long, the next signal kills the process.
        asyncio.get_running_loop().remove_signal_handler(by)
        signal.signal(by, signal.SIG_DFL)

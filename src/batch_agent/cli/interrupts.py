"""Ctrl-C: the first drains the run, the second stops it, the third kills the process. SIGTERM stops the run at once.
So does SIGHUP, which a process gets when its terminal is closed (not under ``nohup``)."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Protocol

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import say
from batch_agent.run.interruption import Interruption


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


def interruption_of(run: Stoppable) -> Interruption:
    """Return the context manager during which signals drain or stop the run."""

    def drain() -> None:
        say("batch-agent: stopping: running agents finish, no new one starts. Ctrl-C again stops at once.")
        run.drain()

    def stop() -> None:
        say("batch-agent: stopping at once.")
        run.cancel()

    return Interruption(stop_signals(), owns=True).stopping(drain, stop)

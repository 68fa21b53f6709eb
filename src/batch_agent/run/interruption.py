"""Ctrl-C during a run: the run ends, finished rows are kept, and one line says how to continue.

The first Ctrl-C stops the run; the next one has its usual effect. An interactive session gets the finished results. In
a script, KeyboardInterrupt is raised with them as ``results``. If it is not caught, it prints that one line instead of
a traceback. Handlers that a program has installed itself are not replaced.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from batch_agent.observe.statistics import Statistics
from batch_agent.observe.text import rows
from batch_agent.spec import BatchSpec

R = TypeVar("R")


class Interruption:
    def __init__(self) -> None:
        self.happened = False
        self._stop: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Any = None

    def stopping(self, stop: Callable[[], None]) -> Self:
        """Return the context manager for a run. ``stop`` is called on its event loop at the first Ctrl-C."""
        self._stop, self._loop = stop, asyncio.get_running_loop()
        return self

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if _is_pythons_own(before):
                self._before = before
                signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def request(self) -> bool:
        """Stop the run as Ctrl-C does, from any thread. Returns False if no run is active."""
        if self._loop is None or self.happened:
            return False
        self.happened = True
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._stop)
        return True

    def conclude(self, outcome: R, results: object, words: str) -> R:
        """Return the outcome in an interactive session; elsewhere raise KeyboardInterrupt with the results."""
        if hasattr(sys, "ps1"):
            _say(words)
            return outcome
        error = KeyboardInterrupt(words)
        error.results = results  # type: ignore[attr-defined]
        if threading.current_thread() is threading.main_thread():
            sys.excepthook = functools.partial(_in_one_line, error, sys.excepthook)
        raise error

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self.request()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def _is_pythons_own(handler: object) -> bool:
    """Return whether the handler is the default, that of ``asyncio.run``, or that of an interactive session."""
    if handler is signal.default_int_handler or (hasattr(sys, "ps1") and callable(handler)):
        return True
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, functools.partial) else None
    return isinstance(owner, asyncio.Runner)


def interrupted_words(statistics: Statistics, spec: BatchSpec) -> str:
    """Return a line about the progress of the run and how to continue it."""
    done = (
        f"{rows(statistics.done)}" if statistics.total is None else f"{statistics.done:,} of {rows(statistics.total)}"
    )
    words = f"batch-agent: interrupted: {done} done"
    if spec.run_dir is None:
        return f"{words}. Nothing is recorded; with run_dir='DIR', resume=True the next run can be continued."
    again = "run this again" if spec.resume else "run this again with resume=True"
    return f"{words}, recorded in {spec.run_dir}. To continue, {again}."


def _in_one_line(
    interrupt: KeyboardInterrupt,
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """An excepthook that prints this interrupt as one line, and passes everything else to the previous hook."""
    if error is interrupt:
        _say(str(error))
    else:
        before(kind, error, trace)


def _say(words: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()

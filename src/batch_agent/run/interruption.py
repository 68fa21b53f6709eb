"""Ctrl-C and other signals during a run: the run ends, finished rows are kept, and one line says how to continue.

Each Ctrl-C calls the next step: in the library the first one stops the run, on the command line the first one drains it
and the second one stops it. After the last step a signal has its usual effect.

In the library, an interactive session gets the finished results. In a script, KeyboardInterrupt is raised with them as
``results``. If it is not caught, it prints that one line instead of a traceback. Handlers that a program has installed
itself are not replaced.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from batch_agent.observe.statistics import Statistics
from batch_agent.observe.text import rows
from batch_agent.spec import BatchSpec

R = TypeVar("R")


class Interruption:
    """``at_once`` are further signals, which call the last step. ``owns``: the process is a command of this package, so
    other handlers are replaced, and a signal after the last step kills the process."""

    def __init__(self, at_once: Sequence[signal.Signals] = (), *, owns: bool = False) -> None:
        self.happened = False  # the last step was called
        self.stopped_by: signal.Signals | None = None  # the signal that called it
        self._at_once, self._owns = at_once, owns
        self._steps: Sequence[Callable[[], None]] = ()
        self._count = 0  # of Ctrl-C
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[signal.Signals, Any] = {}  # the handlers that were replaced

    def stopping(self, *steps: Callable[[], None]) -> Self:
        """Return the context manager for a run. The steps are called on its event loop."""
        self._steps = steps
        self._loop = asyncio.get_running_loop()
        return self

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *self._at_once):
                before = signal.getsignal(number)
                if self._owns or _is_pythons_own(before):
                    self._before[number] = before
                    signal.signal(number, self._received)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not installed by Python
        self._before.clear()

    def request(self) -> bool:
        """Stop the run as the last Ctrl-C does, from any thread. Returns False if no run is active."""
        if self._loop is None or self.happened:
            return False
        self._call(len(self._steps))
        return True

    def _received(self, number: int, frame: FrameType | None) -> None:
        by = signal.Signals(number)
        self._count += by == signal.SIGINT
        count = self._count if by == signal.SIGINT else len(self._steps)
        if count >= len(self._steps):
            self.stopped_by = by
            before = self._before.pop(by)
            signal.signal(by, signal.SIG_DFL if self._owns else before)
        self._call(count)

    def _call(self, count: int) -> None:
        """Call a step; the last one if there are no more."""
        assert self._loop is not None, "a signal is handled only while a run is active"
        self.happened = self.happened or count >= len(self._steps)
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._steps[min(count, len(self._steps)) - 1])

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
    """An excepthook that prints this interrupt as one line. Any other exception is passed to the previous hook."""
    if error is interrupt:
        _say(str(error))
    else:
        before(kind, error, trace)


def _say(words: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()

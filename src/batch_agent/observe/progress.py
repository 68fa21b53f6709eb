"""Progress for programs: which view fits the environment, when it starts, and how it ends.

By default, a terminal or a notebook shows a run that takes longer than a moment; pipes, files and tests show nothing. A
view writes to standard error or to the notebook, never to standard output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import html
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, TextIO

from batch_agent.blocking import in_thread
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.terminal import LiveDisplay, NotebookDisplay, PlainDisplay, TerminalDisplay, publisher

MOMENT = 1.5  # seconds after which a run is shown by default
PATIENCE = 1.0  # seconds that the end of a run waits for a drawing that does not finish


class ProgressDisplay:
    """Shows a run. ``wanted``: True shows it from its start, as lines if there is no terminal. False never shows it.
    None shows it if a view fits the environment."""

    _timer: asyncio.TimerHandle | None = None
    _display: Display | None = None
    _conclude: Callable[[str], None] | None = None

    def __init__(self, wanted: bool | None, statistics: Callable[[], Statistics]) -> None:
        self._wanted, self._statistics = wanted, statistics

    async def __aenter__(self) -> Self:
        if self._wanted:
            self._begin()
        elif self._wanted is None and _suits():
            self._timer = asyncio.get_running_loop().call_later(MOMENT, self._begin)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._display is not None:
            await self._display.__aexit__(*exception)

    def conclude(self, summary: str) -> None:
        """Show the run's summary, if its progress was shown; in a notebook only its first line: results show it."""
        if self._conclude is not None:
            with suppress(OSError):
                self._conclude(summary)

    def _begin(self) -> None:
        """Start the view. Only now is the terminal checked."""
        view: TerminalDisplay
        if _in_notebook():
            view = notebook = NotebookDisplay(publisher())
            self._conclude = lambda summary: notebook.conclude(summary.partition("\n")[0])
        elif sys.stderr is None or _taken(sys.stderr):
            return
        else:
            view = LiveDisplay(sys.stderr) if _has_terminal() else PlainDisplay(sys.stderr)
            self._conclude = _say
        self._display = Display(view, self._statistics)
        self._display.begin()


def show_address(address: str) -> None:
    """Show the address of a run's page: as a link in a notebook, else on standard error."""
    if _in_notebook():
        link = html.escape(address, quote=True)
        publisher()({"text/plain": address, "text/html": f'<a href="{link}" target="_blank">view the run</a>'}, False)
    elif sys.stderr is not None:
        with suppress(OSError):
            _say(f"view the run: {address}")


def _suits() -> bool:
    if "PYTEST_CURRENT_TEST" in os.environ or sys.stderr is None:
        return False
    return _in_notebook() or _has_terminal()


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. IPython on a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def _has_terminal() -> bool:
    """Return whether only this process uses the terminal. At the other end of a pipe another program may write to the
    same terminal, and both would overwrite each other."""
    return can_redraw(sys.stderr) and not is_pipe(sys.stdout)


def can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which lines can be overwritten."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def is_pipe(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or not a file of the operating system
        return False


def _taken(stream: TextIO) -> bool:
    """Return whether a live display of another run, or the user's own, uses the terminal: rich then replaces the
    stream. Two live displays would overwrite each other."""
    return type(stream).__module__ == "rich.file_proxy"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Display:
    """Keeps a view up to date during a run. Statistics are read on the event loop a few times a second. Drawing happens
    in a thread, because a stopped terminal or a full pipe must not stop the agents. A view that fails is switched
    off."""

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

"""Progress of a run: a live view on a terminal, plain lines elsewhere.

A view shows one Statistics when called; the caller decides when and in which thread. Text of users, models or servers
is never interpreted as markup.
"""

from __future__ import annotations

import sys
from typing import Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from batch_agent.observe.metrics import RecentError, Statistics
from batch_agent.observe.screen import Screen
from batch_agent.observe.text import counted, duration, rate, terminal_width, wrapped
from batch_agent.observe.words import (
    error_line,
    failing_tools,
    outage_line,
    phase,
    progress,
    rejected_line,
    states,
    time_left,
    tokens,
)

FIRST_INTERVAL, LAST_INTERVAL = 5.0, 60.0  # seconds between plain lines, early and late in a run


class TerminalDisplay(Protocol):
    interval: float  # seconds between two calls of show

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def show(self, statistics: Statistics) -> None: ...


class LiveDisplay:
    """The bottom of the terminal, redrawn in place and removed when the run is over."""

    interval = 0.25

    def __init__(self, stream: TextIO) -> None:
        console = Console(file=stream, markup=False, highlight=False, emoji=False)
        # Other output (of a tool, a warning) appears above the view. Output to a file or a pipe is unaffected.
        shared = sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=shared, redirect_stderr=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, statistics: Statistics) -> None:
        # The cursor rests on a line of its own, so that the ^C that a terminal echoes does not push the view down.
        self._live.update(Group(Screen(statistics), Text()), refresh=True)


class PlainDisplay:
    """Prints one line every few seconds, less often as the run gets long, and at each tenth of the rows."""

    interval = 1.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = 0.0
        self._shown_tenth = 0
        self._shown_phase = ""
        self._shown_error: RecentError | None = None
        self._shown_rejected = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, statistics: Statistics) -> None:
        tenth = 10 * statistics.done // statistics.total if statistics.total else 0
        pause = min(LAST_INTERVAL, max(FIRST_INTERVAL, statistics.elapsed / 10))
        waits = phase(statistics)
        news = tenth > self._shown_tenth or (waits and waits != self._shown_phase and statistics.elapsed > 1)
        if not news and statistics.elapsed - self._shown_at < pause:
            return
        self._shown_phase = waits
        self._shown_at, self._shown_tenth = statistics.elapsed, tenth
        lines = [progress_line(statistics)]
        last = statistics.recent_errors[-1] if statistics.recent_errors else None
        if last is not None and last != self._shown_error:
            self._shown_error = last
            lines.append("  " + error_line(last))
        if statistics.last_rejected is not None and statistics.rejected > self._shown_rejected:
            self._shown_rejected = statistics.rejected
            lines.append("  " + rejected_line(statistics.last_rejected))
        self._stream.write(wrapped("\n".join(lines), terminal_width(self._stream)) + "\n")
        self._stream.flush()


class NoDisplay:
    """Shows nothing."""

    interval = 60.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, statistics: Statistics) -> None:
        pass


def progress_line(statistics: Statistics) -> str:
    parts = [progress(statistics)]
    if statistics.stages:
        parts[0] += f" ({'; '.join(f'{stage.name} {stage.words}' for stage in statistics.stages)})"
    parts += [f"{count:,} {label}" for label, count, _ in states(statistics) if count]
    parts.append(rate(statistics.recent_rate))
    parts += [words for words in (time_left(statistics), phase(statistics)) if words]
    parts.append(f"tokens {tokens(statistics)}")
    if statistics.rejected:
        parts.append(f"{counted(statistics.rejected, 'answer')} rejected")
    parts += [*map(outage_line, statistics.outages), *failing_tools(statistics)]
    return f"[{duration(statistics.elapsed)}] " + ", ".join(parts)

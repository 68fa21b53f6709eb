"""A run as it goes, for people: a live view on a terminal, plain lines everywhere else.

A view shows one Statistics when it is told to; when that is, and in which thread, is its caller's affair. Nothing here
interprets text of users, models or servers as markup.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Protocol, Self, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batch_agent.observe.metrics import Outage, RecentError, Statistics
from batch_agent.observe.text import amount, clock, dollars, duration, harmless, rate, rows, share

ERROR_CHARACTERS = 300
FIRST_INTERVAL, LAST_INTERVAL = 5.0, 60.0  # seconds between plain lines, early and late in a run


class View(Protocol):
    interval: float  # seconds between two calls of show

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def show(self, statistics: Statistics) -> None: ...


class LiveView:
    """A few lines at the bottom of the terminal, redrawn in place and gone when the run is over."""

    interval = 0.25

    def __init__(self, stream: TextIO) -> None:
        console = Console(file=stream, markup=False, highlight=False, emoji=False)
        # What anybody prints meanwhile (a tool, a warning) appears above the view instead of tearing it. What goes to a
        # file or a pipe goes on to it.
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
        # The cursor rests on a line of its own: the ^C that a terminal echoes must not wrap and push the view down.
        self._live.update(Group(render(statistics), Text()), refresh=True)


class PlainView:
    """One line every few seconds, more seldom as the run gets long, and at each tenth of the rows."""

    interval = 1.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = 0.0
        self._shown_tenth = 0
        self._shown_error: RecentError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, statistics: Statistics) -> None:
        tenth = 10 * statistics.done // statistics.total if statistics.total else 0
        pause = min(LAST_INTERVAL, max(FIRST_INTERVAL, statistics.elapsed / 10))
        if tenth <= self._shown_tenth and statistics.elapsed - self._shown_at < pause:
            return
        self._shown_at, self._shown_tenth = statistics.elapsed, tenth
        lines = [progress_line(statistics)]
        last = statistics.recent_errors[-1] if statistics.recent_errors else None
        if last is not None and last != self._shown_error:
            self._shown_error = last
            lines.append("  " + error_line(last))
        self._stream.write("\n".join(lines) + "\n")
        self._stream.flush()


class NoView:
    """Shows nothing."""

    interval = 60.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, statistics: Statistics) -> None:
        pass


def progress_line(statistics: Statistics) -> str:
    parts = [_progress(statistics), *(f"{count:,} {label}" for label, count, _ in _states(statistics) if count)]
    parts.append(rate(statistics.recent_rate))
    if statistics.eta is not None:
        parts.append(f"{duration(statistics.eta)} left")
    parts.append(f"tokens {_tokens(statistics)}")
    parts += map(outage_line, statistics.outages)
    return f"[{duration(statistics.elapsed)}] " + ", ".join(parts)


def outage_line(outage: Outage) -> str:
    name = f" {harmless(outage.endpoint)}" if outage.endpoint else ""
    again = f"trying again in {duration(outage.next_trial)}" if outage.next_trial else "trying"
    return f"server{name} down for {clock(outage.lasted)}, {again}"


def error_line(error: RecentError) -> str:
    times = f" ({error.count:,} times)" if error.count > 1 else ""
    again = ", trying again" if error.retried else ""
    return f"row {error.index} {error.type}{times}{again}: {harmless(error.message, ERROR_CHARACTERS)}"


def render(statistics: Statistics) -> RenderableType:
    """The live view of one moment."""
    parts: list[RenderableType] = [
        _title(statistics),
        _bar(statistics),
        _state_line(statistics),
        _work_line(statistics),
    ]
    for outage in statistics.outages:
        line = f"  {outage_line(outage)}: {harmless(outage.reason, ERROR_CHARACTERS)}"
        parts.append(Text(line, style="bold yellow", no_wrap=True, overflow="ellipsis"))
    for error in reversed(statistics.recent_errors):
        style = "yellow" if error.retried else "red"
        parts.append(Text("  " + error_line(error), style=style, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _title(statistics: Statistics) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(harmless(statistics.model) or "batch", style="bold")
    if statistics.backend:
        title.append(f"  {harmless(statistics.backend)}", style="dim")
    return title


def _bar(statistics: Statistics) -> RenderableType:
    words = Text("  ", no_wrap=True)
    words.append(_progress(statistics))
    words.append(f"  {rate(statistics.recent_rate)}", style="cyan")
    timing = f"{duration(statistics.eta)} left" if statistics.eta is not None else duration(statistics.elapsed)
    words.append(f"  {timing}", style="cyan")
    line = Table.grid(expand=True)
    line.add_column(ratio=1, min_width=8)
    line.add_column(no_wrap=True)
    total = statistics.total
    # Without a total the bar only shows that something is alive.
    bar = ProgressBar(
        total=float(total or 1),
        completed=float(statistics.done),
        pulse=total is None,
        animation_time=statistics.elapsed,
    )
    line.add_row(bar, words)
    return line


def _state_line(statistics: Statistics) -> RenderableType:
    items = [_item("done", f"{statistics.done:,}", "green")]
    for label, count, style in _states(statistics):
        of = f"/{statistics.max_inflight:,}" if label == "running" and statistics.max_inflight else ""
        items.append(_item(label, f"{count:,}{of}", style if count else "dim"))
    return _wrapped(items)


def _work_line(statistics: Statistics) -> RenderableType:
    items = [_item("tokens", _tokens(statistics))]
    if statistics.cost is not None:
        items.append(_item("cost", dollars(statistics.cost)))
    if statistics.tool_calls:
        counts = f"{statistics.tool_shared:,} shared, {statistics.tool_cached:,} cached"
        items.append(_item("tools", f"{statistics.tool_calls:,} calls, {counts}"))
    if statistics.retries:
        items.append(_item("sent again", f"{statistics.retries:,}", "yellow"))
    return _wrapped(items)


def _item(label: str, value: str, style: str = "") -> Text:
    item = Text(no_wrap=True, overflow="ellipsis")
    item.append(f"{label} ", style="dim")
    item.append(value, style=style)
    return item


def _wrapped(items: list[Text]) -> RenderableType:
    """Side by side, and below each other where the terminal is narrow; an item itself is not torn."""
    return Columns(items, padding=(0, 3))


def _states(statistics: Statistics) -> Iterator[tuple[str, int, str]]:
    yield "failed", statistics.failed, "red"
    yield "running", statistics.running, "cyan"
    yield "waiting on tools", statistics.waiting_on_tools, "magenta"
    yield "backing off", statistics.backing_off, "yellow"
    yield "queued", statistics.queued, "default"


def _progress(statistics: Statistics) -> str:
    if statistics.total is None:
        return f"{rows(statistics.done)} done"
    return f"{statistics.done:,}/{statistics.total:,} ({share(statistics.done, statistics.total)})"


def _tokens(statistics: Statistics) -> str:
    usage = statistics.usage
    cached = f" ({share(usage.cached_tokens, usage.prompt_tokens)} cached)" if usage.cached_tokens else ""
    return f"{amount(usage.prompt_tokens)} in{cached}, {amount(usage.completion_tokens)} out"

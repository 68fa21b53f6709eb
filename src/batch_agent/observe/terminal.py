"""Progress of a run: a live view on a terminal, plain lines elsewhere.

A view shows one Statistics when called; the caller decides when and in which thread. Text of users, models or servers
is never interpreted as markup.
"""

from __future__ import annotations

import html
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Self, TextIO, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batch_agent.observe.history import sparkline
from batch_agent.observe.numbers import answered_words, of_statistics
from batch_agent.observe.statistics import RecentError, Statistics
from batch_agent.observe.summary import (
    cache,
    error_line,
    failing_tools,
    outage_line,
    phase,
    progress,
    rejected_line,
    row_name,
    states,
    time_left,
    tokens,
)
from batch_agent.observe.text import clock, counted, cut, duration, harmless, rate, terminal_width, wrapped

FIRST_INTERVAL, LAST_INTERVAL = 5.0, 60.0  # seconds between plain lines, early and late in a run

GAP = 3  # between two items of a line
NARROWEST_BAR = 8
WIDE, HIGH = 120, 30  # from this size on there is room for more
SPARE_LINES = 4  # of a high terminal: for the prompt and other output
SHORTEST_PANEL = 3

# A text for each MIME type, and whether it replaces the previous output.
Publish: TypeAlias = Callable[[Mapping[str, str], bool], None]


class TerminalDisplay:
    """A view of a run. This one shows nothing."""

    interval = 60.0  # seconds between two calls of show

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, statistics: Statistics) -> None:
        pass


class LiveDisplay(TerminalDisplay):
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


class PlainDisplay(TerminalDisplay):
    """Prints one line every few seconds, less often as the run gets long, and at each tenth of the rows."""

    interval = 1.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = 0.0
        self._shown_tenth = 0
        self._shown_phase = ""
        self._shown_error: RecentError | None = None
        self._shown_rejected = 0

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


def progress_line(statistics: Statistics) -> str:
    parts = [progress(statistics)]
    if statistics.stages:
        parts[0] += f" ({'; '.join(f'{stage.name} {stage.words}' for stage in statistics.stages)})"
    parts += [f"{count:,} {label}" for label, count, _ in states(statistics) if count]
    parts.append(rate(statistics.overall_rate))
    parts += [words for words in (time_left(statistics), phase(statistics)) if words]
    parts.append(f"tokens {tokens(statistics)}")
    if statistics.rejected:
        parts.append(f"{counted(statistics.rejected, 'answer')} rejected")
    parts += [*map(outage_line, statistics.outages), *failing_tools(statistics)]
    return f"[{duration(statistics.elapsed)}] " + ", ".join(parts)


# The live view fits its terminal: a few lines on a small one; on a large one also the pace, recent results, failures by
# type and tools by time. Items are never split, and a long text ends between two words.
class Screen:
    """A renderable that reads the terminal's size whenever it is drawn."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        statistics, width = self._statistics, options.max_width
        large = width >= WIDE and console.size.height >= HIGH
        yield _title(statistics, width)
        yield from _bar(statistics, width)
        longest = max((len(stage.name) for stage in statistics.stages), default=0)
        lines = [_line(f"  {stage.name:<{longest}}  {stage.words}", width) for stage in statistics.stages]
        lines += [*_items(_state_items(statistics), width), *_items(_work_items(statistics), width)]
        lines += _notes(statistics, width)
        if large:
            room = console.size.height - len(lines) - 2 - SPARE_LINES
            lines += _panels(statistics, width, room)
        else:
            lines += [_error(error, width) for error in reversed(statistics.recent_errors)]
        yield from lines


def _line(text: str, width: int, style: str = "") -> Text:
    return Text(cut(text, width), style=style, no_wrap=True, overflow="crop")


def _title(statistics: Statistics, width: int) -> Text:
    title = Text(no_wrap=True, overflow="crop")
    model = harmless(statistics.model) or "batch"
    backend = harmless(statistics.backend)
    title.append(cut(model, width), style="bold")
    if backend and len(model) + 2 + len(backend) <= width:
        title.append(f"  {backend}", style="dim")
    return title


def _bar(statistics: Statistics, width: int) -> Iterator[Table | Text]:
    words = [progress(statistics), rate(statistics.overall_rate), time_left(statistics) or duration(statistics.elapsed)]
    text = Text("  ".join(words), style="cyan", no_wrap=True)
    if len(text) + NARROWEST_BAR + 2 > width:
        yield from _items([(word, "", "cyan") for word in words], width)
        return
    total = statistics.total
    # Without a total the bar is indeterminate.
    bar = ProgressBar(
        total=float(total or 1),
        completed=float(statistics.done),
        pulse=total is None,
        animation_time=statistics.elapsed,
    )
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(bar, text)
    yield line


_Item = tuple[str, str, str]  # label, value, style of the value


def _state_items(statistics: Statistics) -> Iterator[_Item]:
    yield "done", f"{statistics.done:,}", "green"
    if statistics.resumed:
        yield "from the record", f"{statistics.resumed:,}", ""
    for label, count, style in states(statistics):
        of = _limit(count, statistics.max_inflight) if label == "running" else ""
        yield label, f"{count:,}{of}", style if count else "dim"


def _limit(running: int, limit: int | None) -> str:
    """Return the limit as text beside the number of requests in flight. This number may be higher, because requests
    stay in flight when the limit falls."""
    if not limit:
        return ""
    return f"/{limit:,}" if running <= limit else f" (limit now {limit:,})"


def _work_items(statistics: Statistics) -> Iterator[_Item]:
    yield "tokens", tokens(statistics), ""
    numbers = of_statistics(statistics)
    if numbers.cost is not None:
        yield "cost", numbers.cost_words + (" in all sessions" if numbers.sessions > 1 else ""), ""
    if words := answered_words(statistics.answered_by):
        yield "answers", words, ""
    if statistics.tool_calls:
        counts = f"{statistics.tool_shared:,} shared, {statistics.tool_cached:,} cached"
        yield "tools", f"{counted(statistics.tool_calls, 'call')}, {counts}", ""
    if statistics.kv is not None and (text := cache(statistics.kv)):
        yield "KV cache", text, "yellow" if statistics.kv.held else ""
    if statistics.retries:
        yield "sent again", f"{statistics.retries:,}", "yellow"
    if statistics.rejected:
        yield "answers rejected", f"{statistics.rejected:,}", "yellow"


def _items(items: Iterator[_Item] | Sequence[_Item], width: int) -> list[Text]:
    """Return the items side by side, or below each other on a narrow terminal; an item is never split."""
    lines: list[Text] = []
    for label, value, style in items:
        item = Text(no_wrap=True, overflow="crop")
        item.append(cut(label, width), style="dim" if value else style)
        if value:
            item.append(cut(f" {value}", max(0, width - len(label))), style=style)
        if lines and len(lines[-1]) + GAP + len(item) <= width:
            lines[-1].append(" " * GAP).append_text(item)
        else:
            lines.append(item)
    return lines


def _notes(statistics: Statistics, width: int) -> Iterator[Text]:
    """Yield notes that need attention now."""
    if waiting_for := phase(statistics):
        yield _line(f"  {waiting_for} ({clock(statistics.elapsed)})", width, "bold cyan")
    if statistics.draining and not statistics.ended:
        yield _line(f"  stopping: {counted(statistics.alive, 'row')} still running", width, "bold yellow")
    for outage in statistics.outages:
        yield _line(f"  {outage_line(outage)}: {harmless(outage.reason)}", width, "bold yellow")
    for tool in failing_tools(statistics):
        yield _line(f"  {tool}", width, "bold red")
    if statistics.last_rejected is not None:
        yield _line(f"  {rejected_line(statistics.last_rejected)}", width, "yellow")


def _error(error: RecentError, width: int) -> Text:
    return _line(f"  {error_line(error)}", width, "yellow" if error.retried else "red")


def _panels(statistics: Statistics, width: int, room: int) -> list[Text]:
    """Return two columns below the rest: results and pace on the left, failures and tools on the right."""
    left = (width - GAP) * 3 // 5
    right = width - GAP - left
    pace = statistics.pace
    beside = [
        *_panel("failures by type", _failures(statistics), right),
        *_panel("tools by time", _tools(statistics), right),
        *_panel("recent errors", [_error(error, right) for error in reversed(statistics.recent_errors)], right),
    ]
    marks = sparkline(pace, left - 2)
    each = f"rows per second, each mark {duration(pace.seconds)}"
    main = _panel(each, [Text(f"  {marks}", style="cyan", no_wrap=True)] if marks.strip() else [], left)
    rest = room - len(main)
    if rest >= SHORTEST_PANEL:
        main += _panel("recent results", _results(statistics, left, rest - 2), left)
    lines = []
    for place in range(min(max(len(main), len(beside)), max(0, room))):
        line = main[place].copy() if place < len(main) else Text(no_wrap=True)
        line.truncate(left, overflow="ellipsis", pad=True)
        if place < len(beside):
            line.append(" " * GAP).append_text(beside[place])
        line.no_wrap, line.overflow = True, "crop"
        lines.append(line)
    return lines


def _panel(title: str, lines: Sequence[Text], width: int) -> list[Text]:
    return [Text(), _line(title, width, "bold"), *lines] if lines else []


def _failures(statistics: Statistics) -> list[Text]:
    by_count = sorted(statistics.failures.items(), key=lambda item: -item[1])
    return [Text(f"  {count:>7,}  {kind}", style="red", no_wrap=True) for kind, count in by_count]


def _tools(statistics: Statistics) -> list[Text]:
    lines = []
    for name, use in sorted(statistics.tools.items(), key=lambda item: -item[1].seconds):
        failed = f", {use.failed:,} failed" if use.failed else ""
        text = f"  {duration(use.seconds):>7}  {harmless(name, 40)}  {counted(use.calls, 'call')}{failed}"
        lines.append(Text(text, style="red" if use.failed else "", no_wrap=True))
    return lines


def _results(statistics: Statistics, width: int, most: int) -> list[Text]:
    latest = statistics.recent_results[::-1][: max(0, most)]
    return [
        _line(
            f"  {row_name(result):>7}  {duration(result.seconds):>6}  {harmless(result.text)}",
            width,
            "" if result.ok else "red",
        )
        for result in latest
    ]


def publisher() -> Publish:
    """Return a function that shows output in the running cell; all its calls share one output."""
    publish = import_module("IPython.display").publish_display_data
    name = secrets.token_hex(8)

    def show(data: Mapping[str, str], update: bool) -> None:
        publish(dict(data), transient={"display_id": name}, update=update)

    return show


class NotebookDisplay(TerminalDisplay):
    interval = 0.5

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def __enter__(self) -> Self:
        self._publish(_page(Statistics()), False)
        return self

    def show(self, statistics: Statistics) -> None:
        self._publish(_page(statistics), True)

    def conclude(self, summary: str) -> None:
        """Show the summary in place of the progress."""
        self._publish({"text/plain": summary, "text/html": f"<pre>{html.escape(summary)}</pre>"}, True)


def _page(statistics: Statistics) -> dict[str, str]:
    troubles = [*map(outage_line, statistics.outages), *map(error_line, reversed(statistics.recent_errors))]
    line = progress_line(statistics)
    # Without a value a browser shows an indeterminate bar.
    value = f' max="{statistics.total}" value="{statistics.done}"' if statistics.total else ""
    shown = "".join(f"<br>{html.escape(text)}" for text in (line, *troubles))
    bar = f'<progress style="width: 100%"{value}></progress>'
    return {
        "text/plain": "\n".join([line, *troubles]),
        "text/html": f'<div style="font-family: monospace">{bar}{shown}</div>',
    }

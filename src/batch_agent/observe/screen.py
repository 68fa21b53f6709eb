"""The live view at one moment, drawn to fit: a few lines on a small terminal; on a large one also the pace, recent
results, failures by type and tools by time.

Items are never split: they move to the next line as a whole, and a long text ends between two words. Text of users,
models and servers is never interpreted as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batch_agent.observe.history import sparkline
from batch_agent.observe.metrics import RecentError, Statistics
from batch_agent.observe.text import clock, counted, cut, dollars, duration, harmless, rate
from batch_agent.observe.words import (
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

GAP = 3  # between two items of a line
NARROWEST_BAR = 8
WIDE, HIGH = 120, 30  # from this size on there is room for more
SPARE_LINES = 4  # of a high terminal: for the prompt and other output
SHORTEST_PANEL = 3


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
    model, backend = harmless(statistics.model) or "batch", harmless(statistics.backend)
    title.append(cut(model, width), style="bold")
    if backend and len(model) + 2 + len(backend) <= width:
        title.append(f"  {backend}", style="dim")
    return title


def _bar(statistics: Statistics, width: int) -> Iterator[Table | Text]:
    words = [progress(statistics), rate(statistics.recent_rate), time_left(statistics) or duration(statistics.elapsed)]
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
    """The limit beside the number running; requests that were sent before it fell may be more."""
    if not limit:
        return ""
    return f"/{limit:,}" if running <= limit else f" (limit now {limit:,})"


def _work_items(statistics: Statistics) -> Iterator[_Item]:
    yield "tokens", tokens(statistics), ""
    if statistics.cost is not None:
        yield "cost", dollars(statistics.cost), ""
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

"""Sentences about a running run for every view: its state, what it waits for, what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

from batch_agent.events import CacheRead
from batch_agent.observe.metrics import Outage, RecentError, RecentResult, Statistics
from batch_agent.observe.text import amount, clock, counted, duration, harmless, rows, share

ERROR_CHARACTERS = 300
NAME_CHARACTERS = 60
SLOW_START = 5.0  # seconds without an answer, after which a note is shown
ALMOST = 1.0  # second: less than that is shown without a number
OFTEN = 3  # failed calls of a tool before the warning that all fail


def progress(statistics: Statistics) -> str:
    if statistics.total is None:
        return f"{rows(statistics.done)} done"
    return f"{statistics.done:,}/{statistics.total:,} ({share(statistics.done, statistics.total)})"


def time_left(statistics: Statistics) -> str:
    """Return the remaining time; "" if unknown."""
    eta, left = statistics.eta, statistics.left
    if eta is None or not left:
        return ""
    if eta >= ALMOST:
        return f"{duration(eta)} left"
    # All rows have started, and the time of one row is over. If few of them are done, that says little.
    return "" if left > statistics.done else "last row" if left == 1 else f"last {rows(left)}"


def states(statistics: Statistics) -> Iterator[tuple[str, int, str]]:
    """Yield the states of rows: label, count, colour."""
    yield "failed", statistics.failed, "red"
    yield "running", statistics.running, "cyan"
    yield "waiting on tools", statistics.waiting_on_tools, "magenta"
    yield "backing off", statistics.backing_off, "yellow"
    yield "queued", statistics.queued, "default"


def tokens(statistics: Statistics) -> str:
    usage = statistics.usage
    cached = f" ({share(usage.cached_tokens, usage.prompt_tokens)} cached)" if usage.cached_tokens else ""
    return f"{amount(usage.prompt_tokens)} in{cached}, {amount(usage.completion_tokens)} out"


def cache(kv: CacheRead) -> str:
    """The KV caches of the engines; empty where nothing is worth a word."""
    parts = []
    if kv.held:
        parts.append(f"{counted(kv.held, 'agent')} held back: contexts do not fit {amount(kv.tokens or 0)} tokens")
    if kv.recomputed:
        parts.append(f"{amount(kv.recomputed)} tokens recomputed ({duration(kv.recompute_seconds)})")
    if parts and kv.usage is not None:
        parts.insert(0, f"{kv.usage:.0%} in use")
    return ", ".join(parts)


def phase(statistics: Statistics) -> str:
    """Return what a run without an answer waits for; "" otherwise."""
    if statistics.ended or statistics.turns or statistics.done or statistics.outages:
        return ""
    if not statistics.backend:
        return "reading the rows"
    if not statistics.started:
        local = statistics.backend.startswith("local://")
        return "loading the model" if local else "waiting for the server"
    waiting = statistics.running and statistics.elapsed >= SLOW_START
    return "no answer yet; the server may be loading the model" if waiting else ""


def failing_tools(statistics: Statistics) -> Iterator[str]:
    """Yield a warning for each tool whose calls all failed."""
    for name, use in statistics.tools.items():
        if use.failed == use.calls >= OFTEN:
            yield f"every call of {harmless(name)} failed, {use.calls:,} so far"


def row_name(of: RecentError | RecentResult) -> str:
    """Return the id of a row, or its index if it has none."""
    return harmless(of.job_id or str(of.index), NAME_CHARACTERS)


def rejected_line(error: RecentError) -> str:
    times = f" ({error.count:,} so far)" if error.count > 1 else ""
    return f"answer rejected{times}, asked again: row {row_name(error)} {harmless(error.message, ERROR_CHARACTERS)}"


def outage_line(outage: Outage) -> str:
    name = f" {harmless(outage.endpoint)}" if outage.endpoint else ""
    again = f"trying again in {duration(outage.next_trial)}" if outage.next_trial else "trying"
    return f"server{name} down for {clock(outage.lasted)}, {again}"


def error_line(error: RecentError) -> str:
    times = f" ({error.count:,} times)" if error.count > 1 else ""
    again = ", trying again" if error.retried else ""
    return f"row {row_name(error)} {error.type}{times}{again}: {harmless(error.message, ERROR_CHARACTERS)}"

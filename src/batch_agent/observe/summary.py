"""The summary at the end of a run: the same facts as text lines and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from batch_agent.events import CacheRead
from batch_agent.messages import JsonObject, Usage
from batch_agent.observe.numbers import ShownNumbers, all_sessions_json, answered_words, of_statistics
from batch_agent.observe.statistics import Outage, RecentError, RecentResult, Statistics, ToolUse
from batch_agent.observe.text import amount, clock, counted, dollars, duration, harmless, rate, rows, share
from batch_agent.record.promise import PromiseStanding
from batch_agent.tools.execution import ToolStatistics
from batch_agent.trust.score import Score
from batch_agent.trust.shown import score_lines

ERROR_CHARACTERS = 300
REASON_CHARACTERS = 600
SHOWN_LIMITS = 4
NO_TOOLS: Mapping[str, ToolStatistics] = MappingProxyType({})

NAME_CHARACTERS = 60
SLOW_START = 5.0  # seconds without an answer, after which a note is shown
ALMOST = 1.0  # second: less than that is shown without a number
OFTEN = 3  # failed calls of a tool before the warning that all fail


def summary_lines(
    statistics: Statistics,
    *,
    output: str = "",
    tools: Mapping[str, ToolStatistics] = NO_TOOLS,
    score: Score | None = None,
    promise: PromiseStanding | None = None,
) -> list[str]:
    """Return the lines. ``output`` is where the results are; ``tools`` has the statistics of the run's tools,
    ``score`` how many answers are right, and ``promise`` how the promise of the run stands."""
    lines = [_headline(statistics)]
    lines += _labelled("stages", [f"{stage.name}: {stage.words}" for stage in statistics.stages])
    for name, use in statistics.tools.items():
        if use.failed == use.calls:
            reason = harmless(_reason(tools.get(name)), ERROR_CHARACTERS)
            lines += _labelled(
                "WARNING", [f"not one of {counted(use.calls, 'call')} of {harmless(name)} worked{reason}"]
            )
    if statistics.ended == "out of budget":
        lines += _labelled("budget", [f"{statistics.reason}; resume with a higher limit to do the rest"])
    elif statistics.reason:
        lines += _labelled("why", [harmless(statistics.reason, REASON_CHARACTERS)])
    if statistics.outage_seconds:
        down = sorted(statistics.down_seconds.items(), key=lambda item: -item[1])
        lines += _labelled("outage", [f"{harmless(name)} was down for {clock(lasted)} in all" for name, lasted in down])
    if statistics.schema_note:
        lines += _labelled("schema", [harmless(statistics.schema_note, REASON_CHARACTERS)])
    if statistics.limits:
        shown = statistics.limits[-SHOWN_LIMITS:]
        earlier = "…; " if len(shown) < len(statistics.limits) else ""
        lines += _labelled("limit", [earlier + "; ".join(map(str, shown))])
    lines += _labelled("answers", [words] if (words := answered_words(statistics.answered_by)) else [])
    lines += _labelled("failed", _failure_lines(statistics))
    lines += _labelled("tokens", [_token_line(statistics)])
    if statistics.kv is not None and (text := _cache_line(statistics.kv)):
        lines += _labelled("KV", [text])
    lines += _labelled("cost", _cost_lines(of_statistics(statistics)))
    if statistics.tool_calls:
        lines += _labelled("tools", [_tool_line(statistics), *map(harmless, _tool_words(statistics, tools))])
    if statistics.cascade is not None:
        lines += _labelled("cascade", [*map(harmless, statistics.cascade.lines())])
    if statistics.voted:
        lines += _labelled("samples", _sample_lines(statistics))
    if statistics.prewarm is not None:
        begun = statistics.prewarm.begun
        used = statistics.prewarm.hits
        wasted = statistics.prewarm.wasted
        words = f"{begun:,} calls begun before they were asked for: {used:,} used, {wasted:,} wasted"
        lines += _labelled("prewarm", [f"{words}; {statistics.prewarm.misses:,} calls were not foreseen"])
    lines += _labelled("saved", [f"{saving.text} ({saving.how})" for saving in savings(statistics)])
    if score is not None:
        lines += score_summary(score)
    if promise is not None:
        lines += promise_summary(promise)
    if output:
        lines += _labelled("results", [harmless(output)])
    return lines


def summary_json(
    statistics: Statistics,
    *,
    output: str = "",
    tools: Mapping[str, ToolStatistics] = NO_TOOLS,
    score: Score | None = None,
    promise: PromiseStanding | None = None,
) -> JsonObject:
    usage = statistics.usage
    return {
        "ended": statistics.ended,
        "reason": statistics.reason,
        "rows": {
            "total": statistics.total,
            "done": statistics.done,
            "ok": statistics.ok,
            "failed": statistics.failed,
            "failures": dict(statistics.failures),
            "resumed": statistics.resumed,
        },
        "answered_by": dict(statistics.answered_by),
        **({"stages": [stage.to_json() for stage in statistics.stages]} if statistics.stages else {}),
        "seconds": round(statistics.elapsed, 3),
        "outage_seconds": round(statistics.outage_seconds, 3),
        "down_seconds": {name: round(lasted, 3) for name, lasted in statistics.down_seconds.items()},
        "rows_per_second": round(statistics.overall_rate, 3),
        "turns": statistics.turns,
        "retries": statistics.retries,
        "control_requests": statistics.control_requests,
        "answers_rejected": statistics.rejected,
        **({} if statistics.cascade is None else {"cascade": statistics.cascade.to_json()}),
        "samples": _samples_json(statistics) if statistics.voted else None,
        "schema_note": statistics.schema_note or None,
        "peak_inflight": statistics.peak_running,
        "limits": [
            {"from": step.before, "to": step.after, "reason": step.reason, "endpoint": step.endpoint}
            for step in statistics.limits
        ],
        "inference_seconds": round(statistics.inference_seconds, 3),
        "tool_wait_seconds": round(statistics.tool_wait_seconds, 3),
        "tokens": {**usage_json(usage), "cache_write": usage.cache_write_tokens},
        "prefix_hit_rate": round(usage.cached_tokens / usage.prompt_tokens, 4) if usage.cached_tokens else None,
        "kv": None if statistics.kv is None else cache_json(statistics.kv),
        "cost": None if statistics.cost is None else round(statistics.cost, 9),
        "all_sessions": all_sessions_json(of_statistics(statistics)),
        "saved": {saving.name: {"value": saving.value, "how": saving.how} for saving in savings(statistics)},
        "tool_calls": {
            "run": statistics.tool_runs,
            "shared": statistics.tool_shared,
            "cached": statistics.tool_cached,
            "errors": statistics.tool_errors,
        },
        "prewarm": None
        if statistics.prewarm is None
        else asdict(statistics.prewarm) | {"wasted": statistics.prewarm.wasted},
        "failing_tools": [_failing_json(name, use, tools.get(name)) for name, use in _failing(statistics)],
        "advice": [tool.advice for tool in tools.values() if tool.advice],
        "model": statistics.model,
        "backend": statistics.backend,
        "output": output or None,
        **({} if score is None else {"score": score.to_json()}),
        **({} if promise is None else {"promise": promise.to_json()}),
    }


def _samples_json(statistics: Statistics) -> JsonObject:
    return {
        "rows": statistics.voted,
        "asked": statistics.samples,
        "spared": statistics.samples_spared,
        "identical": statistics.samples_are_identical,
        "rows_identical": statistics.samples_identical,
    }


def score_summary(score: Score) -> list[str]:
    """Return the lines of a summary about the score."""
    return _labelled("score", [*map(harmless, score_lines(score, details=False))])


def promise_summary(promise: PromiseStanding, run: str = "") -> list[str]:
    """Return the lines of a summary about a promise. ``run`` is the name of the run in commands."""
    return _labelled("promise", [*map(harmless, promise.lines(run))])


def _headline(statistics: Statistics) -> str:
    line = f"{rows(statistics.done)} in {duration(statistics.elapsed)}: {statistics.ok:,} ok"
    if statistics.failed:
        line += f", {statistics.failed:,} failed"
    if statistics.resumed:
        line += f", {statistics.resumed:,} of them from the record"
    if statistics.fresh:
        line += f" ({rate(statistics.overall_rate)})"
    stopped = {ended: ended for ended in ("out of budget", "unreachable", "failed")}
    stopped |= {**dict.fromkeys(("drained", "cancelled"), "stopped early"), "pilot": "stopped after the pilot"}
    if statistics.ended in stopped and (statistics.done != statistics.total or statistics.reason):
        left = statistics.total - statistics.done if statistics.total is not None else 0
        line += f"; {stopped[statistics.ended]}" + (f", {rows(left)} not done" if left else "")
    return line


def _cost_lines(numbers: ShownNumbers) -> list[str]:
    """Return the cost of all sessions, and of this one if there were others."""
    if numbers.sessions > 1:
        return [numbers.spent_words]
    if numbers.cost is None:
        return []
    return [numbers.cost_words + ("" if numbers.cost_per_row is None else f", {dollars(numbers.cost_per_row)} a row")]


def _failure_lines(statistics: Statistics) -> list[str]:
    if not statistics.failures:
        return []
    by_count = sorted(statistics.failures.items(), key=lambda item: -item[1])
    lines = [", ".join(f"{count:,} {kind}" for kind, count in by_count)]
    latest = {error.type: error for error in statistics.recent_errors if not error.retried}
    for kind, _ in by_count:
        if kind in latest:
            message = harmless(latest[kind].message, ERROR_CHARACTERS)
            lines.append(f"{kind}, for example row {row_name(latest[kind])}: {message}")
    return lines


def _token_line(statistics: Statistics) -> str:
    usage = statistics.usage
    line = tokens(statistics)
    if usage.reasoning_tokens:
        line += f" ({share(usage.reasoning_tokens, usage.completion_tokens)} reasoning)"
    line += f" in {counted(statistics.turns, 'turn')}"
    if statistics.retries:
        line += f", {counted(statistics.retries, 'request')} sent again"
    if statistics.control_requests:
        line += f", {counted(statistics.control_requests, 'control request')}"
    if statistics.rejected:
        line += f", {counted(statistics.rejected, 'answer')} rejected and asked for again"
    return line


def _sample_lines(statistics: Statistics) -> list[str]:
    asked, spared = statistics.samples, statistics.samples_spared
    line = f"{counted(asked, 'sample')} of {rows(statistics.voted)} voted"
    if spared:
        line += f"; {spared:,} more ({share(spared, asked + spared)}) could not have changed a vote and were not asked"
    if not statistics.samples_are_identical:
        return [line]
    alike = "all samples of all rows were identical: the server may ignore temperature and seed, or answer from a cache"
    return [line, alike]


def _cache_line(kv: CacheRead) -> str:
    """Return what the KV caches of the engines cost, and what was done about it; "" if there was nothing."""
    parts = []
    if kv.recomputed:
        parts.append(f"{amount(kv.recomputed)} evicted tokens computed again, {duration(kv.recompute_seconds)}")
    if kv.held_seconds:
        size = f" of {amount(kv.tokens)} tokens" if kv.tokens else ""
        parts.append(
            f"agents held back for {duration(kv.held_seconds)} in all, because their contexts did not fit a cache{size}"
        )
    if kv.touches:
        parts.append(f"{counted(kv.touches, 'evicted context')} touched, {amount(kv.touched_tokens)} tokens")
    if kv.kept_alive:
        parts.append(f"shared prefix touched {counted(kv.kept_alive, 'time')}")
    return "; ".join(parts)


def usage_json(usage: Usage) -> JsonObject:
    return {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "completion": usage.completion_tokens,
        "reasoning": usage.reasoning_tokens,
    }


def cache_json(kv: CacheRead) -> JsonObject:
    return {name: value for name, value in asdict(kv).items() if name not in ("at", "run")}


def _tool_line(statistics: Statistics) -> str:
    line = f"{counted(statistics.tool_calls, 'call')}: {statistics.tool_runs:,} run"
    line += f", {statistics.tool_shared:,} shared, {statistics.tool_cached:,} cached"
    return line + (f", {statistics.tool_errors:,} failed" if statistics.tool_errors else "")


def _tool_words(statistics: Statistics, tools: Mapping[str, ToolStatistics]) -> list[str]:
    """Return the most frequent reason for which each tool failed, and then what declaring tools would have saved."""
    failing = [
        f"{counted(use.failed, 'call')} of {name} failed{_reason(tools.get(name))}"
        for name, use in _failing(statistics)
        if use.failed < use.calls
    ]
    return failing + [tool.advice for tool in tools.values() if tool.advice]


def _failing(statistics: Statistics) -> list[tuple[str, ToolUse]]:
    return [(name, use) for name, use in statistics.tools.items() if use.failed]


def _reason(tool: ToolStatistics | None) -> str:
    if tool is None or not tool.failure_reasons:
        return ""
    reason, count = tool.failure_reasons[0]
    others = f" ({count:,} times)" if len(tool.failure_reasons) > 1 else ""
    return f": {reason}{others}"


def _failing_json(name: str, use: ToolUse, tool: ToolStatistics | None) -> JsonObject:
    reasons = tool.failure_reasons if tool is not None else ()
    return {
        "tool": name,
        "calls": use.calls,
        "failed": use.failed,
        "reasons": [{"reason": reason, "count": count} for reason, count in reasons],
    }


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"  {label if number == 0 else '':<8} {line}" for number, line in enumerate(lines)]


@dataclass(frozen=True, slots=True)
class Saving:
    name: str
    value: float
    text: str
    how: str


def savings(statistics: Statistics) -> list[Saving]:
    """Return the savings that are not zero."""
    return [saving for saving in _all(statistics) if saving.value > 0]


def _all(statistics: Statistics) -> Iterator[Saving]:
    usage = statistics.usage
    yield Saving(
        "cached_prompt_tokens",
        usage.cached_tokens,
        f"{amount(usage.cached_tokens)} prompt tokens, {share(usage.cached_tokens, usage.prompt_tokens)}, cached",
        "reported by the engine",
    )
    at_hand = statistics.tool_shared + statistics.tool_cached
    yield Saving(
        "coalesced_tool_calls",
        at_hand,
        f"{at_hand:,} of {statistics.tool_calls:,} tool calls",
        "results shared or cached",
    )
    tokens = statistics.saved.prompt_tokens + statistics.saved.completion_tokens
    yield Saving(
        "response_cache_answers",
        statistics.cache_hits,
        f"{statistics.cache_hits:,} of {statistics.turns:,} answers, {amount(tokens)} tokens",
        "from the response cache, tokens as first reported",
    )


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
    """Return the state of the KV caches of the engines as text; "" if nothing is remarkable."""
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
        return "loading the model" if local else "waiting for the first answer"
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

"""The metrics of a run for Prometheus.

Totals are those of its statistics, read at a scrape. What these do not have is counted from events (``counts``).

Labels are bounded: endpoints, error types, tools and fixed values. No label names a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from batch_agent.errors import JobError
from batch_agent.events import CacheRead
from batch_agent.observe.counts import EventCounts, begin_at_zero
from batch_agent.observe.exposition import Counter, Family, Gauge, page
from batch_agent.observe.statistics import Statistics
from batch_agent.scheduler.server import Endpoint
from batch_agent.version import __version__


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """Values read at a scrape. ``endpoints`` come with display names. ``waiting``: requests without a slot;
    ``journal_lag``: age in seconds of the oldest record that is not yet on disk."""

    endpoints: Collection[tuple[str, Endpoint]] = ()
    waiting: int = 0
    journal_lag: float | None = None


class RunNumbers(EventCounts):
    """``statistics`` and ``live`` are called at each scrape."""

    def __init__(
        self,
        statistics: Callable[[], Statistics] = Statistics,
        live: Callable[[], LiveNumbers] = LiveNumbers,
        *,
        conventions: bool = False,
    ) -> None:
        super().__init__(conventions=conventions)
        self._statistics, self._live = statistics, live

    def page(self) -> str:
        now, live = self._statistics(), self._live()
        for name, _ in live.endpoints:
            self.turns.add(0, name)
            self.outages.add(0, name)
        counted = (self.turns, self.controls, self.failed_turns, self.retries, self.rejected, self.compactions)
        times = self.first_token, self.turn_time, self.tool_time, self.row_time
        return page([*self._state(now, live), *totals(now), *counted, self.tools, self.outages, *times])

    def _state(self, now: Statistics, live: LiveNumbers) -> list[Family]:
        """Return the current gauges."""
        about = ("version", "backend", "model")
        rows = Gauge("batch_agent_rows", "Unfinished rows, by state.", ("state",)).set(now.alive, "running")
        if now.total is not None:
            rows.set(max(0, now.total - now.done - now.interrupted - now.alive), "waiting")
        families: list[Family] = [
            Gauge("batch_agent_run_info", "The run: always 1.", about).set(1, __version__, now.backend, now.model),
            rows,
            Gauge("batch_agent_requests_waiting", "Requests waiting for a slot.").set(live.waiting),
            *endpoint_gauges(live.endpoints),
            *cache_families(self.caches.values()),
        ]
        if self.began is not None:
            began = Gauge("batch_agent_run_start_time_seconds", "When the run began, in seconds since 1970.")
            families.append(began.set(self.began))
        if live.journal_lag is not None:
            lag = Gauge("batch_agent_journal_lag_seconds", "Age of the oldest record that is not yet on disk.")
            families.append(lag.set(live.journal_lag))
        return families


def totals(now: Statistics) -> list[Family]:
    """Return the counters of rows, tokens and cost."""
    rows = Counter("batch_agent_rows_finished_total", "Rows with a result.", ("state",))
    resumed = Counter("batch_agent_rows_resumed_total", "Rows with a result recorded by an earlier session.")
    failures = Counter("batch_agent_row_failures_total", "Failed rows by type of error.", ("error_type",))
    begin_at_zero(failures, JobError)
    for error_type, failed in now.failures.items():
        failures.add(failed, error_type)
    answered = Counter(
        "batch_agent_rows_answered_total",
        "Rows with a result by the model that answered, in a run with a standby.",
        ("model",),
    )
    for name, count in now.answered_by.items():
        answered.add(count, name)
    tokens = Counter(
        "batch_agent_tokens_total",
        "Tokens of this session by kind. The kinds do not overlap: input is neither cached nor written to a cache, "
        "output is without reasoning.",
        ("kind",),
    )
    used = now.usage
    kinds = {
        "input": used.prompt_tokens - used.cached_tokens - used.cache_write_tokens,
        "output": used.completion_tokens - used.reasoning_tokens,
        "cached": used.cached_tokens,
        "cache_write": used.cache_write_tokens,
        "reasoning": used.reasoning_tokens,
    }
    for kind, amount in kinds.items():
        tokens.add(max(0, amount), kind)
    saved = Counter("batch_agent_saved_tokens_total", "Tokens of answers from the response cache.")
    cost = Counter("batch_agent_cost_dollars_total", "Cost of this session, where prices are known.")
    return [
        rows.add(now.ok, "ok").add(now.failed, "failed"),
        resumed.add(now.resumed),
        failures,
        *([answered] if now.answered_by else []),
        tokens,
        saved.add(now.saved.prompt_tokens + now.saved.completion_tokens),
        cost.add(now.cost or 0.0),
    ]


def cache_families(caches: Collection[CacheRead]) -> list[Family]:
    """Return what the KV caches of the engines hold and cost; [] if no engine reports it."""
    if not caches:
        return []
    usage = Gauge("batch_agent_kv_usage", "Part of the engines' KV caches that running requests hold, 0 to 1.")
    told = [each.usage for each in caches if each.usage is not None]
    if told:
        usage.set(sum(told) / len(told))
    capacity = Gauge("batch_agent_kv_capacity_tokens", "Tokens that the engines' KV caches hold.")
    contexts = Gauge("batch_agent_kv_context_tokens", "Tokens of the contexts of admitted agents.")
    held = Gauge("batch_agent_agents_held", "Agents that wait because their contexts do not fit the KV cache.")
    waited = Counter("batch_agent_agents_held_seconds_total", "Seconds that agents waited so, all together.")
    tokens = Counter("batch_agent_recomputed_tokens_total", "Tokens computed again because they had been evicted.")
    seconds = Counter("batch_agent_recompute_seconds_total", "Seconds of the engines that this took.")
    touches = Counter("batch_agent_kv_touches_total", "Requests that keep contexts in the cache, by kind.", ("kind",))
    touches.add(sum(each.touches for each in caches), "context")
    touches.add(sum(each.kept_alive for each in caches), "prefix")
    return [
        usage,
        capacity.set(max(each.tokens or 0 for each in caches)),
        contexts.set(sum(each.contexts for each in caches)),
        held.set(sum(each.held for each in caches)),
        waited.add(sum(each.held_seconds for each in caches)),
        tokens.add(sum(each.recomputed for each in caches)),
        seconds.add(sum(each.recompute_seconds for each in caches)),
        touches,
    ]


def endpoint_gauges(endpoints: Iterable[tuple[str, Endpoint]]) -> list[Family]:
    """Return the requests in flight, the limit and the health of each endpoint."""
    inflight = Gauge("batch_agent_endpoint_in_flight", "Requests in flight at an endpoint.", ("endpoint",))
    limit = Gauge("batch_agent_endpoint_limit", "Requests that may be in flight at an endpoint.", ("endpoint",))
    about = "1 if the endpoint gets requests or is an idle standby, 0 if it is down."
    up = Gauge("batch_agent_endpoint_up", about, ("endpoint",))
    for name, endpoint in endpoints:
        inflight.set(endpoint.inflight, name)
        idle = endpoint.is_idle and not (endpoint.given_up or endpoint.leaving or endpoint.health.is_down)
        up.set(float(endpoint.is_working or idle), name)
        if endpoint.capacity.limit is not None:
            limit.set(endpoint.capacity.limit, name)
    return [inflight, limit, up]

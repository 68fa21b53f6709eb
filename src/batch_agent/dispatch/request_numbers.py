"""Prometheus metrics of programs that send requests without a run: the proxy and the ticks server.

The metrics have the same names as those of a run (``observe/prometheus.py``), so one dashboard shows both.
"""

from __future__ import annotations

from collections.abc import Iterable

from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Observer
from batch_agent.errors import BackendError
from batch_agent.messages import Reply
from batch_agent.observe.exposition import Counter, Family, Gauge, Histogram
from batch_agent.observe.prometheus import endpoint_gauges


class RequestNumbers(Observer):
    """Counts every request of a program, as its observer."""

    def __init__(self) -> None:
        self._retries = Counter("batch_agent_retries_total", "Requests sent again, by type of error.", ("error_type",))
        self._failed = Counter(
            "batch_agent_turn_failures_total", "Turns that failed, by type of error.", ("error_type",)
        )
        self._tokens = Counter("batch_agent_tokens_total", "Tokens by kind, where the server reports them.", ("kind",))
        self._queued = Histogram("batch_agent_queue_duration_seconds", "Seconds a request waited for a slot.")
        self._answered = Histogram("batch_agent_turn_duration_seconds", "Seconds from sending a request to its answer.")

    def sent(self, queued: float) -> None:
        self._queued.observe(queued)

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        (self._failed if delay is None else self._retries).add(1, error.type)

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        self._answered.observe(seconds)
        usage = reply.usage
        if usage.prompt_tokens:
            self._tokens.add(max(0, usage.prompt_tokens - usage.cached_tokens), "input")
            self._tokens.add(usage.cached_tokens, "cached")
        if usage.completion_tokens:
            self._tokens.add(usage.completion_tokens, "output")

    def families(self, dispatchers: Iterable[tuple[str, Dispatcher]]) -> list[Family]:
        """Return all metrics as of now. ``dispatchers`` come with the names of their backends."""
        known = list(dispatchers)
        waiting = Gauge("batch_agent_requests_waiting", "Requests waiting for a slot.")
        waiting.set(sum(dispatcher.scheduler.waiting for _, dispatcher in known))
        endpoints = [(each.name or name, each) for name, of in known for each in of.scheduler.endpoints]
        counted = (self._retries, self._failed, self._tokens, self._queued, self._answered)
        return [waiting, *endpoint_gauges(endpoints), *counted]

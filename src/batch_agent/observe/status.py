"""A run at one moment as one JSON object, for ``control status`` and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from batch_agent.messages import JsonObject
from batch_agent.observe.metrics import Clock
from batch_agent.observe.numbers import IDLE, STANDING_IN, all_sessions_json, of_statistics
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.summary import cache_json, usage_json
from batch_agent.record.timeline import SAMPLE, Line
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_events import Reason
from batch_agent.spec import BatchSpec
from batch_agent.tools.execution import ToolStatistics

ENDPOINTS = 256  # maximum listed
EARLIER = 10  # earlier conclusions about an endpoint that are listed
LIMITS = ("max_cost", "max_total_tokens", "max_wall_time")


@dataclass(frozen=True, slots=True)
class LabelledEndpoint:
    """An endpoint with its address, and the models that are asked for there."""

    address: str
    model: str
    endpoint: Endpoint


def status_json(
    statistics: Statistics,
    endpoints: Iterable[LabelledEndpoint],
    tools: Mapping[str, ToolStatistics],
    spec: BatchSpec,
    *,
    slots: int | None,
    clock: Clock,
    paused: bool,
) -> JsonObject:
    now, listed = statistics, list(islice(endpoints, ENDPOINTS))
    numbers = of_statistics(now, paused=paused, endpoints=list(health_of(listed)))
    return {
        "at": round(clock(), 3),
        "state": numbers.state,
        "degraded": numbers.degraded or None,
        "reason": now.reason or None,
        "model": now.model,
        "backend": now.backend,
        "rows": {
            "total": now.total,
            "started": now.started,
            "done": now.done,
            "ok": now.ok,
            "failed": now.failed,
            "resumed": now.resumed,
            "interrupted": now.interrupted,
        },
        "failures": dict(now.failures),
        "agents": {
            "running": now.running,
            "queued": now.queued,
            "tools": now.waiting_on_tools,
            "backing_off": now.backing_off,
        },
        "seconds": round(now.elapsed, 3),
        "rows_per_second": round(numbers.rate, 4),
        "seconds_left": None if now.eta is None else round(now.eta, 1),
        "turns": now.turns,
        "retries": now.retries,
        "answers_rejected": now.rejected,
        "tokens": usage_json(now.usage),
        "cost": None if now.cost is None else round(now.cost, 9),
        "all_sessions": all_sessions_json(numbers),
        "answered_by": dict(now.answered_by),
        "budget": {name: value for name in LIMITS if (value := getattr(spec, name)) is not None},
        "cache_hits": now.cache_hits,
        "max_inflight": slots,
        "endpoints": [_endpoint(endpoint, clock) for endpoint in listed],
        "outage_seconds": round(now.outage_seconds, 1),
        "kv": None if now.kv is None else cache_json(now.kv),
        "tools": [_tool(tool, now) for tool in tools.values() if tool.calls],
        "errors": [
            {
                "row": error.index,
                "job_id": error.job_id or str(error.index),
                "type": error.type,
                "message": error.message,
                "count": error.count,
            }
            for error in now.recent_errors
        ],
        "schema_note": now.schema_note or None,
    }


def health_of(endpoints: Iterable[LabelledEndpoint]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the state and the failure of each endpoint."""
    for each in endpoints:
        health, given_up = each.endpoint.health, each.endpoint.given_up
        state = "down" if health.is_down and not (given_up or each.endpoint.is_idle) else endpoint_state(each.endpoint)
        yield each.address, state, given_up or (health.reason if health.is_down else "")


def endpoint_state(endpoint: Endpoint) -> str:
    """Return the state of an endpoint in one word or two."""
    if endpoint.given_up:
        return "given up"
    if endpoint.leaving:
        return "leaving"
    if endpoint.is_idle:
        return IDLE
    return STANDING_IN if endpoint.standby is not None and not endpoint.health.is_down else endpoint.health.state


def _endpoint(labelled: LabelledEndpoint, clock: Clock) -> JsonObject:
    endpoint = labelled.endpoint
    health = endpoint.health
    return {
        "name": labelled.address,
        "model": (labelled.model or None) if endpoint.standby is None else endpoint.standby.model,
        "inflight": endpoint.inflight,
        "limit": endpoint.capacity.limit,
        "state": endpoint_state(endpoint),
        "reason": endpoint.given_up or (health.reason if health.is_down else "") or None,
        "why": [_reason(reason, clock) for reason in endpoint.server.why()],
        "history": [_reason(reason, clock) for reason in list(endpoint.server.past)[-EARLIER:]],
        "seconds_per_turn": round(endpoint.server.seconds, 3) or None,
    }


def _reason(reason: Reason, clock: Clock) -> JsonObject:
    return {
        "about": reason.about,
        "rule": reason.rule,
        "evidence": reason.evidence,
        "since": round(clock.at(reason.since), 3),
    }


def _tool(tool: ToolStatistics, statistics: Statistics) -> JsonObject:
    use = statistics.tools.get(tool.name)
    return {
        "name": tool.name,
        "calls": tool.calls,
        "runs": tool.runs,
        "shared": tool.shared,
        "cached": tool.cache_hits,
        "failed": tool.failures,
        "seconds": round(use.seconds, 3) if use is not None else None,
        "p50": tool.p50,
        "p99": tool.p99,
        "reason": tool.failure_reasons[0][0] if tool.failure_reasons else None,
    }


def sample_line(statistics: Statistics, endpoints: Iterable[LabelledEndpoint], slots: int | None, at: float) -> Line:
    """Return one sample of the timeline."""
    now, usage = statistics, statistics.usage
    by_name: JsonObject = {
        each.address: [each.endpoint.inflight, each.endpoint.capacity.limit, each.endpoint.health.state]
        for each, _ in zip(endpoints, range(ENDPOINTS), strict=False)
    }
    return [
        *(SAMPLE, round(at, 3), now.done, now.failed, now.running, now.queued, now.waiting_on_tools, now.backing_off),
        *(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, now.cost, by_name, slots),
    ]

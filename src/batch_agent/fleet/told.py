"""Reads the ``/metrics`` of any engine: vLLM, SGLang or Dynamo. Pure.

An address does not show which engine it is, so the metric names of all engines are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.backends.base import Load
from batch_agent.backends.engines import dynamo, sglang, vllm
from batch_agent.backends.engines.exposition import Exposition

RUNNING = (vllm.RUNNING, sglang.RUNNING)
WAITING = (vllm.WAITING, sglang.WAITING, dynamo.PENDING)
KV_USAGE = (*vllm.KV_USAGE, sglang.USAGE)
QUERIES = (*vllm.QUERIES, sglang.PROMPT, dynamo.PROMPT)
HITS = (*vllm.HITS, sglang.CACHED, dynamo.CACHED)
GENERATED = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "dynamo_frontend_output_sequence_tokens_sum",
)
# Metric, label and label values of errors: of the web framework of vLLM and SGLang, of vLLM's engine, of Dynamo's
# frontend.
ERRORS = (
    ("http_requests_total", "status", ("5xx", "500", "502", "503", "504")),
    ("vllm:request_success_total", "finished_reason", ("error",)),
    ("dynamo_frontend_requests_total", "status", ("error",)),
)
NAMES = frozenset(
    [*RUNNING, dynamo.INFLIGHT, *WAITING, *KV_USAGE, *QUERIES, *HITS, *GENERATED, *(name for name, *_ in ERRORS)]
)


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine reports; None for what it does not report. Tokens and errors count from the server's start."""

    load: Load
    generated_tokens: int | None = None
    errors: int | None = None

    @property
    def prefix_hit_rate(self) -> float | None:
        queries, hits = self.load.prefix_queries, self.load.prefix_hits
        return None if not queries or hits is None else min(1.0, hits / queries)


def read_told(text: str) -> Told | None:
    """Return what the text of ``/metrics`` reports; None if it is not from an engine."""
    metrics = Exposition(text, NAMES)
    running, waiting = metrics.count(*RUNNING), metrics.count(*WAITING) or 0
    if running is None:
        inflight = metrics.count(dynamo.INFLIGHT)
        if inflight is None:
            return None
        running = max(0, inflight - waiting)
    load = Load(
        running=running,
        waiting=waiting,
        kv_usage=metrics.mean(*KV_USAGE),
        prefix_queries=metrics.count(*QUERIES),
        prefix_hits=metrics.count(*HITS),
    )
    return Told(load, metrics.count(*GENERATED), _errors(metrics))


def _errors(metrics: Exposition) -> int | None:
    """Return the number of answers with a server error."""
    for name, label, wrong in ERRORS:
        if samples := metrics.samples(name):
            return int(sum(sample.value for sample in samples if sample.labels.get(label) in wrong))
    return None


def tokens_per_second(before: Told, after: Told, seconds: float) -> float | None:
    """Return the rate between two readings; None if the server does not count, or was restarted in between."""
    first, second = before.generated_tokens, after.generated_tokens
    if first is None or second is None or second < first or seconds <= 0:
        return None
    return (second - first) / seconds

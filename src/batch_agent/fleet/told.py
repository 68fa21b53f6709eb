"""What engines tell of themselves at ``/metrics``, whichever engine it is. Pure.

The address does not say who listens there, so the names of all of them are looked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.backends.base import Load
from batch_agent.backends.exposition import Exposition

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "dynamo_frontend_inflight_requests")
WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "dynamo_frontend_router_queue_pending_requests",
)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",
    "sglang:prompt_tokens_total",
    "dynamo_frontend_input_sequence_tokens_sum",
)
HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "dynamo_frontend_cached_tokens_sum",
)
GENERATED = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "dynamo_frontend_output_sequence_tokens_sum",
)
ANSWERS = "http_requests_total"  # of the web framework under vLLM and SGLang, by class of status
ENDED = "vllm:request_success_total"
DYNAMO_REQUESTS = "dynamo_frontend_requests_total"
NAMES = frozenset(
    [*RUNNING, *WAITING, *KV_USAGE, *QUERIES, *HITS, *GENERATED, ANSWERS, ENDED, DYNAMO_REQUESTS],
)


@dataclass(frozen=True, slots=True)
class Told:
    """None: it does not say. Tokens and errors are counted since the server started."""

    load: Load
    generated_tokens: int | None = None
    errors: int | None = None

    @property
    def prefix_hit_rate(self) -> float | None:
        queries, hits = self.load.prefix_queries, self.load.prefix_hits
        return None if not queries or hits is None else min(1.0, hits / queries)


def read_told(text: str) -> Told | None:
    """None where the text is not an engine's."""
    metrics = Exposition(text, NAMES)
    running = metrics.count(*RUNNING)
    if running is None:
        return None
    load = Load(
        running=running,
        waiting=metrics.count(*WAITING) or 0,
        kv_usage=metrics.mean(*KV_USAGE),
        prefix_queries=metrics.count(*QUERIES),
        prefix_hits=metrics.count(*HITS),
    )
    return Told(load, metrics.count(*GENERATED), _errors(metrics))


def _errors(metrics: Exposition) -> int | None:
    """Answers that were the server's fault; what an engine gave up by itself is one of them where those are counted."""
    for name, label, wrong in (
        (ANSWERS, "status", ("5xx", "500", "502", "503", "504")),
        (ENDED, "finished_reason", ("error",)),
        (DYNAMO_REQUESTS, "status", ("error",)),
    ):
        if samples := metrics.samples(name):
            return int(sum(sample.value for sample in samples if sample.labels.get(label) in wrong))
    return None


def tokens_per_second(before: Told, after: Told, seconds: float) -> float | None:
    """None where the server does not count, or has started anew meanwhile."""
    first, second = before.generated_tokens, after.generated_tokens
    if first is None or second is None or second < first or seconds <= 0:
        return None
    return (second - first) / seconds

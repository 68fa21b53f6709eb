"""The metrics of test servers as Prometheus text, under vLLM's names."""

from __future__ import annotations

from typing import Self

from batch_agent.backends.simulated.backend import engine_load
from batch_agent.backends.simulated.core import SimulatedEngine
from batch_agent.observe.exposition import Counter, Gauge, Values, page


class VllmMetrics:
    """``origin`` is added to every HELP line, so that readers see where the numbers come from."""

    def __init__(self, model_name: str, origin: str) -> None:
        self._model_name, self._origin = model_name, origin
        self._families: dict[str, Values] = {}

    def put(self, name: str, text: str, value: float, **labels: str) -> Self:
        """Add a value: ``name`` without the prefix ``vllm:``; counters end in ``_total``."""
        if name not in self._families:
            make = Counter if name.endswith("_total") else Gauge
            names = ("engine", "model_name", *labels)
            self._families[name] = make(f"vllm:{name}", f"{text} ({self._origin}).", names)
        self._families[name].values["0", self._model_name, *labels.values()] = value
        return self

    def __str__(self) -> str:
        return page(self._families.values())


def engine_metrics(engine: SimulatedEngine) -> str:
    model, counters, load = engine.model, engine.counters, engine_load(engine)
    source, ended = "Prompt tokens by where their KV came from", "Requests that ended, by reason"
    told = VllmMetrics(model.name, "simulated")
    told.put("num_requests_running", "Requests in the running batch", load.running)
    told.put("num_requests_waiting", "Requests waiting in the queue", load.waiting)
    told.put("kv_cache_usage_perc", "Part of the KV cache held by running requests, 0 to 1", load.kv_usage or 0.0)
    told.put("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache", counters.prefix_queries)
    told.put("prefix_cache_hits_total", "Prompt tokens found in the prefix cache", counters.prefix_hits)
    told.put("num_preemptions_total", "Running requests preempted because the KV cache was full", counters.preemptions)
    told.put("prompt_tokens_total", "Prompt tokens of requests that started", counters.prompt_tokens)
    told.put("prompt_tokens_by_source_total", source, counters.prompt_tokens_computed, source="local_compute")
    told.put("prompt_tokens_by_source_total", source, counters.prefix_hits, source="local_cache_hit")
    told.put("generation_tokens_total", "Tokens generated", counters.generated_tokens)
    told.put("request_success_total", ended, counters.finished, finished_reason="stop")
    told.put("request_success_total", ended, counters.aborted, finished_reason="abort")
    told.put(
        "cache_config_info",
        "The KV cache's configuration, in labels",
        1,
        block_size=str(model.block_size),
        num_gpu_blocks=str(model.blocks),
        enable_prefix_caching=str(model.prefix_caching),
        kv_offloading_size=str(model.offload_tokens or None),  # vLLM's is in GiB
    )
    return str(told)

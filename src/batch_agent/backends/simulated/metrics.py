"""The engine's state as Prometheus text, under vLLM's metric names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from batch_agent.backends.base import Load
from batch_agent.backends.simulated.core import Engine


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: ``name`` without the prefix ``vllm:``; counters end in ``_total``."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def prometheus_text(samples: Iterable[Sample], *, model_name: str, origin: str) -> str:
    """Return the text. ``origin`` is added to every HELP line, so that readers see where the numbers come from."""
    lines: list[str] = []
    described: set[str] = set()
    for sample in samples:
        if sample.name not in described:
            described.add(sample.name)
            kind = "counter" if sample.name.endswith("_total") else "gauge"
            lines.append(f"# HELP vllm:{sample.name} {sample.help} ({origin}).")
            lines.append(f"# TYPE vllm:{sample.name} {kind}")
        labels = {"engine": "0", "model_name": model_name, **sample.labels}
        text = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        lines.append(f"vllm:{sample.name}{{{text}}} {float(sample.value)}")
    return "\n".join(lines) + "\n"


def engine_load(engine: Engine) -> Load:
    """Return the same values for callers in this process."""
    counters, pool = engine.counters, engine.pool
    return Load(
        running=len(engine.running),
        waiting=engine.waiting,
        kv_usage=pool.held / pool.num_gpu_blocks,
        kv_tokens=pool.num_gpu_blocks * engine.model.block_size,
        offloads=bool(engine.offload.size),
        generated=counters.generated_tokens,
        preemptions=counters.preemptions,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
    )


def engine_metrics(engine: Engine) -> str:
    model, counters, usage = engine.model, engine.counters, engine_load(engine).kv_usage or 0.0
    computed = counters.prompt_tokens_computed
    config = {
        "block_size": str(model.block_size),
        "num_gpu_blocks": str(model.blocks),
        "enable_prefix_caching": str(model.prefix_caching),
        "kv_offloading_size": str(model.offload_tokens or None),  # vLLM's is in GiB
    }
    source = "Prompt tokens by where their KV came from"
    ended = "Requests that ended, by reason"
    samples = [
        Sample("num_requests_running", "Requests in the running batch", len(engine.running)),
        Sample("num_requests_waiting", "Requests waiting in the queue", engine.waiting),
        Sample("kv_cache_usage_perc", "Part of the KV cache held by running requests, 0 to 1", usage),
        Sample("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache", counters.prefix_queries),
        Sample("prefix_cache_hits_total", "Prompt tokens found in the prefix cache", counters.prefix_hits),
        Sample(
            "num_preemptions_total", "Running requests preempted because the KV cache was full", counters.preemptions
        ),
        Sample("prompt_tokens_total", "Prompt tokens of requests that started", counters.prompt_tokens),
        Sample("prompt_tokens_by_source_total", source, computed, {"source": "local_compute"}),
        Sample("prompt_tokens_by_source_total", source, counters.prefix_hits, {"source": "local_cache_hit"}),
        Sample("generation_tokens_total", "Tokens generated", counters.generated_tokens),
        Sample("request_success_total", ended, counters.finished, {"finished_reason": "stop"}),
        Sample("request_success_total", ended, counters.aborted, {"finished_reason": "abort"}),
        Sample("cache_config_info", "The KV cache's configuration, in labels", 1, config),
    ]
    return prometheus_text(samples, model_name=model.name, origin="simulated")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

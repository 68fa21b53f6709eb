"""What an engine lacks for agents, the flag that sets it, and what it is worth as far as it was measured.

Pure: ``EngineState`` comes from the adapters of the engines. The numbers of an engine are measured on that engine:
docs/kv.md and benchmarks/engines.md say how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from batch_agent.messages import JsonObject

SHARED = 0.5  # the least part of a prompt that two requests share where the prefix cache works


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine was seen to have. None: it does not say."""

    engine: str  # as in FLAGS
    prefix_caching: bool | None = None
    reports_cached: bool | None = None  # each answer says how much of its prompt was cached
    by_priority: bool | None = None  # schedules by the priority of a request
    offloads: bool | None = None  # keeps evicted contexts in the memory of the host
    pins: bool | None = None  # keeps contexts of agents in tool waits (batch_agent.vllm_pin)
    kv_tokens: int | None = None  # that its cache holds


@dataclass(frozen=True, slots=True)
class Advice:
    lack: str
    flag: str
    worth: str

    def __str__(self) -> str:
        return f"{self.lack}: {self.flag} ({self.worth})"

    def to_json(self) -> JsonObject:
        return {"lack": self.lack, "flag": self.flag, "worth": self.worth}


FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "prefix_caching": "start it without --no-enable-prefix-caching",
            "reports_cached": "--enable-prompt-tokens-details",
            "by_priority": "--scheduling-policy priority, and ?priority=true behind the address",
            "offloads": "--kv-offloading-size GIB, at least as large as the GPU's KV cache",
            "kv_tokens": "--gpu-memory-utilization, --kv-cache-dtype fp8, or --kv-offloading-size GIB",
        },
        "sglang": {
            "prefix_caching": "start it without --disable-radix-cache",
            "reports_cached": "--enable-cache-report",
            "by_priority": "--enable-priority-scheduling",
            "offloads": "--enable-hierarchical-cache --hicache-ratio 2",
            "kv_tokens": "--mem-fraction-static, --kv-cache-dtype fp8_e5m2, or --enable-hierarchical-cache",
        },
    }
)
LACKS = {
    "prefix_caching": "the prefix cache is off, so every turn computes its whole history",
    "reports_cached": "answers do not say how many prompt tokens were cached, so evicted contexts are not noticed",
    "by_priority": "requests are not scheduled by priority, so agents near their end wait like new ones",
    "offloads": "evicted contexts are computed again, because none are kept in the host's memory",
}
_BY_PRIORITY = "no gain was measured for a batch alone; for an engine that other clients use"
_REPORTS_CACHED = "admission works without; it then learns nothing from evictions"
# Measured on the same engine; docs/kv.md and benchmarks/engines.md say how.
WORTH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "vllm": {
            "prefix_caching": "32 requests with a shared prefix of 1,000 tokens: 159 s without, 17 s with; 2 CPU cores",
            "reports_cached": _REPORTS_CACHED,
            "by_priority": _BY_PRIORITY,
            "offloads": "24 agents that overflow the cache, in a plain loop: 75.7 s without, 40.0 s with (H200, "
            "vLLM 0.26)",
            "kv_tokens": "24 agents with contexts of up to 12k tokens, 32B shape, H200: 59.8 s with 98k of KV, "
            "45.9 s with 200k",
        },
        "sglang": {
            "prefix_caching": "not measured on SGLang",
            "reports_cached": _REPORTS_CACHED,
            "by_priority": f"{_BY_PRIORITY}: behind 700 requests, preferred ones waited 1.7 s, others 12.5 s (H200, "
            "SGLang 0.5.16)",
            "offloads": "24 agents that overflow the cache: 76.9 s in a plain loop without, 53.5 s with; 56.5 and "
            "47.0 s with admission (H200, SGLang 0.5.16)",
            "kv_tokens": "24 agents with contexts of up to 12k tokens and 98k of KV, 32B shape: 76.9 s if all run at "
            "once, 56.5 s with admission (H200, SGLang 0.5.16)",
        },
    }
)


def advice(state: EngineState, *, agents: int | None = None, context_tokens: int | None = None) -> Iterator[Advice]:
    """What to change, the most valuable first. ``agents`` with contexts of ``context_tokens`` are to run at once."""
    flags, worth = FLAGS[state.engine], WORTH[state.engine]
    if state.prefix_caching is False:
        yield Advice(LACKS["prefix_caching"], flags["prefix_caching"], worth["prefix_caching"])
    if state.kv_tokens and agents and context_tokens and agents * context_tokens > state.kv_tokens:
        fit = state.kv_tokens // context_tokens
        lack = (
            f"the KV cache holds {state.kv_tokens:,} tokens, {fit:,} contexts of {context_tokens:,}; "
            f"{agents:,} agents at once need {agents * context_tokens:,}"
        )
        yield Advice(lack, flags["kv_tokens"], worth["kv_tokens"])
    for name in ("reports_cached", "offloads", "by_priority"):
        if getattr(state, name) is False:
            yield Advice(LACKS[name], flags[name], worth[name])

"""``vllm://``: vLLM's dialect of the chat wire.

What it adds: an id for each request that shows in the server's log, a salt for its prefix cache, priorities where the
server schedules by them, exact counts of tokens, and how busy it is. Names of metrics are those of vLLM 0.32, with the
ones they had before.
"""

from __future__ import annotations

from dataclasses import replace

from batch_agent.backends.address import Address
from batch_agent.backends.base import Load, ModelRequest
from batch_agent.backends.engine import ABLE, EngineBackend, whole
from batch_agent.backends.exposition import Exposition
from batch_agent.backends.openai import Tail
from batch_agent.messages import JsonObject

PORT = 8000
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = "vllm:num_preemptions_total"
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
CACHE = "vllm:cache_config_info"
NAMES = frozenset(
    [RUNNING, WAITING, *KV_USAGE, PREEMPTIONS, *QUERIES, *HITS, f"{FIRST_TOKEN}_count", f"{FIRST_TOKEN}_sum", CACHE]
)


def from_address(address: Address) -> VllmBackend:
    return VllmBackend(address)


class VllmBackend(EngineBackend):
    def __init__(self, address: Address) -> None:
        able = replace(ABLE)
        super().__init__(address, port=PORT, capabilities=able)
        self._salt = address.text("cache_salt")

    def own_part(self, request: ModelRequest) -> Tail:
        fields: JsonObject = {}
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        return Tail(fields)

    async def load(self, endpoint: str = "") -> Load:
        told = await self.read_metrics(NAMES)
        if not told.samples(RUNNING):
            raise self._metrics.faults.bad("the metrics are not those of a vLLM server")
        return read_load(told)


def read_load(told: Exposition) -> Load:
    """Several engines behind one address (data parallel) are told apart by a label, and count together."""
    caches = [cache.labels for cache in told.samples(CACHE)]
    sizes = [(whole(labels.get("num_gpu_blocks")), whole(labels.get("block_size"))) for labels in caches]
    return Load(
        running=told.count(RUNNING) or 0,
        waiting=told.count(WAITING) or 0,
        kv_usage=told.mean(*KV_USAGE),
        kv_tokens=sum((blocks or 0) * (size or 0) for blocks, size in sizes) or None,
        preemptions=told.count(PREEMPTIONS),
        prefix_queries=told.count(*QUERIES),
        prefix_hits=told.count(*HITS),
        first_token_count=told.count(f"{FIRST_TOKEN}_count"),
        first_token_seconds=told.total(f"{FIRST_TOKEN}_sum"),
    )
